"""Conversion of states to JSON and tensors, and back."""

from __future__ import annotations

import enum
import json
import math
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.training.format.structure import pack, unpack
from ciuic.training.format.tensors import Unsaveable

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(),
    st.binary(max_size=20),
    st.sampled_from(
        [np.float32(1.1), np.int64(-3), np.bool_(True), np.float64("nan"), np.datetime64("2020-01-01")]
    ),
    st.binary(max_size=3).map(bytearray),
    st.binary(max_size=3).map(np.bytes_),
    st.text(max_size=3).map(np.str_),
    st.sampled_from([10**1000, -(10**1000)]),
)
ARRAYS = st.builds(
    lambda dtype, shape: np.arange(math.prod(shape)).astype(dtype).reshape(shape),
    st.sampled_from(["<f8", "<f4", "<f2", "<i8", "<u2", "u1", "?", "<c16", ">f4"]),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
)
KEYS = st.one_of(st.text(max_size=3), st.integers(-3, 3), st.tuples(st.integers(0, 2), st.text(max_size=1)))
HASHABLE = st.one_of(st.integers(), st.text(max_size=3))
STATES = st.recursive(
    st.one_of(SCALARS, ARRAYS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(st.text(max_size=3), inner, max_size=4).map(OrderedDict),
        st.dictionaries(KEYS, st.integers(), max_size=4).map(Counter),
        st.dictionaries(KEYS, inner, max_size=4).flatmap(
            lambda made: st.sampled_from([int, list, None]).map(lambda kind: defaultdict(kind, made))
        ),
        st.sets(HASHABLE, max_size=3),
        st.frozensets(HASHABLE, max_size=3),
    ),
    max_leaves=20,
)


def _round_trip(value: object) -> Any:
    packed = pack(value, "state")
    arrays = {leaf.name: leaf.value for leaf in packed.leaves}
    assert len(arrays) == len(packed.leaves), "two tensors have one name"
    return unpack(json.loads(json.dumps(packed.skeleton, allow_nan=False)), lambda name, _: arrays[name])


def _are_equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, int):
        return bool(one == other)
    if isinstance(one, defaultdict) and one.default_factory is not other.default_factory:
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(_are_equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    if isinstance(one, np.generic):
        return one.tobytes() == other.tobytes()
    if isinstance(one, (set, frozenset)):  # in any order: equal ones may be shown in two
        return sorted(map(repr, one)) == sorted(map(repr, other))
    return repr(one) == repr(other)  # NaN, and the sign of zero


@given(STATES)
def test_a_state_comes_back_equal_in_type_value_and_order(value: object) -> None:
    """Any value that `pack` accepts comes back equal."""
    assert _are_equal(_round_trip(value), value)


@pytest.mark.parametrize("value", [10**5000, -(10**5000)], ids=["above", "below"])
def test_integers_come_back_that_python_would_not_read_in_decimal(value: int) -> None:
    """Integers of more than 4300 digits, which Python refuses to read in decimal, come back equal."""
    assert _round_trip({"count": value}) == {"count": value}


def test_the_metadata_of_a_torch_state_dict_is_kept() -> None:
    """The `_metadata` of a state_dict, which modules read when they load, is kept."""
    value: Any = OrderedDict(weight=np.ones(2))
    value._metadata = OrderedDict({"": {"version": 1}})
    assert _round_trip(value)._metadata == value._metadata


def test_an_array_under_two_names_is_stored_once_and_comes_back_as_one() -> None:
    """Tied weights are stored once and are tied again when loaded."""
    tied = np.arange(4.0)
    packed = pack({"a": tied, "b": tied, "c": tied.copy()}, "state")
    assert len(packed.leaves) == 2


class _Colour(enum.IntEnum):
    RED = 1


def _holds_itself() -> dict[str, Any]:
    made: dict[str, Any] = {}
    made["x"] = [made]
    return made


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [object()]}, "state.a.0 is a builtins.object"),
        ({"rule": lambda: 1}, "state.rule"),
        ({1: {"x": np.array([None])}}, "state.1.x is a NumPy array of dtype object"),
        ([_Colour.RED], "_Colour"),
        ({"a": defaultdict(lambda: 1)}, "state.a is a defaultdict"),
        ({"a": np.ma.array([1, 2], mask=[0, 1])}, "state.a is a numpy.ma.MaskedArray"),
        ({"a": np.zeros(1, [("x", "i4")])[0]}, "state.a is a numpy.void"),
        (_holds_itself(), "nested too deeply, or holds itself"),
    ],
)
def test_values_that_need_pickle_are_refused_with_their_path(value: object, message: str) -> None:
    """Values that only pickle could store are refused by `pack`, which names their path."""
    with pytest.raises(Unsaveable, match=message.replace(".", r"\.")):
        pack(value, "state")


@pytest.mark.parametrize(
    "skeleton",
    [
        {"$": "object", "module": "os"},
        {"$": "tuple"},
        {"$": "float", "bits": "00"},
        {"$": "dict", "items": [[1]]},
    ],
)
def test_a_foreign_document_is_an_error_and_executes_nothing(skeleton: object) -> None:
    """A document that `pack` did not write raises ValueError and executes nothing."""
    with pytest.raises(ValueError):  # noqa: PT011 (whichever)
        unpack(skeleton, lambda name, _: name)
