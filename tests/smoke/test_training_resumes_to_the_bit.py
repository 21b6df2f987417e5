"""SnapshotManager in PyTorch trainings on the CPU: a killed training resumes to the same bits."""

from __future__ import annotations

import signal
import textwrap
from pathlib import Path

import pytest
from support.warm_python import WarmPython

from ciuic import SnapshotManager

torch = pytest.importorskip("torch", reason="no CPU build of PyTorch is offered here")

HEAD = """
    import os, random, signal, sys, torch, hashlib
    from torch.utils.data import DataLoader, Dataset
    from ciuic import SnapshotManager
    torch.set_num_threads(1)

    class Numbers(Dataset):
        def __len__(self): return 40
        def __getitem__(self, at):
            return torch.full((8,), float(at)) + torch.rand(8), torch.tensor(at % 3)  # drawn while loading

    torch.manual_seed(3); random.seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Dropout(0.3),
                                torch.nn.Linear(64, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    loader = DataLoader(Numbers(), batch_size=4, shuffle=True)
    save_dir, die_at = sys.argv[1], int(sys.argv[2])
    done = 0

    def step(batch):
        global done
        x, y = batch
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        if manager.step + 1 == die_at:
            manager.wait()  # so that what the next run finds does not depend on how fast the writer is
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        scheduler.step()
        average.update_parameters(model)

    def digest():
        whole = hashlib.sha256()
        for one in (model, average):
            for value in one.state_dict().values():
                whole.update(value.numpy().tobytes())
        whole.update(repr((optimizer.state_dict()["param_groups"], scheduler.state_dict(), torch.rand(2).tolist())).encode())
        return whole.hexdigest()
"""

WITH_LOADER = """
    manager = SnapshotManager(save_dir, every_steps=4)
    manager.register(model=model, optimizer=optimizer, scheduler=scheduler, average=average, loader=loader)
    resumed = manager.resume()
    for epoch in range(resumed.epoch if resumed else 0, 3):
        for batch in loader:
            step(batch)
    print(manager.step, digest())
"""

WITHOUT_LOADER = """
    manager = SnapshotManager(save_dir, every_steps=4)
    manager.register(model=model, optimizer=optimizer, scheduler=scheduler, average=average)
    manager.resume()
    while manager.step < 30:
        step((torch.rand(4, 8), torch.randint(3, (4,))))
    print(manager.step, digest())
"""

AS_WRITTEN = """
    from ciuic import SnapshotManager
    manager = SnapshotManager(save_dir=save_dir, interval=3600, max_snapshots=10)
    start_epoch = 0
    state = manager.load_latest_snapshot()
    if state is not None:
        model.load_state_dict(state["model_state_dict"]); optimizer.load_state_dict(state["optimizer_state_dict"])
        start_epoch = state["epoch"] + 1
    for epoch in range(start_epoch, 5):
        torch.manual_seed(epoch)
        for _ in range(3):
            step((torch.rand(4, 8), torch.randint(3, (4,))))
        manager.save_snapshot(model, optimizer, epoch)
    print(epoch, hashlib.sha256(b"".join(v.numpy().tobytes() for v in model.state_dict().values())).hexdigest())
"""


def _run(python: WarmPython, program: str, save_dir: Path, die_at: int = -1) -> str:
    source = textwrap.dedent(HEAD) + textwrap.dedent(program)
    done = python.run(["-c", source, save_dir, die_at], timeout=120)
    assert done.returncode == (0 if die_at < 0 else -signal.SIGKILL), done.stderr
    return done.stdout


@pytest.mark.parametrize("program", [WITH_LOADER, WITHOUT_LOADER], ids=["loader", "no loader"])
def test_a_run_that_is_killed_ends_with_the_bits_of_one_that_is_not(
    warm_torch: WarmPython, program: str, tmp_path: Path
) -> None:
    """A killed run with register and resume alone ends with the bits of an undisturbed one.

    Dropout, batch norm, schedule, averaged weights, and the order and noise of the data.
    """
    expected = _run(warm_torch, program, tmp_path / "whole")
    for die_at in (8, 21):
        assert _run(warm_torch, program, tmp_path / "killed", die_at) == ""
    assert _run(warm_torch, program, tmp_path / "killed") == expected


