"""Tests of when `[[snapshot_when]]` cuts: bursts, spacing, limits, and changed bytes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import trio

from ciuic.config import SnapshotWhen
from ciuic.daemon.base.events import Alerts, EventBus
from ciuic.daemon.base.runtime import RuntimeDirectory
from ciuic.daemon.snapshots.schedule import MAX_WAIT_SECONDS, EventSnapshots
from ciuic.errors import CiuicError
from ciuic.protocol.control_types import SnapshotRequest
from ciuic.protocol.worker_frames import NameCounts, WatchedNames


class _Site:
    """Two roots whose workers count what the test says."""

    place: ClassVar[Path]

    def __init__(self, *rules: SnapshotWhen) -> None:
        self.rules = rules
        self.counts: dict[str, tuple[int, ...]] = {}
        self.dirty_bytes = 0
        self.lost: tuple[int, ...] = ()
        self.epoch = 1
        self.taken: list[SnapshotRequest] = []
        self.failure: CiuicError | None = None
        self.asked: list[WatchedNames] = []
        self.alerts = Alerts(EventBus(lambda: 0), lambda: 0)
        roots: Any = {path: SimpleNamespace(worker=self._worker(path)) for path in ("/a", "/b")}
        settings: Any = lambda: SimpleNamespace(snapshot_when=self.rules)  # noqa: E731
        self._make = lambda: EventSnapshots(
            settings, lambda: roots, self._take, self.alerts, RuntimeDirectory(self.place)
        )
        self.part = self._make()

    def _worker(self, path: str) -> Any:
        async def ask(call: Any) -> NameCounts:
            def name_events(wanted: WatchedNames) -> NameCounts:
                self.asked.append(wanted)
                counts = self.counts.pop(path, (0,) * len(wanted.rules))
                return NameCounts(
                    counts=counts, epoch=self.epoch, dirty_bytes=self.dirty_bytes, lost=self.lost
                )

            return call(SimpleNamespace(name_events=name_events))  # type: ignore[no-any-return]

        return SimpleNamespace(ask=ask)

    async def _take(self, request: SnapshotRequest) -> None:
        if self.failure is not None:
            raise self.failure
        self.taken.append(request)

    def restart(self) -> None:
        """Go on with the part of another daemon, which knows what lies in the runtime directory alone."""
        self.part = self._make()

    def at(self, now: float, **counts: tuple[int, ...]) -> int:
        """Look at this time, after these counts of the roots; return the number of snapshots so far."""
        self.counts = {f"/{name}": found for name, found in counts.items()}
        trio.run(self.part.once, now)
        return len(self.taken)


@pytest.fixture(autouse=True)
def _runtime_directory(tmp_path: Path) -> None:
    _Site.place = tmp_path


def test_a_burst_gives_one_snapshot_when_it_is_over() -> None:
    """While names come the cut waits, but not for ever; the snapshot has the roots in which it happened."""
    site = _Site(SnapshotWhen(renamed="*.pt", least_between_seconds=0))
    assert [site.at(1, a=(900,)), site.at(2, a=(99,)), site.at(3, b=(1,)), site.at(4), site.at(5)] == [
        *(0, 0, 0, 0),
        1,
    ]
    (request,) = site.taken
    assert (request.roots, request.tags, request.message) == (["/a", "/b"], ["event"], "renamed *.pt")
    began = 100.0
    looks = [site.at(began + second, a=(1,)) for second in range(int(MAX_WAIT_SECONDS) + 1)]
    assert looks == [1] * int(MAX_WAIT_SECONDS) + [2]


def test_limits_of_a_rule_delay_and_lose_nothing() -> None:
    """What happens too soon, or too often in an hour, is cut when it may be."""
    site = _Site(SnapshotWhen(appears="DONE", least_between_seconds=60, per_hour=2))
    site.at(0, a=(1,))
    assert [site.at(2), site.at(10, a=(1,)), site.at(61), site.at(62)] == [1, 1, 1, 2]
    site.at(200, a=(1,))
    assert [site.at(3601), site.at(3602)] == [2, 3]


def test_events_in_one_root_use_up_no_limit_of_another() -> None:
    """The owner of a root who makes events all the time delays the snapshot of another root by the burst's limit at most."""
    site = _Site(SnapshotWhen(appears="DONE", least_between_seconds=60, per_hour=2))
    for now in range(400):
        site.at(now, a=(1,))
    assert [request.roots for request in site.taken] == [["/a"]] * 2
    for now in range(400, 400 + int(MAX_WAIT_SECONDS) + 1):
        site.at(now, a=(1,), b=(int(now == 400),))
    assert site.taken[-1].roots == ["/b"]


