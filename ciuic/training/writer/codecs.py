"""Coding of states: the codec of each file when it is committed, later the difference of an older state from the one after it.

Guarantees: the content comes back the same whatever is chosen. With "auto", codecs run when no other process
wants the processors, and not at all where the training keeps them all busy, unless the training waits for the
snapshot. Blocks that were not coded when the next save waits, or when the snapshot has waited for codecs long
enough, are stored as they are. Files whose elements have no known width are left to the repository's own
choice. Where earlier states are coded when they are not the newest any more (`ReverseDeltas`, in the turns of
`CodingTurns`), numbers are stored as they are.

Bases of differences: every 16th snapshot of a writer is a *key* without a base. The next one is based on the
key, two more each on their predecessor, the fourth on the key again, and so on. So at most three bases lie in
a chain, and two in three are next to what they are a base of. Where few snapshots are kept, bases that
outlive their snapshots take what differences save: differences are then used only until the first snapshot
has to go.

Half-precision copies: mixed precision trains weights of bfloat16 or float16 and keeps them in float32 (*masters*) in
the optimizer. Either one says all that the other does but for the bits that rounding takes. So masters may be stored as
these bits, and copies by themselves, which needs no other snapshot. This way and not the other, because what a block of
masters needs lies in one block of its copy, while a block of the copy would need three of its masters; both ways take
the same space. Where no file has numbers of 16 bits nothing is examined; otherwise a few numbers of each file that
could belong to a pair.

References:
    docs/decisions/idle-codecs.md, docs/decisions/masters-beside-twins.md, docs/decisions/reverse-deltas.md: the measurements
        behind the constants.
"""

from __future__ import annotations

import os
import stat
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from ciuic.errors import Busy
from ciuic.repository import Repository, Writer, compression
from ciuic.repository import compression as codec_module
from ciuic.repository.block_maps import blocks_of
from ciuic.repository.byte_planes import Widening
from ciuic.repository.byte_planes_math import BFLOAT16, FLOAT16, WIDTHS
from ciuic.repository.compression import Codec, Coded, Pace
from ciuic.system.disk_space import available_bytes
from ciuic.training.format.layout import OWN_FILE_BYTES, decode_header
from ciuic.training.free_resources import CpuIdle
from ciuic.training.rules import Latest
from ciuic.training.writer.messages import ManifestFile, RetentionRules
from ciuic.types import ChunkId, Entry, SnapshotId

Blocks = Mapping[int, ChunkId]
"""Chunk ids of a file by block number."""

_Kind = codec_module.Kind | Literal["best"]
# Snapshots from one key to the next (docs/decisions/idle-codecs.md, Choice of bases).
_KEY_EVERY: Final = 16
# Differences in a row, each on the one before. Ten AdamW states take 0.750 of raw with three and 0.751 with
# four, and with three reading takes one base less.
_CHAIN_LENGTH: Final = 3
# Commits after which all codecs are tried anew on a file: trials at every commit would take processor time.
_RETRY_EVERY: Final = 8
# Kept snapshots from which differences pay in the long run: up to three bases outlive theirs (break-even at
# 20 to 30).
_MIN_KEPT_SNAPSHOTS: Final = 32
_MAX_WAIT_SECONDS: Final = 5.0
# Size of a state for which a snapshot waits one second more for codecs; it is not durable meanwhile.
_MAX_WAIT_BYTES_PER_SECOND: Final = 50e6
# Idle share of the processors since the last commit below which no codecs run: there they would cost the
# training 2 % of its steps, in spite of SCHED_IDLE.
_IDLE_SHARE: Final = 0.15
# Time for the message to arrive that the training waits for this snapshot.
_AWAITED_GRACE_SECONDS: Final = 0.02


def _base_of(number: int) -> int | None:
    """Return the number of the snapshot that this one is based on; None for a key."""
    after_key = number % _KEY_EVERY
    if not after_key:
        return None
    return number - (after_key if after_key % _CHAIN_LENGTH == 1 else 1)


