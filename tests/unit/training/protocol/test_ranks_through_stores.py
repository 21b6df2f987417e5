"""Ranks that meet over a store which outlives them, and each rank's own state on its way to rank 0, never through the job's store."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.late_modules import torch

from ciuic.training import ranks
from ciuic.training.ranks import PartLost, Ranks
from ciuic.training.state import rank_state
from ciuic.training.state.rank_state import RankState, TooDifferent

pytestmark = pytest.mark.usefixtures("torch_distributed")


class _MeasuredStore:
    """The job's store, which notes the largest value and the most keys that it has had."""

    def __init__(self) -> None:
        self.store = torch.distributed.HashStore()
        self.longest = self.most = 0

    def below(self, prefix: str) -> Any:
        return _Prefixed(self, torch.distributed.PrefixStore(prefix, self.store))


class _Prefixed:
    def __init__(self, whole: _MeasuredStore, store: Any) -> None:
        self._whole, self._store = whole, store

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)
        self._whole.longest = max(self._whole.longest, len(value))
        self._whole.most = max(self._whole.most, self._whole.store.num_keys())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[_MeasuredStore], list[Ranks]]:
    """Return a function that makes two ranks of one directory that have a store alone in common."""
    monkeypatch.setattr(ranks, "_keys_set", deque())

    def made(store: _MeasuredStore) -> list[Ranks]:
        both = [Ranks(rank, 2, None, None, "ciuic/run/meeting") for rank in range(2)]
        for one in both:
            one.directory = tmp_path
            one._store = store.below  # type: ignore[method-assign]
        return both

    return made


def test_states_of_any_size_leave_few_small_keys_and_no_files(
    two: Callable[[_MeasuredStore], list[Ranks]], tmp_path: Path
) -> None:
    """States of 9 MiB reach rank 0 call after call, and the job's store has few keys of a few bytes all the while."""
    store = _MeasuredStore()
    first, other = two(store)
    content = bytes(9 << 20)
    for step in range(40):
        for one in (other, first):
            one.begin_asked(step, "train.py:7")
        assert other.hand_in((step, content)) == []
        assert first.hand_in(step) == [step, (step, content)]
        assert first.durable(0.0)
        assert other.durable(10.0)
    assert store.longest < 64
    assert store.most < 2 * ranks._KEPT_EVENTS
    assert not [*first._files.iterdir()]


def test_files_of_calls_that_rank_0_does_not_make_do_not_pile_up(
    two: Callable[[_MeasuredStore], list[Ranks]],
) -> None:
    """A rank that asks where rank 0 does not keeps the states of its last calls alone."""
    first, other = two(_MeasuredStore())
    for step in range(20):
        other.begin_asked(step, "train.py:7")
        other.hand_in(step)
    assert len([*first._files.iterdir()]) == ranks._KEPT_FILES
    first.begin_asked(step, "train.py:7")
    assert first.hand_in(0) == [0, step]


def test_a_state_that_cannot_be_left_is_lost_and_says_why(
    two: Callable[[_MeasuredStore], list[Ranks]], tmp_path: Path
) -> None:
    """Rank 0 is told why another rank has no file for it, in no more than a few bytes."""
    store = _MeasuredStore()
    first, other = two(store)
    (tmp_path / "parts").write_text("no directory")
    for one in (other, first):
        one.begin_asked(1, "x" * 500)
    other.hand_in(1)
    with pytest.raises(PartLost, match=r"rank 1.*Not a directory"):
        first.hand_in(1)
    assert store.longest <= ranks._MAX_PROBLEM_BYTES


