"""State as trainers have it (nested dicts, lists, numbers, tensors) as JSON and a list of tensors; and back, without pickle.

Guarantees: what `pack` accepts comes back from `unpack` equal in type and value: integers of any size, floats to the last bit, NaN
and infinities included, bytes, tuples, sets, dicts with keys that are no strings, in their order. What it cannot promise that of it
refuses by the path at which it stands. Reading executes nothing: a kind that is not in the table below is an error.

Plain JSON stands for itself. All else is an object with the key ``$``, which names the kind:

=============  =======================================================================================
``dict``       ``items``: [[key, value], …]; ``type``: ``ordered`` for an OrderedDict; ``metadata``: torch's of a state_dict
``tuple``      ``items``; also ``set``, ``frozenset`` and ``size`` (torch.Size)
``float``      ``bits``: 16 hexadecimal digits, big-endian; for what JSON has no number for
``complex``    ``real``, ``imag``
``bytes``      ``base64``
``scalar``     a NumPy scalar: ``dtype``, ``base64``
``dtype``      torch's: ``name``; ``device``: ``name``
``tensor``     ``name`` in its object's files; ``of``: ``numpy`` where it is not torch's; ``dtype``, ``shape``: where safetensors has
               no name for the dtype
=============  =======================================================================================
"""

from __future__ import annotations

import base64
import enum
import math
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from ciuic.training import tensors
from ciuic.training.tensors import Array, Unsaveable

KIND: Final = "$"
Json = Any


class Leaf(NamedTuple):
    """One tensor of a packed state."""

    name: str
    """Unique in the state: the keys on the way to it, joined by dots."""
    value: Any
    """As `tensors.as_plain` returns it."""
    array: Array


class Packed(NamedTuple):
    skeleton: Json
    leaves: list[Leaf]


def pack(value: object, where: str) -> Packed:
    """``where``: how errors call it. Unsaveable names the path and what stands there. Copies no tensor."""
    packer = _Packer(where)
    return Packed(packer.json(value, ()), packer.leaves)


def unpack(skeleton: Json, tensor: Callable[[str, Json], Any]) -> Any:
    """``tensor``: asked for each by its name, with the object that stands for it. ValueError for what `pack` did not write."""
    return _Unpacker(tensor).value(skeleton)