def _max_coding_seconds(size_bytes: int) -> float:
    """Return how long codecs of a state may wait for idle time, and hold the repository's lock."""
    return _MAX_WAIT_SECONDS + size_bytes / _MAX_WAIT_BYTES_PER_SECOND


def _worth_differences(rules: RetentionRules | None, there: int) -> bool:
    """Return whether differences take less space in all, with `there` snapshots in the repository."""
    return rules is not None and all(
        isinstance(rule, Latest) and (rule.number >= _MIN_KEPT_SNAPSHOTS or there < rule.number)
        for rule in rules.keep
    )


class _FileOutcome(NamedTuple):
    """Result of the last trial of all codecs on a file."""

    kind: _Kind
    """Codec of all blocks; "best" where blocks differ in it."""
    has_difference: bool
    """True if some blocks were stored as differences."""
    had_base: bool
    had_copy: bool
    age: int
    """Commits since the trial."""


class CodecChooser:
    """Choice of codecs for all commits of one writer."""

    def __init__(
        self,
        compression: str,
        rules: RetentionRules | None,
        idleness: CpuIdle | None = None,
        *,
        later: bool = False,
    ) -> None:
        """Start without knowledge of any file.

        Args:
            compression: one of `messages.COMPRESSIONS`.
            rules: retention rules of the snapshots; None if they are not known, which rules out differences.
            idleness: idle time of the processors.
            later: whether numbers are coded later, and stored as they are now.
        """
        self.compression = compression
        self.later = later
        self._rules = rules
        self._outcomes: dict[str, _FileOutcome] = {}
        self._number = 0
        self._idleness = CpuIdle() if idleness is None else idleness
        self._blocks: dict[int, dict[str, Blocks]] = {}
        """Blocks by path, of the snapshots that a later one may be based on."""
        self.is_busy = False
        """True if other processes kept the processors busy before the last commit."""

    def begin(
        self,
        writer: Writer,
        *,
        size_bytes: int = 0,
        in_a_hurry: Callable[[], bool] = lambda: False,
        awaited: Callable[[], bool] = lambda: False,
    ) -> CommitCodecs:
        """Begin a commit.

        Args:
            writer: writer of the repository; its pace is set.
            size_bytes: size of the state.
            in_a_hurry: whether the next save is waiting.
            awaited: whether the training waits for this snapshot.
        """
        idle = self._idleness.share()
        # Too short a time since the last commit says nothing new.
        if idle is not None:
            self.is_busy = idle < _IDLE_SHARE
        max_wait_seconds = _max_coding_seconds(size_bytes)
        # Where the training uses all processors, codecs slow it in spite of SCHED_IDLE: two cores, two torch
        # threads, a save of 50 MB every 2.7 s: 5 % of the steps with codecs, 1 to 3 % without.
        wait_seconds = _AWAITED_GRACE_SECONDS if self.is_busy else max_wait_seconds
        end = time.monotonic() + wait_seconds
        latest = time.monotonic() + max_wait_seconds

        def pace() -> Pace:
            if self.compression != "auto":
                return "soon"
            # The next save waits for this arena: skipped saves cost more than uncoded bytes.
            if in_a_hurry():
                return "now"
            # The training stands still, so its processors are free; only the total time is limited.
            if awaited():
                return "soon" if time.monotonic() < latest else "now"
            # SCHED_IDLE threads: they get what no other process wants of the processors.
            return "patient" if time.monotonic() < end else "now"

        writer.set_pace(pace)
        base = None
        if self.later:
            # The state is read again when it is coded, and the next one with it.
            writer.keep_cached()
        elif self.compression != "none" and _worth_differences(self._rules, _snapshots(writer)):
            # Stored chunks stay in memory: the next snapshot takes them as bases without reading them from
            # disk.
            writer.keep_cached()
            base = _base_of(self._number)
        bases = {} if base is None else self._blocks[base]
        return CommitCodecs(self, bases, pace, writer.repository.block_size)

    def done(self, chosen: CommitCodecs) -> None:
        """Record a commit that was made."""
        key = self._number - self._number % _KEY_EVERY
        # Only the last snapshot and the key can be bases of later ones.
        self._blocks = {self._number: chosen.blocks, key: self._blocks.get(key, chosen.blocks)}
        self._number += 1
        self._idleness.begin()
        for path, outcome in chosen.outcomes():
            self._outcomes[path] = outcome

    def measure_anew(self) -> None:
        """Measure idle time from now on: what codecs have used since the last commit was idle time."""
        self._idleness.begin()

    def recent_outcome(self, path: str, has_base: bool, has_copy: bool) -> _FileOutcome | None:
        """Return the last outcome for a file if it still holds.

        It does for some commits, and until the file gets its first base or half-precision copy.
        """
        outcome = self._outcomes.get(path)
        if outcome is None or outcome.age >= _RETRY_EVERY:
            return None
        if (has_base and not outcome.had_base) or (has_copy and not outcome.had_copy):
            return None
        self._outcomes[path] = outcome._replace(age=outcome.age + 1)
        return outcome


