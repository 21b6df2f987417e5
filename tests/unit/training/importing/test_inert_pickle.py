"""Pickles are read as data: plain values come back, and nothing is ever made or called."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from support.late_modules import torch

from ciuic.training.inert_pickle import Made, Name, read_pickle

_PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
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


def test_a_call_stays_a_name() -> None:
    """A pickle that calls a function is read as the function's name and its arguments."""

    class Evil:
        def __reduce__(self) -> Any:
            return os.getenv, ("HOME",)

    found = read_pickle(torch.serialization.pickle.dumps([Evil()], 4))[0]
    assert isinstance(found, Made)
    assert (found.function, found.arguments) == (Name("os", "getenv"), ("HOME",))
