"""What a manager logs to experiment trackers, with a real writer, NumPy alone, and trackers that fail, hang and come back."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from support.tiny_training import Model, Optimizer

from ciuic import SnapshotManager
from ciuic.errors import NotFound
from ciuic.training import SaveResult, trackers
from ciuic.training.trackers import TrackedSave, TrackerFeeds


class Recorder:
    """Tracker that remembers, refuses while ``refuses`` is set, and stands still while ``may_go`` is not."""

    def __init__(self, run: str = "run-1", name: str = "recorder") -> None:
        self.name, self.run_id = name, run
        self.saves: list[TrackedSave] = []
        self.refuses = False
        self.may_go, self.asked, self.logged = threading.Event(), threading.Event(), threading.Condition()
        self.may_go.set()

    def run(self) -> Mapping[str, str]:
        return {"run": self.run_id, "experiment": "7"} if self.run_id else {}

    def log(self, save: TrackedSave) -> None:
        self.asked.set()
        assert self.may_go.wait(60)
        if self.refuses:
            raise ConnectionError("503 Service Unavailable")
        with self.logged:
            self.saves.append(save)
            self.logged.notify_all()

    def wait(self, count: int) -> None:
        with self.logged:
            assert self.logged.wait_for(lambda: len(self.saves) >= count, 60)


def result(step: int, id_: str | None = None) -> SaveResult:
    return SaveResult(
        id_, step, None, {}, None if id_ else "no space", trackers={"recorder": {"run": "run-1"}}
    )


def test_each_save_is_logged_with_its_verdict_and_names_its_run(tmp_path: Path) -> None:
    """A tracker gets id, step, verdict and sizes of each save, in order; the snapshot stores run and experiment."""
    tracker = Recorder()
    with SnapshotManager(tmp_path / "snapshots", every_steps=2, name="mine") as manager:
        model = Model()
        optimizer = Optimizer(model)
        manager.track(tracker)
        manager.register(model=model, optimizer=optimizer)
        for _ in range(4):
            optimizer.step()
            manager.wait()
    listed = manager.list_snapshots()[::-1]
    assert [(one.result.id, one.result.step) for one in tracker.saves] == [
        (one.id, one.facts.step) for one in listed
    ]
    assert [one.facts.trackers for one in listed] == [{"recorder": {"run": "run-1", "experiment": "7"}}] * 2
    first = tracker.saves[0]
    assert (first.repository, first.training, first.verdict) == (str(tmp_path / "snapshots"), "mine", "GOOD")
    assert first.facts["size_bytes"] == listed[0].size_bytes
    assert first.facts["new_bytes"] == listed[0].new_bytes > 0
    assert first.numbers["good"] == 1


@pytest.mark.full
def test_a_save_that_failed_and_one_that_is_gone_are_logged(tmp_path: Path) -> None:
    """A failed save is logged as FAILED with its reason; a snapshot that went before it was judged as UNKNOWN."""
    SnapshotManager(tmp_path / "snapshots").close()
    tracker = Recorder()
    feeds = TrackerFeeds(str(tmp_path / "snapshots"), "training")
    feeds.add(tracker)
    feeds.put(result(1))
    feeds.put(result(2, "cs-123456"))
    tracker.wait(2)
    feeds.close(60)
    assert [one.verdict for one in tracker.saves] == ["FAILED", "UNKNOWN"]
    assert tracker.saves[0].facts == {"step": 1, "verdict": "FAILED", "error": "no space"}


@pytest.mark.full
def test_a_run_is_resumed_by_its_id(tmp_path: Path) -> None:
    """`resume(tracker_run=)` puts the newest state of that run back, to the bit; another id says which there are."""
    model = Model()
    with SnapshotManager(tmp_path / "snapshots") as manager:
        manager.track(tracker := Recorder())
        manager.register(model=model)
        states = {}
        for step, run in enumerate(["first", "first", "second"], 1):
            tracker.run_id = run
            model.weights["layer.weight"] += step
            manager.save_snapshot(step=step, wait=True)
            states[step] = model.weights["layer.weight"].copy()
    again = Model()
    with SnapshotManager(tmp_path / "snapshots", max_snapshots=1) as manager:
        manager.register(model=again)
        resumed = manager.resume(tracker_run="first")
        assert resumed is not None
        assert resumed.step == 2
        assert np.array_equal(again.weights["layer.weight"], states[2])
        assert manager.load_snapshot(tracker_run="second").facts.step == 3
        with pytest.raises(
            NotFound, match=r"the run third: .*; there are snapshots of second, first, the newest is cs"
        ):
            manager.resume(tracker_run="third")
        with pytest.raises(ValueError, match="tracker_run= alone"):
            manager.load_snapshot(step=1, tracker_run="first")
        # Logged nowhere; the rule of this run removes the snapshots of the others.
        newest = manager.save_snapshot(step=4, wait=True)
    assert newest is not None
    with SnapshotManager(tmp_path / "snapshots") as manager:
        manager.register(model=again)
        with pytest.raises(NotFound, match="or they have been removed; no snapshot there was") as raised:
            manager.resume(tracker_run="second")
    assert f"the newest is {newest.id} (step 4)" in str(raised.value)


def test_a_tracker_that_hangs_delays_no_save_and_not_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While a tracker stands still saves become durable, and `close` leaves it behind, saying what was not logged."""
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.05)
    tracker = Recorder()
    tracker.may_go.clear()
    other = Recorder(name="other")
    manager = SnapshotManager(tmp_path / "snapshots")
    manager.track(tracker)
    manager.track(other)
    manager.register(model=Model())
    for step in (1, 2):
        save = manager.save_snapshot(step=step, wait=True)
        assert save is not None
        assert save.id
    other.wait(2)
    assert tracker.asked.wait(60)
    with caplog.at_level(logging.WARNING, "ciuic"):
        manager.close()
    assert "ciuic: 2 saves were not logged to recorder" in caplog.text
    assert not tracker.saves
    tracker.may_go.set()


