"""Plain values of exported states: what `torch.load(weights_only=True)` opens, and nothing else."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import io
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePosixPath
from typing import Any, NamedTuple
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.late_modules import torch

from ciuic.training.convert.export_state import as_plain, without_classes
from ciuic.training.format import structure
from ciuic.training.format.structure import register_type


@register_type
class Level(enum.IntEnum):
    HIGH = 3


@register_type
class Point(NamedTuple):
    x: int
    y: int


@register_type
@dataclasses.dataclass(frozen=True)
class Options:
    name: str
    level: Level


_KEYS = (
    st.text(max_size=8)
    | st.integers()
    | st.sampled_from([Level.HIGH, Point(1, 2), Options("a", Level.HIGH), Fraction(1, 3)])
    | st.tuples(st.integers(), st.booleans())
)
_VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 2500), 1 << 2500)
    | st.floats()
    | st.complex_numbers()
    | st.text(max_size=20)
    | st.binary(max_size=20)
    | st.decimals()
    | st.fractions()
    | st.uuids()
    | st.datetimes()
    | st.dates()
    | st.times()
    | st.timedeltas()
    | st.builds(bytearray, st.binary(max_size=4))
    | st.builds(slice, st.none() | st.integers())
    | st.builds(range, st.integers(-9, 9))
    | st.sampled_from(list(Level))
    | st.builds(Point, st.integers(), st.integers())
    | st.builds(Options, st.text(max_size=3), st.just(Level.HIGH))
    | st.frozensets(_KEYS, max_size=1)
    | st.sets(_KEYS, max_size=3)
    | st.deferred(
        lambda: st.sampled_from(
            [PurePosixPath("/a"), torch.Size([1, 2]), torch.bfloat16, torch.device("cpu")]
        )
    )
)
_STATES = st.recursive(
    _VALUES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(_KEYS, inner, max_size=3)
        | st.builds(collections.OrderedDict, st.dictionaries(_KEYS, inner, max_size=3))
        | st.builds(collections.deque, st.lists(inner, max_size=3))
        | st.tuples(inner, inner)
    ),
    max_leaves=12,
)


def _shown(value: Any) -> str:
    """Return a text that is equal for equal values of equal types; NaN equals NaN, and sets have no order."""
    if isinstance(value, dict):
        return f"{type(value).__name__} {[(_shown(key), _shown(item)) for key, item in value.items()]}"
    if isinstance(value, set):
        return f"set {sorted(map(_shown, value))}"
    if type(value) in (list, tuple):
        return f"{type(value).__name__} {[*map(_shown, value)]}"
    return repr(value)


@given(_STATES)
def test_any_state_is_opened_with_weights_only(state: Any) -> None:
    """Whatever a snapshot may hold becomes plain values that torch opens with weights_only=True, unchanged."""
    plain = as_plain(state)
    file = io.BytesIO()
    torch.save(plain, file)
    file.seek(0)
    assert _shown(torch.load(file, weights_only=True)) == _shown(plain)


@given(_STATES)
def test_no_class_of_the_program_is_needed(state: Any) -> None:
    """A program without the registered classes gets from a stored state the values that their program gets."""
    packed = structure.pack({"state": state}, "state")
    stored = without_classes(packed.skeleton)
    assert "Level" not in repr(stored)
    assert "Point" not in repr(stored)
    found = structure.unpack(stored, lambda name, _: pytest.fail(f"there is no tensor {name}"))["state"]
    as_plain(found)
    if "Options" not in repr(state):
        assert _shown(as_plain(found)) == _shown(as_plain(state))


def test_plain_values_are_as_the_page_says() -> None:
    """Each kind of value becomes what docs/export.md says."""
    pairs: list[tuple[Any, Any]] = [
        (Level.HIGH, "HIGH"),
        (Point(1, 2), (1, 2)),
        (Options("a", Level.HIGH), {"name": "a", "level": "HIGH"}),
        (Decimal("1.10"), "1.10"),
        (UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (datetime.date(2024, 2, 29), "2024-02-29"),
        (datetime.time(1, 2, 3), "01:02:03"),
        (datetime.timezone.utc, "UTC"),
        (datetime.timedelta(days=1), 86400.0),
        (slice(1, None), (1, None, None)),
        (collections.deque([1]), [1]),
        (frozenset({1}), (1,)),
        (bytearray(b"a"), b"a"),
        (collections.defaultdict(int, a=1), {"a": 1}),
    ]
    for value, plain in pairs:
        assert as_plain(value) == plain
        assert type(as_plain(value)) is type(plain)
    with pytest.raises(TypeError, match="object"):
        as_plain(object())


def test_one_of_many_tensors_does_not_bring_the_others() -> None:
    """A small view of a large storage is copied, once for all its ties; other tensors are not copied."""
    large = torch.zeros(1 << 20)
    view = large[:4]
    found = as_plain({"a": view, "b": view, "whole": large, "parameter": torch.nn.Parameter(large)})
    assert found["a"].untyped_storage().nbytes() == 16
    assert found["a"] is found["b"]
    assert found["whole"] is large
    assert isinstance(found["parameter"], torch.nn.Parameter)
