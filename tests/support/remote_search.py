"""Exhaustive search: every order of the requests of a few parties that run the real code on one bucket.

A party is a function that is run again from its beginning whenever its next request is wanted, with the replies that
it has had so far. What it does next depends on these alone, so a state is the bucket and the replies of each party.
A party that stops for ever is one that is not scheduled any more: all its stops are among the states.
A listing may lack anything of what is there, in one listing of a prefix that the caller says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from support.remote_bucket import Bucket

from ciuic.remote.objects.model import NoSuchObject, ObjectInfo, Objects
from ciuic.repository.ids import Bytes

Request = tuple[str, tuple[Any, ...]]
Contents = frozenset[tuple[str, bytes]]
Replies = tuple[tuple[Any, ...], ...]


class State(NamedTuple):
    """Bucket, the replies of each party, and how many listings may yet lack something."""

    contents: Contents
    replies: Replies
    lacks: int

    def answered(self, at: int, contents: Contents, reply: Any, lacks: int) -> State:
        """Return the state after one party had a reply."""
        replies = (*self.replies[:at], (*self.replies[at], reply), *self.replies[at + 1 :])
        return State(contents, replies, lacks)


class Stop(BaseException):
    """The party wants a reply that it has not had."""

    def __init__(self, request: Request) -> None:
        self.request = request


class Outcome(NamedTuple):
    """What a party does next: a request, or nothing more, with what it has said on the way."""

    request: Request | None
    said: tuple[Any, ...]


class ReplayedObjects:
    """Objects that give recorded replies, and stop the party at the first request without one."""

    url = "memory://bucket"

    def __init__(self, replies: Sequence[Any]) -> None:
        self._replies = iter(replies)

    def _reply(self, method: str, *arguments: Any) -> Any:
        try:
            reply = next(self._replies)
        except StopIteration:
            raise Stop((method, arguments)) from None
        if isinstance(reply, Exception):
            raise reply
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
        stolen: Names that a party deletes against the rules.
    """

    def __init__(
        self,
        parties: Sequence[Callable[[Objects, Callable[[Any], None]], None]],
        problem: Callable[[Contents, frozenset[Any]], str],
        lacks_in: str = "",
        stolen: Sequence[str] = (),
    ) -> None:
        self._parties = parties
        self._stolen = stolen
        self._lacks_in = lacks_in
        self._problem = problem
        self._next: dict[tuple[int, tuple[Any, ...]], Outcome] = {}
        self._judged: dict[tuple[Contents, frozenset[Any]], str] = {}
        self.states = 0

    def run(self, contents: Contents, max_states: int) -> str:
        """Return the first problem that is found, or an empty text. Stops after ``max_states`` states."""
        first = State(contents, tuple(() for _ in self._parties), int(bool(self._lacks_in)))
        seen = {first}
        todo = [first]
        while todo and len(seen) <= max_states:
            state = todo.pop()
            outcomes = [self._outcome(at, replies) for at, replies in enumerate(state.replies)]
            if problem := self._judge(
                state.contents, frozenset(said for some in outcomes for said in some.said)
            ):
                self.states = len(seen)
                return problem
            for following in self._following(state, outcomes):
                if following not in seen:
                    seen.add(following)
                    todo.append(following)
        self.states = len(seen)
        return ""

    def _following(self, state: State, outcomes: list[Outcome]) -> Iterator[State]:
        contents = state.contents
        # What is read and never changes can be read at once: its order against other requests makes no difference.
        for at, outcome in enumerate(outcomes):
            if outcome.request and self._is_fixed(contents, outcome.request):
                _, reply = perform(contents, outcome.request)
                yield state.answered(at, contents, reply, state.lacks)
                return
        for at, outcome in enumerate(outcomes):
            if outcome.request:
                after, reply = perform(contents, outcome.request)
                yield state.answered(at, after, reply, state.lacks)
                method, arguments = outcome.request
                if state.lacks and method == "list" and arguments[0].startswith(self._lacks_in):
                    for lack in lacking(reply):
                        yield state.answered(at, after, lack, state.lacks - 1)

    def _is_fixed(self, contents: Contents, request: Request) -> bool:
        method, arguments = request
        if method not in ("get_ranges", "info") or not arguments[0].startswith(("w/", "gc/")):
            return False
        if arguments[0] in self._stolen:
            return False
        return any(name == arguments[0] for name, _ in contents)

    def _outcome(self, at: int, replies: tuple[Any, ...]) -> Outcome:
        key = (at, replies)
        if key not in self._next:
            said: list[Any] = []
            given = [
                NoSuchObject(reply[1]) if isinstance(reply, tuple) and reply[:1] == ("missing",) else reply
                for reply in replies
            ]
            request: Request | None = None
            try:
                self._parties[at](ReplayedObjects(given), said.append)
            except Stop as stop:
                request = stop.request
            self._next[key] = Outcome(request, tuple(said))
        return self._next[key]

    def _judge(self, contents: Contents, said: frozenset[Any]) -> str:
        key = (contents, said)
        if key not in self._judged:
            self._judged[key] = self._problem(contents, said)
        return self._judged[key]
