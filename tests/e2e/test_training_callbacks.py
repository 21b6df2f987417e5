"""Callbacks of `SnapshotManager.on_saved`, with a real writer and NumPy alone."""

from __future__ import annotations

import json
import logging
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.tiny_training import Model, Optimizer

from ciuic import SnapshotManager
from ciuic.training import SaveResult
from ciuic.training.results import SaveCallbacks
from ciuic.training.snapshots import TrainingSnapshots

RESULT = SaveResult("cs-123456", 1, None, {})


def _refuse(_: SaveResult) -> None:
    raise ValueError("no route to the bucket")


def _exit(_: SaveResult) -> None:
    sys.exit(3)


def test_each_save_is_told_once_automatic_ones_too(tmp_path: Path) -> None:
    """Each save is told once and in order, on the thread of the manager, with what was saved."""
    model = Model()
    optimizer = Optimizer(model)
    told: list[SaveResult] = []
    threads = set()
    with SnapshotManager(tmp_path / "snapshots", every_steps=2) as manager:
        manager.register(model=model, optimizer=optimizer)
        manager.epoch = 4

        @manager.on_saved
        def note(result: SaveResult) -> None:
            threads.add(threading.current_thread().name)
            told.append(result)

        for _ in range(4):
            manager.report(loss=0.5)
            optimizer.step()
            manager.wait()
        manager.save_snapshot(metrics={"loss": 0.25})
    saved = [(one.id, one.facts.step, 4, one.facts.metrics) for one in manager.list_snapshots()]
    assert [(one.id, one.step, one.epoch, one.metrics) for one in told] == saved[::-1]
    assert len(saved) == 3
    assert all(one.durable and one.error is None for one in told)
    assert threads == {"ciuic-on-saved"}


def remove_while_written(path: Path) -> None:
    """Remove a directory in which the writer may be storing the older snapshots as differences."""
    while path.exists():
        shutil.rmtree(path, ignore_errors=True)


def test_a_save_that_fails_in_the_writer_is_told_with_the_reason(tmp_path: Path) -> None:
    """A save that the writer cannot store is told as failed, with the reason that is counted."""
    told: list[SaveResult] = []
    with SnapshotManager(tmp_path / "snapshots") as manager:
        manager.on_saved(told.append)
        manager.save_snapshot(Model(), epoch=1, wait=True)
        remove_while_written(tmp_path / "snapshots")
        manager.save_snapshot(epoch=2, metrics={"loss": 1.0}, wait=True)
    assert [one.durable for one in told] == [True, False]
    assert (told[1].id, told[1].epoch, told[1].metrics) == (None, 2, {"loss": 1.0})
    assert told[1].error
    assert told[1].error == manager.stats.last_error


def test_an_automatic_save_that_cannot_be_packed_is_told(tmp_path: Path) -> None:
    """An automatic save of a value that cannot be stored is told: the program sees no exception of it."""
    model = Model()
    optimizer = Optimizer(model)
    told: list[SaveResult] = []
    with SnapshotManager(tmp_path / "snapshots", every_steps=1) as manager:
        manager.register(model=model, optimizer=optimizer)
        manager.on_saved(told.append)
        model.weights["made_by"] = _refuse  # type: ignore[assignment]
        optimizer.announce()
    assert [(one.step, one.durable) for one in told] == [(1, False)]
    assert "model.made_by" in str(told[0].error)


def test_a_save_without_memory_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that could not be staged is told once, as failed."""
    told: list[SaveResult] = []
    with SnapshotManager(tmp_path / "snapshots") as manager:
        manager.on_saved(told.append)

        def no_memory(*_: Any) -> None:
            raise OSError(12, "Cannot allocate memory")

        monkeypatch.setattr("ciuic.training.writer.client.allocate_arena", no_memory)
        assert manager.save_snapshot(Model(), step=7) is None
    assert [(one.step, one.error) for one in told] == [(7, "Cannot allocate memory")]


@pytest.mark.parametrize("broken", [_refuse, _exit])
def test_a_callback_that_raises_is_logged_and_ends_nothing(
    broken: Callable[[SaveResult], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An exception of a callback is logged; the other callback gets this result and later ones."""
    told: list[SaveResult] = []
    with caplog.at_level(logging.ERROR, "ciuic"), SnapshotManager(tmp_path / "snapshots") as manager:
        manager.on_saved(broken)
        manager.on_saved(told.append)
        manager.save_snapshot(Model(), wait=True)
        manager.save_snapshot(wait=True)
    assert len(told) == manager.stats.saved == 2
    assert [record.message for record in caplog.records] == [
        "ciuic: a callback of on_saved failed; the training is unaffected"
    ] * 2


def test_a_callback_may_mark_the_snapshot(tmp_path: Path) -> None:
    """A callback may use the manager, for example to tag the snapshot."""
    with SnapshotManager(tmp_path / "snapshots") as manager:
        manager.on_saved(lambda result: manager.tag(str(result.id), "uploaded"))
        manager.save_snapshot(Model(), wait=True)
    assert "uploaded" in manager.list_snapshots()[0].tags


def test_nothing_is_called_after_close() -> None:
    """`close` leaves a callback that hangs behind, and no further one begins."""
    callbacks, begun, may_end = SaveCallbacks(), threading.Event(), threading.Event()
    told: list[SaveResult] = []

    def hang(result: SaveResult) -> None:
        told.append(result)
        begun.set()
        may_end.wait()

    callbacks.add(hang)
    callbacks.notify(RESULT)
    callbacks.notify(RESULT)
    assert begun.wait(60)
    callbacks.close(0.0)
    callbacks.notify(RESULT)
    may_end.set()
    assert callbacks._thread is not None
    callbacks._thread.join(60)
    assert not callbacks._thread.is_alive()
    assert told == [RESULT]


def test_a_callback_may_close_the_manager(tmp_path: Path) -> None:
    """A callback that closes the manager does not wait for itself."""
    manager = SnapshotManager(tmp_path / "snapshots")
    closed = threading.Event()

    def close(_: SaveResult) -> None:
        manager.close()
        closed.set()

    manager.on_saved(close)
    manager.save_snapshot(Model(), wait=True)
    assert closed.wait(60)
    with pytest.raises(ValueError, match="the manager is closed"):
        manager.on_saved(close)


def test_what_cannot_be_called_is_refused(tmp_path: Path) -> None:
    """Anything but a function is refused when it is given."""
    with SnapshotManager(tmp_path / "snapshots") as manager, pytest.raises(TypeError, match="got 'print'"):
        manager.on_saved("print")  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore")
def test_of_several_ranks_rank_0_calls(tmp_path: Path) -> None:
    """Rank 0 alone of the ranks that store a sharded state calls, once for each snapshot."""
    torch = pytest.importorskip("torch", reason="no CPU build of PyTorch is offered here")
    if not torch.distributed.is_available():
        pytest.skip("this PyTorch has no torch.distributed")
    from support import sharded_training
    from support.sharded_training import Ranks

    save_dir, result = str(tmp_path / "snapshots"), tmp_path / "result"
    Ranks(tmp_path / "save", 2, sharded_training.note_saves, save_dir, str(result)).check()
    ids = [one.id for one in TrainingSnapshots(save_dir).list_snapshots()]
    assert len(ids) == 3
    assert json.loads(Path(f"{result}-0").read_text()) == ids[::-1]
    assert json.loads(Path(f"{result}-1").read_text()) == []
