"""Code each state when it is not the newest any more: as a difference from the state that came after it.

So the newest state, which nearly every load reads, lies as it is, and older ones pay for reading. Guarantees:
what the newest state has is never coded here, also where an older one has it too. Where rules of retention
keep single states, whose bases would outlive theirs, older states become planes without a base; where they
keep the newest of all, the base of a state goes after it, so differences cost nothing in the long run. A
state that finds no idle time stays as it is. A save that arrives is waited for by one chunk at most.

References:
    docs/decisions/reverse-deltas.md: the measurements.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from ciuic.errors import Busy
from ciuic.repository import Repository
from ciuic.repository.codecs.byte_planes_math import WIDTHS
from ciuic.repository.codecs.codec import Codec, Pace
from ciuic.system.disk_space import available_bytes
from ciuic.training.policy.retention_rules import Latest
from ciuic.training.protocol.messages import RetentionRules
from ciuic.training.writer.codecs import Blocks, CommitCodecs
from ciuic.training.writer.half_precision_pairs import HalfPrecisionCopy
from ciuic.types import ChunkId, SnapshotId

SEAL_FROM_BYTES: Final = 1 << 20
"""Size from which a state gets packs of its own, which go when it is coded."""
# States that wait for idle time at most: the others stay as they are.
_MAX_WAITING: Final = 4
# Free space below which nothing is stored again: the new copies of a pack precede the end of the old ones.
_MIN_FREE_BYTES: Final = 256 << 20


class _State(NamedTuple):
    id: SnapshotId
    blocks: dict[str, Blocks]
    widths: dict[str, int]
    copies: dict[str, HalfPrecisionCopy]


class ReverseDeltas:
    """States of one writer that are to be coded."""

    def __init__(self, repository: str, rules: RetentionRules) -> None:
        """Begin without knowledge of any state.

        Args:
            repository: path of the repository.
            rules: retention rules of the snapshots.
        """
        self._repository = repository
        self._has_bases = all(isinstance(rule, Latest) for rule in rules.keep)
        self._newest: _State | None = None
        self._waiting: deque[tuple[_State, _State]] = deque(maxlen=_MAX_WAITING)
        """States with the one after each."""

    def saved(self, id_: SnapshotId, chosen: CommitCodecs) -> None:
        """Record a snapshot that was made, and that the one before it may be coded."""
        state = _State(id_, chosen.blocks, chosen.widths, chosen.copies)
        if self._newest is not None:
            self._waiting.append((self._newest, state))
        self._newest = state

    @property
    def is_waiting(self) -> bool:
        """True if a state waits to be coded."""
        return bool(self._waiting)

    def run(self, pace: Callable[[], Pace]) -> None:
        """Code what waits until the pace is "now".

        Raises:
            CiuicError: the repository is damaged.
            OSError: the repository cannot be read or written.
        """
        while self._waiting and pace() != "now" and available_bytes(self._repository) >= _MIN_FREE_BYTES:
            state, after = self._waiting[0]
            try:
                stopped = self._code(state, after, pace)
            # Another process stores or copies, and a save comes first: the next one tries again.
            except Busy:
                return
            except BaseException:
                self._waiting.popleft()
                raise
            if stopped:
                return
            self._waiting.popleft()

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
            done = writer.recode(wanted, pace)
            writer.seal_packs(SEAL_FROM_BYTES)
            return done.stopped

    def _wanted(self, state: _State, after: _State | None, block_size: int) -> dict[ChunkId, Codec]:
        """Return the codec of each chunk that the newest state does not have."""
        newest = self._newest
        kept = {id_ for blocks in newest.blocks.values() for id_ in blocks.values()} if newest else set()
        wanted: dict[ChunkId, Codec] = {}
        # Masters first: what is to become a difference itself cannot be chosen as a base.
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
