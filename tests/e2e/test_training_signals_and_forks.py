"""SnapshotManager with handlers that save, forks, interrupts, and writers that are stopped or killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.leftovers import training_writer

import ciuic
from ciuic import SnapshotManager
from ciuic.repository import Repository
from ciuic.training import save_pipeline
from ciuic.training.format.tensors import ArrayBuffer
from ciuic.training.writer import client
from ciuic.types import ChunkId


class Model:
    """Model large enough for a file of its own."""

    def __init__(self) -> None:
        self.weights = {f"layer{number}": np.zeros(40_000) for number in range(3)}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.weights)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = dict(state)


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def manager(tmp_path: Path, model: Model) -> Iterator[SnapshotManager]:
    with SnapshotManager(tmp_path / "snapshots") as made:
        made.register(model=model)
        yield made


def test_a_handler_that_saves_in_the_middle_of_a_save_gets_a_snapshot_of_its_own(
    manager: SnapshotManager, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler that saves within a save gets the other arena; both snapshots are whole."""
    fill, saves = ArrayBuffer.fill, []

    def interrupted(place: ArrayBuffer, value: Any) -> None:
        fill(place, value)
        if not saves:
            saves.append(None)
            for weights in model.weights.values():
                weights += 1
            saves.append(manager.save_snapshot(metrics={"inner": 1.0}))
            for weights in model.weights.values():
                weights -= 1

    monkeypatch.setattr(ArrayBuffer, "fill", interrupted)
    saves.append(manager.save_snapshot(metrics={"outer": 1.0}))
    assert manager.wait()
    for save, metrics, value in ((saves[1], {"inner": 1.0}, 1.0), (saves[2], {"outer": 1.0}, 0.0)):
        assert save is not None
        assert save.id
        state = manager.load_snapshot(save.id)
        assert state["metrics"] == metrics
        assert {float(one) for array in state["model_state_dict"].values() for one in array} == {value}


def test_a_forked_process_can_load_and_cannot_save_and_does_not_disturb_its_parent(
    manager: SnapshotManager, capfd: pytest.CaptureFixture[str]
) -> None:
    """A forked child can load, cannot save, and leaves its parent's socket and arenas alone."""
    manager.save_snapshot(wait=True)
    save = manager.save_snapshot()
    child = os.fork()
    if not child:
        code = 1
        try:
            manager.wait(1)
            code = 0 if manager.load_latest_snapshot() is not None and manager.save_snapshot() is None else 2
            manager.close()
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert save is not None
    assert save.wait()
    later = manager.save_snapshot(wait=True)
    assert later is not None
    assert later.id
    assert len(manager.list_snapshots()) == 3


def test_a_forked_process_ends_as_any_other(tmp_path: Path) -> None:
    """A forked child ends cleanly although it inherited the manager."""
    program = (
        "import os, sys, numpy\nfrom ciuic import SnapshotManager\n"
        f"manager = SnapshotManager({str(tmp_path / 'snapshots')!r})\n"
        "manager.register(state={'a': numpy.zeros(100_000)})\nmanager.save_snapshot(wait=True)\n"
        "child = os.fork()\n"
        "if not child:\n    manager.load_latest_snapshot()\n    sys.exit(0)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", program]) == 0


@pytest.mark.parametrize("sent", [False, True])
def test_an_interrupt_in_the_middle_of_handing_over_loses_no_later_snapshot(
    manager: SnapshotManager, model: Model, monkeypatch: pytest.MonkeyPatch, *, sent: bool
) -> None:
    """Arenas that the writer may read are not filled again after an interrupt during the handover."""
    send = client.send

    def interrupted(sock: Any, message: Any, fds: tuple[int, ...] = ()) -> None:
        if sent or not isinstance(message, client.SaveRequest):
            send(sock, message, fds)
        if isinstance(message, client.SaveRequest):
            monkeypatch.setattr(client, "send", send)
            raise KeyboardInterrupt

    monkeypatch.setattr(client, "send", interrupted)
    with pytest.raises(KeyboardInterrupt):
        manager.save_snapshot(metrics={"number": 0.0})
    for number in range(1, 5):
        for weights in model.weights.values():
            weights += 1
        save = manager.save_snapshot(metrics={"number": float(number)}, wait=True)
        assert save is not None
        assert save.id
    for saved in manager.list_snapshots():
        state = manager.load_snapshot(saved.id)
        values = {float(one) for array in state["model_state_dict"].values() for one in array}
        assert values == {state["metrics"]["number"]}


