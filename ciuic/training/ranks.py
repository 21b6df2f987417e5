"""Several processes that train one model (DDP), and what they must tell each other for one of them to save.

Rank 0 saves; the others give it what differs from rank to rank (`rank_state`), and all agree on the step. They talk over process groups
of their own, on gloo, with time-outs of their own: a save that takes long trips none of the training's, and nothing of it is on the
training's streams. Every rank makes the manager and calls the same of its methods in the same order.
"""

from __future__ import annotations

import logging
import sys
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

log = logging.getLogger("ciuic")

_MEET_SECONDS: Final = 20.0
"""For all ranks to make their managers."""
_GATHER_SECONDS: Final = 300.0
"""For all ranks to come to one save: less than what training allows its own messages."""
_PATIENT_SECONDS: Final = 86400.0
_POLL_SECONDS: Final = 0.02
_made: dict[str, int] = {}
"""How many managers of a name this process has made."""


class RanksApart(Exception):
    """The other ranks did not come, or are gone."""


class Ranks:
    """One of them, from its own side. Not for several threads at once."""

    def __init__(self, rank: int, world_size: int, quick: Any, patient: Any) -> None:
        self.rank = rank
        self.world_size = world_size
        self._quick, self._patient = quick, patient

    @classmethod
    def meet(cls, name: str) -> Ranks | None:
        """None where this process trains alone, or the others make no manager, which is said."""
        torch = sys.modules.get("torch")
        dist = getattr(torch, "distributed", None)
        if dist is None or not dist.is_available() or not dist.is_initialized():
            return None
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if world_size == 1:
            return None
        number = _made[name] = _made.get(name, 0) + 1
        if not _all_are_here(dist, f"ciuic/{name}/{number}", rank, world_size):
            log.warning(
                "ciuic: not every rank has made a SnapshotManager, so rank %d saves for itself alone, and a resume would not be exact "
                "on the others: make it on every rank, or with distributed=False where that is meant",
                rank,
            )
            return None
        quick = dist.new_group(backend="gloo", timeout=timedelta(seconds=_GATHER_SECONDS))
        patient = dist.new_group(backend="gloo", timeout=timedelta(seconds=_PATIENT_SECONDS))
        return cls(rank, world_size, quick, patient)

    @property
    def saves(self) -> bool:
        """Whether it is this one that writes."""
        return self.rank == 0

    def vote(self) -> Vote:
        """To agree on one thing, again and again."""
        return Vote(self._patient)

    def gather(self, mine: Any) -> list[Any] | None:
        """What each rank gave, on rank 0; None on the others. RanksApart."""
        import torch.distributed as dist

        everybody: list[Any] | None = [None] * self.world_size if self.saves else None
        try:
            dist.gather_object(mine, everybody, group=self._quick, group_dst=0)
        except RuntimeError as error:
            raise RanksApart(str(error)) from None
        return everybody

    def exchange(self, mine: Any) -> list[Any]:
        """What each rank gave, on every rank. RanksApart."""
        import torch.distributed as dist

        everybody: list[Any] = [None] * self.world_size
        try:
            dist.all_gather_object(everybody, mine, group=self._quick)
        except RuntimeError as error:
            raise RanksApart(str(error)) from None
        return everybody

    def tell(self, what: Any = None) -> Any:
        """What rank 0 tells, on every rank; those wait for it as long as it takes. RanksApart."""
        import torch.distributed as dist

        box = [what]
        try:
            dist.broadcast_object_list(box, group=self._patient, group_src=0)
        except RuntimeError as error:
            raise RanksApart(str(error)) from None
        return box[0]

    def first_problem(self, mine: str) -> str:
        """The first that is not empty, on every rank; empty if all are well. RanksApart."""
        texts = enumerate(self.exchange(mine))
        return next((f"rank {rank}: {text}" for rank, text in texts if text), "")

    def close(self) -> None:
        """Lets go of the groups, if the training has not ended them all."""
        import torch.distributed as dist

        if dist.is_initialized():
            for group in (self._quick, self._patient):
                with suppress(RuntimeError, ValueError, AssertionError):
                    dist.destroy_process_group(group)


class Vote:
    """Whether any rank wanted it at the boundary before. The messages travel during the step between the two."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._under_way: tuple[Any, Any] | None = None

    def __call__(self, wanted: bool, again: bool = True) -> bool:
        """To be called by every rank at every boundary. ``again``: False if every rank knows that nobody can want it at this one.
        RuntimeError when the others are gone."""
        import torch
        import torch.distributed as dist

        agreed = False
        if self._under_way is not None:
            (work, tensor), self._under_way = self._under_way, None
            work.wait()
            agreed = bool(tensor.item())
        if not agreed and again:
            tensor = torch.tensor([wanted], dtype=torch.uint8)
            work = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group, async_op=True)
            self._under_way = work, tensor
        return agreed


def _all_are_here(dist: Any, prefix: str, rank: int, world_size: int) -> bool:
    """The same answer on every rank that asks. Rank 0 counts, for so long; the others hear what it found."""
    store = dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())
    end = time.monotonic() + _MEET_SECONDS
    store.set(f"here-{rank}", "1")
    if rank:
        while time.monotonic() < end + _MEET_SECONDS:
            if store.check(["all"]):
                return bool(store.get("all") == b"1")
            time.sleep(_POLL_SECONDS)
        return False
    names = [f"here-{one}" for one in range(world_size)]
    while not (here := bool(store.check(names))) and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)
    store.set("all", "1" if here else "0")
    return here
