"""Figures of the tensors in files of other programs, over snapshots, against what torch and NumPy load."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.late_modules import torch
from support.restoring import take

from ciuic.history import timelines
from ciuic.remote.reading.cache_directory import CacheDirectory
from ciuic.repository import Repository
from ciuic.training.tensor_history import TensorVersion, tensor_history

_DTYPES = ("float32", "bfloat16", "float64", "float16", "int32", "int64", "uint8", "bool")
State = dict[str, Any]


def _safetensors(path: Path, state: State) -> None:
    from safetensors.torch import save_file

    save_file({name: one.contiguous() for name, one in state.items()}, path)


def _torch(path: Path, state: State) -> None:
    # As programs do: a state dict with its attributes, parameters, plain values, and a tensor met twice.
    inner = torch.nn.Module.state_dict(torch.nn.Module())
    inner.update(state)
    torch.save({"model": inner, "epoch": 3, "extra": [1.5, None, ("a", b"b")], "again": inner}, path)


def _npz(path: Path, state: State) -> None:
    arrays = {
        name: np.asfortranarray(_array(one)) if one.ndim == 2 else _array(one) for name, one in state.items()
    }
    with path.open("wb") as file:
        np.savez(file, **arrays)


def _array(tensor: Any) -> Any:
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


_FORMATS: Mapping[str, tuple[Callable[[Path, State], None], str]] = {
    "a.safetensors": (_safetensors, ""),
    "a.pt": (_torch, "model."),
    "a.npz": (_npz, ""),
}


def _norm(values: Any) -> float:
    finite = values[np.isfinite(values)]
    return float(np.sqrt(np.sum(finite.astype(np.longdouble) ** 2)))


def _history(path: Path, root: Path, file: Path, cache: CacheDirectory | None) -> list[TensorVersion]:
    with Repository.open(path) as repository:
        (timeline,) = timelines(repository.snapshots.load_all()[0])
        found = list(tensor_history(repository, timeline, bytes(file), cache=cache))
    assert timeline.path == bytes(root)
    return found


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(sorted(_FORMATS)), st.integers(0, 2**32 - 1))
def test_figures_are_those_of_the_numbers(data: st.DataObject, name: str, seed: int) -> None:
    """Of any type, order of elements, change, NaN and infinity, in every format; a second look reads the cache and says the same."""
    save, prefix = _FORMATS[name]
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as top:
        root, place = Path(top) / "root", Path(top) / "repository"
        root.mkdir()
        cache = CacheDirectory(Path(top))
        repository = Repository.create(place, block_size=4096)
        state: State = {}
        for number in range(data.draw(st.integers(1, 4))):
            shape = tuple(data.draw(st.lists(st.integers(0, 40), max_size=2)))
            dtype = getattr(torch, data.draw(st.sampled_from(_DTYPES)))
            values = torch.from_numpy(rng.normal(0, 3, shape)).to(dtype)
            # Not in the order of its dimensions.
            state[f"t{number}"] = values.t() if len(shape) == 2 and data.draw(st.booleans()) else values
        states: list[State] = []
        for _ in range(data.draw(st.integers(1, 4))):
            for key in data.draw(st.sets(st.sampled_from(sorted(state)))):
                new = state[key].clone()
                if new.numel():
                    # A view: the strides, which the file tells, stay.
                    flat = new.view(-1) if new.is_contiguous() else new.t().view(-1)
                    at = int(rng.integers(len(flat)))
                    flat[at] = math.nan if new.is_floating_point() and data.draw(st.booleans()) else 7
                state[key] = new
            states.append(dict(state))
            save(root / name, state)
            take(repository, root)
        repository.close()
        # Versions with the same numbers are one.
        distinct = [one for at, one in enumerate(states) if at == 0 or not _same(one, states[at - 1])]
        for _ in range(2):
            found = _history(place, root, root / name, cache)
            assert [one.problem for one in found] == [""] * len(distinct)
            for at, one in enumerate(reversed(found)):
                _check(one, distinct[at], distinct[at - 1] if at else None, prefix)


def test_the_stride_of_a_dimension_of_one_element_is_no_other_shape(tmp_path: Path) -> None:
    """A transposed row and a column of the same numbers lie alike in a file, whatever strides its pickle tells."""
    root = tmp_path / "root"
    root.mkdir()
    with Repository.create(tmp_path / "repository", block_size=4096) as repository:
        for state in (
            torch.ones(1, 2).t(),
            torch.full((2, 1), 2.0),
            torch.zeros(0, 3).t(),
            torch.zeros(3, 0),
        ):
            _torch(root / "a.pt", {"t": state})
            take(repository, root)
    found = [one.tensors["model.t"] for one in _history(tmp_path / "repository", root, root / "a.pt", None)]
    assert [one.shape for one in found] == [(3, 0), (3, 0), (2, 1), (2, 1)]
    assert [one.change_norm for one in found] == [0, None, pytest.approx(math.sqrt(2)), None]


def _same(one: State, other: State) -> bool:
    return all(_array(one[key]).tobytes() == _array(other[key]).tobytes() for key in one)


def _check(found: TensorVersion, new: State, old: State | None, prefix: str) -> None:
    assert set(found.tensors) == {prefix + key for key in new}
    for key, value in new.items():
        figures, now = found.tensors[prefix + key], _array(value).astype(np.float64)
        assert sorted(figures.shape) == sorted(value.shape)
        assert figures.norm == pytest.approx(_norm(now), rel=1e-6)
        assert (figures.nan, figures.inf) == (int(np.isnan(now).sum()), int(np.isinf(now).sum()))
        if old is None:
            assert figures.drift is None
            continue
        before = _array(old[key]).astype(np.float64)
        both = np.isfinite(before) & np.isfinite(now)
        assert figures.change_norm == pytest.approx(_norm(now[both] - before[both]), rel=1e-6)
        norm = _norm(before[both])
        assert figures.drift == pytest.approx(
            figures.change_norm / norm if norm else math.inf if figures.change_norm else 0, rel=1e-6
        )
