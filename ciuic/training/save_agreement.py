"""Agreement of all ranks on one save: whether all can save now, and what the others have of their own.

Guarantees: of a sharded state all ranks stage their parts at the same step, or none does. Before anything is staged,
they exchange whether they can save, what they would store, and the token that rank 0 gave the snapshot. From then on no
rank waits for another: each writer stores its part, and rank 0's makes the snapshot when all have (`writer.rank_parts`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import xxhash

from ciuic.repository import Repository
from ciuic.repository.writing.shared_write_claim import Claim
from ciuic.training.format import shards
from ciuic.training.logs import log
from ciuic.training.ranks import Ranks, RanksApart
from ciuic.training.staging import GatheredState, gather, rank_pieces
from ciuic.training.state import rank_state
from ciuic.training.state.rank_state import RankState
from ciuic.training.writer.messages import JointSave


class RanksGone(NamedTuple):
    """Another rank has ended, or cannot be reached."""

    problem: str


class AgreedSave(NamedTuple):
    """Agreement of all ranks to save now."""

    parts: list[RankState]
    joint_save: JointSave
    size_bytes: int
    """Size of all ranks' parts together."""
    claim: Claim | None
    """Claim on the repository, on rank 0: nothing is swept until the snapshot is made."""


GatheredStates = list[RankState] | AgreedSave | RanksGone | None
"""What the ranks have of their own: the states of all on rank 0, and [] on the others. For a sharded state the agreement,
or [] on all if they skip this save. None where this process saves for itself.
"""


class _Readiness(NamedTuple):
    """Message of one rank before a sharded save."""

    mine: RankState
    token: str
    is_busy: bool
    outline: str
    """Digest of what must be the same on all ranks."""
    size_bytes: int

    def message(self) -> dict[str, Any]:
        """Return the plain value that is sent to other ranks."""
        return {**self._asdict(), "mine": self.mine.message()}

    @classmethod
    def of(cls, message: Any) -> _Readiness:
        """Decode the message of another rank.

        Raises:
            ValueError: it is something else.
        """
        try:
            made = cls(**{**message, "mine": RankState.of(message["mine"])})
        except (TypeError, LookupError):
            made = None
        texts = () if made is None else (made.token, made.outline)
        if (
            made is None
            or not all(isinstance(text, str) for text in texts)
            or type(made.size_bytes) is not int
        ):
            raise ValueError("another rank sent an invalid message before a sharded save")
        return made


def gather_part(objects: Mapping[str, Any], states: Mapping[str, Any], rank: int) -> GatheredState:
    """Gather what this rank stores, without the documents of the snapshot.

    Raises:
        Unsaveable: a value cannot be stored.
    """
    for name, value in objects.items():
        shards.check_optimizer(value, name)
    return rank_pieces(states, rank) if rank else gather(states, {}, {}, with_shards=True)


def agree(
    ranks: Ranks, repository: str, objects: Mapping[str, Any], states: Mapping[str, Any], *, is_busy: bool
) -> AgreedSave | None:
    """Agree with the other ranks on a save. Collective.

    Args:
        ranks: connection to the other ranks.
        repository: path of the repository.
        objects: registered objects by name.
        states: their states by name.
        is_busy: whether this rank has no free arena.

    Returns:
        The agreement; None on all ranks if one has no room.

    Raises:
        RanksApart: another rank cannot be reached or sent something else.
        ValueError: on all ranks, if one has a state that cannot be stored.
    """
    claim = None
    if ranks.saves:
        # Claimed before any rank stores: a prune between two parts would free what no snapshot refers to yet.
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
) -> AgreedSave | None:
    """Exchange the ranks' messages and compare them."""
    mine, size_bytes = rank_state.own_state(objects), 0
    try:
        size_bytes = gather_part(objects, states, ranks.rank).size_bytes
    except (TypeError, ValueError) as error:
        # Sent to the other ranks instead of raised here: all must leave the exchange together, and raise
        # alike.
        mine = RankState({}, str(error))
    # Random: reports that a dead run left in the same directory must not count for this snapshot.
    token = os.urandom(16).hex() if ranks.saves else ""
    ready = _Readiness(mine, token, is_busy, _outline(states), size_bytes)
    try:
        all_ready = [_Readiness.of(one) for one in ranks.exchange(ready.message())]
    except ValueError as error:
        raise RanksApart(str(error)) from None
    problem = next(
        (f"rank {at}: {one.mine.problem}" for at, one in enumerate(all_ready) if one.mine.problem), ""
    )
    if problem:
        raise ValueError(problem)
    # Pipeline parallelism: each rank has tensors that no other knows.
    if any(one.outline != all_ready[0].outline for one in all_ready):
        raise ValueError(
            "the ranks have different tensors, or shards of different ones: save such states with "
            "torch.distributed.checkpoint and ciuic.training.dcp.storage"
        )
    # All or none: rank 0's writer would wait for the missing part and then make no snapshot.
    if any(one.is_busy for one in all_ready):
        log.warning("ciuic: snapshot skipped: the writer of one rank is still storing the last two")
        return None
    return AgreedSave(
        [one.mine for one in all_ready],
        JointSave(all_ready[0].token, ranks.rank, ranks.world_size),
        sum(one.size_bytes for one in all_ready),
        None,
    )


def _outline(states: Mapping[str, Any]) -> str:
    """Return the digest of the names, shapes and dtypes that all ranks must share."""
    # A digest, because only equality matters and every rank gets it from all others.
    whole = xxhash.xxh3_128()
    for line in shards.outline(states):
        whole.update(line.encode("utf-8", "surrogatepass"))
    return whole.hexdigest()


def decode_states(messages: list[Any] | None) -> list[RankState] | None:
    """Decode the states that the other ranks sent.

    Raises:
        RanksApart: one of them sent something else.
    """
    try:
        return None if messages is None else [RankState.of(message) for message in messages]
    except ValueError as error:
        raise RanksApart(str(error)) from None
