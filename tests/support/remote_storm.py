"""Random operations of writers and collectors on one bucket, one request at a time, with everything that can go wrong.

Writers upload, remove, are killed, restart with or without their caches, and are cloned with their disks; collectors run
rounds; any of them may pause for long, lose requests or replies, or never go on. The invariant is checked after every
request that changes logs or deletes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeVar

from support.remote_bucket import Bucket, Killed, Party, jumping_clock
from support.remote_world import (
    BucketJudge,
    Ids,
    MemoryState,
    Uploader,
    chunk,
    make_collector,
)

from ciuic.remote.log.compaction import LogRotation
from ciuic.remote.log.errors import LostCommits, NothingCommitted
from ciuic.remote.log.log_reader import LogReader, LogSummary
from ciuic.remote.objects.model import RemoteUnreachable
from ciuic.remote.remote_index import RemoteIndex
from ciuic.types import ChunkId

# What happens to a request, and how often if it is not carried out as it should be.
_FATES = (("lose reply", 40), ("lose request", 20), ("late", 10), ("kill before", 15), ("kill after", 15))
_T = TypeVar("_T")
_LATE_STEPS = 40
"""Steps after which a request whose sender gave up arrives at the latest."""


class Violation(AssertionError):
    """The bucket is not as it must be."""


class Machine:
    """Host with a disk: the caches and the name of a log survive its processes."""

    weight = 1
    fault_share = 0.05
    pause_share = 0.02

    def __init__(self, storm: Storm, name: str) -> None:
        self.storm = storm
        self.name = name
        self.party = Party(storm.bucket, name)
        self.state = MemoryState()
        self.index = RemoteIndex.open(None, threads=1)
        self.paused_until = 0
        self.operations = 0

    def reset_disk(self) -> None:
        """Lose all caches, and the name."""
        self.index.close()
        self.index = RemoteIndex.open(None, threads=1)
        self.state = MemoryState()

    def ids(self) -> Ids:
        self.storm.processes += 1
        return Ids(f"{self.storm.seed}/{self.storm.processes}")

    def choose_work(self) -> Callable[[], None]:
        raise NotImplementedError

    def ended(self) -> None:
        """Take note of how the process ended."""
        error = self.party.error
        # A collector deletes nothing without any commit, nor beside a manifest whose commit may be lost.
        if error is not None and not isinstance(
            error, Killed | RemoteUnreachable | NothingCommitted | LostCommits
        ):
            raise error


class WriterMachine(Machine):
    """Uploader of one host."""

    def __init__(self, storm: Storm, name: str) -> None:
        super().__init__(storm, name)
        self.mine: set[str] = set()

    def choose_work(self) -> Callable[[], None]:
        rng = self.storm.rng
        list_packs = rng.random() < 0.3 or self.index.rounds_finished is None
        uploader = Uploader(self.party.objects, self.ids(), self.state, self.index, list_packs=list_packs)
        plan = [self._snapshot() for _ in range(rng.randint(1, 4))]
        removals = [rng.random() for _ in plan]
        sums = rng.random() < self.storm.sum_share
        own_log: list[LogRotation] = []

        def work() -> None:
            nonlocal own_log
            retry(uploader.begin)
            for number, chunks in enumerate(plan):
                self._upload(uploader, chunks)
                if sums:
                    # A writer that sums up its own log, and begins another one.
                    own_log = own_log or [self._own_log(uploader)]
                    retry(own_log[0].tidy)
                if self.mine and removals[number] < self.storm.remove_share:
                    self._remove(uploader, sorted(self.mine)[int(removals[number] * 1000) % len(self.mine)])

        return work

    def _own_log(self, uploader: Uploader) -> LogRotation:
        reader = LogReader(uploader.objects, uploader.sealer, threads=1, skip_damaged=True)
        return LogRotation(
            uploader.objects,
            uploader.sealer,
            uploader.log,
            reader,
            max_entries=2,
            max_snapshots=3,
            new_id=uploader.ids.hex,
        )

    def _snapshot(self) -> dict[ChunkId, ChunkId | None]:
        rng = self.storm.rng
        numbers = rng.sample(range(self.storm.universe), rng.randint(1, min(3, self.storm.universe)))
        # A difference has a base of a higher number, so that there is no cycle.
        return {
            chunk(number): chunk(number + 1)
            if rng.random() < 0.2 and number + 1 < self.storm.universe
            else None
            for number in numbers
        }

    def _upload(self, uploader: Uploader, chunks: dict[ChunkId, ChunkId | None]) -> None:
        manifest = retry(lambda: uploader.upload(chunks, "cs-abcdef"))
        self.operations += 1
        self.storm.judge.acknowledged.add(manifest)
        self.mine.add(manifest)

    def _remove(self, uploader: Uploader, manifest: str) -> None:
        self.mine.discard(manifest)
        self.storm.judge.acknowledged.discard(manifest)
        retry(lambda: uploader.log.remove([manifest]))
        self.operations += 1
        self.storm.judge.gone.add(manifest)


class CollectorMachine(Machine):
    """Collector of one host. Its processes take many requests, so that it gets more of them and fewer faults."""

    weight = 6
    fault_share = 0.005
    pause_share = 0.003

    def __init__(self, storm: Storm, name: str) -> None:
        super().__init__(storm, name)
        self.logs: dict[str, LogSummary] = {}

    def reset_disk(self) -> None:
        super().reset_disk()
        self.logs = {}

    def choose_work(self) -> Callable[[], None]:
        if self.storm.rng.random() < 0.1:
            self.reset_disk()
        collector = make_collector(self.party.objects, self.ids(), self.state, self.index, logs=self.logs)

        def work() -> None:
            for _ in range(2):
                retry(collector.run)
                self.operations += 1

        return work


def retry(call: Callable[[], _T]) -> _T:
    """Call until there is a reply, as every caller does."""
    while True:
        try:
            return call()
        except RemoteUnreachable:
            continue


class Storm:
    """One run. ``operations`` counts snapshots, removals and rounds that were completed."""

    def __init__(
        self,
        seed: int,
        *,
        writers: int = 3,
        collectors: int = 2,
        universe: int = 5,
        remove_share: float = 0.5,
        switch_share: float = 1.0,
        sum_share: float = 0.5,
    ) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.bucket = Bucket(jumping_clock(random.Random(seed + 1)))
        self.judge = BucketJudge(self.bucket)
        self.universe = universe
        self.remove_share = remove_share
        self.sum_share = sum_share
        # Most faults of protocols need few switches at the right requests, and long stretches between them.
        self.switch_share = switch_share
        self.processes = 0
        self.steps = 0
        self.history: list[str] = []
        self.machines: list[Machine] = [WriterMachine(self, f"writer {n}") for n in range(writers)]
        self.machines += [CollectorMachine(self, f"collector {n}") for n in range(collectors)]
        self._current = self.machines[0]
        self._late_until: dict[str, int] = {}

    @property
    def operations(self) -> int:
        return sum(machine.operations for machine in self.machines)

    def run(self, operations: int, max_steps: int) -> None:
        """Go on until so many operations are done. Violation if anything is wrong on the way."""
        try:
            while self.operations < operations and self.steps < max_steps:
                self.step()
        finally:
            self.close()

    def close(self) -> None:
        """End all threads."""
        for machine in self.machines:
            machine.party.kill()
            machine.index.close()

    def step(self) -> None:
        """Let one machine do one request, or begin or end something."""
        self.steps += 1
        ready = [machine for machine in self.machines if machine.paused_until <= self.steps]
        if not ready:
            self.steps = min(machine.paused_until for machine in self.machines)
            return
        if self._current not in ready or self.rng.random() < self.switch_share:
            (self._current,) = self.rng.choices(ready, [machine.weight for machine in ready])
        machine = self._current
        self._late_by_chance(machine)
        if not machine.party.running:
            self._begin(machine)
        elif self.rng.random() < machine.pause_share:
            machine.paused_until = self.steps + self.rng.choice((20, 200, 2000))
        else:
            fate = "go"
            if self.rng.random() < machine.fault_share:
                (fate,) = self.rng.choices([fate for fate, _ in _FATES], [share for _, share in _FATES])
            self._one_request(machine, fate)

    def let(self, machine: Machine, fate: str) -> None:
        """Let this machine do one request with this fate, or begin."""
        if machine.party.running:
            self._one_request(machine, fate)
        else:
            self._begin(machine)

    def _begin(self, machine: Machine) -> None:
        machine.ended()
        if isinstance(machine, WriterMachine) and self.rng.random() < 0.05:
            other = self.rng.choice([some for some in self.machines if isinstance(some, WriterMachine)])
            # A disk was cloned: two uploaders have one name.
            machine.state = MemoryState(other.state.position)
        machine.party.objects.page_size = self.rng.choice((7, 50, 1 << 30))
        machine.party.start(machine.choose_work())

    def _one_request(self, machine: Machine, fate: str) -> None:
        request = machine.party.request
        self.history.append(f"{machine.name}: {fate}: {request}")
        machine.party.step(fate)
        self._check(machine, request)

    def _late_by_chance(self, machine: Machine) -> None:
        if not machine.party.objects.late:
            return
        until = self._late_until.setdefault(machine.name, self.steps + _LATE_STEPS)
        if self.rng.random() < 0.1 or self.steps >= until:
            self.deliver_late(machine)
            del self._late_until[machine.name]

    def deliver_late(self, machine: Machine) -> None:
        """Carry out what the machine asked for and has given up."""
        self.history.append(f"{machine.name}: late requests arrive")
        for call in machine.party.objects.late:
            call()
        machine.party.objects.late.clear()
        self._check(machine, "create w/")

    def _check(self, machine: Machine, request: str) -> None:
        # Only these can make a snapshot appear, or take something away.
        if not request.startswith(("create w/", "delete")) and machine.party.running:
            return
        if problem := self.judge.problem():
            raise Violation(f"after {len(self.history)} requests (seed {self.seed}): {problem}")
