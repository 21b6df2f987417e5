"""Conversion of a state (dicts, lists, numbers, tensors) to JSON and tensors and back, without pickle.

Guarantees: what `pack` accepts comes back from `unpack` equal in type and value: integers of any size, floats
to the last bit, NaN and infinities included, bytes, tuples, sets, dicts with keys that are no strings, in
their order. `pack` refuses any other value and names its path; of a class derived from str or dict only the
value comes back. Reading executes nothing: a kind that is not in the table below is an error.

Plain JSON stands for itself. Any other value is an object with the key ``$``, which names the kind:

=============  =======================================================================================
``dict``       ``items``: [[key, value], …]; ``type``: ``ordered`` for an OrderedDict, ``counter``, or ``default`` with the name of its
               ``factory``; ``metadata``: that of torch's state_dict
``tuple``      ``items``; also ``set``, ``frozenset`` and ``size`` (torch.Size)
``float``      ``bits``: 16 hexadecimal digits, big-endian; for values that JSON has no number for
``complex``    ``real``, ``imag``
``int``        ``hex``: for an integer that is too large for readers of JSON
``bytes``      ``base64``; also ``bytearray``
``scalar``     a NumPy scalar: ``dtype``, ``base64``
``dtype``      torch's: ``name``; ``device``: ``name``
``tensor``     ``name`` in its object's files; ``of``: ``numpy`` where it is not torch's; ``dtype``, ``shape``: where safetensors has
               no name for the dtype; ``parameter``: ``requires_grad`` of a torch.nn.Parameter
``sparse``     torch's: ``layout``, ``size``, ``parts``: tensors; ``coalesced``
``value``      of a known class (`register_type`): ``type``: its name; ``value``: its content
``sharded``    ``name``, ``dtype``, ``shape`` of a tensor that is stored in pieces (`shards`), also by other ranks
=============  =======================================================================================

Sparse tensors of torch are stored as the dense tensors of indices and values that they consist of. The loaded tensor has
the same layout, shape and entries, in the same order. A COO tensor also keeps whether it is coalesced.

A value of a known class comes back with the same type and equal. Nothing is imported or called by a name that is stored: a
class of the program is used only if the program has registered it under that name (`register_type`). Only values of exactly a
known class are converted, since of a subclass what it adds would be lost.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import importlib
import io
import json
import math
import os
import pathlib
import struct
import sys
import uuid
import zoneinfo
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from ciuic.training.format import shards, tensors
from ciuic.training.format.tensors import Array, Unsaveable
from ciuic.training.json_documents import MALFORMED, raise_shortage

Class = TypeVar("Class", bound=type)


class ValueType(NamedTuple):
    """Form in which the values of one class are stored."""

    cls: type
    name: str
    """Name of the class in snapshots."""
    to_plain: Callable[[Any], Any]
    """Returns what is stored: anything that a state may hold."""
    from_plain: Callable[[Any], Any]
    """Returns the value, given what `to_plain` returned."""


class UnknownType(Exception):
    """Error: a snapshot holds a value of a class that the program has not registered.

    No ValueError: the snapshot is whole, and an older one must not be loaded in its place.
    """


def register_type(
    cls: Class,
    name: str = "",
    to_plain: Callable[[Any], Any] | None = None,
    from_plain: Callable[[Any], Any] | None = None,
) -> Class:
    """Let values of a class be part of saved states. Call it before saving and before loading.

        register_type(Color)                                             # an Enum, a named tuple or a dataclass
        register_type(Version, "version", lambda v: str(v), Version)     # any other class

    Args:
        cls: The class; of its subclasses each is registered by itself.
        name: Name in snapshots. By default module and name of the class, which must then stay as they are.
        to_plain: Returns a value's content: anything that a state may hold. Not needed for an Enum, whose
            members are stored by name (flags by value), for a named tuple, and for a dataclass, of which the
            fields are stored.
        from_plain: Returns the value, given that content. A dataclass is made without its ``__init__``.

    Returns:
        The class, so that this can be used as a decorator.

    Raises:
        TypeError: The class needs ``to_plain`` and ``from_plain``.
        ValueError: Another class has the name.
    """
    if not isinstance(cls, type):
        raise TypeError(f"register_type needs a class, got {cls!r}")
    if (to_plain is None) != (from_plain is None):
        raise TypeError("register_type needs both to_plain and from_plain, or none of them")
    if to_plain is None or from_plain is None:
        found = _conversions(cls)
        if found is None:
            raise TypeError(
                f"{_full_name(cls)} must be an Enum, a named tuple or a dataclass, "
                "or register_type needs to_plain and from_plain"
            )
        to_plain, from_plain = found
    name = name or _full_name(cls)
    before = _BY_NAME.get(name)
    # A class that a notebook or a reload has defined anew takes the place of the one before.
    if before is not None and _full_name(before.cls) != _full_name(cls):
        raise ValueError(
            f"the name {name} is taken by {_full_name(before.cls)}: give register_type another name"
        )
    if before is not None:
        _BY_CLASS.pop(before.cls, None)
    # A class has one name in what is saved; snapshots with an earlier one can still be read.
    _BY_CLASS[cls] = _BY_NAME[name] = ValueType(cls, name, to_plain, from_plain)
    return cls


def type_of(value: object) -> ValueType | None:
    """Return how a value is stored; None if its class is not known."""
    found = _BY_CLASS.get(type(value))
    # Looked up, not imported: ciuic imports no framework for a program that does not use it.
    torch = sys.modules.get("torch")
    if found is None and torch is not None and type(value) is torch.Generator:
        return _BY_NAME["torch.Generator"]
    return found


def _are_registered(types: Iterable[type]) -> bool:
    """Return whether any of these classes is known."""
    return not _BY_CLASS.keys().isdisjoint(types)


def from_plain(name: str, plain: Any) -> Any:
    """Return the value that was stored.

    Raises:
        UnknownType: No class is registered under this name.
        ValueError: The content does not fit.
    """
    found = _BY_NAME.get(name)
    if found is None:
        raise UnknownType(
            f"the snapshot holds a value of the class {name}, which this program has not registered: "
            f"call ciuic.training.register_type with the class, and with the name {name!r} if it has moved"
        )
    try:
        return found.from_plain(plain)
    # A denominator of 0, a text that is no Decimal, a time zone that cannot be read, arguments that are not
    # those of the class.
    except (ValueError, ArithmeticError, OSError, *MALFORMED) as error:
        raise_shortage(error)
        raise ValueError(f"a value of the class {name} cannot be made: {error!r}") from None


def is_standard(name: str) -> bool:
    """Return whether a name in snapshots is that of a class which needs no registration."""
    return name in _STANDARD_NAMES


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _conversions(cls: type) -> tuple[Callable[[Any], Any], Callable[[Any], Any]] | None:
    """Return the conversions that follow from the kind of a class; None if none do."""
    if issubclass(cls, enum.Flag):
        # A union of flags has no name of its own.
        return (lambda value: value.value), cls
    if issubclass(cls, enum.Enum):
        return (lambda value: value.name), (lambda name: cls[name])
    if issubclass(cls, tuple) and hasattr(cls, "_fields") and hasattr(cls, "_make"):
        return list, cls._make
    if dataclasses.is_dataclass(cls):
        return _fields_of, lambda plain: _dataclass_of(cls, plain)
    return None


def _fields_of(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _dataclass_of(cls: Any, plain: dict[str, Any]) -> Any:
    """Make an instance without `__init__`, which may have other arguments, or do more than set fields."""
    made = object.__new__(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    if unknown := [name for name in plain if name not in fields]:
        raise ValueError(f"{_full_name(cls)} has no field {', '.join(unknown)}, and the snapshot has it")
    for name, field in fields.items():
        if name in plain:
            value = plain[name]
        # Fields that the class got since the snapshot.
        elif field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        elif field.default is not dataclasses.MISSING:
            value = field.default
        else:
            raise ValueError(f"{_full_name(cls)} has a field {name}, which the snapshot does not have")
        # Not by the class's own __setattr__: that of a frozen dataclass refuses.
        object.__setattr__(made, name, value)
    return made


def _path_text(path: pathlib.PurePath) -> Any:
    """Return a path as text, or as bytes where it is not UTF-8, which JSON could not hold."""
    text = str(path)
    try:
        text.encode()
    except UnicodeEncodeError:
        return os.fsencode(text)
    return text


def _path(cls: type) -> Callable[[Any], Any]:
    return lambda text: cls(os.fsdecode(text))


def _time_parts(value: datetime.datetime | datetime.time) -> list[Any]:
    return [value.hour, value.minute, value.second, value.microsecond, value.tzinfo, value.fold]


def _datetime(plain: list[Any]) -> datetime.datetime:
    *parts, fold = plain
    return datetime.datetime(*parts, fold=fold)  # noqa: DTZ001 (one without a time zone comes back so)


def _time(plain: list[Any]) -> datetime.time:
    *parts, fold = plain
    return datetime.time(*parts, fold=fold)


def _zone_key(value: zoneinfo.ZoneInfo) -> str:
    if value.key is None:
        raise ValueError("a ZoneInfo without a key, which was made from a file")
    return value.key


def _deque(plain: dict[str, Any]) -> collections.deque[Any]:
    return collections.deque(plain["items"], plain["maxlen"])


def _bytes_io(plain: list[Any]) -> io.BytesIO:
    content, position = plain
    made = io.BytesIO(content)
    made.seek(position)
    return made


def _generator(plain: dict[str, Any]) -> Any:
    import torch  # type: ignore[import-not-found, unused-ignore]

    made = torch.Generator(plain["device"])
    made.set_state(plain["state"])
    return made


_STANDARD: Final = (
    ValueType(pathlib.PurePosixPath, "PurePosixPath", _path_text, _path(pathlib.PurePosixPath)),
    ValueType(pathlib.PureWindowsPath, "PureWindowsPath", _path_text, _path(pathlib.PureWindowsPath)),
    ValueType(type(pathlib.Path()), "Path", _path_text, _path(pathlib.Path)),
    ValueType(
        datetime.datetime,
        "datetime",
        lambda value: [value.year, value.month, value.day, *_time_parts(value)],
        _datetime,
    ),
    ValueType(
        datetime.date,
        "date",
        lambda value: [value.year, value.month, value.day],
        lambda plain: datetime.date(*plain),
    ),
    ValueType(datetime.time, "time", _time_parts, _time),
    ValueType(
        datetime.timedelta,
        "timedelta",
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda plain: datetime.timedelta(*plain),
    ),
    ValueType(
        datetime.timezone,
        "timezone",
        # What pickle and copy use: the offset, and the name if it was given one.
        lambda value: list(value.__getinitargs__()),
        lambda plain: datetime.timezone(*plain),
    ),
    ValueType(zoneinfo.ZoneInfo, "ZoneInfo", _zone_key, zoneinfo.ZoneInfo),
    ValueType(
        range,
        "range",
        lambda value: [value.start, value.stop, value.step],
        lambda plain: range(*plain),
    ),
    ValueType(
        slice,
        "slice",
        lambda value: [value.start, value.stop, value.step],
        lambda plain: slice(*plain),
    ),
    ValueType(
        fractions.Fraction,
        "Fraction",
        lambda value: [value.numerator, value.denominator],
        lambda plain: fractions.Fraction(*plain),
    ),
    ValueType(decimal.Decimal, "Decimal", str, decimal.Decimal),
    ValueType(uuid.UUID, "UUID", str, uuid.UUID),
    ValueType(io.BytesIO, "BytesIO", lambda value: [value.getvalue(), value.tell()], _bytes_io),
    ValueType(
        collections.deque,
        "deque",
        lambda value: {"items": list(value), "maxlen": value.maxlen},
        _deque,
    ),
)
_BY_CLASS: Final[dict[type, ValueType]] = {one.cls: one for one in _STANDARD}
_BY_NAME: Final[dict[str, ValueType]] = {one.name: one for one in _STANDARD} | {
    "torch.Generator": ValueType(
        object,
        "torch.Generator",
        lambda value: {"device": str(value.device), "state": value.get_state()},
        _generator,
    )
}
_STANDARD_NAMES: Final = frozenset(_BY_NAME)


KIND: Final = "$"
Json = Any
# Levels of nesting: far below the limits of Python and of JSON readers, however deep their caller is.
_MAX_DEPTH: Final = 100
# Python can be configured to read no more than 640 decimal digits (about 2126 bits).
_LARGE_BITS: Final = 2000
_LARGE: Final = 1 << _LARGE_BITS
FACTORIES: Final[dict[str, Any]] = {
    kind.__name__: kind
    for kind in (
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        list,
        tuple,
        dict,
        set,
        frozenset,
        OrderedDict,
        Counter,
    )
}
"""Factories with which a defaultdict can be stored."""


_AS_THEY_ARE: Final[frozenset[type]] = frozenset((str, bool, type(None)))
"""Exact types whose values stand for themselves in JSON, whatever they are."""
_USUAL: Final[tuple[type, ...]] = (*_AS_THEY_ARE, int, float, dict, list)


class Leaf(NamedTuple):
    """A tensor of a packed state."""

    name: str
    """Name, unique in the state: the keys of its path, joined by dots."""
    value: Any
    """The tensor as `tensors.as_plain` returns it."""
    array: Array
    is_piece: bool = False
    """True if other ranks have other pieces of the tensor."""


class PackedState(NamedTuple):
    """A state as JSON without its tensors, and the tensors."""

    skeleton: Json
    leaves: list[Leaf]


def pack(value: object, where: str, *, with_shards: bool = False) -> PackedState:
    """Convert a state to JSON and tensors. Copies no tensor.

    Args:
        value: The state.
        where: What errors call it.
        with_shards: Whether other ranks store their parts of sharded tensors; otherwise such tensors are
            refused.

    Raises:
        Unsaveable: A value cannot be stored; the message names its path.
    """
    packer = Packer(where, with_shards)
    return PackedState(packer.json(value, ()), packer.leaves)


def encode_json(document: object) -> bytes:
    """Return a document of dicts, lists, strings, finite numbers and None as JSON.

    Text that is no Unicode (lone surrogates, as in names of files) is escaped.
    """
    # Ten times as fast as json.dumps, and the training waits: 0.05 s for 500,000 small dicts.
    try:
        return msgspec.json.encode(document)
    except UnicodeEncodeError:
        return json.dumps(document, separators=(",", ":"), allow_nan=False).encode("ascii")


class Packer:
    """Conversion of one state, for `pack` and for what looks at values alone."""

    def __init__(self, where: str, with_shards: bool) -> None:
        """Begin without tensors; the arguments are those of `pack`."""
        self.leaves: list[Leaf] = []
        self._with_shards = with_shards
        self._where = where
        self._is_usual = not _are_registered(_USUAL)
        """True if the program has registered no conversion of its own for the types that JSON has."""
        self._names: dict[object, str] = {}
        self._names_taken: set[str] = set()

    def json(self, value: Any, path: tuple[str, ...]) -> Json:
        """Convert a value at a path; raises Unsaveable."""
        # Most values of large states are in plain dicts and lists.
        if type(value) is dict and self._is_usual and (packed := self._json_object(value, path)) is not None:
            return packed
        # Before other kinds: a class that the program has registered may be derived from str, dict or Tensor.
        if (found := type_of(value)) is not None:
            return self._value(found, value, path)
        if value is None or isinstance(value, (bool, str)) or type(value) is int:
            return self._plain(value, path)
        # JSON has no number for NaN and the infinities; the bits keep the payload of a NaN as well.
        if type(value) is float:
            return value if math.isfinite(value) else {KIND: "float", "bits": struct.pack(">d", value).hex()}
        if tensors.is_array(value):
            return self.tensor(value, path)
        if isinstance(value, dict):
            return self._dict(value, path)
        if type(value) is list:
            return self._items(value, path)
        return self._special(value, path)

    def _plain(self, value: Any, path: tuple[str, ...]) -> Json:
        # A str or int with members is an Enum, of which only the value would come back.
        if isinstance(value, enum.Enum):
            raise self._unsaveable(value, path)
        if type(value) is int and not -_LARGE < value < _LARGE:
            return {KIND: "int", "hex": f"{value:x}"}
        # NumPy's strings are strings of Python too, and would come back as those.
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.str_):
            return {KIND: "scalar", "dtype": "U", "base64": _base64(value.encode("utf-8", "surrogatepass"))}
        return str.__str__(value) if isinstance(value, str) else value

    def _items(self, values: Iterable[Any], path: tuple[str, ...]) -> list[Json]:
        self._check_depth(path)
        packed = []
        for at, item in enumerate(values):
            kind = type(item)
            if self._is_usual and (
                kind in _AS_THEY_ARE
                or (kind is float and item - item == 0)
                or (kind is int and -_LARGE < item < _LARGE)
            ):
                packed.append(item)
            else:
                packed.append(self.json(item, (*path, str(at))))
        return packed

    def _json_object(self, value: dict[Any, Any], path: tuple[str, ...]) -> dict[str, Json] | None:
        """Convert a dict to a JSON object; None where it has keys that JSON objects cannot have.

        The same as `_dict` would return, and written out: a state of 500,000 small dicts takes a third of the
        time.
        """
        # Before any value is converted: a tensor that is converted twice would have two names.
        if KIND in value:
            return None
        for key in value:
            if type(key) is not str:
                return None
        self._check_depth(path)
        packed = {}
        for key, item in value.items():
            kind = type(item)
            # The difference of a number from itself is 0 only where it is finite.
            if (
                kind in _AS_THEY_ARE
                or (kind is float and item - item == 0)
                or (kind is int and -_LARGE < item < _LARGE)
            ):
                packed[key] = item
            else:
                packed[key] = self.json(item, (*path, key))
        return packed

    def _dict(self, value: dict[Any, Any], path: tuple[str, ...]) -> Json:
        self._check_depth(path)
        kind = self._dict_kind(value, path)
        # A plain JSON object unless keys are no strings, or one of them is the marker itself.
        if not kind and all(type(key) is str for key in value) and KIND not in value:
            return {key: self.json(item, (*path, key)) for key, item in value.items()}
        items = [
            [self.json(key, (*path, "(key)")), self.json(item, (*path, str(key)))]
            for key, item in value.items()
        ]
        packed = {KIND: "dict", "items": items, **kind}
        # torch keeps the versions of modules in this attribute of a state_dict; load_state_dict converts by
        # them.
        metadata = getattr(value, "_metadata", None)
        if metadata is not None:
            packed["metadata"] = self.json(metadata, (*path, "_metadata"))
        return packed

    def _dict_kind(self, value: dict[Any, Any], path: tuple[str, ...]) -> dict[str, Json]:
        if isinstance(value, OrderedDict):
            return {"type": "ordered"}
        # A MultiStepLR keeps its milestones in a Counter, and cannot continue with a plain dict.
        if isinstance(value, Counter):
            return {"type": "counter"}
        if not isinstance(value, defaultdict):
            return {}
        # A factory is a function; only those that can be named without a pickle are stored.
        made = value.default_factory
        name = getattr(made, "__name__", "")
        if made is not None and FACTORIES.get(name) is not made:
            raise Unsaveable(
                f"{self._path_text(path)} is a defaultdict with the factory {made!r}, which only pickle could store"
            )
        return {"type": "default", "factory": name}

    def _check_depth(self, path: tuple[str, ...]) -> None:
        # A list that holds itself would end in a RecursionError, which names no path.
        if len(path) > _MAX_DEPTH:
            raise Unsaveable(f"{self._path_text(path[:3])}… is nested too deeply, or holds itself")

    def _special(self, value: Any, path: tuple[str, ...]) -> Json:
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        if torch is not None and isinstance(value, torch.Size):
            return {KIND: "size", "items": list(value)}
        if torch is not None and isinstance(value, torch.dtype):
            return {KIND: "dtype", "name": str(value).removeprefix("torch.")}
        if torch is not None and isinstance(value, torch.device):
            return {KIND: "device", "name": str(value)}
        # Apart from other scalars: as an element of an array it would end at the last byte that is not 0.
        if numpy is not None and isinstance(value, numpy.bytes_):
            return {KIND: "scalar", "dtype": "S", "base64": _base64(bytes(value))}
        if numpy is not None and isinstance(value, numpy.generic):
            if value.dtype.hasobject or value.dtype.names:
                raise self._unsaveable(value, path)
            name = tensors.numpy_name(value.dtype)
            return {KIND: "scalar", "dtype": name, "base64": _base64(value.tobytes())}
        # By exact type: of a subclass (a named tuple) only the values would come back.
        if type(value) in (tuple, set, frozenset):
            return {KIND: type(value).__name__, "items": self._items(value, path)}
        if type(value) is complex:
            return {KIND: "complex", "real": self.json(value.real, path), "imag": self.json(value.imag, path)}
        if type(value) in (bytes, bytearray):
            return {KIND: type(value).__name__, "base64": _base64(bytes(value))}
        raise self._unsaveable(value, path)

    def _value(self, kind: ValueType, value: Any, path: tuple[str, ...]) -> Json:
        self._check_depth(path)
        try:
            plain = kind.to_plain(value)
        except (TypeError, ValueError, AttributeError) as error:
            raise Unsaveable(f"{self._path_text(path)} cannot be stored as {kind.name}: {error}") from None
        return {KIND: "value", "type": kind.name, "value": self.json(plain, path)}

    def _sharded(self, value: Any, path: tuple[str, ...]) -> Json:
        name = self._free_name(".".join(path) or "value")
        try:
            piece = shards.piece_of(value)
            if piece is not None:
                plain = shards.as_storable(tensors.as_plain(piece[1].detach()))
                leaf = Leaf(shards.piece_name(name, piece[0]), plain, tensors.describe(plain), is_piece=True)
                self.leaves.append(leaf)
        except Unsaveable as error:
            raise Unsaveable(f"{self._path_text(path)} is {error}") from None
        dtype = str(value.dtype).removeprefix("torch.")
        return {KIND: "sharded", "name": name, "dtype": dtype, "shape": list(value.shape)}

    def tensor(self, value: Any, path: tuple[str, ...]) -> Json:
        """Convert an array of a framework."""
        if shards.is_sharded(value) and (self._with_shards or shards.is_here_whole(value)):
            return self._sharded(value, path)
        if tensors.is_sparse(value):
            whole = _sparse_parts(value)
            return {KIND: "sparse", **whole, "parts": self._items(whole["parts"], path)}
        try:
            plain = tensors.as_plain(value)
        except Unsaveable as error:
            raise Unsaveable(f"{self._path_text(path)} is {error}") from None
        # Tied weights have one name in the files, and are tied again when they are loaded.
        same = tensors.identity(plain)
        array = tensors.describe(plain)
        name = self._names.get(same)
        if name is None:
            name = self._names[same] = self._free_name(shards.plain_name(".".join(path) or "value"))
            self.leaves.append(Leaf(name, plain, array))
        packed: dict[str, Json] = {KIND: "tensor", "name": name}
        if array.framework != "torch":
            packed["of"] = array.framework
        torch = sys.modules.get("torch")
        if torch is not None and type(value) is torch.nn.Parameter:
            packed["parameter"] = value.requires_grad
        if array.true_dtype:
            packed |= {"dtype": array.true_dtype, "shape": list(array.true_shape)}
        return packed

    def _free_name(self, name: str) -> str:
        """Return the name, with a number if it is taken: keys may contain dots and look like indices."""
        free, number = name, 2
        while free in self._names_taken:
            free, number = f"{name}#{number}", number + 1
        self._names_taken.add(free)
        return free

    def _path_text(self, path: tuple[str, ...]) -> str:
        return ".".join((self._where, *path))

    def _unsaveable(self, value: object, path: tuple[str, ...]) -> Unsaveable:
        kind = type(value)
        if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
            return Unsaveable(
                f"{self._path_text(path)} is a {kind.__module__}.{kind.__qualname__} inside of a list or dict: "
                "give it a name of its own, by save_snapshot(…, NAME=…) or register(NAME=…)"
            )
        if _conversions(type(value)) is not None:
            return Unsaveable(
                f"{self._path_text(path)} is a {kind.__module__}.{kind.__qualname__}: "
                f"call ciuic.training.register_type({kind.__qualname__}) before saving and before loading"
            )
        return Unsaveable(
            f"{self._path_text(path)} is a {kind.__module__}.{kind.__qualname__}, which only pickle could store; "
            "give it state_dict() and load_state_dict(), or ciuic.training.register_type its class, "
            "or store its parts"
        )


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def check_values(state: object, where: str) -> None:
    """Raise Unsaveable for a value that cannot be stored; arrays are not looked at.

    Those of a lazy module, or on the meta device, are there after the first step, and a shard is stored with
    those of other ranks.

    Args:
        state: The state.
        where: What the error calls it.

    Raises:
        Unsaveable: The message names the path of the value.
    """
    _ValuesAlone(where, with_shards=True).json(state, ())


class _ValuesAlone(Packer):
    def tensor(self, value: Any, path: tuple[str, ...]) -> Json:
        return None


def unpack(skeleton: Json, tensor: Callable[[str, Json], Any]) -> Any:
    """Convert JSON back to a state.

    Args:
        skeleton: What `pack` returned.
        tensor: Returns a tensor, given its name and the object that stands for it.

    Raises:
        ValueError: `pack` did not write this.
    """
    try:
        return _Unpacker(tensor).value(skeleton)
    except RecursionError:
        raise ValueError("a value is nested too deeply") from None


class _Unpacker:
    def __init__(self, tensor: Callable[[str, Json], Any]) -> None:
        self._tensor = tensor
        self._parameters: dict[tuple[str, bool], Any] = {}
        """Parameters by name: those that were one object are one again."""

    def value(self, packed: Json) -> Any:
        if isinstance(packed, list):
            return [self.value(item) for item in packed]
        if not isinstance(packed, dict):
            return packed
        if KIND not in packed:
            return {key: self.value(item) for key, item in packed.items()}
        try:
            return self._kind(packed[KIND], packed)
        except (*MALFORMED, struct.error) as error:
            raise_shortage(error)
            raise ValueError(f"a {packed[KIND]!r} is malformed: {error!r}") from None

    def _kind(self, kind: Json, packed: dict[str, Json]) -> Any:
        if kind in ("tensor", "sharded"):
            found = self._tensor(packed["name"], packed)
            return self._parameter(found, packed) if "parameter" in packed else found
        if kind == "value":
            return from_plain(packed["type"], self.value(packed["value"]))
        if kind == "dict":
            return self._dict(packed)
        if kind in _COLLECTIONS:
            return _COLLECTIONS[kind](self.value(item) for item in packed["items"])
        if kind == "float":
            return struct.unpack(">d", bytes.fromhex(packed["bits"]))[0]
        if kind == "complex":
            return complex(self.value(packed["real"]), self.value(packed["imag"]))
        if kind == "int":
            return int(packed["hex"], 16)
        if kind == "bytes":
            return base64.b64decode(packed["base64"])
        if kind == "bytearray":
            return bytearray(base64.b64decode(packed["base64"]))
        if kind == "scalar":
            return _scalar(packed["dtype"], base64.b64decode(packed["base64"]))
        if kind == "sparse":
            return _sparse_from_parts({**packed, "parts": [self.value(part) for part in packed["parts"]]})
        if kind in ("size", "dtype", "device"):
            return self._torch(kind, packed)
        raise ValueError(f"a value of kind {kind!r}, which this version of ciuic does not know")

    def _parameter(self, found: Any, packed: dict[str, Json]) -> Any:
        torch = sys.modules.get("torch")
        # Without torch tensors are arrays of NumPy.
        if torch is None or not isinstance(found, torch.Tensor):
            return found
        key = (packed["name"], bool(packed["parameter"]))
        if key not in self._parameters:
            self._parameters[key] = torch.nn.Parameter(found, requires_grad=key[1])
        return self._parameters[key]

    def _dict(self, packed: dict[str, Json]) -> dict[Any, Any]:
        made = _empty_dict(packed.get("type", ""), packed.get("factory", ""))
        for key, item in packed["items"]:
            made[self.value(key)] = self.value(item)
        if "metadata" in packed:
            made._metadata = self.value(packed["metadata"])  # type: ignore[attr-defined]
        return made

    def _torch(self, kind: str, packed: dict[str, Json]) -> Any:
        import torch  # type: ignore[import-not-found, unused-ignore]

        if kind == "size":
            return torch.Size(packed["items"])
        if kind == "device":
            return torch.device(packed["name"])
        return tensors.torch_dtype(packed["name"])


def _empty_dict(kind: str, factory: str) -> dict[Any, Any]:
    if kind == "ordered":
        return OrderedDict()
    if kind == "counter":
        return Counter()
    if kind == "default":
        # From the table alone: any other name is an error, and nothing is looked up by it.
        return defaultdict(FACTORIES[factory] if factory else None)
    return {}


def _scalar(dtype: str, data: bytes) -> Any:
    import numpy

    if dtype == "S":
        return numpy.bytes_(data)
    if dtype == "U":
        return numpy.str_(data.decode("utf-8", "surrogatepass"))
    # Whatever name was stored: frombuffer refuses dtypes that hold objects.
    return numpy.frombuffer(data, tensors.numpy_dtype(dtype))[0]


_COLLECTIONS: Final[dict[str, Callable[[Iterable[Any]], Any]]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}


_ROWS = ("sparse_csr", "sparse_bsr")
_COLUMNS = ("sparse_csc", "sparse_bsc")


def _sparse_parts(value: Any) -> dict[str, Any]:
    """Return ``layout``, ``size``, ``parts`` (the dense tensors) and ``coalesced`` of a sparse tensor."""
    layout = str(value.layout).removeprefix("torch.")
    found = {"layout": layout, "size": list(value.shape), "coalesced": True}
    if layout == "sparse_coo":
        # Not `indices()` and `values()`, which refuse a tensor that is not coalesced.
        return found | {"parts": [value._indices(), value._values()], "coalesced": value.is_coalesced()}
    if layout in _ROWS:
        return found | {"parts": [value.crow_indices(), value.col_indices(), value.values()]}
    return found | {"parts": [value.ccol_indices(), value.row_indices(), value.values()]}


def _sparse_from_parts(packed: dict[str, Any]) -> Any:
    """Return the sparse tensor of what `_sparse_parts` returned.

    Raises:
        ValueError: The parts do not fit together.
    """
    # Typed Any: no stub knows how many dense tensors there are.
    torch: Any = importlib.import_module("torch")
    layout, dense, size = packed["layout"], packed["parts"], tuple(packed["size"])
    # With the checks: indices outside of the shape would make torch access other memory.
    try:
        if layout == "sparse_coo":
            made = torch.sparse_coo_tensor(*dense, size=size, check_invariants=True)
            # The flag alone: entries and their order stay as they were.
            return made._coalesced_(packed["coalesced"])
        if layout in (*_ROWS, *_COLUMNS):
            layout = getattr(torch, layout)
            return torch.sparse_compressed_tensor(*dense, size=size, layout=layout, check_invariants=True)
    except RuntimeError as error:
        raise ValueError(f"a sparse tensor is malformed: {error}") from None
    raise ValueError(f"a sparse tensor of layout {layout}, which this version of ciuic does not know")
