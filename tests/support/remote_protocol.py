"""Protocol of remotes under every order of requests, under random operations, and with each step of it left out.

The exhaustive search takes every order of the requests of a few parties that run the real code on one bucket.

A party is a function that is run again from its beginning whenever its next request is wanted, with the replies that
it has had so far. What it does next depends on these alone, so a state is the bucket and the replies of each party.
A party that stops for ever is one that is not scheduled any more: all its stops are among the states.
A listing may lack anything of what is there, in one listing of a prefix that the caller says.

Mutations are each of one step of the real code; a test must notice each of them.

In the storm, writers and collectors make random operations on one bucket, one request at a time. Writers upload, remove, are killed, restart with or without their caches, and are cloned with their disks; collectors run
rounds; any of them may pause for long, lose requests or replies, or never go on. The invariant is checked after every
request that changes logs or deletes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import pytest
from support.remote_world import (
    Bucket,
    BucketJudge,
    Ids,
    Killed,
    MemoryState,
    Party,
    Uploader,
    chunk,
    jumping_clock,
    make_collector,
)

from ciuic.remote import documents, writer_log
from ciuic.remote.documents import LogCommit, StoredRound, encode_log_entry, encode_round
from ciuic.remote.log_reader import LogReader, LogSummary, LostCommits, NothingCommitted, Rounds
from ciuic.remote.object_names import log_entry_name, round_name
from ciuic.remote.objects.model import ArchivedObject, NoSuchObject, ObjectInfo, Objects, RemoteUnreachable
from ciuic.remote.remote_index import RemoteIndex
from ciuic.remote.upkeep import collection_round
from ciuic.remote.upkeep.collection_round import CollectionResult, Collector, delete_condemned
from ciuic.remote.writer_log import LogRotation, WriterLog
from ciuic.repository.identity import Bytes
from ciuic.types import ChunkId

Request = tuple[str, tuple[Any, ...]]
Contents = frozenset[tuple[str, bytes]]


class State(NamedTuple):
    """Bucket, where each party is, and how many listings may yet lack something."""

    contents: int
    """Number of the bucket's contents in the search."""
    parties: tuple[int, ...]
    """Number of each party's position: what it does next depends on the replies that it has had, in their order."""
    lacks: int


_MAX_AHEAD = 1000
"""Requests of a party that goes on by itself: one that waits for another would do so for ever."""


class Stop(BaseException):
    """The party is not run any further."""


class Position(NamedTuple):
    """How far a party is: its replies, and its next request, or its end, with what it reported on the way."""

    at: int
    replies: tuple[Any, ...]
    request: Request | None
    said: tuple[Any, ...]


_ERRORS: dict[Any, Callable[[str], Exception]] = {"missing": NoSuchObject, "archived": ArchivedObject}


class ReplayedObjects:
    """Objects that give recorded replies, and what ``further`` returns to the requests after those."""

    url = "memory://bucket"

    def __init__(self, replies: Sequence[Any], further: Callable[[Request], Any]) -> None:
        self._replies = iter(replies)
        self._further = further

    def _reply(self, method: str, *arguments: Any) -> Any:
        try:
            reply = next(self._replies)
        except StopIteration:
            reply = self._further((method, arguments))
        if isinstance(reply, tuple) and len(reply) == 2 and reply[0] in _ERRORS:
            raise _ERRORS[reply[0]](reply[1])
        return reply

    def put(self, name: str, data: Sequence[Bytes]) -> None:
        self._reply("put", name, (b"".join(data),))

    def create(self, name: str, data: bytes) -> bool:
        return bool(self._reply("create", name, bytes(data)))

    def get(self, name: str) -> bytes:
        (whole,) = self.get_ranges(name, [(0, 1 << 30)])
        return whole

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        return list(self._reply("get_ranges", name, tuple(ranges)))

    def tail(self, name: str, length: int) -> tuple[int, bytes]:
        size, data = self._reply("tail", name, length)
        return size, data

    def info(self, name: str) -> ObjectInfo | None:
        found = self._reply("info", name)
        return None if found is None else ObjectInfo(*found)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        return iter([ObjectInfo(*line) for line in self._reply("list", prefix, after)])

    def delete(self, names: Iterable[str]) -> None:
        copied = tuple(names)
        if copied:
            self._reply("delete", copied)

    def reconnect(self) -> None:
        pass

    def close(self) -> None:
        pass


COLD = b"\0archived"
"""End of an object in a class from which it cannot be read."""


