"""Values that trainings hold in their states come back with the same type and equal."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import io
import json
import pathlib
import sys
import zoneinfo
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.training import UnknownType, Unsaveable, register_type
from ciuic.training.format import structure
from ciuic.training.format.structure import pack, unpack


class Color(enum.Enum):
    RED = "r"
    BLUE = ("b", 2)


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Stage(str, enum.Enum):
    TRAIN = "train"


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


class Point(NamedTuple):
    x: Any
    y: Any = None


@dataclasses.dataclass(frozen=True)
class Config:
    rate: Any
    more: Any = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True)
class Slotted:
    value: Any


class Version:
    def __init__(self, text: str) -> None:
        self.text = text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Version) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)


@pytest.fixture(autouse=True, scope="module")
def _registered() -> Iterator[None]:
    """Register the classes of this module, and forget them at its end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(structure, "_BY_CLASS", dict(structure._BY_CLASS))
        patch.setattr(structure, "_BY_NAME", dict(structure._BY_NAME))
        for one in (Color, Level, Stage, Rights, Point, Config, Slotted):
            register_type(one)
        register_type(Version, "version", lambda value: value.text, Version)
        yield


ZONES = st.one_of(
    st.none(),
    st.just(datetime.timezone.utc),
    st.timedeltas(datetime.timedelta(hours=-23), datetime.timedelta(hours=23)).map(datetime.timezone),
    st.just(datetime.timezone(datetime.timedelta(hours=1), "MEZ")),
    st.just(zoneinfo.ZoneInfo("UTC")),
)
HASHABLE = st.one_of(
    st.text(max_size=5).filter(lambda text: "\0" not in text).map(pathlib.Path),
    st.sampled_from(
        [pathlib.Path(b"\xff\xfe".decode(errors="surrogateescape")), pathlib.PureWindowsPath("C:/a")]
    ),
    st.just(pathlib.PurePosixPath("/a/b")),
    st.datetimes(timezones=ZONES).flatmap(lambda one: st.sampled_from([one, one.replace(fold=1)])),
    st.dates(),
    st.times(timezones=st.just(datetime.timezone.utc)),
    st.times(),
    st.timedeltas(),
    st.builds(range, st.integers(-5, 5), st.integers(), st.integers(1, 9)),
    st.fractions(),
    st.decimals(allow_nan=False),
    st.uuids(),
    st.sampled_from([*Color, *Level, *Stage, *Rights, Rights.READ | Rights.WRITE, Rights(0)]),
    st.builds(Version, st.text(max_size=3)),
    st.builds(Point, st.integers(), st.text(max_size=2)),
    st.integers(),
    st.text(max_size=3),
)
VALUES = st.recursive(
    st.one_of(
        HASHABLE,
        st.none(),
        st.floats(allow_nan=False),
        st.builds(slice, st.none() | st.integers(), st.integers(), st.none() | st.integers()),
        st.sampled_from([np.float32(1.5), np.int8(-3), np.datetime64("2020-01-01"), np.complex64(1j)]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(HASHABLE, inner, max_size=3),
        st.frozensets(HASHABLE, max_size=3),
        st.builds(collections.deque, st.lists(inner, max_size=3), st.none() | st.integers(0, 4)),
        st.builds(Point, inner, inner),
        st.builds(Config, inner, inner),
        st.builds(Slotted, inner),
    ),
    max_leaves=15,
)


def _through(value: object) -> Any:
    packed = pack(value, "state")
    # Detached, as what is loaded is: a leaf may be the Parameter itself.
    arrays = {
        leaf.name: getattr(leaf.value, "detach", lambda leaf=leaf: leaf.value)() for leaf in packed.leaves
    }
    return unpack(json.loads(json.dumps(packed.skeleton, allow_nan=False)), lambda name, _: arrays[name])


def _types(value: Any) -> Any:
    """Return the types within a value, in order."""
    inside: list[Any] = []
    if isinstance(value, dict):
        inside = [*value, *value.values()]
    elif isinstance(value, (list, tuple, collections.deque)):
        inside = list(value)
    elif dataclasses.is_dataclass(value):
        inside = [getattr(value, field.name) for field in dataclasses.fields(value)]
    zone = getattr(value, "tzinfo", None)
    kept = (getattr(value, "fold", 0), getattr(value, "maxlen", None), type(zone), str(zone))
    return type(value), kept, [_types(one) for one in inside]


@given(VALUES)
def test_values_come_back_with_their_types(value: Any) -> None:
    """Random nested values of the standard library and of registered classes."""
    found = _through(value)
    assert found == value
    assert _types(found) == _types(value)


@pytest.mark.parametrize("name", ["a", "b"])
def test_singletons_and_odd_values(name: str) -> None:
    """Members are the same objects, and a Decimal may be no number, which == does not tell."""
    assert _through({name: Color.BLUE})[name] is Color.BLUE
    assert _through(datetime.timezone.utc) is datetime.timezone.utc
    assert str(_through(structure.decimal.Decimal("-sNaN12"))) == "-sNaN12"


def test_what_is_not_registered_is_refused_with_what_to_do() -> None:
    """An Enum, a named tuple and a dataclass name register_type, other classes also their parts."""

    class Other(enum.Enum):
        ONE = 1

    class Pair(NamedTuple):
        one: int

    @dataclasses.dataclass
    class Fields:
        one: int

    for value in (Other.ONE, Pair(1), Fields(1)):
        with pytest.raises(Unsaveable, match=r"state\.a\.0 is a .*call ciuic\.training\.register_type\("):
            pack({"a": [value]}, "state")
    with pytest.raises(Unsaveable, match=r"state\.a is a builtins\.object, which only pickle"):
        pack({"a": object()}, "state")
    with pytest.raises(TypeError, match="to_plain and from_plain"):
        register_type(object)
    with pytest.raises(ValueError, match="the name version is taken by"):
        register_type(Other, "version")


def test_a_class_that_is_not_registered_when_loading_is_named() -> None:
    """Nothing is imported or looked up by the stored name, not even a class that is there."""
    skeleton = {"$": "value", "type": "collections.Counter", "value": {}}
    with pytest.raises(UnknownType, match=r"class collections\.Counter.*register_type"):
        unpack(skeleton, lambda *_: None)


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("Fraction", [1, 0]),
        ("Decimal", "no number"),
        ("UUID", "x"),
        ("range", [1, 2, 0]),
        ("ZoneInfo", "../../etc/passwd"),
        ("datetime", [1, 2, 3]),
        ("timezone", ["UTC"]),
        ("deque", []),
        ("Path", 3),
        ("version", None),
    ],
)
def test_content_that_does_not_fit_is_an_error(name: str, plain: Any) -> None:
    """Values that another program has written raise ValueError alone, so that the snapshot is passed over."""
    skeleton = {"$": "value", "type": name, "value": plain}
    if name == "version":
        assert unpack(skeleton, lambda *_: None) == Version(plain)
        return
    with pytest.raises(ValueError, match=f"a value of the class {name} "):
        unpack(skeleton, lambda *_: None)


