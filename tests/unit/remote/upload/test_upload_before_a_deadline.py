"""Uploads before a deadline: what is promised is there at the end, and what would be late is not begun."""

from __future__ import annotations

import os
import random
import shutil
import stat
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from support.remote_host import RemoteHost, new_remote, reading
from support.restoring import write

from ciuic import SnapshotManager
from ciuic.config import RemoteConfig
from ciuic.maintenance.verify import verify_snapshots
from ciuic.remote.access import Remote
from ciuic.remote.objects.memory_objects import MemoryObjects, forget_bucket
from ciuic.remote.objects.model import RemoteUnreachable
from ciuic.remote.objects.wrappers import CountingObjects, RateLimit
from ciuic.remote.replication import Replication
from ciuic.remote.upload_deadline import (
    DeadlineWatch,
    UploadForecast,
    WriteRate,
    announce,
    read_deadline,
    withdraw,
)
from ciuic.remote.uploader import Persistence, Stopped
from ciuic.repository import Repository
from ciuic.repository.identity import Bytes
from ciuic.repository.pack_directory import Packs
from ciuic.training.format.reading import read_facts
from ciuic.training.remote.uploads import labels_of

_NEVER = 1e9
_STAGES = 4


class _Line(MemoryObjects):
    """Store behind a line of a given rate and delay on a clock of its own; at an instant it is cut for good."""

    def __init__(self, bucket: str, rate: float, delay: float, stop: threading.Event) -> None:
        super().__init__(bucket)
        self._rate, self._delay, self._stop = rate, delay, stop
        self._lock = threading.Lock()
        self.now = 0.0
        self.cut_at = _NEVER
        self.sent_bytes = 0

    def clock(self) -> float:
        return self.now

    def _take(self, size_bytes: int) -> None:
        with self._lock:
            self.now += self._delay + size_bytes / self._rate
            if self.now >= self.cut_at:
                self._stop.set()
                raise RemoteUnreachable("the machine is gone")
            self.sent_bytes += size_bytes

    def put(self, name: str, data: Sequence[Bytes]) -> None:
        self._take(sum(len(part) for part in data))
        super().put(name, data)

    def create(self, name: str, data: bytes) -> bool:
        self._take(len(data))
        return super().create(name, data)


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Remote, str]]:
    """Provide one host after each of several saves of two trainings and a snapshot of files, and its remote."""
    place = tmp_path_factory.mktemp("stages")
    bucket = f"deadline-{os.urandom(6).hex()}"
    host = RemoteHost(place / "host", new_remote(MemoryObjects(bucket)))
    rng = np.random.default_rng(1)
    sizes = {"a": (20_000, 90_000, 50_000, 250_000), "b": (60_000, 5_000, 70_000, 10_000)}
    managers = {job: SnapshotManager(host.repository.path, name=job, compression="none") for job in sizes}
    for stage in range(_STAGES):
        for job, manager in managers.items():
            state = {"w": rng.random(sizes[job][stage])}
            saved = manager.save_snapshot(model=state, step=10 * stage + 10, wait=True)
            assert saved is not None
            assert saved.id is not None, saved.error
        write(host.root / "a.log", rng.bytes(100_000 * stage))
        host.snapshot()
        shutil.copytree(host.repository.path, place / f"{stage}" / "repository")
        (place / f"{stage}" / "state").mkdir()
    for manager in managers.values():
        manager.close()
    yield place, host.remote, bucket
    forget_bucket(bucket)