class CommitCodecs:
    """Codecs of the files of one commit."""

    def __init__(
        self, chooser: CodecChooser, bases: Mapping[str, Blocks], pace: Callable[[], Pace], block_size: int
    ) -> None:
        self.blocks: dict[str, Blocks] = {}
        """Stored blocks by path; filled by the caller that stores them."""
        self._chooser = chooser
        self._bases = bases
        self._pace = pace
        self._block_size = block_size
        self.copies: dict[str, HalfPrecisionCopy] = {}
        """Half-precision copies by the paths of their masters; set by `in_order`."""
        self.widths: dict[str, int] = {}
        """Bytes of a number by path; set by `codec`."""
        self._block_kinds: dict[str, _BlockKinds] = {}

    def in_order(self, files: Sequence[ManifestFile], memory: memoryview) -> list[ManifestFile]:
        """Return the files in the order in which they are to be stored. Call it before `codec`."""
        if self._chooser.compression != "none":
            self.copies = find_copies(files, memory)
        return order_masters_last(files, self.copies)

    def codec(self, file: ManifestFile) -> Callable[[int], Codec | None]:
        """Return the codec of each block of a file, as a function of the block's number."""
        self.widths[file.path] = file.width
        if self._chooser.compression == "none":
            return lambda _: Codec("raw")
        # No numbers of a known width: the repository chooses.
        if file.width not in WIDTHS:
            return lambda _: None
        if self._chooser.later:
            return lambda _: Codec("raw")
        base = self._bases.get(file.path, {})
        copy = self.copies.get(file.path)
        known = self._chooser.recent_outcome(file.path, bool(base), copy is not None)
        kind: _Kind = known.kind if known is not None else "best"
        if known is not None and not known.has_difference:
            base = {}
        told = _BlockKinds(bool(base), copy is not None)
        if known is None:
            # Only a trial of all codecs tells which one is best; a fixed choice would confirm itself.
            self._block_kinds[file.path] = told

        def of_block(number: int) -> Codec:
            its_base = base.get(number)
            # One base at most for a block: a difference that has its base needs no half-precision copy.
            other = None if copy is None or (kind == "difference" and its_base) else copy
            return Codec(
                kind,
                file.width,
                its_base,
                on_coded=told,
                twin=other and other.of_block(number, self._block_size, self.blocks.get(other.path, {})),
            )

        return of_block

    def outcomes(self) -> list[tuple[str, _FileOutcome]]:
        """Return the outcomes of the files on which all codecs were tried."""
        if self._pace() == "now":
            return []  # blocks may have been stored uncoded for lack of time: not an outcome
        return [(path, told.outcome()) for path, told in self._block_kinds.items() if told.kinds]