def test_a_dataclass_that_has_changed_since(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new field takes its default; a field that is gone is an error that names it."""
    name = f"{Config.__module__}.{Config.__qualname__}"
    skeleton = {"$": "value", "type": name, "value": {"rate": 1}}
    assert unpack(skeleton, lambda *_: None) == Config(1, [])
    skeleton["value"] = {"more": 1, "gone": 2}
    with pytest.raises(ValueError, match="no field gone"):
        unpack(skeleton, lambda *_: None)


def test_a_generator_of_torch_in_a_container_goes_on() -> None:
    """It draws the same numbers as the one that was saved."""
    torch = pytest.importorskip("torch", reason="no CPU build of PyTorch is offered here")
    generator = torch.Generator().manual_seed(7)
    torch.rand(3, generator=generator)
    [found] = _through([generator])
    assert type(found) is torch.Generator
    assert torch.rand(5, generator=found).equal(torch.rand(5, generator=generator))
    assert "torch" in sys.modules


def test_parameters_come_back_as_parameters() -> None:
    """Outside of a module's state_dict too, tied ones as one object, and the same tensor as a tensor."""
    torch = pytest.importorskip("torch", reason="no CPU build of PyTorch is offered here")
    weight = torch.nn.Parameter(torch.rand(3))
    frozen = torch.nn.Parameter(torch.arange(3), requires_grad=False)
    found = _through({"a": weight, "b": [weight], "c": frozen, "d": weight.detach()})
    assert type(found["a"]) is type(found["c"]) is torch.nn.Parameter
    assert type(found["d"]) is torch.Tensor
    assert found["a"] is found["b"][0]
    assert (found["a"].requires_grad, found["c"].requires_grad) == (True, False)
    assert found["a"].equal(weight)
    assert found["a"].data_ptr() == found["d"].data_ptr()


def test_subclasses_of_tensors_are_refused_by_name_or_registered() -> None:
    """Their class would be lost, which was silent for those without operations of their own."""
    torch = pytest.importorskip("torch", reason="no CPU build of PyTorch is offered here")

    class Image(torch.Tensor):  # type: ignore[misc, name-defined]
        pass

    image = torch.rand(2).as_subclass(Image)
    with pytest.raises(Unsaveable, match=r"state\.x is a .*Image, a tensor subclass"):
        pack({"x": image}, "state")
    register_type(
        Image, "image", lambda one: one.as_subclass(torch.Tensor), lambda plain: plain.as_subclass(Image)
    )
    found = _through({"x": image})["x"]
    assert type(found) is Image
    assert found.equal(image)


@given(st.binary(max_size=300), st.integers(0, 400))
def test_a_file_in_memory_keeps_content_and_position(content: bytes, position: int) -> None:
    """A BytesIO comes back with its bytes and its position, also one behind its end."""
    value = io.BytesIO(content)
    value.seek(position)
    packed = pack({"losses": value}, "state")
    found = unpack(json.loads(json.dumps(packed.skeleton)), lambda *_: None)["losses"]
    assert type(found) is io.BytesIO
    assert (found.getvalue(), found.tell()) == (content, position)
