"""Which codec each file of a state is stored with: found out on samples, kept for a while, and given up where time is short.

Guarantees: none for the content, which comes back the same whatever is chosen; and the processor time that codecs take stays within a
budget, but for what is on its way when it is spent. Files whose elements have no known width are left to the repository's own choice.

Which base a difference has: every 17th snapshot of a writer has none (a *key*), the next one is based on it, three more each on the one before,
the fifth on the key again, and so on. So at most four bases lie behind each other and three in four are next to what they are a base of: ten states
of AdamW, 1.9 million parameters, 20 steps apart, take 0.747 of their size (make bench-sizes).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Final, Literal, NamedTuple

import zstandard

from ciuic.errors import Damaged
from ciuic.repository import Writer, planes
from ciuic.repository.lanes import WIDTHS
from ciuic.repository.packing import MOST_BASES, Codec
from ciuic.training.messages import File, Rules
from ciuic.training.preservation import Latest
from ciuic.types import ChunkId

Blocks = Mapping[int, ChunkId]
"""The chunks of a file by their numbers."""
_Kind = Literal["own", "planes", "difference"]

_KEY_EVERY: Final = 17
_SAMPLE_BYTES: Final = 16 << 10
_TRY_AGAIN_EVERY: Final = 8
_WORTH: Final = 0.95
"""Share of the raw size below which planes are worth their time at every read."""
_WORTH_MORE: Final = 0.02
"""So much less must a dearer codec leave than a cheaper one."""
_SHARE_OF_TIME: Final = 0.01
"""Of all processors' time between two saves: what a training may lose by codecs, and no more."""
_LONG_ENOUGH: Final = 64
"""Snapshots that stay: bases outlive their snapshots, up to five at a time, and with 32 that takes what differences save."""


def _base_of(number: int) -> int | None:
    """The snapshot that this one is based on, by its number."""
    after_key = number % _KEY_EVERY
    if not after_key:
        return None
    return number - (after_key if after_key % MOST_BASES == 1 else 1)


class _Choice(NamedTuple):
    kind: _Kind
    age: int
    """Commits since it was made."""


class Chooser:
    """Of one writer, for all its commits."""

    def __init__(self, compression: str, rules: Rules) -> None:
        self._differences = all(
            isinstance(rule, Latest) and rule.number >= _LONG_ENOUGH for rule in rules.keep
        )
        self.compression = compression
        self._choices: dict[tuple[str, bool], _Choice] = {}
        """By path, and whether there was a base to try."""
        self._number = 0
        self._blocks: dict[int, dict[str, Blocks]] = {}
        """Of the snapshots that a later one may be based on."""

    def begin(self, writer: Writer, interval_seconds: float | None, in_a_hurry: Callable[[], bool]) -> Chosen:
        """For one commit. ``interval_seconds``: since the one before, as far as is known. ``in_a_hurry``: whether the next is waiting."""
        budget = None
        if self.compression == "auto" and interval_seconds is not None:
            budget = interval_seconds * _SHARE_OF_TIME * len(os.sched_getaffinity(0))
        base = _base_of(self._number) if self._differences else None
        return Chosen(self, writer, {} if base is None else self._blocks[base], budget, in_a_hurry)

    def done(self, chosen: Chosen) -> None:
        """The commit was made."""
        key = self._number - self._number % _KEY_EVERY
        self._blocks = {self._number: chosen.blocks, key: self._blocks.get(key, chosen.blocks)}
        self._number += 1

    def codec_kind(self, file: File, has_base: bool, trial: Callable[[], _Kind]) -> _Kind:
        """As it was chosen, or by a new ``trial``."""
        key = file.path, has_base
        choice = self._choices.get(key)
        if choice is None or choice.age >= _TRY_AGAIN_EVERY:
            choice = _Choice(trial(), 0)
        self._choices[key] = choice._replace(age=choice.age + 1)
        return choice.kind


class Chosen:
    """The codecs of one commit."""

    def __init__(
        self,
        chooser: Chooser,
        writer: Writer,
        bases: Mapping[str, Blocks],
        budget_seconds: float | None,
        in_a_hurry: Callable[[], bool],
    ) -> None:
        self.blocks: dict[str, Blocks] = {}
        """What was stored, by path: to be filled by who stores it."""
        self._chooser = chooser
        self._writer = writer
        self._bases = bases
        self._budget_seconds = budget_seconds
        self._in_a_hurry = in_a_hurry
        self._spent = False

    def codec(self, file: File, data: memoryview) -> Callable[[int], Codec | None]:
        """For each block of this file, whose content is ``data``."""
        if self._chooser.compression == "none":
            return lambda _: Codec("raw")
        if file.width not in WIDTHS or self._is_spent():
            return lambda _: None
        base = self._bases.get(file.path, {})
        kind = self._chooser.codec_kind(file, bool(base), lambda: self._trial(file, data, base))
        by_planes = Codec("planes", file.width)

        def of_block(number: int) -> Codec | None:
            if kind == "own" or self._is_spent():
                return None
            if kind == "difference" and number in base:
                return Codec("difference", file.width, base[number])
            return by_planes

        return of_block

    def _is_spent(self) -> bool:
        if self._chooser.compression == "auto" and not self._spent:
            over = self._budget_seconds is not None and self._writer.coding_seconds > self._budget_seconds
            self._spent = over or self._in_a_hurry()
        return self._spent

    def _trial(self, file: File, data: memoryview, base: Blocks) -> _Kind:
        """What makes samples of a file small enough to be worth it."""
        block_size = self._writer.repository.block_size
        best: tuple[_Kind, float] = "own", 1.0
        plain, by_planes, by_difference, compared = 0, 0, 0, 0
        compressor = zstandard.ZstdCompressor(level=1)
        samples = _samples(data, block_size)
        for number, start, sample in samples:
            plain += min(len(sample), len(compressor.compress(sample)))
            by_planes += len(planes.encode(sample, file.width))
            if number in base:
                before = self._content(base[number])[start : start + len(sample)]
                if len(before) == len(sample):
                    by_difference += len(planes.encode(sample, file.width, before))
                    compared += len(sample)
        size = sum(len(sample) for _, _, sample in samples)
        if not size:
            return "own"
        best = "own", plain / size
        if by_planes / size < min(_WORTH, best[1] - _WORTH_MORE):
            best = "planes", by_planes / size
        if compared == size and by_difference / size < min(_WORTH, best[1] - _WORTH_MORE):
            best = "difference", by_difference / size
        return best[0]

    def _content(self, chunk: ChunkId) -> bytes:
        try:
            return self._writer.chunks.get(chunk)
        except Damaged:
            return b""


def _samples(data: memoryview, block_size: int) -> list[tuple[int, int, memoryview]]:
    """(block, offset in it, content) at a quarter, the middle and three quarters; none reaches over the end of its block."""
    found = []
    for quarter in (1, 2, 3):
        at = len(data) * quarter // 4 // 8 * 8
        start = min(at % block_size, max(0, block_size - _SAMPLE_BYTES))
        at = at // block_size * block_size + start
        sample = data[at : min(at + _SAMPLE_BYTES, (at // block_size + 1) * block_size)]
        if len(sample) >= 8:
            found.append((at // block_size, start, sample))
    return found
