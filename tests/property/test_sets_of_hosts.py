"""Hosts that cut a set over a store that loses, delays and refuses, while they die and hang at any step.

The protocol is the program's own (`ciuic.remote.sets`); store, daemons and clock are simulated: each operation of a
host takes a random time before and after its effect, and the host that wakes first goes on, so that their steps
mix in every order.
"""

from __future__ import annotations

import heapq
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.depth import by_depth

from ciuic.errors import CiuicError, UsageError
from ciuic.remote.documents import StoredSetMark, decode_set_object
from ciuic.remote.objects.memory_objects import MemoryObjects, forget_bucket
from ciuic.remote.objects.model import RemoteRefused, RemoteUnreachable
from ciuic.remote.sealing.sealer import MasterKey, Sealer
from ciuic.remote.sets import SetMeeting, SetNotCut, SetRequest
from ciuic.types import SetMember

SEALER = Sealer(b"r" * 16, MasterKey(b"k" * 32))
LIMIT_SECONDS = 2.0
LONG_AGO_SECONDS = 10_000.0
_numbers = count()


class Killed(BaseException):
    """A process ends where it stands."""


class Died(Exception):
    """The model itself is at fault."""


@dataclass
class Faults:
    """Chances of what goes wrong at each step, and the hosts that it happens to."""

    lost: float = 0.0
    refused: float = 0.0
    slow: float = 0.0
    dies: float = 0.0
    hangs: float = 0.0


class Cut(NamedTuple):
    """Snapshot with a label: the hold that it lies in, and its instant."""

    set_id: str
    member: str
    held_at: float
    cut_at: float


class World:
    """Simulated time, and processes of which one runs at a time."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.bucket = f"sets-{next(_numbers)}"
        self.objects = MemoryObjects(self.bucket)
        self.created: dict[str, float] = {}
        self.cuts: list[Cut] = []
        self.holds: list[tuple[str, float, float]] = []
        self.outcomes: defaultdict[str, list[object]] = defaultdict(list)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._idle = threading.Semaphore(0)
        self._failure: BaseException | None = None

    def at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (when, next(self._order), act))

    def run(self) -> None:
        """Let everything happen, in the order of time, to the end."""
        while self._queue:
            self.now, _, act = heapq.heappop(self._queue)
            act()
            assert self.now < LONG_AGO_SECONDS, "a command has no end"
        forget_bucket(self.bucket)
        if self._failure is not None:
            raise self._failure

    def start(self, when: float, work: Callable[[Process], None]) -> None:
        process = Process(self)

        def body() -> None:
            process.turn.acquire()
            try:
                work(process)
            except Killed:
                pass
            except BaseException as error:
                self._failure = self._failure or error
            finally:
                self._idle.release()

        thread = threading.Thread(target=body, daemon=True)
        thread.start()
        self.at(when, lambda: self.resume(process))

    def resume(self, process: Process) -> None:
        """Let a process run to its next wait."""
        process.turn.release()
        self._idle.acquire()

    def wait(self, process: Process, seconds: float) -> None:
        """Let others run; called by the process itself."""
        self.at(self.now + seconds, lambda: self.resume(process))
        self._idle.release()
        process.turn.acquire()


class Process:
    """One command."""

    def __init__(self, world: World, faults: Faults | None = None) -> None:
        self.world = world
        self.turn = threading.Semaphore(0)
        self.faults = faults or Faults()

    def step(self) -> None:
        """Take the time that a request takes one way; a process may die or hang in it."""
        chance = self.world.random.random
        seconds = self.world.random.uniform(0.0005, 0.01)
        if chance() < self.faults.slow:
            seconds = self.world.random.uniform(0.1, 1.5)
        if chance() < self.faults.hangs:
            seconds = self.world.random.choice([0.5, 1.0, 1.9, 3.0, 30.0])
        self.world.wait(self, seconds)
        if chance() < self.faults.dies:
            raise Killed

    def sleep(self, seconds: float) -> None:
        self.world.wait(self, seconds)

    def clock(self) -> float:
        return self.world.now


class FaultyObjects:
    """The store, as one process reaches it."""

    url = "memory://sets"

    def __init__(self, process: Process) -> None:
        self._process = process
        self._world = process.world

    def _do(self, act: Callable[[], Any]) -> Any:
        world, faults = self._world, self._process.faults
        self._process.step()
        chance = world.random.random()
        if chance < faults.refused:
            raise RemoteRefused("refused")
        if chance < faults.refused + faults.lost:
            # The request, or only the reply, is lost; or a proxy sends it on much later.
            what = world.random.choice(["request", "reply", "late"])
            if what == "reply":
                self._quietly(act)
            elif what == "late":
                world.at(world.now + world.random.uniform(0.01, 5.0), lambda: self._quietly(act))
            raise RemoteUnreachable("lost")
        result = act()
        self._process.step()
        return result

    @staticmethod
    def _quietly(act: Callable[[], Any]) -> None:
        with suppress(CiuicError):
            act()

    def create(self, name: str, data: bytes) -> bool:
        def act() -> bool:
            made = self._world.objects.create(name, data)
            if made:
                self._world.created[name] = self._world.now
            return made

        return bool(self._do(act))

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> Any:
        return self._do(lambda: self._world.objects.get_ranges(name, ranges))

    def info(self, name: str) -> Any:
        return self._do(lambda: self._world.objects.info(name))

    def list(self, prefix: str, *, after: str = "") -> Any:
        return self._do(lambda: list(self._world.objects.list(prefix, after=after)))

    def delete(self, names: Any) -> None:
        self._do(lambda: self._world.objects.delete(names))

    def __getattr__(self, name: str) -> Any:
        raise Died(f"the protocol asks for {name}")


class SimulatedDaemon:
    """A daemon and its workers, whose holds end by themselves."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def flush(self) -> bool:
        self._process.step()
        return True

    def hold(self, member: SetMember, limit_seconds: float, *, flushed: bool) -> SimulatedHold:
        assert (limit_seconds, flushed) == (LIMIT_SECONDS, True)
        self._process.step()
        hold = SimulatedHold(self._process, member, limit_seconds)
        self._process.step()
        return hold


