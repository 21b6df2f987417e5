"""Which codec each file of a state is stored with, and in whose time that is found out.

Guarantees: none for the content, which comes back the same whatever is chosen. With "auto" codecs run
when no other process wants the processors, and not where the training keeps all of them busy, unless it waits for the snapshot itself. What they have not come to when the
next save waits, or when the snapshot has waited for them for long, is stored as it is. Files whose elements have no known width are
left to the repository's own choice.

Which base a difference has: every 16th snapshot of a writer has none (a *key*), the next one is based on it, two more each on the one before,
the fourth on the key again, and so on. So at most three bases lie behind each other and two in three are next to what they are a base of.
Where few snapshots stay, bases that outlive theirs take what differences save: there are differences then until the first has to go. Numbers of 4 bytes that are there rounded to 2 as well (twins.py) may be stored as what rounding took
from them, which needs no other snapshot.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from ciuic.repository import Writer, coding
from ciuic.repository.coding import Codec, Pace
from ciuic.repository.lanes import WIDTHS
from ciuic.training.messages import File, Rules
from ciuic.training.preservation import Latest
from ciuic.training.processors import Idleness
from ciuic.training.twins import Twin, found_among, with_masters_behind
from ciuic.types import ChunkId

Blocks = Mapping[int, ChunkId]
"""The chunks of a file by their numbers."""

_Kind = coding.Kind | Literal["best"]
_KEY_EVERY: Final = 16
_IN_A_ROW: Final = 3
_TRY_AGAIN_EVERY: Final = 8
_LONG_ENOUGH: Final = 32
"""Snapshots that stay: up to three bases outlive theirs, which with this many takes less than differences save."""
_PATIENCE_SECONDS: Final = 5.0
_PATIENCE_BYTES_PER_SECOND: Final = 50e6
"""A snapshot is not durable while it waits for codecs: so long it does, where the processors are taken."""
_IDLE_SHARE: Final = 0.15
"""Of the processors' time since the last commit, below which the training wants them all: codecs would cost it, whatever their class."""
_WORD_SECONDS: Final = 0.02
"""For the word to come that the training waits for this snapshot."""


def _base_of(number: int) -> int | None:
    """The snapshot that this one is based on, by its number."""
    after_key = number % _KEY_EVERY
    if not after_key:
        return None
    return number - (after_key if after_key % _IN_A_ROW == 1 else 1)


def _worth_differences(rules: Rules | None, there: int) -> bool:
    """Whether they take less in all. ``there``: the snapshots there are."""
    return rules is not None and all(
        isinstance(rule, Latest) and (rule.number >= _LONG_ENOUGH or there < rule.number)
        for rule in rules.keep
    )


class _Outcome(NamedTuple):
    """Of a file, when all codecs were tried last."""

    kind: _Kind
    """How all of it was stored; "best" where its blocks differ in that."""
    different: bool
    """Some of it as a difference."""
    had_base: bool
    had_twin: bool
    age: int
    """Commits since."""