def test_a_killed_daemons_events_and_limits_are_its_successors() -> None:
    """What was counted before it was killed is cut, and neither spacing nor the hour begins anew; another boot begins with nothing."""
    site = _Site(SnapshotWhen(appears="DONE", least_between_seconds=60, per_hour=2))
    site.at(100, a=(1,))
    site.restart()
    assert [site.at(101), site.at(103)] == [0, 1]
    assert site.taken[0].roots == ["/a"]
    site.at(110, a=(1,))
    site.restart()
    assert [site.at(130), site.at(162), site.at(163)] == [1, 1, 2]
    site.at(300, a=(1,))
    site.restart()
    assert [site.at(3000), site.at(3702), site.at(3703)] == [2, 2, 3]
    site.restart()
    assert site.at(3900) == 3
    site.at(4000, a=(1,))
    site.restart()
    # Since another boot: times before its beginning are none.
    record = site.place / "snapshot-events.json"
    record.write_bytes(record.read_bytes().replace(b'"boot_id":"', b'"boot_id":"0'))
    assert [site.at(5), site.at(10)] == [3, 3]


def test_rules_that_are_due_together_share_a_snapshot() -> None:
    """The message names both rules."""
    site = _Site(SnapshotWhen(renamed="*.pt"), SnapshotWhen(closed="*.bin"))
    site.at(0, a=(1, 1))
    assert site.at(2) == 1
    assert site.taken[0].message == "renamed *.pt, closed *.bin"


def test_changed_bytes_count_from_the_last_cut() -> None:
    """A rule of bytes cuts when both enough time and enough changes have come since the last cut of the root."""
    site = _Site(SnapshotWhen(after_seconds=900, changes_bytes=1 << 30, least_between_seconds=0))
    site.at(0)
    site.dirty_bytes = 1 << 30
    assert [site.at(899), site.at(900)] == [0, 1]
    site.epoch += 1
    assert [site.at(901), site.at(1800), site.at(1801)] == [1, 1, 2]
    site.dirty_bytes -= 1
    site.epoch += 1
    assert site.at(9000) == 2


def test_a_failed_cut_is_tried_again() -> None:
    """The event is not lost, and an alert stands meanwhile."""
    site = _Site(SnapshotWhen(renamed="*.pt"))
    site.failure = CiuicError("the disk is full")
    site.at(0, a=(1,))
    assert site.at(2) == 0
    assert [alert.key for alert in site.alerts.standing()] == ["event"]
    site.failure = None
    assert [site.at(3), site.at(32)] == [0, 1]
    assert site.alerts.standing() == []


def test_a_file_that_no_snapshot_had_is_told_and_the_others_are_cut_at_once() -> None:
    """Its alert stands until a snapshot of the root after which nothing was lost."""
    site = _Site(SnapshotWhen(renamed="*.pt", least_between_seconds=0))
    site.lost = (2,)
    assert site.at(0, a=(3,)) == 1
    found = {alert.key: alert.message for alert in site.alerts.standing()}
    assert found["lost:/a"] == "/a: 2 files with a name like *.pt were removed before any snapshot had them"
    site.lost = ()
    assert [site.at(5, a=(1,), b=(1,)), site.at(7)] == [1, 2]
    assert site.alerts.standing() == []


@pytest.mark.parametrize("before", [(), (SnapshotWhen(renamed="*.pt"),)])
def test_without_rules_no_worker_is_asked(before: tuple[SnapshotWhen, ...]) -> None:
    """Workers are told once that nothing is counted any more, and then left alone."""
    site = _Site(*before)
    site.at(0)
    site.rules = ()
    site.asked.clear()
    for now in range(1, 4):
        site.at(now)
    assert [wanted.rules for wanted in site.asked] == [()] * 2 * len(before)
