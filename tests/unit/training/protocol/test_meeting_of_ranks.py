"""Meeting of ranks over a store that outlives them, as torchrun's does while it starts ranks anew."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from support.late_modules import torch

from ciuic.training import ranks

pytestmark = pytest.mark.usefixtures("torch_distributed")
_WORLD = 3
_SECONDS = 30.0


class _SeenStore:
    """Store that tells when a key was looked for."""

    def __init__(self, store: object, key: str) -> None:
        self._store = store
        self._key = key
        self.looked = threading.Event()

    def check(self, names: list[str]) -> bool:
        found = bool(self._store.check(names))  # type: ignore[attr-defined]
        if self._key in names:
            self.looked.set()
        return found

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)


@pytest.mark.parametrize("last", range(_WORLD))
def test_ranks_of_an_earlier_round_answer_for_nobody(last: int) -> None:
    """Whoever comes last is waited for in every round, and each round gets a name of its own."""
    store = torch.distributed.HashStore()
    names = set()
    with ThreadPoolExecutor(_WORLD) as pool:
        for _ in range(3):
            found: list[Future[str]] = []
            for rank in range(_WORLD):
                if rank != last:
                    # Twice: what it has found the first time is what an earlier round left.
                    seen = _SeenStore(store, f"all-{rank}" if rank else f"here-{last}")
                    found.append(pool.submit(ranks._meet, seen, rank, _WORLD, _SECONDS))
                    assert seen.looked.wait(_SECONDS)
                    seen.looked.clear()
                    assert seen.looked.wait(_SECONDS)
            assert not any(one.done() for one in found)
            found.append(pool.submit(ranks._meet, store, last, _WORLD, _SECONDS))
            (name,) = {one.result() for one in found}
            assert name
            names.add(name)
    assert len(names) == 3


def test_a_rank_that_does_not_come_again_is_missed() -> None:
    """Rank 0 counts nobody who has met an earlier rank 0 alone, and tells those who came."""
    store = torch.distributed.HashStore()
    with ThreadPoolExecutor(_WORLD) as pool:
        rounds = [pool.submit(ranks._meet, store, rank, _WORLD, _SECONDS) for rank in range(_WORLD)]
        assert all(one.result() for one in rounds)
        here = [pool.submit(ranks._meet, store, rank, _WORLD, 0.2) for rank in range(_WORLD - 1)]
        assert [one.result() for one in here] == ["", ""]
