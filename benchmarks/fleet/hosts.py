"""Hosts of a simulated fleet: the real uploader, log, index, status and collection of each, on one simulated store.

Snapshots are real ones in one small repository: a file of `CHUNKS` blocks that compress, and its tree. So a snapshot is a data pack of as many
records as a pack of 16 MiB has, which counts as that many bytes, and a pack of tree nodes. All hosts begin before the first
upload, when the remote is empty, as a host does that never restarts.

Packs are sent by threads of the real uploader, which take no simulated time: how long bytes are under way is left out.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from support.small_repository import make_snapshot

from benchmarks.fleet.store import MIB, Clock, SimulatedStore, Usage, simulated_threads
from ciuic.remote.access import Remote, init_remote
from ciuic.remote.host_status import HostStatus, StatusKey, StatusReporter, StatusRoot
from ciuic.remote.log_reader import LogReader, Rounds
from ciuic.remote.reading.opening import read_remote
from ciuic.remote.remote_index import RemoteIndex
from ciuic.remote.upkeep.collect import CollectedSpace, collect_remote
from ciuic.remote.upkeep.collection_round import CollectionPolicy
from ciuic.remote.uploader import Persistence, UncommittedPacks, UploadedSnapshot, Uploader
from ciuic.remote.writer_log import WriterLog, WriterPosition
from ciuic.repository import Repository, Writer
from ciuic.repository.pack_directory import Packs
from ciuic.repository.repository import PACKS_DIR
from ciuic.types import SnapshotId

BLOCK: Final = 4096
CHUNKS: Final = 64
PACK_BYTES: Final = 16 * MIB


class _MemoryState:
    """Stand-in for the file with the name of a log."""

    def __init__(self) -> None:
        self._position: WriterPosition | None = None

    def load(self) -> WriterPosition | None:
        return self._position

    def save(self, position: WriterPosition) -> None:
        self._position = position


class FleetHost:
    """Host that uploads."""

    def __init__(self, fleet: Fleet, number: int) -> None:
        self._fleet = fleet
        self.name = f"node-{number:05d}"
        self.manifests: list[str] = []
        remote = fleet.remote
        self.index = RemoteIndex.open(None)
        fleet.closing.callback(self.index.close)
        self.log = WriterLog(
            remote.objects,
            remote.sealer,
            _MemoryState(),  # type: ignore[arg-type]
            Rounds(remote.objects, remote.sealer, known=self.index.rounds_finished),
            host=self.name,
            repository=fleet.repository.id,
        )
        directory = fleet.top / self.name
        self.uploader = Uploader(
            fleet.repository,
            fleet.packs,
            remote,
            self.log,
            self.index,
            UncommittedPacks(str(directory)),
            host=self.name,
            persist=Persistence(threading.Event()),
        )
        self.reader = LogReader(
            remote.objects, remote.sealer, cache_path=str(directory / "logs"), skip_damaged=True
        )
        self._status = StatusReporter(
            remote.objects,
            remote.sealer,
            StatusKey(os.urandom(32)),
            lambda: HostStatus(
                time_ns=fleet.clock.ns,
                host=self.name,
                repository=fleet.repository.id,
                interval_seconds=900,
                roots=(StatusRoot(path="/data", snapshot="cs-abcdef", time_ns=fleet.clock.ns),),
            ),
            900,
            clock=lambda: fleet.clock.now,
        )

    def begin(self) -> None:
        """Do what an uploader does before its first upload: hello, rounds, packs and their tables, logs."""
        self.uploader.begin()
        self.reader.refresh()

    def upload(self, id_: SnapshotId) -> UploadedSnapshot:
        """Upload a snapshot."""
        done = self.uploader.upload(id_)
        self.manifests.append(done.manifest)
        return done

    def report(self) -> bool:
        """Store the status."""
        return self._status.report()


class Fleet:
    """One remote, and hosts. Close by `closing`."""

    def __init__(self, top: Path, *, seed: int = 1) -> None:
        self.top = top
        self.closing = ExitStack()
        self.clock = Clock()
        self.store = SimulatedStore(self.clock, seed=seed, sizes={"packs/data/": PACK_BYTES})
        self.remote: Remote = init_remote(self.store, master=None, block_size=BLOCK)
        self.repository = Repository.create(
            top / "repository", block_size=BLOCK, identity=self.remote.identity
        )
        self.closing.callback(self.repository.close)
        self.packs = Packs(
            f"{self.repository.path}/{PACKS_DIR}",
            bytes.fromhex(self.repository.id),
            self.repository.config.hash,
        )
        self.closing.callback(self.packs.close)
        self._made = 0
        self.hosts: list[FleetHost] = []

    def snapshots(self, count: int) -> list[SnapshotId]:
        """Make snapshots of new content, each of one data pack."""
        with self.repository.writer() as writer:
            return [self._snapshot(writer) for _ in range(count)]

    def _snapshot(self, writer: Writer) -> SnapshotId:
        self._made += 1
        data = b"".join(b"%08d%08d" % (self._made, at) * (BLOCK // 16) for at in range(CHUNKS))
        files = {b"state": data}
        return make_snapshot(writer, f"cs-{self._made:08x}", files, time_ns=self.clock.ns + self._made).id

    def add_hosts(self, count: int, *, reading_logs: bool = True) -> list[FleetHost]:
        """Add hosts, which begin now; without ``reading_logs`` all but the logs, which takes long for many at once."""
        new = [FleetHost(self, len(self.hosts) + at) for at in range(count)]
        for host in new:
            if reading_logs:
                host.begin()
            else:
                host.uploader.begin()
        self.hosts += new
        return new

    def upload_all(self, snapshots_each: int) -> None:
        """Have each host upload so many snapshots of its own, and report."""
        ids = iter(self.snapshots(snapshots_each * len(self.hosts)))
        for _ in range(snapshots_each):
            for host in self.hosts:
                host.upload(next(ids))
                host.report()

    def pass_days(self, days: float) -> None:
        """Move the clock."""
        self.clock.now += days * 86_400

    def collect(self) -> tuple[Usage, Sequence[CollectedSpace]]:
        """Collect as `ciuic prune --remote` on a host that reads the remote for the first time."""
        with (
            tempfile.TemporaryDirectory(dir=self.top) as cache,
            self.store.measured() as used,
            read_remote(self.remote, cache_root=Path(cache)) as opened,
        ):
            spaces = collect_remote(opened, host="operator", policy=CollectionPolicy())
        return used[0], spaces


@contextmanager
def open_fleet(hosts: int, snapshots_each: int = 0, *, seed: int = 1) -> Iterator[Fleet]:
    """Provide a fleet whose hosts have begun, and uploaded so many snapshots each."""
    place = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="ciuic-fleet-", dir=place) as top:
        fleet = Fleet(Path(top), seed=seed)
        with fleet.closing, simulated_threads(fleet.clock):
            fleet.add_hosts(hosts, reading_logs=False)
            fleet.upload_all(snapshots_each)
            yield fleet