def perform(contents: Contents, request: Request) -> tuple[Contents, Any]:
    """Carry out a request on the bucket; return the bucket then, and the reply."""
    bucket = Bucket()
    bucket.objects = {name: (data, 0) for name, data in contents}
    method, arguments = request
    if method == "list":
        reply: Any = tuple(tuple(line) for line in bucket.list(arguments[0], after=arguments[1]))
    else:
        try:
            reply = getattr(bucket, method)(*arguments)
            if method in ("get_ranges", "tail") and bucket.objects[arguments[0]][0].endswith(COLD):
                reply = ("archived", arguments[0])
        except NoSuchObject as error:
            reply = ("missing", error.name)
    if isinstance(reply, list):
        reply = tuple(reply)
    if method in ("put", "create", "delete"):
        contents = frozenset((name, data) for name, (data, _) in bucket.objects.items())
    return contents, reply


def lacking(listing: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Yield a listing without anything, without each object, and without all of each directory."""
    names = [line[0] for line in listing]
    directories = (f"{name.rpartition('/')[0]}/" for name in names)
    # Each once: most directories have one object.
    yield from {
        tuple(line for line in listing if not line[0].startswith(some)) for some in ("", *names, *directories)
    } - {listing}


class Search:
    """Search from one bucket.

    Args:
        parties: Functions of (objects, say): ``say`` records what the party claims at this point.
        problem: Function of the bucket and all claims; it says what is wrong, or returns an empty text.
        lacks_in: Prefix of which any one listing may lack something; empty for none.
        stolen: Names that a party deletes or replaces against the rules.
        owner: Party that alone does so, and that therefore finds them as it left them; -1 for several.
        kept: Prefixes of names that nobody deletes or replaces here.
        quiet: Prefixes below which nobody changes anything here: a listing of one is the same at any time.
    """

    def __init__(
        self,
        parties: Sequence[Callable[[Objects, Callable[[Any], None]], None]],
        problem: Callable[[Contents, frozenset[Any]], str],
        lacks_in: str = "",
        stolen: Sequence[str] = (),
        owner: int = -1,
        kept: Sequence[str] = (),
        quiet: Sequence[str] = (),
    ) -> None:
        self._parties = parties
        self._stolen = stolen
        self._owner = owner
        self._kept = ("w/", "gc/", *kept)
        self._lacks_in = lacks_in
        self._quiet = quiet
        self._problem = problem
        # Contents and positions are numbered: they are large, and each is in thousands of states.
        self._contents: dict[Contents, int] = {}
        self._by_number: list[Contents] = []
        self._positions: list[Position] = []
        self._after: dict[tuple[int, Any], int] = {}
        self._performed: dict[tuple[int, Request], tuple[int, Any]] = {}
        self._judged: dict[tuple[int, frozenset[Any]], str] = {}
        self.states = 0

    def run(self, contents: Contents, max_states: int) -> str:
        """Return the first problem that is found, or an empty text. Stops after ``max_states`` states."""
        number = self._number(contents)
        parties = tuple(self._position(at, (), number) for at in range(len(self._parties)))
        first = State(number, parties, int(bool(self._lacks_in)))
        seen = {first}
        todo = [first]
        while todo and len(seen) <= max_states:
            state = todo.pop()
            positions = [self._positions[number] for number in state.parties]
            if problem := self._judge(
                state.contents, frozenset(said for some in positions for said in some.said)
            ):
                self.states = len(seen)
                return problem
            for following in self._following(state, positions):
                if following not in seen:
                    seen.add(following)
                    todo.append(following)
        self.states = len(seen)
        return ""

    def _following(self, state: State, positions: list[Position]) -> Iterator[State]:
        contents = state.contents
        # What is read and never changes can be read at once: its order against other requests makes no difference.
        for at, position in enumerate(positions):
            if position.request and self._is_fixed(contents, position.request, at):
                _, reply = self._perform(contents, position.request)
                yield self._answered(state, at, contents, reply, state.lacks)
                return
        for at, position in enumerate(positions):
            if position.request:
                after, reply = self._perform(contents, position.request)
                yield self._answered(state, at, after, reply, state.lacks)
                method, arguments = position.request
                if state.lacks and method == "list" and arguments[0].startswith(self._lacks_in):
                    for lack in lacking(reply):
                        yield self._answered(state, at, after, lack, state.lacks - 1)

    def _is_fixed(self, contents: int, request: Request, at: int) -> bool:
        method, arguments = request
        if method == "list":
            return arguments[0] in self._quiet
        if method not in ("get_ranges", "tail", "info") or not arguments[0].startswith(self._kept):
            return False
        if arguments[0] in self._stolen and at != self._owner:
            return False
        return any(name == arguments[0] for name, _ in self._by_number[contents])

    def _number(self, contents: Contents) -> int:
        number = self._contents.setdefault(contents, len(self._by_number))
        if number == len(self._by_number):
            self._by_number.append(contents)
        return number

    def _perform(self, contents: int, request: Request) -> tuple[int, Any]:
        key = (contents, request)
        if key not in self._performed:
            after, reply = perform(self._by_number[contents], request)
            self._performed[key] = (self._number(after), reply)
        return self._performed[key]

    def _answered(self, state: State, at: int, contents: int, reply: Any, lacks: int) -> State:
        """Return the state after one party had a reply."""
        key = (state.parties[at], reply)
        if key not in self._after:
            replies = (*self._positions[state.parties[at]].replies, reply)
            self._after[key] = self._position(at, replies, contents)
        return State(contents, (*state.parties[:at], self._after[key], *state.parties[at + 1 :]), lacks)

    def _position(self, at: int, replies: tuple[Any, ...], contents: int) -> int:
        """Return the number of a party's position after these replies.

        The party goes on by itself from these contents: most of the positions that it then has are needed later, and each
        would take a run from the beginning.
        """
        said: list[Any] = []
        given = list(replies)
        numbers: list[int] = []

        def add(request: Request | None) -> None:
            if numbers:
                self._after[numbers[-1], given[-1]] = len(self._positions)
            numbers.append(len(self._positions))
            self._positions.append(Position(at, tuple(given), request, tuple(said)))

        def reply_to(request: Request) -> Any:
            nonlocal contents
            add(request)
            if len(numbers) > _MAX_AHEAD:
                raise Stop
            contents, reply = self._perform(contents, request)
            given.append(reply)
            return reply

        try:
            self._parties[at](ReplayedObjects(replies, reply_to), said.append)
            add(None)
        except Stop:
            pass
        except Exception:
            # Of a position that the search may not come to.
            if not numbers:
                raise
        return numbers[0]

    def _judge(self, contents: int, said: frozenset[Any]) -> str:
        key = (contents, said)
        if key not in self._judged:
            self._judged[key] = self._problem(self._by_number[contents], said)
        return self._judged[key]


Patch = Callable[[pytest.MonkeyPatch], None]


def no_hello(patch: pytest.MonkeyPatch) -> None:
    """A writer begins without an entry in its log."""
    plain_begin, plain_stands = WriterLog._begin, WriterLog._stands

    def begin(self: WriterLog) -> None:
        # A collector takes the store's time from its own.
        if self._host == "collector":
            return plain_begin(self)
        self._become(self._new_id(), 0, "")
        self._lost = False
        self._rounds_unread = True
        return None

    def stands(self: WriterLog) -> bool:
        return self._next == 0 or plain_stands(self)

    patch.setattr(WriterLog, "_begin", begin)
    patch.setattr(WriterLog, "_continue", lambda self, known: False)
    patch.setattr(WriterLog, "_stands", stands)


def list_before_hello(patch: pytest.MonkeyPatch) -> None:
    """A writer reads the rounds first and says hello then."""

    def hello(self: WriterLog) -> None:
        self._read_rounds()
        known = self._state.load()
        self._lost = known is None or not self._continue(known)
        if self._lost:
            self._begin()
        self._rounds_unread = False
        self._said_hello = True

    patch.setattr(WriterLog, "hello", hello)


def stale_index(patch: pytest.MonkeyPatch) -> None:
    """A writer relies on its index as it was, whatever the rounds say that it reads when it begins."""
    plain = RemoteIndex.follow

    def follow(self: RemoteIndex, rounds: Any) -> None:
        # The collectors' own look-ups list all packs anyway.
        if rounds.unfinished is not None or rounds.finished > (self.rounds_finished or -1):
            return
        plain(self, rounds)

    patch.setattr(RemoteIndex, "follow", follow)
    patch.setattr(RemoteIndex, "_usable_numbers", lambda self: self._packs.refs.__contains__)


def unconditional_commit(patch: pytest.MonkeyPatch) -> None:
    """A commit is put in place of whatever stands there."""

    def create_entry(objects: Any, sealer: Any, writer: str, number: int, entry: Any) -> bool:
        # Fences and sums are created by the same function of the same module.
        if not isinstance(entry, LogCommit):
            return documents.create_entry(objects, sealer, writer, number, entry)
        objects.put(log_entry_name(writer, number), [encode_log_entry(sealer, writer, number, entry)])
        return True

    patch.setattr(writer_log, "create_entry", create_entry)


def fence_ignored(patch: pytest.MonkeyPatch) -> None:
    """A writer passes over a fence without reading the round."""
    plain = WriterLog._append

    def append(self: WriterLog, entry: Any) -> bool:
        before = self._rounds_unread
        done = plain(self, entry)
        self._rounds_unread = before
        return done

    patch.setattr(WriterLog, "_append", append)


def no_fence(patch: pytest.MonkeyPatch) -> None:
    """A collector puts no fences into logs."""
    patch.setattr(Collector, "_fence_logs", lambda self, round_: None)


def fence_before_round(patch: pytest.MonkeyPatch) -> None:
    """A collector puts fences into logs, and creates the round then."""
    fence, begin = Collector._fence_logs, Collector._begin

    def fence_and_begin(self: Collector, proposal: StoredRound) -> None:
        fence(self, self._log.rounds.last + 1)
        begin(self, proposal)

    patch.setattr(Collector, "_begin", fence_and_begin)
    patch.setattr(Collector, "_fence_logs", lambda self, round_: None)


def no_second_list(patch: pytest.MonkeyPatch) -> None:
    """A collector decides by what it read before the round began."""
    patch.setattr(Collector, "_decide", lambda self, content: content)


def overlapping_rounds(patch: pytest.MonkeyPatch) -> None:
    """A collector begins a round while another is under way."""

    def run(self: Collector) -> CollectionResult:
        self._log.hello()
        rounds = self._log.rounds
        proposal = self._choose()
        if not proposal.condemned and not proposal.manifests:
            return CollectionResult(-1)
        mine = rounds.last + 1
        self._begin(proposal)
        content = documents.create_round(self._objects, self._sealer, mine, "begun", proposal)
        self._fence_logs(mine)
        content = documents.create_round(self._objects, self._sealer, mine, "final", self._decide(content))
        delete_condemned(self._objects, content)
        documents.create_round(self._objects, self._sealer, mine, "done", StoredRound(nonce=self._new_id()))
        return CollectionResult(mine)

    def refresh(self: Rounds) -> None:
        # Several rounds are under way: each counts as far as it is.
        before = (self.condemned, self.manifests)
        parts = self._list()
        for round_ in parts:
            self._learn(round_, not parts[round_].isdisjoint(("final", "done")))
            self.last = max(self.last, round_)
        self._count(before)

    patch.setattr(Collector, "run", run)
    patch.setattr(Rounds, "refresh", refresh)


def every_final_counts(patch: pytest.MonkeyPatch) -> None:
    """A collector deletes what it decided itself, though the decision of another stands."""

    def create_round(objects: Any, sealer: Any, round_: int, part: Any, content: StoredRound) -> StoredRound:
        objects.create(round_name(round_, part), encode_round(sealer, round_, part, content))
        return content

    patch.setattr(collection_round, "create_round", create_round)


def entry_before_not_read(patch: pytest.MonkeyPatch) -> None:
    """A writer takes an entry for its own log's end though the log was cut there."""
    patch.setattr(WriterLog, "_stands", lambda self: True)


def bases_not_followed(patch: pytest.MonkeyPatch) -> None:
    """A writer relies on a difference whose base is condemned."""

    def stored(self: RemoteIndex, chunks: Any, bases_left: int) -> set[bytes]:
        usable = self._usable_numbers()
        return {chunk for chunk in chunks if any(usable(place.pack) for place in self.find(chunk))}

    patch.setattr(RemoteIndex, "_stored", stored)


def bases_not_marked(patch: pytest.MonkeyPatch) -> None:
    """A collector does not mark the bases of live chunks."""
    patch.setattr(collection_round, "add_bases", lambda index, live: None)


def manifest_name_reused(patch: pytest.MonkeyPatch) -> None:
    """A writer stores a condemned manifest again under its name."""
    patch.setattr(
        Rounds, "manifests", property(lambda self: frozenset(), lambda self, value: None), raising=False
    )


def next_round_not_asked_for(patch: pytest.MonkeyPatch) -> None:
    """A writer takes a listing of rounds as it comes."""

    def list_all(self: Rounds) -> Any:
        parts = self._list()
        return parts, max(parts, default=self.last)

    patch.setattr(Rounds, "_list_all", list_all)


THE_NINE: dict[str, Patch] = {
    mutation.__name__: mutation
    for mutation in (
        no_hello,
        list_before_hello,
        stale_index,
        unconditional_commit,
        fence_ignored,
        no_fence,
        fence_before_round,
        no_second_list,
        overlapping_rounds,
    )
}
"""Mutations of the model (remote.md)."""

MORE: dict[str, Patch] = {
    mutation.__name__: mutation
    for mutation in (
        every_final_counts,
        entry_before_not_read,
        bases_not_followed,
        bases_not_marked,
        manifest_name_reused,
    )
}

OF_LISTINGS: dict[str, tuple[str, Patch]] = {
    "next_round_not_asked_for": ("gc/", next_round_not_asked_for),
}
"""Mutations that believe a listing that lacks something, with the prefix that is listed."""


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
