"""The reserve as the daemon knows it: what others took during the last interval, and no longer."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
import trio.testing

from ciuic.control_types import RepositoryStatus
from ciuic.daemon import space
from ciuic.daemon.settings import RootSettings, Settings
from ciuic.daemon.space import SpaceWatch
from ciuic.daemon.store import Store
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
        monkeypatch.setattr(space, "_is_on", lambda root, home, mounts: same_disk)

    def reserve_gib(self, after_seconds: float = 30) -> int:
        self.at += after_seconds
        return self.watch.look().reserve_bytes // GIB


def test_twice_what_others_took_for_as_long_as_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """Growth counts for an interval and is forgotten then: a reserve that refuses snapshots goes down by itself."""
    watched = Watched(monkeypatch)
    assert watched.reserve_gib() == 50
    watched.disk.others += 60 * GIB
    assert watched.reserve_gib() == 120
    for _ in range(INTERVAL_SECONDS // 30 - 2):
        assert watched.reserve_gib() == 120
    assert [watched.reserve_gib() for _ in range(3)][-1] == 50
    assert "5%" in watched.watch.look().reserve_reason


def test_what_the_repository_took_itself_is_no_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures and saves make no reserve larger, nor does a root on another disk."""
    watched = Watched(monkeypatch)
    assert watched.reserve_gib() == 50
    watched.disk.own += 300 * GIB
    assert watched.reserve_gib() == 50
    elsewhere = Watched(monkeypatch, same_disk=False)
    assert elsewhere.reserve_gib() == 50
    elsewhere.disk.others += 300 * GIB
    assert elsewhere.reserve_gib() == 50


def test_a_configured_reserve_is_the_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever grows."""
    watched = Watched(monkeypatch)
    watched.settings = watched.settings._replace(reserve=MinFree(size_bytes=GIB))
    watched.reserve_gib()
    watched.disk.others += 300 * GIB
    assert watched.reserve_gib() == 1


def test_samples_stay_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody who asks for the status ten times a second costs no memory, and the growth is still known."""
    watched = Watched(monkeypatch)
    for number in range(20_000):
        watched.disk.others = 100 * GIB + number * (GIB // 100)
        watched.reserve_gib(0.1)
    assert len(watched.watch._samples) <= space._MAX_SAMPLES + 2
    assert watched.reserve_gib(0.1) in (2 * 199, 2 * 199 + 1)


def test_what_did_not_fit_is_not_written_again_every_interval() -> None:
    """The schedule waits until as much is free as was written in vain, a day at the longest."""

    async def main() -> None:
        shortage = space.Shortage()
        assert shortage.needed_bytes() == 0
        shortage.met(0)  # failed for another reason
        shortage.met(7 * GIB)
        shortage.met(3 * GIB)
        assert shortage.needed_bytes() == 7 * GIB
        await trio.sleep(86399)
        assert shortage.needed_bytes() == 7 * GIB
        await trio.sleep(1)
        assert shortage.needed_bytes() == 0

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