class _BlockKinds:
    """Collector of the codecs with which the blocks of one file were stored; called from several threads."""

    def __init__(self, had_base: bool, had_copy: bool) -> None:
        self.kinds: set[codec_module.Kind] = set()
        self._had_base = had_base
        self._had_copy = had_copy
        self._lock = threading.Lock()

    def __call__(self, kind: codec_module.Kind) -> None:
        # The repository codes blocks on a pool of threads, and each reports here.
        with self._lock:
            self.kinds.add(kind)

    def outcome(self) -> _FileOutcome:
        only = next(iter(self.kinds)) if len(self.kinds) == 1 else "best"
        return _FileOutcome(only, "difference" in self.kinds, self._had_base, self._had_copy, 0)


def _snapshots(writer: Writer) -> int:
    """Return the number of snapshots in the repository."""
    return len(writer.repository.snapshots.names())


# Numbers compared before a pair is tried as a whole: many tensors have one shape, and only one of them is the
# copy.
_SAMPLES: Final = 32
_KINDS: Final = {"BF16": BFLOAT16, "F16": FLOAT16}
_Fingerprint = tuple[int, int, tuple[int, ...]]
"""Kind of half precision, count of numbers, and a sample of them in 16 bits."""


class HalfPrecisionCopy(NamedTuple):
    """File with the same numbers in 16 bits, and its position relative to the masters."""

    path: str
    kind: int
    shift_bytes: int
    """Offset of a number in the copy minus half its offset in the masters' file."""

    def of_block(
        self, number: int, block_size: int, stored: Mapping[int, ChunkId]
    ) -> compression.TwinBase | None:
        """Return the block of the copy on which a block of masters may rest; None if it was not stored.

        The block with most of the numbers is taken, or the one before it.

        Args:
            number: number of the masters' block.
            block_size: size of a block.
            stored: blocks of the copy.
        """
        start = number * block_size // 2 + self.shift_bytes
        # A block of masters has numbers of half a block of the copy, which may lie across two blocks.
        for at in ((start + block_size // 4) // block_size, start // block_size):
            if at in stored:
                return compression.TwinBase(stored[at], Widening(self.kind, (start - at * block_size) // 2))
        return None


class _Numbers(NamedTuple):
    """Content of a file that holds one tensor."""

    dtype: str
    start: int
    """Offset of the data in the file."""
    data: memoryview


def find_copies(files: Sequence[ManifestFile], memory: memoryview) -> dict[str, HalfPrecisionCopy]:
    """Return the half-precision copy of each file of masters, by the masters' path."""
    narrow = [
        (file, numbers)
        for file in files
        if file.width == 2
        and (numbers := _read_numbers(file, memory)) is not None
        and numbers.dtype in _KINDS
    ]
    if not narrow:
        return {}
    # Masters have twice the length of a copy: no header of another file is decoded.
    lengths = {2 * len(numbers.data) for _, numbers in narrow}
    by_fingerprint: dict[_Fingerprint, tuple[ManifestFile, _Numbers]] = {}
    for file, numbers in narrow:
        # The first of several equal files: each has the same numbers.
        by_fingerprint.setdefault(_copy_fingerprint(numbers), (file, numbers))
    twins = {}
    for file in files:
        masters = _read_numbers(file, memory, lengths) if file.width == 4 else None
        if masters is None or masters.dtype != "F32":
            continue
        for fingerprint in _master_fingerprints(masters):
            # A sample of zeros matches every other tensor of zeros, and says nothing.
            if fingerprint in by_fingerprint and any(fingerprint[2]):
                other, numbers = by_fingerprint[fingerprint]
                shift_bytes = numbers.start - masters.start // 2
                # Both must be aligned to their numbers: blocks are taken apart as whole numbers.
                if masters.start % 4 == shift_bytes % 2 == 0:
                    twins[file.path] = HalfPrecisionCopy(other.path, fingerprint[0], shift_bytes)
    return twins


def order_masters_last(
    files: Sequence[ManifestFile], twins: Mapping[str, HalfPrecisionCopy]
) -> list[ManifestFile]:
    """Return the files with each file of masters right after its copy, on which it may rest."""
    if not twins:
        return list(files)
    masters: dict[str, list[ManifestFile]] = {}
    for file in files:
        if file.path in twins:
            masters.setdefault(twins[file.path].path, []).append(file)
    ordered = []
    for file in files:
        if file.path not in twins:
            ordered += [file, *masters.get(file.path, ())]
    return ordered


def _read_numbers(
    file: ManifestFile, memory: memoryview, lengths: Iterable[int] | None = None
) -> _Numbers | None:
    """Return the tensor of a file; None unless the file is one large tensor.

    Args:
        file: position of the file in `memory`.
        memory: the arena.
        lengths: lengths in bytes that are of interest; None for all.
    """
    if file.size_bytes < OWN_FILE_BYTES:
        return None
    content = memory[file.offset : file.offset + file.size_bytes]
    start = 8 + int.from_bytes(content[:8], "little")
    if (
        len(content) != file.size_bytes
        or start > len(content)
        or (lengths is not None and len(content) - start not in lengths)
    ):
        return None
    try:
        found = decode_header(bytes(content[:start]), file.size_bytes)
    except ValueError:
        return None
    if isinstance(found, int) or len(found) != 1:
        return None
    tensor = next(iter(found.values()))
    data = content[tensor.start : tensor.stop]
    return _Numbers(tensor.dtype, tensor.start, data) if len(data) >= 4 * _SAMPLES else None


def _copy_fingerprint(numbers: _Numbers) -> _Fingerprint:
    """Return the fingerprint of numbers of 16 bits."""
    return _KINDS[numbers.dtype], len(numbers.data) // 2, _sample(numbers.data, "<H")


def _master_fingerprints(numbers: _Numbers) -> list[_Fingerprint]:
    """Return the fingerprints that copies of these numbers would have, one per kind of half precision."""
    some = _sample(numbers.data, "<I")
    count = len(numbers.data) // 4
    return [
        (BFLOAT16, count, tuple(map(_as_bfloat16, some))),
        (FLOAT16, count, tuple(map(_as_float16, some))),
    ]


def _sample(data: memoryview, format_: str) -> tuple[int, ...]:
    """Return numbers at evenly spaced positions; the positions depend on the count of numbers only."""
    width = struct.calcsize(format_)
    count = len(data) // width
    places = (count * part // _SAMPLES for part in range(_SAMPLES))
    return tuple(struct.unpack_from(format_, data, place * width)[0] for place in places)


def _as_bfloat16(bits: int) -> int:
    """Round the bits of a float32 to the nearest bfloat16, ties to even."""
    # Adding half a unit less one, plus the lowest bit kept, rounds ties to even; a carry may run into the
    # exponent, as rounding up to the next power of two requires.
    return bits + 0x7FFF + (bits >> 16 & 1) >> 16 & 0xFFFF


def _as_float16(bits: int) -> int:
    """Round the bits of a float32 to the nearest float16, ties to even; overflow gives infinity."""
    try:
        half = struct.pack("<e", struct.unpack("<f", struct.pack("<I", bits))[0])
    except OverflowError:
        return bits >> 31 << 15 | 0x7C00
    return int(struct.unpack("<H", half)[0])


SEAL_FROM_BYTES: Final = 1 << 20
"""Size from which packs are sealed after a state, which go when what is in them is coded."""
# Chunks that wait until their pack is mostly theirs; of more, the oldest stay as they are.
_MAX_LEFT: Final = 1024
# States that wait at most: older ones stay as they are. Their ids take memory; `CodingTurns` keeps fewer.
_MAX_WAITING: Final = 16
# States of an earlier process that are looked at: so many wait on a busy machine.
_MAX_ADOPTED: Final = 6
# Free space below which nothing is stored again: the new copies of a pack precede the end of the old ones.
_MIN_FREE_BYTES: Final = 256 << 20


class _State(NamedTuple):
    id: SnapshotId
    blocks: dict[str, Blocks]
    widths: dict[str, int]
    copies: dict[str, HalfPrecisionCopy]


class ReverseDeltas:
    """States of one writer, each coded as a difference from the state after it when it is not the newest any more.

    So the newest state, which nearly every load reads, lies as it is, and older ones pay for reading.

    Guarantees: what the newest state has is never coded here, also where an older one has it too. Where rules of retention keep
    single states, whose bases would outlive theirs, older states become planes without a base; where they keep the newest of all,
    the base of a state goes after it, so differences cost nothing in the long run. What was coded until a turn was stopped is not
    coded again. States that an earlier process left as they are when it ended are coded too. Small states share packs: they are
    coded when the newest has none of its content there.
    """

    def __init__(
        self,
        repository: str,
        root: bytes,
        rules: RetentionRules,
        *,
        seal_from_bytes: int = SEAL_FROM_BYTES,
    ) -> None:
        """Begin without knowledge of any state.

        Args:
            repository: path of the repository.
            root: path under which the snapshots keep their states.
            rules: retention rules of the snapshots.
            seal_from_bytes: size from which the caller seals packs.
        """
        self._seal_from_bytes = seal_from_bytes
        self._repository = repository
        self._root = root
        self._has_bases = all(isinstance(rule, Latest) for rule in rules.keep)
        self._newest: _State | None = None
        self._waiting: deque[tuple[_State, _State]] = deque()
        """States with the one after each."""
        self._begun: dict[ChunkId, Coded | None] = {}
        """Chunks of the first waiting state that are coded already."""
        self._left: dict[ChunkId, Codec] = {}
        """Chunks of coded states in packs that are mostly of others still, the oldest first."""
        self._has_adopted = False

    def saved(self, id_: SnapshotId, chosen: CommitCodecs) -> None:
        """Record a snapshot that was made, and that the one before it may be coded."""
        state = _State(id_, chosen.blocks, chosen.widths, chosen.copies)
        if self._newest is not None:
            if len(self._waiting) == _MAX_WAITING:
                self._forget_first()
            self._waiting.append((self._newest, state))
        self._newest = state

    @property
    def waiting(self) -> int:
        """Number of states that wait to be coded."""
        return len(self._waiting)

    def adopt(self) -> None:
        """Let states wait that an earlier process has left as they are; call it when a snapshot was made.

        Raises:
            CiuicError: the repository is damaged.
            OSError: the repository cannot be read.
        """
        if self._has_adopted or self._newest is None:
            return
        self._has_adopted = True
        after = self._waiting[0][0] if self._waiting else self._newest
        with Repository.open(self._repository) as repository:
            ids = [info.id for info in repository.snapshots.list(root=self._root)]
            earlier = ids[ids.index(after.id) + 1 :] if after.id in ids else []
            for id_ in earlier[:_MAX_ADOPTED]:
                state = self._stored_state(repository, id_, after)
                if not _lies_as_it_is(repository, state, after):
                    return
                self._waiting.appendleft((state, after))
                after = state

    def _stored_state(self, repository: Repository, id_: SnapshotId, after: _State) -> _State:
        """Return what is known of a snapshot of another process: its blocks, the rest as in the next state."""
        blocks: dict[str, Blocks] = {}
        for root in repository.snapshots.load(id_).roots:
            if root.path == self._root:
                for path, entry in _files(repository, root.entry):
                    if after.widths.get(path, 0) in WIDTHS:
                        count = blocks_of(entry.size_bytes, repository.block_size)
                        ref = entry.content, entry.map_height
                        blocks[path] = dict(repository.block_maps.ids(*ref, count))
        # A copy that was none in this state makes nothing smaller, and what is coded is decoded once.
        copies = {path: copy for path, copy in after.copies.items() if path in blocks}
        return _State(id_, blocks, after.widths, copies)

    def run(self, pace: Callable[[], Pace], *, leave: int = 0) -> None:
        """Code what waits, the oldest first, until the pace is "now" or no more than ``leave`` wait.

        Raises:
            CiuicError: the repository is damaged.
            OSError: the repository cannot be read or written.
        """
        while (
            len(self._waiting) > leave
            and pace() != "now"
            and available_bytes(self._repository) >= _MIN_FREE_BYTES
        ):
            state, after = self._waiting[0]
            try:
                stopped = self._code(state, after, pace)
            # Another process stores or copies, and a save comes first: the next one tries again.
            except Busy:
                return
            except BaseException:
                self._forget_first()
                raise
            if stopped:
                return
            self._forget_first()

    def _forget_first(self) -> None:
        self._waiting.popleft()
        self._begun.clear()

    def _code(self, state: _State, after: _State, pace: Callable[[], Pace]) -> bool:
        """Code one state; return whether the pace has ended that."""
        with (
            Repository.open(self._repository) as repository,
            repository.writer(wait_seconds=0, command="SnapshotManager: code an earlier state") as writer,
        ):
            names = repository.snapshots.names()
            if state.id not in names:
                return False
            wanted = self._wanted(state, after if after.id in names else None, repository.block_size)
            # Read again when the next state is coded.
            writer.keep_cached()
            done = writer.recode(wanted, pace, self._begun, min_pack_bytes=self._seal_from_bytes)
            if not done.stopped:
                self._left = {chunk: wanted[chunk] for chunk in done.left[-_MAX_LEFT:]}
            writer.seal_packs(self._seal_from_bytes)
            return done.stopped

    def _wanted(self, state: _State, after: _State | None, block_size: int) -> dict[ChunkId, Codec]:
        """Return the codec of each chunk that the newest state does not have."""
        newest = self._newest
        kept = {id_ for blocks in newest.blocks.values() for id_ in blocks.values()} if newest else set()
        # Older ones first: what is to become a difference itself cannot be chosen as a base.
        wanted = {chunk: codec for chunk, codec in self._left.items() if chunk not in kept}
        # Masters first, for the same reason.
        for path in sorted(state.blocks, key=lambda path: path not in state.copies):
            width = state.widths.get(path, 0)
            if width not in WIDTHS:
                continue
            bases = after.blocks.get(path, {}) if after is not None and self._has_bases else {}
            copy = state.copies.get(path)
            for number, chunk in state.blocks[path].items():
                if chunk in kept:
                    continue
                twin = copy and copy.of_block(number, block_size, state.blocks.get(copy.path, {}))
                wanted.setdefault(chunk, Codec("best", width, bases.get(number), twin=twin))
        return wanted


def _files(repository: Repository, top: Entry) -> Iterator[tuple[str, Entry]]:
    """Yield the files of a state with their paths, which have one level of directories at most."""
    for entry in repository.trees.entries(top.content):
        if not stat.S_ISDIR(entry.mode):
            yield os.fsdecode(entry.name), entry
            continue
        for below in repository.trees.entries(entry.content):
            yield f"{os.fsdecode(entry.name)}/{os.fsdecode(below.name)}", below


def _lies_as_it_is(repository: Repository, state: _State, after: _State) -> bool:
    """Return whether most of what the next state does not have is stored as it is."""
    kept = {id_ for blocks in after.blocks.values() for id_ in blocks.values()}
    own = {id_ for blocks in state.blocks.values() for id_ in blocks.values()} - kept
    return bool(own) and sum(not repository.chunks.locate(chunk).flags for chunk in own) > len(own) / 2


MAX_WAITING_WHEN_BUSY: Final = 2
"""States that wait for idle time on a busy machine, beside the newest, which is never coded."""
# Share of all processors, by the number of states beyond those.
_SHARES: Final = (0.01, 0.02, 0.04)
OVERDUE: Final = MAX_WAITING_WHEN_BUSY + len(_SHARES) + 1
"""Waiting states of which the oldest is coded before the next save."""
# Processor time between two pauses, more for large states: each slice looks up all chunks of the state anew.
_SLICE_SECONDS: Final = 0.25
_SLICE_BYTES_PER_SECOND: Final = 1e9
_MIN_PAUSE_SECONDS: Final = 0.5


class Trainer(NamedTuple):
    """State of the trainer while earlier states are coded."""

    has_message: Callable[[], bool]
    """Returns True if a message has arrived or the trainer has ended."""
    stands_still: Callable[[], bool]
    """Returns True if the trainer waits for a save, or is ending."""
    pause: Callable[[float], None]
    """Wait for so many seconds, or until there is a message."""


class Clock(NamedTuple):
    """Time in seconds."""

    now: Callable[[], float] = time.monotonic
    used: Callable[[], float] = time.process_time
    """Processor time of this process."""
    processors: int = len(os.sched_getaffinity(0))


class CodingTurns:
    """Turns in which one writer codes earlier states, in time that the training can spare.

    Guarantees: while the training leaves processors idle, everything that waits is coded between saves, in idle time. On a machine
    that it keeps busy, `MAX_WAITING_WHEN_BUSY` states wait for better times. What waits beyond them is coded by slices of
    idle-class threads with pauses in between, the longer the fewer wait, so that the share of all processors is at most `_SHARES`.
    A training that saves faster than that pays with processor time: from `OVERDUE` states on, one is coded after each save without
    pauses, and the next save waits for it. So `OVERDUE` states wait at most, unless coding one takes longer than the repository's
    lock may be held for it (`_max_coding_seconds`); what was coded until then counts for the next turn. A save for which the
    training stands still, or after which it has to be gone, never waits for this. The repository is not locked in the pauses.
    """

    def __init__(self, trainer: Trainer, clock: Clock | None = None) -> None:
        self._trainer = trainer
        self._clock = Clock() if clock is None else clock

    def run(self, deltas: ReverseDeltas, *, is_busy: bool, size_bytes: int) -> None:
        """Code earlier states after a save, until the next message or until enough is done.

        Args:
            deltas: the states.
            is_busy: whether the training keeps all processors busy.
            size_bytes: size of a state.

        Raises:
            CiuicError: the repository is damaged.
            OSError: the repository cannot be read or written.
        """
        deltas.adopt()
        if not is_busy:
            self._run_until(deltas, self._trainer.has_message, "patient", _max_coding_seconds(size_bytes), 0)
        if deltas.waiting >= OVERDUE:
            seconds = _max_coding_seconds(size_bytes)
            self._run_until(deltas, self._trainer.stands_still, "soon", seconds, OVERDUE - 1)
        while is_busy and deltas.waiting > MAX_WAITING_WHEN_BUSY and not self._trainer.has_message():
            self._run_slice(deltas, size_bytes)

    def _run_slice(self, deltas: ReverseDeltas, size_bytes: int) -> None:
        """Code for a moment, then pause so long that the share of the processors is kept."""
        clock = self._clock
        beyond = deltas.waiting - MAX_WAITING_WHEN_BUSY
        share = _SHARES[min(beyond, len(_SHARES)) - 1]
        slice_seconds = _SLICE_SECONDS + size_bytes / _SLICE_BYTES_PER_SECOND
        began, used = clock.now(), clock.used()
        self._run_until(
            deltas,
            lambda: self._trainer.has_message() or clock.used() - used >= slice_seconds,
            "patient",
            _max_coding_seconds(size_bytes),
            MAX_WAITING_WHEN_BUSY,
        )
        end = began + (clock.used() - used) / (share * clock.processors)
        self._trainer.pause(max(_MIN_PAUSE_SECONDS, end - clock.now()))

    def _run_until(
        self, deltas: ReverseDeltas, stop: Callable[[], bool], pace: Pace, seconds: float, leave: int
    ) -> None:
        end = self._clock.now() + seconds
        deltas.run(lambda: "now" if stop() or self._clock.now() > end else pace, leave=leave)
