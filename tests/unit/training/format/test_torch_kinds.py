"""Every kind of tensor, optimizer and scheduler of torch, through what a snapshot stores of it."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.late_modules import LateModule, torch

from ciuic import SnapshotManager
from ciuic.training.format.structure import pack, unpack
from ciuic.training.format.tensors import Unsaveable

schedulers: Any = LateModule("torch.optim.lr_scheduler")
_NEED_MORE = {"SparseAdam", "Optimizer"}
"""Sparse gradients; the base class."""


def _round_trip(value: object) -> Any:
    packed = pack(value, "state")
    arrays = {leaf.name: leaf.value.detach().clone() for leaf in packed.leaves}
    return unpack(json.loads(json.dumps(packed.skeleton, allow_nan=False)), lambda name, _: arrays[name])


def _values_of(module: Any) -> list[Any]:
    return [getattr(module, name) for name in dir(module)]


def _bytes(tensor: Any) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return bytes(plain.reshape(-1).view(torch.uint8).numpy()) if plain.numel() else b""


def test_tensors_of_every_kind_come_back_through_a_snapshot_bit_for_bit(tmp_path: Path) -> None:
    """Tensors of each dtype and memory layout come back bit for bit, or are refused by name."""
    state: dict[str, Any] = {
        "strided": torch.arange(24.0).reshape(4, 6).t()[::2],
        "expanded": torch.ones(1).expand(5),
        "of no dimension": torch.tensor(float("nan")),
        "empty": torch.zeros(0, 3),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
        "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "large": torch.randn(200, 200)[:, :190],
        "of odd width": __import__("numpy").array([b"1234567"]),
    }
    for name in sorted({str(kind) for kind in _values_of(torch) if isinstance(kind, torch.dtype)}):
        made = torch.randint(0, 255, (12,), dtype=torch.uint8)
        try:
            state[name] = made.view(getattr(torch, name.removeprefix("torch.")))
            pack({name: state[name]}, "state")
        except (Unsaveable, RuntimeError):
            state.pop(name, None)  # quantized ones
    box: dict[str, Any] = dict(state)
    with SnapshotManager(tmp_path / "snapshots") as manager:
        manager.register(box=box)
        save = manager.save_snapshot(wait=True)
        assert save is not None
        assert save.id, manager.stats.last_error
        box.clear()
        assert manager.resume() is not None
    assert list(box) == list(state)
    for name, value in state.items():
        assert (box[name].dtype, box[name].shape) == (value.dtype, value.shape), name
        if name != "of odd width":
            assert _bytes(box[name]) == _bytes(value), name


@pytest.mark.parametrize(
    "made",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.sparse_coo_tensor([[0, 0, 1]], [1.0, 2.0, 3.0], (4,)),
        lambda: torch.eye(4).to_sparse_csr(),
        lambda: torch.eye(4).to_sparse_csc(),
        lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_tensors_come_back_with_their_layout(made: Callable[[], Any]) -> None:
    """Sparse tensors, which models have as buffers, come back with layout, shape and entries."""
    value = made()
    back = _round_trip({"value": value})["value"]
    assert (back.layout, back.shape, back.dtype) == (value.layout, value.shape, value.dtype)
    assert torch.equal(back.to_dense(), value.to_dense())
    if value.layout == torch.sparse_coo:
        assert back.is_coalesced() == value.is_coalesced()


def test_tensors_without_content_are_refused_by_name() -> None:
    """Tensors without content are refused by name, and not saved as something else."""
    with pytest.raises(Unsaveable, match="lazy module"):
        pack(torch.nn.LazyLinear(3).state_dict(), "model")
    with pytest.raises(Unsaveable, match="meta device"):
        pack(torch.nn.Linear(2, 3, device="meta").state_dict(), "model")


def test_every_optimizer_goes_on_to_the_same_bits() -> None:
    """An optimizer continues from its stored state to the same bits."""
    optimizers = [
        kind
        for kind in _values_of(torch.optim)
        if inspect.isclass(kind)
        and issubclass(kind, torch.optim.Optimizer)
        and kind.__name__ not in _NEED_MORE
    ]
    assert torch.optim.AdamW in optimizers
    for kind in optimizers:
        _goes_on(partial(kind, lr=0.01), None)


_SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "steps": lambda one: schedulers.StepLR(one, 2),
    "milestones": lambda one: schedulers.MultiStepLR(one, [1, 3, 3, 5]),
    "exponential": lambda one: schedulers.ExponentialLR(one, 0.9),
    "cosine": lambda one: schedulers.CosineAnnealingLR(one, 5),
    "warm restarts": lambda one: schedulers.CosineAnnealingWarmRestarts(one, 3),
    "one cycle": lambda one: schedulers.OneCycleLR(one, 0.1, total_steps=50),
    "cyclic": lambda one: schedulers.CyclicLR(one, 0.01, 0.1, step_size_up=2, scale_fn=lambda x: 0.9**x),
    "a function": lambda one: schedulers.LambdaLR(one, lambda epoch: 0.9**epoch),
    "plateau": lambda one: schedulers.ReduceLROnPlateau(one, patience=1),
    "chained": lambda one: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(one), schedulers.ExponentialLR(one, 0.9)]
    ),
    "one after the other": lambda one: schedulers.SequentialLR(
        one, [schedulers.LinearLR(one), schedulers.MultiStepLR(one, [1, 2])], [5]
    ),
    "averaging": lambda one: torch.optim.swa_utils.SWALR(one, swa_lr=0.05),
}


@pytest.mark.parametrize("name", _SCHEDULERS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_scheduler_goes_on_to_the_same_bits(name: str) -> None:
    """A scheduler continues from its stored state to the same bits, also across the change to its next schedule."""
    _goes_on(lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), _SCHEDULERS[name])


def _goes_on(make: Callable[[Any], Any], schedule: Callable[[Any], Any] | None) -> None:
    def program() -> tuple[dict[str, Any], Callable[[], None]]:
        torch.manual_seed(1)
        model = torch.nn.Linear(4, 3, bias=False)
        optimizer = make(model.parameters())
        objects = {"model": model, "optimizer": optimizer}
        if schedule is not None:
            objects["scheduler"] = schedule(optimizer)
        x, y = torch.randn(8, 4), torch.randn(8, 3)

        def loss() -> Any:
            optimizer.zero_grad()
            value = torch.nn.functional.mse_loss(model(x), y)
            value.backward()
            return value

        def step() -> None:
            value = optimizer.step(loss)
            if schedule is not None:
                needs = isinstance(objects["scheduler"], schedulers.ReduceLROnPlateau)
                objects["scheduler"].step(*([float(value)] if needs else []))

        return objects, step

    objects, step = program()
    for _ in range(3):
        step()
    saved = {key: _round_trip(value.state_dict()) for key, value in objects.items()}
    for _ in range(6):
        step()
    again, step_again = program()
    for key, value in again.items():
        value.load_state_dict(saved[key])
    for _ in range(6):
        step_again()
    assert _bytes(again["model"].weight) == _bytes(objects["model"].weight), make
    assert again["optimizer"].param_groups[0]["lr"] == objects["optimizer"].param_groups[0]["lr"]


def test_the_state_of_a_generator_may_stand_anywhere_among_other_tensors(tmp_path: Path) -> None:
    """The state of a generator is loaded into a storage of its own, from whose beginning torch reads it."""
    with SnapshotManager(tmp_path / "snapshots") as manager:
        for before in (1, 1000, 100_000):
            generator = torch.Generator().manual_seed(before)
            manager.save_snapshot(
                alone=torch.zeros(before, dtype=torch.uint8), generator=generator, wait=True
            )
            expected = torch.rand(4, generator=generator)
            state = manager.load_latest_snapshot()
            assert state is not None
            saved = state["generator_state_dict"]
            assert saved.storage_offset() == state["random_state"]["torch"].storage_offset() == 0
            assert torch.equal(torch.rand(4, generator=_set(torch.Generator(), saved)), expected)


def _set(generator: Any, state: Any) -> Any:
    generator.set_state(state)
    return generator
