"""Pieces of a tensor are accepted exactly where they cover it once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.errors import Damaged
from ciuic.training.format import shards
from ciuic.training.format.layout import TensorInFile
from ciuic.training.format.shards import Region, is_whole
from ciuic.training.format.stored_files import PiecewiseTensor, StoredPiece

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def _tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Region]]:
    """Return a shape and blocks that cover it, made by cutting one block after another in two."""
    shape = draw(SHAPES)
    regions: list[Region] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        offsets, sizes = regions.pop(draw(st.integers(0, len(regions) - 1)))
        at = draw(st.integers(0, len(shape) - 1))
        first = draw(st.integers(0, sizes[at]))
        moved = (*offsets[:at], offsets[at] + first, *offsets[at + 1 :])
        regions.append((offsets, (*sizes[:at], first, *sizes[at + 1 :])))
        regions.append((moved, (*sizes[:at], sizes[at] - first, *sizes[at + 1 :])))
    return shape, draw(st.permutations(regions))


def _moves(shape: tuple[int, ...], region: Region) -> Iterator[Region]:
    """Return the same block at every other place within the tensor."""
    for offsets in np.ndindex(*(whole - size + 1 for whole, size in zip(shape, region[1], strict=True))):
        if offsets != region[0]:
            yield offsets, region[1]


def _counted(shape: tuple[int, ...], regions: list[Region]) -> bool:
    """Return whether each element is covered once, by counting."""
    count = np.zeros(shape, int)
    for offsets, sizes in regions:
        count[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))] += 1
    return bool((count == 1).all())


@pytest.mark.parametrize("max_cut_dimensions", [8, 0])
@given(_tilings(), st.data())
def test_cover_is_told_as_by_counting(
    max_cut_dimensions: int, made: tuple[tuple[int, ...], list[Region]], data: st.DataObject
) -> None:
    """Cuts of the tensor cover it; with one block moved they do where counting says so."""
    shape, regions = made
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "_MAX_CUT_DIMENSIONS", max_cut_dimensions)
        assert is_whole(regions, shape)
        number = data.draw(st.integers(0, len(regions) - 1))
        elsewhere = list(_moves(shape, regions[number]))
        if elsewhere:
            moved = [*regions[:number], data.draw(st.sampled_from(elsewhere)), *regions[number + 1 :]]
            assert is_whole(moved, shape) == _counted(shape, moved)


def test_overlapping_pieces_are_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum of the elements is right, and the last row would be memory that nothing was written to."""

    class Dtype:
        itemsize = 4

    torch: Any = SimpleNamespace(dtype=Dtype, float32=Dtype())
    monkeypatch.setitem(__import__("sys").modules, "torch", torch)

    def piece(row: int, rows: int) -> StoredPiece:
        return StoredPiece((row, 0), f"{row}", TensorInFile("F32", (rows, 3), 0, rows * 12))

    said = {"shape": [4, 3], "dtype": "float32"}
    source: Any = None
    PiecewiseTensor("a", said, [piece(0, 2), piece(2, 2)], source)
    with pytest.raises(Damaged, match="a some elements are there twice, and others are missing"):
        PiecewiseTensor("a", said, [piece(0, 2), piece(1, 2)], source)
    with pytest.raises(Damaged, match="there are 6 elements of 12"):
        PiecewiseTensor("a", said, [piece(0, 2), piece(3, 2)], source)


def test_many_pieces_take_linear_time() -> None:
    """Staircases, in which every piece has neighbours everywhere, are as fast as grids."""
    number = 20_000
    columns = [((0, at), (at + 1, 1)) for at in range(number)]
    columns += [((at + 1, at), (number - at, 1)) for at in range(number)]
    shape = (number + 1, number)
    assert sum(prod(sizes) for _, sizes in columns) == prod(shape)
    began = time.process_time()
    assert is_whole(columns, shape)
    # A second is ten times what it takes; pairs would take minutes.
    assert time.process_time() - began < 10
