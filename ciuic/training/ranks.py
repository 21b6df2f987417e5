"""Several processes that train one model (DDP), and what they must tell each other for one of them to save.

Rank 0 saves; the others give it what differs from rank to rank (`rank_state`), and all agree on the step. They talk over process groups
of their own, on gloo, with time-outs of their own: a save that takes long trips none of the training's, and nothing of it is on the
training's streams. Every rank makes the manager and registers the same.

What must not wait for ranks that may never come goes through the store that torch.distributed was initialized with: whether all are there
before the first message that needs all, and what each has of its own when the program asks for a snapshot, perhaps on rank 0 alone.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Final

from ciuic.training import rank_messages

log = logging.getLogger("ciuic")

_MEET_SECONDS: Final = 10.0
"""For all ranks to make their managers."""
_SAY_SECONDS: Final = 2.0
"""After so long it is said what is waited for."""
_BOUNDARY_SECONDS: Final = 30.0
"""For all to come to their first boundary: training itself keeps them within a step."""
_COME_SECONDS: Final = 5.0
"""For others to be asked for a snapshot, too."""
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

    def __init__(self, rank: int, world_size: int, quick: Any, patient: Any, prefix: str) -> None:
        self.rank = rank
        self.world_size = world_size
        self._quick, self._patient = quick, patient
        self._prefix = prefix
        self._apart: set[str] = set()
        """Places in the program that ask for snapshots on rank 0 alone."""
        self._asked: dict[str, tuple[int, int]] = {}
        """By place: the step at which it asked last, and how often there."""
        self._now = "", 0, 0
        """The place that asks, with these."""

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
        prefix = f"ciuic/{name}/{number}"
        if not _all_are_here(dist, prefix, rank, world_size, _MEET_SECONDS, "make a SnapshotManager"):
            log.warning(
                "ciuic: not every rank has made a SnapshotManager, so rank %d saves for itself alone, and a resume would not be exact "
                "on the others: make it on every rank, or with distributed=False where that is meant",
                rank,
            )
            return None
        quick = dist.new_group(backend="gloo", timeout=timedelta(seconds=_GATHER_SECONDS))
        patient = dist.new_group(backend="gloo", timeout=timedelta(seconds=_PATIENT_SECONDS))
        return cls(rank, world_size, quick, patient, prefix)

    @property
    def saves(self) -> bool:
        """Whether it is this one that writes."""
        return self.rank == 0

    def all_at_boundary(self) -> bool:
        """The same answer on every rank that asks, before anything is agreed at boundaries. RanksApart."""
        seconds = _COME_SECONDS if self._apart else _BOUNDARY_SECONDS
        return self._all_come("boundary", seconds, "come to a boundary of two steps")

    def begin_asked(self, step: int, place: str) -> None:
        """The program asks for a snapshot, at this place in it. To be called before the next three."""
        before, number = self._asked.get(place, (step, 0))
        self._asked[place] = step, number + 1 if before == step else 1
        self._now = place, *self._asked[place]

    def all_asked(self) -> bool:
        """The same answer on every rank that was asked. RanksApart."""
        return self._all_come(f"asked/{self._now}", _COME_SECONDS, "call save_snapshot")

    def hand_in(self, mine: Any) -> list[Any] | None:
        """What each rank has of its own, on rank 0; None if the others were not asked, for which it waits once. [] on the others, which wait
        for nobody. RanksApart, also for what rank 0 received and cannot read."""
        place = self._now[0]
        with _heard():
            store = self._store(f"{self._prefix}/own/{self._now}")
            if not self.saves:
                store.set(str(self.rank), rank_messages.encode(mine))
                return []
            names = [str(rank) for rank in range(1, self.world_size)]
            end = time.monotonic() + (0.0 if place in self._apart else _COME_SECONDS)
            while not (here := bool(store.check(names))) and time.monotonic() < end:
                time.sleep(_POLL_SECONDS)
            if not here:
                if place not in self._apart:
                    log.warning(
                        "ciuic: save_snapshot is called on rank 0 alone at %s: the snapshot has no other rank's generators and position, and "
                        "the others are not waited for there again; call it on every rank, or make the manager on rank 0 alone with "
                        "distributed=False if this is meant",
                        place,
                    )
                self._apart.add(place)
                return None
            # Rank 0's own as well: what is compared with it has come the same way.
            found = [
                rank_messages.decode(one) for one in (rank_messages.encode(mine), *map(store.get, names))
            ]
            for name in names:
                with suppress(RuntimeError):  # not every store can
                    store.delete_key(name)
            return found

    def durable(self, seconds: float) -> bool:
        """Rank 0 says that what the program asked for is there, or could not be saved; the others wait for it, so long. RanksApart."""
        name = repr(self._now)
        with _heard():
            store = self._store(f"{self._prefix}/durable")
            if self.saves:
                store.set(name, "1")
                return True
            end = time.monotonic() + seconds
            while not store.check([name]):
                if time.monotonic() > end:
                    return False
                time.sleep(_POLL_SECONDS)
            return True

    def _all_come(self, where: str, seconds: float, what: str) -> bool:
        import torch.distributed as dist

        with _heard():
            prefix = f"{self._prefix}/{where}"
            return _all_are_here(dist, prefix, self.rank, self.world_size, seconds, what)

    def _store(self, prefix: str) -> Any:
        import torch.distributed as dist

        return dist.distributed_c10d.PrefixStore(prefix, dist.distributed_c10d._get_default_store())

    def vote(self) -> Vote:
        """To agree on one thing, again and again."""
        return Vote(self._patient)

    def gather(self, mine: Any) -> list[Any] | None:
        """What each rank gave, on rank 0; None on the others. RanksApart."""
        with _heard():
            everybody = rank_messages.gather(rank_messages.encode(mine), self._quick)
            return None if everybody is None else [rank_messages.decode(one) for one in everybody]

    def exchange(self, mine: Any) -> list[Any]:
        """What each rank gave, on every rank. RanksApart."""
        with _heard():
            everybody = rank_messages.all_gather(rank_messages.encode(mine), self._quick)
            return [rank_messages.decode(one) for one in everybody]

    def tell(self, what: Any = None) -> Any:
        """What rank 0 tells, on every rank; those wait for it as long as it takes. RanksApart."""
        with _heard():
            data = rank_messages.encode(what) if self.saves else None
            return rank_messages.decode(rank_messages.broadcast(data, self._patient))

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
    """Whether any rank wanted it at the boundary before: the largest number that one of them gave, 0 to 255. The messages travel during
    the step between the two."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._under_way: tuple[Any, Any] | None = None

    def __call__(self, wanted: int, again: bool = True) -> int:
        """To be called by every rank at every boundary. ``again``: False if every rank knows that nobody can want it at this one.
        RuntimeError when the others are gone."""
        import torch
        import torch.distributed as dist

        agreed = 0
        if self._under_way is not None:
            (work, tensor), self._under_way = self._under_way, None
            work.wait()
            agreed = int(tensor.item())
        if not agreed and again:
            tensor = torch.tensor([int(wanted)], dtype=torch.uint8)
            work = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group, async_op=True)
            self._under_way = work, tensor
        return agreed


@contextmanager
def _heard() -> Iterator[None]:
    """Raise RanksApart where the store or a rank is gone, or has sent what no rank of ours does."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise RanksApart(str(error)) from None


def _all_are_here(dist: Any, prefix: str, rank: int, world_size: int, seconds: float, what: str) -> bool:
    """The same answer on every rank that asks. Rank 0 counts, for so long; the others hear what it found."""
    store = dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())
    store.set(f"here-{rank}", "1")
    names = ["all"] if rank else [f"here-{one}" for one in range(world_size)]
    if rank:
        seconds *= 2
    began, said = time.monotonic(), False
    while not (here := bool(store.check(names))) and time.monotonic() < began + seconds:
        if not said and time.monotonic() > began + _SAY_SECONDS:
            said = True
            log.warning(
                "ciuic: rank %d waits up to %.0f s for the other ranks to %s; where rank 0 alone is to save, its manager is made with "
                "distributed=False",
                rank,
                seconds,
                what,
            )
        time.sleep(_POLL_SECONDS)
    if rank:
        return here and bool(store.get("all") == b"1")
    store.set("all", "1" if here else "0")
    return here