@pytest.mark.full
def test_what_waits_for_a_tracker_is_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of more saves than may wait the newest are logged."""
    tracker = Recorder()
    tracker.may_go.clear()
    feeds = TrackerFeeds(str(tmp_path), "training")
    feeds.add(tracker)
    count = trackers.MAX_WAITING + 50
    for step in range(count):
        feeds.put(result(step))
    assert tracker.asked.wait(60)
    tracker.may_go.set()
    tracker.wait(trackers.MAX_WAITING)
    with caplog.at_level(logging.WARNING, "ciuic"):
        feeds.close(60)
    steps = [one.result.step for one in tracker.saves]
    assert steps[-trackers.MAX_WAITING :] == list(range(50, count))
    # One of the 50 may have been on its way when it was dropped.
    assert f"{count - len(steps)} saves were not logged" in caplog.text


@pytest.mark.full
def test_a_tracker_that_is_away_is_told_once_and_gets_what_waited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A tracker that refuses is asked again; the log tells of it once, and once when it answers again."""
    monkeypatch.setattr(trackers, "_MIN_PAUSE_SECONDS", 0.001)
    tracker = Recorder()
    tracker.refuses = True
    attempts = threading.Semaphore(0)
    log = tracker.log

    def counted(save: TrackedSave) -> None:
        attempts.release()
        log(save)

    monkeypatch.setattr(tracker, "log", counted)
    feeds = TrackerFeeds(str(tmp_path), "training")
    feeds.add(tracker)
    with caplog.at_level(logging.WARNING, "ciuic"):
        feeds.put(result(1))
        feeds.put(result(2))
        for _ in range(3):
            assert attempts.acquire(timeout=60)
        tracker.refuses = False
        tracker.wait(2)
        feeds.close(60)
    assert [one.result.step for one in tracker.saves] == [1, 2]
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "recorder does not take what is logged of a save, which is tried again" in caplog.messages[0]
    assert "503" in caplog.messages[0]
    assert "logged to recorder again" in caplog.messages[1]


@pytest.mark.full
def test_a_save_that_is_rejected_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A save that a tracker rejects for good is counted as lost, and the next one is logged at once."""
    tracker = Recorder()
    log = tracker.log

    def rejecting(save: TrackedSave) -> None:
        if save.result.step == 1:
            raise trackers.Rejected("no such run")
        log(save)

    monkeypatch.setattr(tracker, "log", rejecting)
    feeds = TrackerFeeds(str(tmp_path), "training")
    feeds.add(tracker)
    with caplog.at_level(logging.WARNING, "ciuic"):
        for step in (1, 2):
            feeds.put(result(step))
        tracker.wait(1)
        feeds.close(60)
    assert [one.result.step for one in tracker.saves] == [2]
    assert "which is not tried again" in caplog.messages[0]
    assert "1 save were" not in caplog.messages[-1]
    assert "1 save was not logged to recorder" in caplog.messages[-1]


@pytest.mark.full
def test_a_tracker_that_cannot_name_its_run_costs_nothing(tmp_path: Path) -> None:
    """A save goes on without a tracker that raises or has no run yet."""
    broken, none = Recorder(name="broken"), Recorder("", "none")
    broken.run = lambda: {}["run"]  # type: ignore[method-assign]
    with SnapshotManager(tmp_path / "snapshots") as manager:
        manager.track(broken)
        manager.track(none)
        save = manager.save_snapshot(Model(), wait=True)
    assert save is not None
    assert save.id
    assert not broken.saves
    assert not none.saves
    assert manager.list_snapshots()[0].facts.trackers == {}
    with pytest.raises(ValueError, match="closed"):
        manager.track(none)