def _replicate(
    place: Path,
    remote: Remote,
    stop: threading.Event,
    counting: CountingObjects,
    line: _Line,
    forecasts: list[UploadForecast],
) -> None:
    with Repository.open(place / "repository") as repository:
        packs = Packs(f"{repository.path}/packs", bytes.fromhex(repository.id), repository.config.hash)
        replication = Replication(
            repository,
            packs,
            RemoteConfig(name="remote", url="memory://unused"),
            place / "state",
            host="host",
            persist=Persistence(stop),
            labels=labels_of,
            deadlines=DeadlineWatch(place / "state", clock=line.clock),
            rate=counting.write_rate,
            forecast=lambda found: forecasts.append(found) if found else None,
        )
        try:
            replication.catch_up(remote._replace(objects=counting))
        except Stopped:
            assert line.now >= line.cut_at


@pytest.mark.parametrize("seed", range(12))
def test_what_is_promised_is_there_when_the_machine_goes(
    stages: tuple[Path, Remote, str], tmp_path: Path, seed: int
) -> None:
    """Random rates, delays, grace periods and uploads before: promises hold, and a resume starts at the step that was told."""
    place, made, bucket = stages
    rng = random.Random(seed)
    here = f"{bucket}-{seed}"
    forget_bucket(here)
    stop = threading.Event()
    line = _Line(here, rng.choice((2e5, 1e6, 5e6)), rng.choice((0.0, 0.02, 0.2)), stop)
    for info in made.objects.list(""):
        MemoryObjects.put(line, info.name, [made.objects.get(info.name)])
    remote = made._replace(objects=line)
    counting = CountingObjects(line, clock=line.clock)
    before = rng.randrange(_STAGES)
    host = tmp_path / "host"
    shutil.copytree(place / f"{before}", host)
    forecasts: list[UploadForecast] = []
    _replicate(host, remote, stop, counting, line, forecasts)
    assert not forecasts
    shutil.rmtree(host / "repository")
    shutil.copytree(place / f"{_STAGES - 1}" / "repository", host / "repository")
    if rng.random() < 0.2:
        # A process that has measured nothing.
        counting = CountingObjects(line, clock=line.clock)
    grace = rng.choice((0.5, 2.0, 5.0, 10.0, 30.0))
    announce(host / "state", grace, "test", clock=line.clock)
    line.cut_at, sent = line.now + grace, line.sent_bytes
    _replicate(host, remote, stop, counting, line, forecasts)

    with Repository.open(host / "repository") as local:
        # Newest first, so that the later of two has the smaller number.
        places = {str(info.id): number for number, info in enumerate(local.snapshots.list())}
    with reading(made._replace(objects=MemoryObjects(here)), tmp_path / "cache") as opened:
        (repository,) = opened.repositories
        infos = repository.snapshots.list()
        stored = {str(info.id) for info in infos}
        assert not verify_snapshots(repository, [info.id for info in infos], checksum=True).damaged
        for forecast in forecasts:
            for one in forecast.states:
                assert one.outcome not in ("stored", "promised") or one.newest in stored
                # Or something newer, once the rate was known better.
                newest = min(
                    (places[str(info.id)] for info in infos if one.root in info.roots), default=len(places)
                )
                assert one.outcome == "tried" or not one.resume or newest <= places[one.resume]
        last = forecasts[-1]
        assert {one.root for one in last.states} >= {b"/a", b"/b"}
        for one in last.states:
            assert one.outcome != "left out" or one.newest not in stored
            there = [info for info in infos if one.root in info.roots]
            if one.outcome != "tried" and there:
                assert one.resume == there[0].id
            if one.outcome != "tried" and one.step is not None:
                assert read_facts(repository, there[0].id).step == one.step
    if all(one.outcome == "left out" and one.resume for one in forecasts[0].states) and len(forecasts) == 1:
        # Hello and the retention of an opened log are all.
        assert line.sent_bytes - sent < 50_000
    forget_bucket(here)


