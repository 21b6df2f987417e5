"""Figures of `SnapshotManager.diff` against NumPy, on random tensors and random changes."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.late_modules import torch
from support.saved_states import BLOCK, SavedStates, Sharded, rows

from ciuic.repository import Repository
from ciuic.training import StateDiff
from ciuic.training.state_diff import diff_states

DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("int8", "int16", "int32", "int64", "uint8", "uint64", "bool", "complex64", "complex128"),
)


@contextmanager
def _states() -> Iterator[SavedStates]:
    with tempfile.TemporaryDirectory() as top:
        yield SavedStates(Path(top) / "repository")


def _diff(states: SavedStates, old: Any, new: Any, *, whole: bool = True) -> StateDiff:
    with Repository.open(states.path) as repository:
        return diff_states(repository, old, new, whole=whole)


def _random(generator: np.random.Generator, dtype: str, count: int) -> Any:
    """Return a tensor of any values of the dtype, by its bits, without those that are not finite."""
    kind = getattr(torch, dtype)
    size = kind.itemsize
    raw = generator.integers(0, 256, count * size, dtype=np.uint8)
    if dtype == "bool":
        raw &= 1
    made = torch.from_numpy(raw).view(kind).clone() if count else torch.empty(0, dtype=kind)
    if kind.is_floating_point or kind.is_complex:
        wide = made.to(torch.complex128 if kind.is_complex else torch.float64)
        wide = torch.where(torch.isfinite(wide), wide, torch.zeros_like(wide))
        made = wide.to(kind)
    return made


def _numbers(value: Any) -> Any:
    """Return the elements as NumPy's long double or object, in which sums are exact enough."""
    if value.dtype.is_complex:
        return value.to(torch.complex128).numpy().astype(np.clongdouble)
    if value.dtype.is_floating_point:
        return value.to(torch.float64).numpy().astype(np.longdouble)
    return (
        value.numpy().astype(object)
        if value.dtype != torch.bool
        else value.numpy().astype(int).astype(object)
    )


def _bits(value: Any) -> Any:
    size = value.dtype.itemsize
    return (
        value.contiguous().view(torch.uint8).numpy().reshape(-1, size)
        if value.numel()
        else np.empty((0, size))
    )


def _check(old: Any, new: Any, diff: StateDiff) -> None:
    """Check the figures of the one tensor of a diff against those that NumPy gives."""
    differs = (_bits(old) != _bits(new)).any(axis=1)
    if not differs.any():
        assert (len(diff), diff.identical) == (0, 1)
        return
    (change,) = diff
    figures = change.figures
    assert figures is not None
    assert (change.kind, figures.elements, figures.changed_elements) == (
        "changed",
        old.numel(),
        differs.sum(),
    )
    before, after = (_numbers(one).reshape(-1) for one in (old, new))
    if old.dtype.is_floating_point or old.dtype.is_complex:
        counted = [int(np.isnan(one).sum()) for one in (before, after)]
        infinite = [int(np.isinf(one).sum()) for one in (before, after)]
        assert [figures.old_nan, figures.new_nan] == counted
        assert [figures.old_inf, figures.new_inf] == infinite
        finite = np.isfinite(before) & np.isfinite(after)
        before, after = before[finite], after[finite]
    # Long double has the exponents for squares of any float64, integers of Python are exact.
    distance = abs(after - before)
    change_norm, old_norm, new_norm = (_root((abs(one) ** 2).sum()) for one in (distance, before, after))
    largest = distance.max() if distance.size else 0
    assert figures.largest_change == (
        int(largest) if before.dtype == object else pytest.approx(float(largest), rel=1e-9)
    )
    assert figures.change_norm == pytest.approx(float(change_norm), rel=1e-9)
    assert figures.old_norm == pytest.approx(float(old_norm), rel=1e-9)
    if old_norm:
        assert figures.relative_change == pytest.approx(float(change_norm / old_norm), rel=1e-9)
    else:
        assert figures.relative_change == (math.inf if change_norm else 0.0)
    if not old_norm or not new_norm:
        assert figures.cosine is None
    else:
        product = (np.conj(before) * after).sum()
        assert figures.cosine == pytest.approx(float(np.real(product) / (old_norm * new_norm)), abs=1e-9)