def test_the_three_lines_that_users_write_run_as_they_stand(warm_torch: WarmPython, tmp_path: Path) -> None:
    """The documented three lines run: save, load the latest, continue with the next epoch."""
    expected = _run(warm_torch, AS_WRITTEN.replace("scheduler.step()", ""), tmp_path / "whole")
    assert expected.startswith("4 ")
    program = AS_WRITTEN.replace("range(start_epoch, 5)", "range(start_epoch, min(start_epoch + 2, 5))")
    for epoch in (1, 3, 4):
        assert _run(warm_torch, program, tmp_path / "parts").startswith(f"{epoch} ")


@pytest.mark.full
def test_check_resume_names_only_objects_that_are_not_registered(tmp_path: Path) -> None:
    """The function check_resume finds nothing if all is registered, and names what is not."""
    from ciuic import check_resume

    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    forgotten = {"scale": 1.0}

    def step() -> float:
        optimizer.zero_grad()
        loss = model(torch.rand(2, 4)).sum() * forgotten["scale"]
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    def step_and_forget() -> float:
        forgotten["scale"] *= 0.5
        return step()

    step()
    objects = {"model": model, "optimizer": optimizer}
    before = [value.clone() for value in model.state_dict().values()]
    assert check_resume(objects, step) is None
    assert all(map(torch.equal, before, model.state_dict().values())), "the check changed the run"
    found = check_resume(objects, step_and_forget)
    assert found is not None
    assert (found.step, found.where.partition(".")[0]) == (1, "model")
    assert check_resume({**objects, "forgotten": forgotten}, step_and_forget) is None


@pytest.mark.full
def test_dtypes_layouts_and_ties_come_back_as_they_were(tmp_path: Path) -> None:
    """Bfloat16, float8, complex, bool, views, tied weights and an empty tensor come back as they were."""
    from ciuic import SnapshotManager

    tied = torch.rand(300, 300)
    value = {
        "bf16": torch.randn(5).bfloat16(),
        "f8": torch.randn(5).to(torch.float8_e4m3fn),
        "complex": torch.randn(3, dtype=torch.complex128),
        "mask": torch.tensor([True, False]),
        "transposed": torch.rand(300, 400).t(),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 4),
        "tied": (tied, tied),
        "device": torch.device("cpu"),
        "dtype": torch.float16,
        "size": torch.Size([2, 3]),
    }
    with SnapshotManager(tmp_path / "snapshots") as manager:
        manager.save_snapshot(extra=value, wait=True)
        state = manager.load_latest_snapshot()
    assert state is not None
    found = state["extra"]
    assert list(found) == list(value)
    for name in ("bf16", "f8", "complex", "mask", "transposed", "scalar", "empty"):
        assert found[name].dtype == value[name].dtype
        assert found[name].shape == value[name].shape
        assert (
            found[name].contiguous().view(torch.uint8).tolist()
            == value[name].contiguous().view(torch.uint8).tolist()
            if found[name].dim()
            else found[name] == value[name]
        )
    assert found["tied"][0] is found["tied"][1]
    assert torch.equal(found["tied"][0], tied)
    assert (found["device"], found["dtype"], found["size"]) == (
        value["device"],
        value["dtype"],
        value["size"],
    )


@pytest.mark.full
def test_state_of_inference_mode_can_be_trained_outside_of_it(tmp_path: Path) -> None:
    """An evaluation in inference mode may save and load: the next save works, and what was loaded trains."""
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.ones(2, 300)).sum().backward()
        optimizer.step()

    step()
    with SnapshotManager(tmp_path) as manager:
        with torch.inference_mode():
            assert manager.save_snapshot(model, optimizer, 1, wait=True) is not None
            state = manager.load_latest_snapshot()
        assert manager.save_snapshot(model, optimizer, 2, wait=True) is not None
    assert state is not None
    model.load_state_dict(state["model_state_dict"])
    optimizer.load_state_dict(state["optimizer_state_dict"])
    step()