def test_a_deadline_overtakes_the_upload_under_way(stages: tuple[Path, Remote, str], tmp_path: Path) -> None:
    """An upload of everything stops at the next object once there is a deadline, and only the newest states follow."""
    place, made, bucket = stages
    here = f"{bucket}-overtaken"
    stop = threading.Event()
    host = tmp_path / "host"
    shutil.copytree(place / f"{_STAGES - 1}", host)

    class Announcing(_Line):
        """Store at whose first large object the end is announced."""

        def put(self, name: str, data: Sequence[Bytes]) -> None:
            super().put(name, data)
            if self.cut_at == _NEVER and sum(len(part) for part in data) > 256 << 10:
                self.cut_at = self.now + 60
                announce(host / "state", 60, "test", clock=self.clock)

    line = Announcing(here, 1e6, 0.01, stop)
    for info in made.objects.list(""):
        MemoryObjects.put(line, info.name, [made.objects.get(info.name)])
    forecasts: list[UploadForecast] = []
    _replicate(
        host, made._replace(objects=line), stop, CountingObjects(line, clock=line.clock), line, forecasts
    )
    assert {one.outcome for one in forecasts[-1].states} == {"stored"}
    with reading(made._replace(objects=MemoryObjects(here)), tmp_path / "cache") as opened:
        stored = {str(info.id) for info in opened.repositories[0].snapshots.list()}
    assert stored == {one.newest for one in forecasts[-1].states}
    forget_bucket(here)


def test_the_earliest_deadline_of_this_boot_counts(tmp_path: Path) -> None:
    """A later note changes nothing, an earlier one does; one that has passed or is of another machine is none."""
    clock = iter(range(100)).__next__
    watch = DeadlineWatch(tmp_path)
    assert watch.now() is None
    announce(tmp_path, 100, "first")
    first = read_deadline(tmp_path)
    announce(tmp_path, 200, "later")
    assert read_deadline(tmp_path) == first
    announce(tmp_path, 50, "earlier")
    earlier = read_deadline(tmp_path)
    assert earlier is not None
    assert earlier.cause == "earlier"
    fresh = DeadlineWatch(tmp_path)
    assert fresh.now() == earlier
    assert DeadlineWatch(tmp_path, clock=lambda: earlier.by_seconds + clock()).now() is None
    text = (tmp_path / "deadline").read_text()
    (tmp_path / "deadline").write_text(text.replace(earlier.boot[:8], "00000000"))
    assert read_deadline(tmp_path) is None


def test_a_lifted_limit_ends_waits() -> None:
    """A request that waits for its place under a limit goes on when the limit ends."""
    limit = RateLimit(1.0)
    limit.take(10**9)
    waiting = threading.Thread(target=limit.take, args=(1,), daemon=True)
    waiting.start()
    limit.change(None)
    waiting.join(60)
    assert not waiting.is_alive()


def test_nothing_is_expected_of_what_was_not_measured() -> None:
    """Without a measured rate there is no expected time."""
    assert WriteRate(0.0, 0.1).seconds_for(10) is None
    assert WriteRate(1e6, 0.1).seconds_for(10**6) == pytest.approx(1.25 * 1.6 + 0.5)


def test_a_note_in_a_directory_of_another_user_follows_no_link(tmp_path: Path) -> None:
    """What its owner plants there is neither read nor written through; the note is one that the owner can read."""
    state, victim = tmp_path / "state", tmp_path / "victim"
    state.mkdir()
    victim.write_bytes(b"untouched")
    for name in ("deadline", "deadline.tmp"):
        (state / name).symlink_to(victim)
    (tmp_path / "link").symlink_to(state)
    announce(tmp_path / "link", 60, "the end")
    found = read_deadline(state)
    assert found is not None
    assert found.cause == "the end"
    assert victim.read_bytes() == b"untouched"
    note = (state / "deadline").lstat()
    assert stat.S_ISREG(note.st_mode)
    assert stat.S_IMODE(note.st_mode) == 0o644
    withdraw(state)
    assert read_deadline(state) is None
    # The open of a pipe would wait for a writer.
    os.mkfifo(state / "deadline")
    announce(state, 60, "after a pipe")
    assert read_deadline(state) is not None
