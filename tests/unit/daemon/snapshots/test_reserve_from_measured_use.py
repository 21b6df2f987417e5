"""Tests of the reserve: what others took and gave back during the last interval, and no longer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import trio
import trio.testing

from ciuic.daemon.base.repository_store import Store
from ciuic.daemon.base.settings import RootSettings, Settings
from ciuic.daemon.snapshots import space_watch
from ciuic.daemon.snapshots.space_watch import SpaceWatch
from ciuic.errors import Damaged
from ciuic.protocol.control_types import RepositoryStatus
from ciuic.retention import MinFree

GIB = 1 << 30
INTERVAL_SECONDS = 3600


class Disk(Store):
    """A repository on a file system of 1,000 GiB."""

    def __init__(self) -> None:
        super().__init__(Path("/store"), block_bytes=4096)
        self.others = 100 * GIB
        self.own = 0

    def status(self) -> RepositoryStatus:
        return RepositoryStatus(
            exists=True, size_bytes=self.own, used_bytes=self.own + self.others, total_bytes=1000 * GIB
        )


class Watched:
    """A watch whose clock and disk the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, same_disk: bool = True) -> None:
        self.at = 0.0
        self.disk = Disk()
        self.settings = Settings(
            Path("/s"),
            Path("/r"),
            Path("/store"),
            roots=(RootSettings("/root"),),
            interval_seconds=INTERVAL_SECONDS,
        )
        self.watch = SpaceWatch(lambda: self.settings, lambda: self.disk, lambda: self.at)
        monkeypatch.setattr(space_watch, "_is_on", lambda root, home, mounts: same_disk)

    def reserve_gib(self, after_seconds: float = 30) -> int:
        self.at += after_seconds
        return self.watch.measure().reserve_bytes // GIB

    def reserve_gib_after_swing(self, gib: int) -> int:
        """Let others take that much and give it back, with a measurement before each."""
        self.reserve_gib()
        self.disk.others += gib * GIB
        self.reserve_gib()
        self.disk.others -= gib * GIB
        return self.reserve_gib()


def test_what_others_took_and_keep_needs_no_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a rise that stays nor a fall alone raises the reserve: nothing of it will be taken again."""
    watched = Watched(monkeypatch)
    assert watched.reserve_gib() == 50
    watched.disk.others += 60 * GIB
    assert watched.reserve_gib() == 50
    fallen = Watched(monkeypatch)
    fallen.reserve_gib()
    fallen.disk.others -= 60 * GIB
    assert fallen.reserve_gib() == 50


def test_the_reserve_is_what_others_took_and_gave_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that took space and gave it back within an interval finds it again; the reserve shrinks by itself."""
    watched = Watched(monkeypatch)
    watched.reserve_gib()
    watched.disk.others += 60 * GIB
    watched.reserve_gib()
    watched.disk.others += 20 * GIB
    watched.reserve_gib()
    watched.disk.others -= 70 * GIB
    assert watched.reserve_gib() == 70
    assert "took and gave back" in watched.watch.measure().reserve_reason
    for _ in range(INTERVAL_SECONDS // 30 - 4):
        assert watched.reserve_gib() == 70
    assert [watched.reserve_gib() for _ in range(5)][-1] == 50
    assert "5%" in watched.watch.measure().reserve_reason


def test_a_large_swing_leaves_room_for_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much others take and give back, three quarters of the disk are for snapshots."""
    watched = Watched(monkeypatch)
    assert watched.reserve_gib_after_swing(600) == 250


def test_a_neighbour_s_swing_counts_no_more_than_the_roots_can_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond twice what the roots hold a swing is somebody else's, and a small snapshot finds room."""
    watched = Watched(monkeypatch)
    for held, reserve_gib in ((40 * GIB, 80), (GIB, 50)):
        info = SimpleNamespace(id="cs-000001", size_bytes=held)
        monkeypatch.setattr(watched.disk, "latest_of", lambda roots, info=info: dict.fromkeys(roots, info))
        assert watched.reserve_gib_after_swing(200) == reserve_gib


def test_a_repository_that_cannot_be_read_bounds_no_swing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the roots hold is not known then, and measuring does not fail."""
    watched = Watched(monkeypatch)

    def refuse(roots: object) -> None:
        raise Damaged("the catalogue cannot be read")

    monkeypatch.setattr(watched.disk, "latest_of", refuse)
    assert watched.reserve_gib_after_swing(80) == 80


def test_writes_of_the_repository_are_no_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures and saves do not raise the reserve, nor does a root on another disk."""
    watched = Watched(monkeypatch)
    assert watched.reserve_gib() == 50
    watched.disk.own += 300 * GIB
    assert watched.reserve_gib() == 50
    elsewhere = Watched(monkeypatch, same_disk=False)
    assert elsewhere.reserve_gib() == 50
    elsewhere.disk.others += 300 * GIB
    elsewhere.reserve_gib()
    elsewhere.disk.others -= 300 * GIB
    assert elsewhere.reserve_gib() == 50


def test_a_configured_reserve_is_the_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    """A configured reserve is used whatever grows."""
    watched = Watched(monkeypatch)
    watched.settings = watched.settings._replace(reserve=MinFree(size_bytes=GIB))
    assert watched.reserve_gib_after_swing(300) == 1


def test_samples_stay_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frequent status requests add no samples beyond a bound, and a slow swing is still known."""
    watched = Watched(monkeypatch)
    for number in range(3_500):
        watched.disk.others = 100 * GIB + min(number, 3_500 - number) * (2 * GIB // 35)
        watched.reserve_gib(1)
    assert len(watched.watch._samples) <= space_watch._MAX_SAMPLES + 2
    assert watched.reserve_gib(0.1) in (98, 99, 100)


def test_schedule_waits_for_space_after_a_full_disk() -> None:
    """The schedule waits after a snapshot failed for space until as much is free, a day at most."""

    async def main() -> None:
        shortage = space_watch.Shortage()
        assert shortage.needed_bytes() == 0
        # This one failed for another reason.
        shortage.met(0)
        shortage.met(7 * GIB)
        shortage.met(3 * GIB)
        assert shortage.needed_bytes() == 7 * GIB
        await trio.sleep(86399)
        assert shortage.needed_bytes() == 7 * GIB
        await trio.sleep(1)
        assert shortage.needed_bytes() == 0

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
