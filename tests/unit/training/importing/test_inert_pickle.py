"""Pickles are read as data: plain values come back, and nothing is ever made or called."""

from __future__ import annotations

import contextlib
import os
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.late_modules import torch

from ciuic.training import inert_pickle
from ciuic.training.inert_pickle import Made, Name, read_pickle

_PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers(-(1 << 59), 1 << 59), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(_PLAIN, st.sampled_from([4, 5]))
def test_plain_values_come_back(value: Any, protocol: int) -> None:
    """What pickle writes of plain values is read as the same values."""
    assert read_pickle(torch.serialization.pickle.dumps(value, protocol)) == value


@given(st.binary(max_size=60), st.integers(0, 200), st.binary(min_size=1, max_size=3))
def test_any_bytes_are_a_value_or_a_valueerror(data: bytes, at: int, changed: bytes) -> None:
    """Arbitrary bytes, and a pickle with some bytes changed, raise nothing but ValueError."""
    genuine = torch.serialization.pickle.dumps({"a": (torch.Size([1, 2]), [torch.float32]), "b": {1: "x"}}, 4)
    for given_bytes in (data, genuine[:at] + changed + genuine[at + len(changed) :]):
        with contextlib.suppress(ValueError):
            read_pickle(given_bytes)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"]" * (1 << 20), id="lists"),
        pytest.param(b"\x8f" * (1 << 20), id="sets"),
        pytest.param(b"(" * (1 << 20), id="marks"),
        pytest.param(b"]" + b"\x94" * (1 << 20), id="memo"),
        pytest.param(b"c\n\n" * (1 << 19), id="names"),
    ],
)
def test_a_pickle_that_stands_for_far_more_is_refused(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opcodes of a byte that make objects of up to 216 take a bounded multiple of the size of the pickle."""
    monkeypatch.setattr(inert_pickle, "_MIN_BYTES", 0)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="far more than its size"):
            read_pickle(b"\x80\x04" + data + b".")
        assert tracemalloc.get_traced_memory()[1] < 64 * len(data)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("tail", [b"N", b"QN"])
def test_keys_that_take_years_to_hash_are_refused(tail: bytes) -> None:
    """Integers of one hash, and references to tuples that hold each other, are no keys."""
    same = b"".join(b"\x8a\x0a" + (at * ((1 << 61) - 1)).to_bytes(10, "little") + b"N" for at in range(1, 9))
    with pytest.raises(ValueError, match="key"):
        read_pickle(b"\x80\x02}(" + same + b"u.")
    nested = b")" + b"q\x00h\x00\x86" * 100
    with pytest.raises(ValueError, match="key"):
        read_pickle(b"\x80\x02}" + nested + tail + b"s.")


def test_a_call_stays_a_name() -> None:
    """A pickle that calls a function is read as the function's name and its arguments."""

    class Evil:
        def __reduce__(self) -> Any:
            return os.getenv, ("HOME",)

    found = read_pickle(torch.serialization.pickle.dumps([Evil()], 4))[0]
    assert isinstance(found, Made)
    assert (found.function, found.arguments) == (Name("os", "getenv"), ("HOME",))