def test_a_writer_that_hangs_does_not_hang_the_training(
    manager: SnapshotManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save is skipped and counted while the writer hangs, and what was staged is stored afterwards."""
    manager.save_snapshot(wait=True)
    monkeypatch.setattr(save_pipeline, "EXIT_SECONDS", 0.1)
    writer = training_writer()
    os.kill(writer, signal.SIGSTOP)
    try:
        staged = 0
        while manager.save_snapshot() is not None:
            staged += 1
    finally:
        os.kill(writer, signal.SIGCONT)
    assert manager.wait()
    assert (staged, manager.stats.saved, manager.stats.skipped, manager.stats.failed) == (8, 9, 1, 0)


def test_a_writer_that_is_killed_between_two_saves_costs_none(manager: SnapshotManager) -> None:
    """A save after the writer was killed is handed to a new one."""
    for _ in range(3):
        save = manager.save_snapshot(wait=True)
        assert save is not None
        assert save.id
        writer = training_writer()
        os.kill(writer, signal.SIGKILL)
        os.waitid(os.P_PID, writer, os.WEXITED | os.WNOWAIT)
    assert (manager.stats.saved, manager.stats.failed) == (3, 0)


def test_a_save_lost_with_its_writer_tells_how_the_writer_ended(manager: SnapshotManager) -> None:
    """The error of a save that a killed writer held names the signal."""
    manager.save_snapshot(wait=True)
    writer = training_writer()
    os.kill(writer, signal.SIGSTOP)
    save = manager.save_snapshot()
    assert save is not None
    os.kill(writer, signal.SIGKILL)
    os.waitid(os.P_PID, writer, os.WEXITED | os.WNOWAIT)
    assert save.wait() is None
    assert save.error == "the writer process is gone (killed by SIGKILL)"


def test_signals_to_all_processes_of_a_job_do_not_end_the_writer(manager: SnapshotManager) -> None:
    """A writer that has just been started, and one that has stored a state, outlive what schedulers send to each process of a job."""
    manager.save_snapshot()
    writer = training_writer()
    for _ in range(2):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(writer, number)
        save = manager.save_snapshot(wait=True)
        assert save is not None
        assert save.id
        assert training_writer() == writer
    # Nothing of it is left behind for the trainer.
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_later_snapshots_do_not_share_a_directory_that_was_found_damaged(tmp_path: Path) -> None:
    """Unchanged content is shared with earlier snapshots until it is found damaged."""
    moving = Model()
    with SnapshotManager(tmp_path / "snapshots", max_snapshots=1) as manager:
        manager.register(moving=moving, frozen=Model())
        # Reading back gives way to the next save four times.
        for number in range(10):
            moving.weights["layer0"] += 1
            assert manager.save_snapshot(epoch=number, wait=True) is not None
            if number == 1:
                _damage_tree(tmp_path / "snapshots", b"frozen")
    with SnapshotManager(tmp_path / "snapshots") as manager:
        state = manager.load_latest_snapshot()
        assert state is not None
        assert (state["epoch"], state.passed_over) == (9, [])


def _damage_tree(save_dir: Path, name: bytes) -> None:
    """Damage the listing of a directory in the newest snapshot."""
    with Repository.open(save_dir) as repository:
        top = repository.snapshots.load(repository.snapshots.ids()[0]).roots[0].entry
        assert top is not None
        chunk = next(one.content for one in repository.trees.entries(top.content) if one.name == name)
        place = repository.chunks.locate(ChunkId(chunk))
    with open(save_dir / "packs" / f"{place.pack:016x}.pack", "r+b") as file:
        file.seek(place.offset)
        first = file.read(1)[0]
        file.seek(place.offset)
        file.write(bytes([first ^ 1]))


def test_waiting_for_a_save_after_the_manager_was_closed_ends(manager: SnapshotManager) -> None:
    """Waiting for a save ends when the manager is closed, because no answer will come."""
    manager.save_snapshot(wait=True)
    writer = training_writer()
    os.kill(writer, signal.SIGSTOP)
    try:
        save = manager.save_snapshot()
        manager.close(0.1)
        assert save is not None
        assert save.wait(60) is None
    finally:
        os.kill(writer, signal.SIGCONT)


def test_the_writer_is_found_where_the_program_was_found(tmp_path: Path) -> None:
    """The writer finds the package in the directory in which the program was started."""
    checkout = Path(ciuic.__file__).parents[1]
    elsewhere = [one for one in sys.path if one and Path(one) != checkout]
    program = (
        f"import sys; sys.path[:] = ['', *{elsewhere!r}]\n"
        "from ciuic import SnapshotManager\n"
        f"manager = SnapshotManager({str(tmp_path / 'snapshots')!r})\n"
        "manager.register(state={'a': 1})\n"
        "save = manager.save_snapshot(wait=True)\nmanager.close()\nsys.exit(not save.id)"
    )
    assert subprocess.run([sys.executable, "-S", "-c", program], cwd=checkout, check=False).returncode == 0


def test_a_thread_that_waits_for_a_snapshot_keeps_no_other_from_saving(manager: SnapshotManager) -> None:
    """Another thread can save while one waits, and both snapshots are whole."""
    manager.save_snapshot(wait=True)
    writer = training_writer()
    os.kill(writer, signal.SIGSTOP)
    try:
        save = manager.save_snapshot()
        assert save is not None
        waiting = threading.Thread(target=save.wait)
        waiting.start()
        assert manager.save_snapshot() is not None
        assert waiting.is_alive()
    finally:
        os.kill(writer, signal.SIGCONT)
    waiting.join()
    assert save.id
    assert manager.wait()
    assert manager.stats.saved == 3


def test_simultaneous_saves_of_threads_make_one_snapshot_each(manager: SnapshotManager) -> None:
    """Threads that save at the same time make one whole snapshot each."""
    done: list[Any] = []

    def save(number: int) -> None:
        done.extend(manager.save_snapshot(metrics={"number": float(number)}) for _ in range(4))

    threads = [threading.Thread(target=save, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert manager.wait()
    assert all(one is not None and one.id for one in done)
    found = sorted(manager.load_snapshot(one.id)["metrics"]["number"] for one in done)
    assert found == sorted([0.0, 1.0, 2.0] * 4)