class SimulatedHold:
    """A hold, as the worker knows it."""

    def __init__(self, process: Process, member: SetMember, limit_seconds: float) -> None:
        self._process = process
        self._member = member
        self._began = process.world.now
        self._ends = self._began + limit_seconds
        self._over = False

    def cut(self) -> Cut:
        world = self._process.world
        self._process.step()
        if self._over or world.now >= self._ends:
            raise CiuicError("the hold ended before the cut")
        self._over = True
        cut = Cut(self._member.id, self._member.member, self._began, world.now)
        world.cuts.append(cut)
        world.holds.append((self._member.member, self._began, world.now))
        self._process.step()
        return cut

    def release(self) -> None:
        self._process.step()
        self._over = True
        self._process.world.holds.append((self._member.member, self._began, self._process.world.now))


@dataclass
class Trial:
    """Commands on some hosts."""

    hosts: int
    seed: int
    faults: dict[int, Faults] = field(default_factory=dict)
    restarts: bool = False
    late: bool = False

    def run(self, world: World | None = None) -> World:
        world = World(self.seed) if world is None else world
        members = tuple(f"h{number}" for number in range(self.hosts))
        for number, member in enumerate(members):
            for again in range(1 + self.restarts):
                when = again * 20 + world.random.uniform(0, 0.5 if not self.late else 70)
                world.start(
                    world.now + when, self._command(members, member, self.faults.get(number, Faults()))
                )
        world.run()
        return world

    def _command(self, members: tuple[str, ...], member: str, faults: Faults) -> Callable[[Process], None]:
        def work(process: Process) -> None:
            process.faults = faults
            request = SetRequest("night", members, member, LIMIT_SECONDS, wait_seconds=60)
            meeting = SetMeeting(
                FaultyObjects(process), SEALER, request, clock=process.clock, sleep=process.sleep
            )
            try:
                outcome: object = meeting.take(SimulatedDaemon(process))
            except CiuicError as error:
                outcome = error
            process.world.outcomes[member].append(outcome)

        return work


def decision_of(world: World, set_id: str) -> tuple[str, float]:
    """Return the attempt in which a set was cut, and when that was decided."""
    for name, at in world.created.items():
        if name.endswith("/decision"):
            mark = decode_set_object(SEALER, name, world.objects.get(name), StoredSetMark)
            if (mark.decision, mark.set) == ("cut", set_id):
                return name.removesuffix("/decision"), at
    raise AssertionError(f"nobody decided to cut {set_id}")