class _Packer:
    def __init__(self, where: str) -> None:
        self.leaves: list[Leaf] = []
        self._where = where
        self._names: dict[object, str] = {}
        self._taken: set[str] = set()

    def json(self, value: Any, path: tuple[str, ...]) -> Json:
        if value is None or isinstance(value, (bool, str)) or type(value) is int:
            if isinstance(value, enum.Enum):
                raise self._refused(value, path)
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {KIND: "float", "bits": struct.pack(">d", value).hex()}
        if tensors.is_array(value):
            return self._tensor(value, path)
        if isinstance(value, dict):
            return self._dict(value, path)
        if type(value) is list:
            return self._items(value, path)
        return self._special(value, path)

    def _items(self, values: Iterable[Any], path: tuple[str, ...]) -> list[Json]:
        return [self.json(item, (*path, str(at))) for at, item in enumerate(values)]

    def _dict(self, value: dict[Any, Any], path: tuple[str, ...]) -> Json:
        ordered = isinstance(value, OrderedDict)
        plain = not ordered and all(type(key) is str for key in value) and KIND not in value
        if plain:
            return {key: self.json(item, (*path, key)) for key, item in value.items()}
        items = [
            [self.json(key, (*path, "(key)")), self.json(item, (*path, str(key)))]
            for key, item in value.items()
        ]
        packed = {KIND: "dict", "items": items}
        if ordered:
            packed["type"] = "ordered"
        metadata = getattr(value, "_metadata", None)
        if metadata is not None:
            packed["metadata"] = self.json(metadata, (*path, "_metadata"))
        return packed

    def _special(self, value: Any, path: tuple[str, ...]) -> Json:
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        if torch is not None and isinstance(value, torch.Size):
            return {KIND: "size", "items": list(value)}
        if torch is not None and isinstance(value, torch.dtype):
            return {KIND: "dtype", "name": str(value).removeprefix("torch.")}
        if torch is not None and isinstance(value, torch.device):
            return {KIND: "device", "name": str(value)}
        if numpy is not None and isinstance(value, numpy.generic) and not value.dtype.hasobject:
            return {KIND: "scalar", "dtype": value.dtype.str, "base64": _base64(value.tobytes())}
        if type(value) in (tuple, set, frozenset):
            return {KIND: type(value).__name__, "items": self._items(value, path)}
        if type(value) is complex:
            return {KIND: "complex", "real": self.json(value.real, path), "imag": self.json(value.imag, path)}
        if type(value) in (bytes, bytearray):
            return {KIND: "bytes", "base64": _base64(bytes(value))}
        raise self._refused(value, path)

    def _tensor(self, value: Any, path: tuple[str, ...]) -> Json:
        try:
            plain = tensors.as_plain(value)
        except Unsaveable as error:
            raise Unsaveable(f"{self._at(path)} is {error}") from None
        same = tensors.identity(plain)
        array = tensors.describe(plain)
        name = self._names.get(same)
        if name is None:
            name = self._names[same] = self._free_name(".".join(path) or "value")
            self.leaves.append(Leaf(name, plain, array))
        packed: dict[str, Json] = {KIND: "tensor", "name": name}
        if array.framework != "torch":
            packed["of"] = array.framework
        if array.true_dtype:
            packed |= {"dtype": array.true_dtype, "shape": list(array.true_shape)}
        return packed

    def _free_name(self, name: str) -> str:
        """Keys may hold dots themselves, and a key of a dict may look like an index."""
        free, number = name, 2
        while free in self._taken:
            free, number = f"{name}#{number}", number + 1
        self._taken.add(free)
        return free

    def _at(self, path: tuple[str, ...]) -> str:
        return ".".join((self._where, *path))

    def _refused(self, value: object, path: tuple[str, ...]) -> Unsaveable:
        kind = type(value)
        return Unsaveable(
            f"{self._at(path)} is a {kind.__module__}.{kind.__qualname__}, which can be stored by pickle alone; "
            "give it state_dict() and load_state_dict(), or store its parts"
        )


class _Unpacker:
    def __init__(self, tensor: Callable[[str, Json], Any]) -> None:
        self._tensor = tensor

    def value(self, packed: Json) -> Any:
        if isinstance(packed, list):
            return [self.value(item) for item in packed]
        if not isinstance(packed, dict):
            return packed
        if KIND not in packed:
            return {key: self.value(item) for key, item in packed.items()}
        try:
            return self._kind(packed[KIND], packed)
        except (KeyError, TypeError, struct.error) as error:
            raise ValueError(f"a {packed[KIND]!r} is not as it should be: {error!r}") from None

    def _kind(self, kind: Json, packed: dict[str, Json]) -> Any:
        if kind == "tensor":
            return self._tensor(packed["name"], packed)
        if kind == "dict":
            return self._dict(packed)
        if kind in _COLLECTIONS:
            return _COLLECTIONS[kind](self.value(item) for item in packed["items"])
        if kind == "float":
            return struct.unpack(">d", bytes.fromhex(packed["bits"]))[0]
        if kind == "complex":
            return complex(self.value(packed["real"]), self.value(packed["imag"]))
        if kind == "bytes":
            return base64.b64decode(packed["base64"])
        if kind == "scalar":
            import numpy

            return numpy.frombuffer(base64.b64decode(packed["base64"]), numpy.dtype(packed["dtype"]))[0]
        if kind in ("size", "dtype", "device"):
            return self._torch(kind, packed)
        raise ValueError(f"a value of kind {kind!r}, which this version of ciuic does not know")

    def _dict(self, packed: dict[str, Json]) -> dict[Any, Any]:
        made: dict[Any, Any] = OrderedDict() if packed.get("type") == "ordered" else {}
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
        dtype = getattr(torch, packed["name"], None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"this torch has no dtype {packed['name']}")
        return dtype


_COLLECTIONS: Final[dict[str, Callable[[Iterable[Any]], Any]]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
