"""One snapshot of a state of which each rank has a part: all ranks stage theirs at the same step, or none does.

Before anything is staged the ranks tell each other whether they can, what they would store, and what rank 0 calls the snapshot. From then on no
rank waits for another: each writer stores its part, and rank 0's makes the snapshot when all have (parts.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import xxhash

from ciuic.repository import Repository
from ciuic.repository.claim import Claim
from ciuic.training import rank_state, shards
from ciuic.training.logs import log
from ciuic.training.messages import Together
from ciuic.training.rank_state import Mine
from ciuic.training.ranks import Ranks, RanksApart
from ciuic.training.staging import State, gather, others_part


class _Ready(NamedTuple):
    """What one rank says beforehand."""

    mine: Mine
    token: str
    is_busy: bool
    outline: str
    """Digest of what must be the same on all ranks."""
    size_bytes: int

    def message(self) -> dict[str, Any]:
        """The plain value that other ranks are sent."""
        return {**self._asdict(), "mine": self.mine.message()}

    @classmethod
    def of(cls, message: Any) -> _Ready:
        """What another rank has sent. ValueError for anything else."""
        try:
            made = cls(**{**message, "mine": Mine.of(message["mine"])})
        except (TypeError, LookupError):
            made = None
        texts = () if made is None else (made.token, made.outline)
        if (
            made is None
            or not all(isinstance(text, str) for text in texts)
            or type(made.size_bytes) is not int
        ):
            raise ValueError("another rank has sent something else than whether it can save")
        return made


class Agreed(NamedTuple):
    """All ranks save, now."""

    parts: list[Mine]
    together: Together
    size_bytes: int
    """Of all ranks' parts."""
    claim: Claim | None
    """Rank 0's: until the snapshot is made nothing is swept."""


def part_of(objects: Mapping[str, Any], states: Mapping[str, Any], rank: int) -> State:
    """What this rank stores, but for what only a snapshot has. Unsaveable."""
    for name, value in objects.items():
        shards.check_optimizer(value, name)
    return others_part(states, rank) if rank else gather(states, {}, {}, with_shards=True)


def agree(
    ranks: Ranks, repository: str, objects: Mapping[str, Any], states: Mapping[str, Any], *, is_busy: bool
) -> Agreed | None:
    """None on all ranks if one has no room. To be called by all. RanksApart; ValueError on all for what one of them cannot store."""
    claim = None
    if ranks.saves:
        with Repository.open(repository) as opened:
            claim = opened.claim()
    try:
        agreed = _agree(ranks, objects, states, is_busy)
    except BaseException:
        if claim is not None:
            claim.release()
        raise
    if agreed is None:
        if claim is not None:
            claim.release()
        return None
    return agreed._replace(claim=claim)


def _agree(
    ranks: Ranks, objects: Mapping[str, Any], states: Mapping[str, Any], is_busy: bool
) -> Agreed | None:
    mine, size_bytes = rank_state.mine(objects), 0
    try:
        size_bytes = part_of(objects, states, ranks.rank).size_bytes
    except (TypeError, ValueError) as error:
        mine = Mine({}, str(error))
    token = os.urandom(16).hex() if ranks.saves else ""
    ready = _Ready(mine, token, is_busy, _outline(states), size_bytes)
    try:
        everybody = [_Ready.of(one) for one in ranks.exchange(ready.message())]
    except ValueError as error:
        raise RanksApart(str(error)) from None
    problem = next(
        (f"rank {at}: {one.mine.problem}" for at, one in enumerate(everybody) if one.mine.problem), ""
    )
    if problem:
        raise ValueError(problem)
    if any(one.outline != everybody[0].outline for one in everybody):
        raise ValueError(
            "the ranks have different tensors, or sharded ones that are not parts of the same: "
            "torch.distributed.checkpoint with ciuic.training.dcp saves such states"
        )
    if any(one.is_busy for one in everybody):
        log.warning("ciuic: a snapshot is skipped: the last two of one rank are still being written")
        return None
    return Agreed(
        [one.mine for one in everybody],
        Together(everybody[0].token, ranks.rank, ranks.world_size),
        sum(one.size_bytes for one in everybody),
        None,
    )


def _outline(states: Mapping[str, Any]) -> str:
    whole = xxhash.xxh3_128()
    for line in shards.outline(states):
        whole.update(line.encode("utf-8", "surrogatepass"))
    return whole.hexdigest()