def _root(value: Any) -> Any:
    return np.sqrt(np.longdouble(value))


@given(
    dtype=st.sampled_from(DTYPES),
    count=st.integers(0, 3 * BLOCK),
    seed=st.integers(0, 1 << 30),
    changed=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 0.3)), max_size=3),
    spoilt=st.lists(
        st.tuples(st.booleans(), st.floats(0, 1), st.sampled_from([math.nan, math.inf, -math.inf])),
        max_size=4,
    ),
    beside=st.integers(0, 3),
)
def test_the_figures_are_those_of_numpy(
    dtype: str,
    count: int,
    seed: int,
    changed: list[tuple[float, float]],
    spoilt: list[tuple[bool, float, float]],
    beside: int,
) -> None:
    """The figures of any dtype and any changed ranges are those that NumPy computes of the whole tensors."""
    generator = np.random.default_rng(seed)
    old = _random(generator, dtype, count)
    new = old.clone()
    for start, share in changed:
        at, upto = int(start * count), int((start + share) * count) + 1
        new[at:upto] = _random(generator, dtype, len(new[at:upto]))
    if old.dtype.is_floating_point or old.dtype.is_complex:
        for in_old, where, value in spoilt:
            if count and not (dtype == "float8_e4m3fn" and math.isinf(value)):
                wide = torch.tensor([value], dtype=torch.float64)
                (old if in_old else new)[int(where * (count - 1))] = wide.to(old.dtype)[0]
    with _states() as states:
        # Tensors of other sizes beside it move it within its block, and leave it where it is if they stay.
        others = {f"a{at}": torch.full((at + 3,), 1.0) for at in range(beside)}
        ids = [states.save(model={"w": one} | others) for one in (old, new)]
        full, part = (_diff(states, *ids, whole=whole) for whole in (True, False))
        full.identical -= len(others)
        _check(old, new, full)
        for one, other in zip(full, part, strict=True):
            assert one.figures is not None
            assert other.figures is not None
            assert other.figures.largest_change == one.figures.largest_change
            assert other.figures.change_norm == one.figures.change_norm
            assert other.figures.changed_elements == one.figures.changed_elements
            assert other.figures.relative_change in (None, one.figures.relative_change)


@given(
    dtype=st.sampled_from(["float32", "bfloat16", "int64", "complex64"]),
    shape=st.tuples(st.integers(1, 90), st.integers(1, 40), st.integers(1, 3)),
    cuts=st.tuples(*[st.lists(st.integers(0, 90), max_size=3).map(sorted)] * 2),
    columns=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_sharded_states_are_compared_however_they_are_cut(
    dtype: str,
    shape: tuple[int, ...],
    cuts: tuple[list[int], list[int]],
    columns: bool,
    seed: int,
) -> None:
    """A tensor in pieces has the figures of the whole, also where both snapshots cut it differently."""
    generator = np.random.default_rng(seed)
    old = _random(generator, dtype, math.prod(shape)).reshape(shape)
    new = old.clone()
    new[shape[0] // 2 :, : shape[1] // 2 + 1] = _random(generator, dtype, 1)
    pieces = [rows(shape, [cut for cut in some if cut < shape[0]]) for some in cuts]
    if columns:
        half = shape[1] // 2
        assume(half)
        pieces[1] = [
            ((0, 0, 0), (shape[0], half, shape[2])),
            ((0, half, 0), (shape[0], shape[1] - half, shape[2])),
        ]
    with _states() as states:
        ids = [
            states.save(model={"w": Sharded(one, cut)}) for one, cut in zip((old, new), pieces, strict=True)
        ]
        _check(old, new, _diff(states, *ids))
        whole = states.save(model={"w": new})
        assert not len(_diff(states, ids[1], whole))