class Chooser:
    """Of one writer, for all its commits."""

    def __init__(self, compression: str, rules: Rules | None, idleness: Idleness | None = None) -> None:
        """``rules``: by which snapshots stay; None where nobody knows, and no difference can be made. ``idleness``: of the processors."""
        self.compression = compression
        self._rules = rules
        self._outcomes: dict[str, _Outcome] = {}
        self._number = 0
        self._idleness = Idleness() if idleness is None else idleness
        self._blocks: dict[int, dict[str, Blocks]] = {}
        """Of the snapshots that a later one may be based on."""

    def begin(
        self,
        writer: Writer,
        *,
        size_bytes: int = 0,
        in_a_hurry: Callable[[], bool] = lambda: False,
        awaited: Callable[[], bool] = lambda: False,
    ) -> Chosen:
        """For one commit. ``in_a_hurry``: whether the next is waiting; ``awaited``: whether the training stands still for this one."""
        idle = self._idleness.share()
        patience_seconds = _PATIENCE_SECONDS + size_bytes / _PATIENCE_BYTES_PER_SECOND
        end = time.monotonic() + (patience_seconds if idle is None or idle >= _IDLE_SHARE else _WORD_SECONDS)

        latest = time.monotonic() + patience_seconds

        def pace() -> Pace:
            if self.compression != "auto":
                return "soon"
            if in_a_hurry():
                return "now"
            if awaited():
                return "soon" if time.monotonic() < latest else "now"
            return "patient" if time.monotonic() < end else "now"

        writer.set_pace(pace)
        base = None
        if self.compression != "none" and _worth_differences(self._rules, _snapshots(writer)):
            writer.keep_cached()
            base = _base_of(self._number)
        bases = {} if base is None else self._blocks[base]
        return Chosen(self, bases, pace, writer.repository.block_size)

    def done(self, chosen: Chosen) -> None:
        """The commit was made."""
        key = self._number - self._number % _KEY_EVERY
        self._blocks = {self._number: chosen.blocks, key: self._blocks.get(key, chosen.blocks)}
        self._number += 1
        self._idleness.begin()
        for path, outcome in chosen.outcomes():
            self._outcomes[path] = outcome

    def known(self, path: str, has_base: bool, has_twin: bool) -> _Outcome | None:
        """What came of it lately, if that tells of now."""
        outcome = self._outcomes.get(path)
        if outcome is None or outcome.age >= _TRY_AGAIN_EVERY:
            return None
        if (has_base and not outcome.had_base) or (has_twin and not outcome.had_twin):
            return None
        self._outcomes[path] = outcome._replace(age=outcome.age + 1)
        return outcome


class Chosen:
    """The codecs of one commit."""

    def __init__(
        self, chooser: Chooser, bases: Mapping[str, Blocks], pace: Callable[[], Pace], block_size: int
    ) -> None:
        self.blocks: dict[str, Blocks] = {}
        """What was stored, by path: to be filled by who stores it."""
        self._chooser = chooser
        self._bases = bases
        self._pace = pace
        self._block_size = block_size
        self._twins: dict[str, Twin] = {}
        self._told: dict[str, _Told] = {}

    def in_order(self, files: Sequence[File], memory: memoryview) -> list[File]:
        """In which they are to be stored. Before `codec`."""
        if self._chooser.compression != "none":
            self._twins = found_among(files, memory)
        return with_masters_behind(files, self._twins)

    def codec(self, file: File) -> Callable[[int], Codec | None]:
        """For each block of this file."""
        if self._chooser.compression == "none":
            return lambda _: Codec("raw")
        if file.width not in WIDTHS:
            return lambda _: None
        base = self._bases.get(file.path, {})
        twin = self._twins.get(file.path)
        known = self._chooser.known(file.path, bool(base), twin is not None)
        kind: _Kind = known.kind if known is not None else "best"
        if known is not None and not known.different:
            base = {}
        told = _Told(bool(base), twin is not None)
        if known is None:
            self._told[file.path] = told

        def of_block(number: int) -> Codec:
            its_base = base.get(number)
            other = None if twin is None or (kind == "difference" and its_base) else twin
            return Codec(kind, file.width, its_base, told=told, twin=self._twin(other, number))

        return of_block

    def _twin(self, twin: Twin | None, number: int) -> coding.Twin | None:
        return twin and twin.of_block(number, self._block_size, self.blocks.get(twin.path, {}))

    def outcomes(self) -> list[tuple[str, _Outcome]]:
        """Of the files with which all was tried."""
        if self._pace() == "now":
            return []  # what was not coded tells nothing
        return [(path, told.outcome()) for path, told in self._told.items() if told.kinds]


class _Told:
    """How the blocks of one file were stored; told by several threads."""

    def __init__(self, had_base: bool, had_twin: bool) -> None:
        self.kinds: set[coding.Kind] = set()
        self._had_base = had_base
        self._had_twin = had_twin
        self._lock = threading.Lock()

    def __call__(self, kind: coding.Kind) -> None:
        with self._lock:
            self.kinds.add(kind)

    def outcome(self) -> _Outcome:
        only = next(iter(self.kinds)) if len(self.kinds) == 1 else "best"
        return _Outcome(only, "difference" in self.kinds, self._had_base, self._had_twin, 0)


def _snapshots(writer: Writer) -> int:
    return len(writer.repository.snapshots.names())
