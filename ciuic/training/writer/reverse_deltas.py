"""Code each state when it is not the newest any more, as a difference from the state after it, in time the training can spare.

So the newest state, which nearly every load reads, lies as it is, and older ones pay for reading. Guarantees:
what the newest state has is never coded here, also where an older one has it too. Where rules of retention
keep single states, whose bases would outlive theirs, older states become planes without a base; where they
keep the newest of all, the base of a state goes after it, so differences cost nothing in the long run. What was coded
until a turn was stopped is not coded again. States that an earlier process left as they are when it ended are coded
too. Small states share packs: they are coded when the newest has none of its content there.

`CodingTurns` decides when. Guarantees: while the training leaves processors idle, everything that waits is coded between
saves, in idle time. On a machine that it keeps busy, `MAX_WAITING_WHEN_BUSY` states wait for better times. What waits
beyond them is coded by slices of idle-class threads with pauses in between, the longer the fewer wait, so that the
share of all processors is at most `_SHARES`. A training that saves faster than that pays with
processor time: from `OVERDUE` states on, one is coded after each save without pauses, and the next save waits
for it. So `OVERDUE` states wait at most, unless coding one takes longer than the repository's lock may be held
for it (`max_coding_seconds`); what was coded until then counts for the next turn. A save for which the training stands
still, or after which it has to be gone, never waits for this. The repository is not locked in the pauses.

References:
    docs/decisions/reverse-deltas.md: the measurements.
"""

from __future__ import annotations

import os
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from ciuic.errors import Busy
from ciuic.repository import Repository
from ciuic.repository.block_maps import blocks_of
from ciuic.repository.byte_planes_math import WIDTHS
from ciuic.repository.compression import Codec, Coded, Pace
from ciuic.system.disk_space import available_bytes
from ciuic.training.policy.retention_rules import Latest
from ciuic.training.writer.codecs import Blocks, CommitCodecs, HalfPrecisionCopy, max_coding_seconds
from ciuic.training.writer.messages import RetentionRules
from ciuic.types import ChunkId, Entry, SnapshotId

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
    """States of one writer that are to be coded."""

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
    """Turns of one writer."""

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
            self._run_until(deltas, self._trainer.has_message, "patient", max_coding_seconds(size_bytes), 0)
        if deltas.waiting >= OVERDUE:
            seconds = max_coding_seconds(size_bytes)
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
            max_coding_seconds(size_bytes),
            MAX_WAITING_WHEN_BUSY,
        )
        end = began + (clock.used() - used) / (share * clock.processors)
        self._trainer.pause(max(_MIN_PAUSE_SECONDS, end - clock.now()))

    def _run_until(
        self, deltas: ReverseDeltas, stop: Callable[[], bool], pace: Pace, seconds: float, leave: int
    ) -> None:
        end = self._clock.now() + seconds
        deltas.run(lambda: "now" if stop() or self._clock.now() > end else pace, leave=leave)