def test_a_rank_that_stays_is_taken_or_leaves_and_both_know(
    two: Callable[[_MeasuredStore], list[Ranks]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that has more to tell is taken by a rank 0 that comes in time; a later one learns that it has left."""
    sent: list[bytes] = []
    monkeypatch.setattr(ranks, "send", lambda data, group, to: sent.append(data))
    monkeypatch.setattr(ranks, "receive", lambda group, source: sent_by_then())
    first, other = two(_MeasuredStore())
    for one in (other, first):
        one.begin_asked(1, "train.py:7")

    def sent_by_then() -> bytes:
        staying.result()
        return sent.pop()

    with ThreadPoolExecutor(1) as pool:
        staying = pool.submit(other.hand_in, "more", stays=True)
        assert first.hand_in("first") == ["first", "more"]
    assert (first.talks_to, other.talks_to) == ([1], [0])
    monkeypatch.setattr(ranks, "_COME_SECONDS", 0.0)
    for one in (other, first):
        one.begin_asked(2, "train.py:7")
    assert other.hand_in("more", stays=True) == []
    with pytest.raises(PartLost, match="rank 1"):
        first.hand_in("first")
    assert (first.talks_to, other.talks_to, sent) == ([], [], [])


_NUMBERS = st.integers(0, 2)


class _Own:
    """Registered object with a state of its own."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def _module(values: list[int]) -> Any:
    module = torch.nn.Module()
    for at, value in enumerate(values):
        module.register_buffer(f"b{at}", torch.full((8,), value))
    return module


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.lists(_NUMBERS, min_size=1, max_size=4), st.lists(_NUMBERS, min_size=2, max_size=2)),
        min_size=2,
        max_size=3,
    ),
    st.integers(0, 70),
    st.integers(0, 200),
    st.integers(0, 400),
    st.integers(1, 100),
)
def test_a_rank_has_its_own_state_or_the_save_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    states: list[tuple[list[int], list[int]]],
    object_bytes: int,
    sent_bytes: int,
    wanted_bytes: int,
    grain_bytes: int,
) -> None:
    """Whatever is too large to be sent unasked, every rank's state is what it was, or the save names what is too large."""
    monkeypatch.setattr(rank_state, "_MAX_OBJECT_BYTES", object_bytes)
    monkeypatch.setattr(rank_state, "_MAX_SENT_BYTES", sent_bytes)
    monkeypatch.setattr(rank_state, "_MAX_WANTED_BYTES", wanted_bytes)
    monkeypatch.setattr(rank_state, "_GRAIN_BYTES", grain_bytes)
    everywhere = [
        {"own": _Own({"t": torch.tensor(values), "n": len(values)}), "model": _module(buffers)}
        for values, buffers in states
    ]
    parts = [
        RankState.of(ranks.decode(ranks.encode(rank_state.own_state(objects).message())))
        for objects in everywhere
    ]
    assert not any(part.problem for part in parts)
    try:
        wanted = rank_state.wanted(parts)
    except TooDifferent:
        with pytest.raises(ValueError, match=r"has not sent its (object own|buffers model)"):
            rank_state.differing(parts)
        return
    for rank, keys in wanted.items():
        parts[rank] = parts[rank].with_wanted(rank_state.wanted_states(everywhere[rank], keys))
    found = rank_state.differing(parts)
    for rank, (values, buffers) in enumerate(states):
        state = {"own_state_dict": everywhere[0]["own"].state}
        rank_state.apply_own_state(state, found, rank)
        assert state["own_state_dict"]["t"].tolist() == values
        target = _module(states[0][1])
        rank_state.load_buffers({"model": target}, found, rank)
        assert [int(one[0]) for one in target.buffers()] == buffers


def _layers(values: list[list[float]], dtype: Any) -> Any:
    module = torch.nn.Module()
    for at, value in enumerate(values):
        module.register_parameter(f"p{at}", torch.nn.Parameter(torch.tensor(value, dtype=dtype)))
    return module


# Of weights; that tiny ones differ says nothing.
_ELEMENTS = st.floats(-4, 4, width=16).map(lambda one: one if abs(one) > 0.01 else 1.0)
_LAYERS = st.lists(st.lists(_ELEMENTS, min_size=1, max_size=3), min_size=1, max_size=4)


def _told(module: Any) -> RankState:
    objects = {"model": module, "optimizer": torch.optim.SGD(module.parameters(), lr=0.1)}
    return RankState.of(ranks.decode(ranks.encode(rank_state.own_state(objects).message())))


@given(_LAYERS, _LAYERS, st.sampled_from(["float32", "bfloat16"]))
def test_ranks_are_saved_together_only_if_they_are_replicas(
    mine: list[list[float]], other: list[list[float]], dtype: str
) -> None:
    """Replicas pass, also compiled or rounded otherwise; ranks with other names, shapes or all other values do not."""
    kind = getattr(torch, dtype)
    first = _told(_layers(mine, kind))
    wrapped = torch.nn.Module()
    wrapped._orig_mod = _layers([[1.004 * one for one in layer] for layer in mine], kind)
    rank_state.wanted([first, _told(wrapped)])
    shapes_differ = [len(one) for one in mine] != [len(one) for one in other]
    opposite = [[-one for one in layer] for layer in mine]
    for layers in (opposite, *([other] if shapes_differ else [])):
        different = _layers(layers, kind)
        with pytest.raises(TooDifferent, match=r"(model|optimizer) has (parameters of other|other values)"):
            rank_state.wanted([first, _told(different)])
        different.alike_on_ranks = True
        alone = RankState.of(rank_state.own_state({"model": different}).message())
        rank_state.wanted([first, alone])


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