def require_one_instant(world: World) -> None:
    """Every labelled cut lies in its own hold, and all of one set were held at the moment of the decision."""
    for cut in world.cuts:
        attempt, decided_at = decision_of(world, cut.set_id)
        ready_at = [at for name, at in world.created.items() if name.startswith(f"{attempt}/ready/")]
        assert cut.held_at <= max(ready_at) <= decided_at <= cut.cut_at < cut.held_at + LIMIT_SECONDS
    require_own_outcomes(world)


def require_own_outcomes(world: World) -> None:
    labels = [(cut.set_id, cut.member) for cut in world.cuts]
    assert len(labels) == len(set(labels)), "a host has two snapshots of one set"
    for member, outcomes in world.outcomes.items():
        for outcome in outcomes:
            if isinstance(outcome, Cut):
                assert outcome in world.cuts
                assert outcome.member == member


some_faults = st.builds(
    Faults,
    lost=st.sampled_from([0.0, 0.01, 0.1]),
    refused=st.sampled_from([0.0, 0.0, 0.0, 0.005]),
    slow=st.sampled_from([0.0, 0.02, 0.1]),
    dies=st.sampled_from([0.0, 0.0, 0.002, 0.02]),
    hangs=st.sampled_from([0.0, 0.002, 0.02]),
)


@settings(max_examples=by_depth(25, 80), deadline=None)
@given(
    st.integers(2, 5),
    st.integers(0, 2**32),
    st.lists(some_faults, min_size=5, max_size=5),
    st.booleans(),
    st.booleans(),
)
def test_all_cuts_of_one_set_contain_one_instant(
    hosts: int, seed: int, faults: list[Faults], restarts: bool, late: bool
) -> None:
    """Whatever is lost, late, dead or asleep: what has the label of a set was held at one moment."""
    require_one_instant(Trial(hosts, seed, dict(enumerate(faults)), restarts, late).run())


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 5), st.integers(0, 2**32))
def test_hosts_without_faults_are_cut_at_once(hosts: int, seed: int) -> None:
    """All hosts are cut in one attempt, held for a part of the limit, and a second set of the name is refused."""
    world = Trial(hosts, seed).run()
    require_one_instant(world)
    assert len({cut.set_id for cut in world.cuts}) == 1
    assert len(world.cuts) == len(world.holds) == hosts
    assert all(end - began < LIMIT_SECONDS / 2 for _, began, end in world.holds)


@settings(max_examples=6, deadline=None)
@given(st.integers(2, 4), st.integers(0, 2**32))
@example(2, 0)
def test_a_host_that_never_comes_holds_nobody(hosts: int, seed: int) -> None:
    """The others are told who is missing, and are never held."""
    world = Trial(hosts, seed, {0: Faults(dies=1.0)}).run()
    assert (world.cuts, world.holds) == ([], [])
    for member, (outcome,) in world.outcomes.items():
        assert member != "h0"
        assert isinstance(outcome, SetNotCut)
        assert "h0 did not come" in outcome.message


@pytest.mark.parametrize("seed", range(10))
def test_a_set_of_the_name_of_another_is_refused(seed: int) -> None:
    """Commands that run again with the name of a set that was cut are told to choose another."""
    world = Trial(3, seed, restarts=True).run()
    assert len(world.cuts) == 3
    for outcomes in world.outcomes.values():
        assert [type(outcome) for outcome in outcomes] == [Cut, UsageError]


@settings(max_examples=by_depth(25, 40), deadline=None)
@given(
    st.integers(2, 4), st.integers(0, 2**32), st.sets(st.sampled_from(["here", "go", "ready", "decision"]))
)
def test_marks_that_are_put_back_make_no_set_of_two_instants(hosts: int, seed: int, kept: set[str]) -> None:
    """Who can write to the store and has no key removes marks of a set that was cut, and keeps others: no second cut is of it."""
    trial = Trial(hosts, seed)
    world = trial.run()
    first = {cut.set_id for cut in world.cuts}
    assert len(first) == 1
    for name in [info.name for info in world.objects.list("")]:
        if not name.startswith("sets/plans/") and name.split("/")[2] not in kept:
            world.objects.delete([name])
    trial.run(world)
    assert first.isdisjoint(cut.set_id for cut in world.cuts[hosts:])
    require_own_outcomes(world)
