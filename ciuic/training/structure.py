"""State as trainers have it (nested dicts, lists, numbers, tensors) as JSON and a list of tensors; and back, without pickle.

Guarantees: what `pack` accepts comes back from `unpack` equal in type and value: integers of any size, floats to the last bit, NaN
and infinities included, bytes, tuples, sets, dicts with keys that are no strings, in their order. What it cannot promise that of it
refuses by the path at which it stands; but of classes that somebody has derived from str and dict the value alone comes back.
Reading executes nothing: a kind that is not in the table below is an error.

Plain JSON stands for itself. All else is an object with the key ``$``, which names the kind:

=============  =======================================================================================
``dict``       ``items``: [[key, value], …]; ``type``: ``ordered`` for an OrderedDict, ``counter``, or ``default`` with the name of its
               ``factory``; ``metadata``: torch's of a state_dict
``tuple``      ``items``; also ``set``, ``frozenset`` and ``size`` (torch.Size)
``float``      ``bits``: 16 hexadecimal digits, big-endian; for what JSON has no number for
``complex``    ``real``, ``imag``
``int``        ``hex``: of one that JSON readers would not take
``bytes``      ``base64``; also ``bytearray``
``scalar``     a NumPy scalar: ``dtype``, ``base64``
``dtype``      torch's: ``name``; ``device``: ``name``
``tensor``     ``name`` in its object's files; ``of``: ``numpy`` where it is not torch's; ``dtype``, ``shape``: where safetensors has
               no name for the dtype
``sparse``     torch's: ``layout``, ``size``, ``parts``: tensors; ``coalesced``
``sharded``    ``name``, ``dtype``, ``shape`` of a tensor that is stored in pieces (`shards`), also by other ranks
=============  =======================================================================================
"""

from __future__ import annotations

import base64
import enum
import math
import struct
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from ciuic.training import shards, sparse, tensors
from ciuic.training.documents import MALFORMED
from ciuic.training.tensors import Array, Unsaveable

KIND: Final = "$"
Json = Any
_DEEPEST: Final = 100
"""Levels: far from what makes Python and readers of JSON give up, wherever they are called from."""
_LARGE_BITS: Final = 2000
"""Python itself reads no more than 640 decimal digits where it is told to be careful."""
_FACTORIES: Final[dict[str, Any]] = {
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
"""What a defaultdict may make and still be stored."""


class Leaf(NamedTuple):
    """One tensor of a packed state."""

    name: str
    """Unique in the state: the keys on the way to it, joined by dots."""
    value: Any
    """As `tensors.as_plain` returns it."""
    array: Array
    is_piece: bool = False
    """Of a tensor of which other ranks have other pieces."""


class Packed(NamedTuple):
    skeleton: Json
    leaves: list[Leaf]


def pack(value: object, where: str, *, with_shards: bool = False) -> Packed:
    """``where``: how errors call it. Unsaveable names the path and what stands there. Copies no tensor.

    ``with_shards``: other ranks store theirs; without it a tensor of which they have parts is refused.
    """
    packer = _Packer(where, with_shards)
    return Packed(packer.json(value, ()), packer.leaves)


def unpack(skeleton: Json, tensor: Callable[[str, Json], Any]) -> Any:
    """``tensor``: asked for each by its name, with the object that stands for it. ValueError for what `pack` did not write."""
    try:
        return _Unpacker(tensor).value(skeleton)
    except RecursionError:
        raise ValueError("a value is nested too deeply") from None


class _Packer:
    def __init__(self, where: str, with_shards: bool) -> None:
        self.leaves: list[Leaf] = []
        self._with_shards = with_shards
        self._where = where
        self._names: dict[object, str] = {}
        self._taken: set[str] = set()

    def json(self, value: Any, path: tuple[str, ...]) -> Json:
        if value is None or isinstance(value, (bool, str)) or type(value) is int:
            return self._plain(value, path)
        if type(value) is float:
            return value if math.isfinite(value) else {KIND: "float", "bits": struct.pack(">d", value).hex()}
        if tensors.is_array(value):
            return self._tensor(value, path)
        if isinstance(value, dict):
            return self._dict(value, path)
        if type(value) is list:
            return self._items(value, path)
        return self._special(value, path)

    def _plain(self, value: Any, path: tuple[str, ...]) -> Json:
        if isinstance(value, enum.Enum):
            raise self._refused(value, path)
        if type(value) is int and value.bit_length() > _LARGE_BITS:
            return {KIND: "int", "hex": f"{value:x}"}
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.str_):
            return {KIND: "scalar", "dtype": "U", "base64": _base64(value.encode("utf-8", "surrogatepass"))}
        return value

    def _items(self, values: Iterable[Any], path: tuple[str, ...]) -> list[Json]:
        self._check_depth(path)
        return [self.json(item, (*path, str(at))) for at, item in enumerate(values)]

    def _dict(self, value: dict[Any, Any], path: tuple[str, ...]) -> Json:
        self._check_depth(path)
        kind = self._dict_kind(value, path)
        if not kind and all(type(key) is str for key in value) and KIND not in value:
            return {key: self.json(item, (*path, key)) for key, item in value.items()}
        items = [
            [self.json(key, (*path, "(key)")), self.json(item, (*path, str(key)))]
            for key, item in value.items()
        ]
        packed = {KIND: "dict", "items": items, **kind}
        metadata = getattr(value, "_metadata", None)
        if metadata is not None:
            packed["metadata"] = self.json(metadata, (*path, "_metadata"))
        return packed

    def _dict_kind(self, value: dict[Any, Any], path: tuple[str, ...]) -> dict[str, Json]:
        if isinstance(value, OrderedDict):
            return {"type": "ordered"}
        if isinstance(value, Counter):
            return {"type": "counter"}
        if not isinstance(value, defaultdict):
            return {}
        made = value.default_factory
        name = getattr(made, "__name__", "")
        if made is not None and _FACTORIES.get(name) is not made:
            raise Unsaveable(
                f"{self._at(path)} is a defaultdict that makes its values by {made!r}, which can be stored by pickle alone"
            )
        return {"type": "default", "factory": name}

    def _check_depth(self, path: tuple[str, ...]) -> None:
        if len(path) > _DEEPEST:
            raise Unsaveable(f"{self._at(path[:3])}… is nested too deeply, or holds itself")

    def _special(self, value: Any, path: tuple[str, ...]) -> Json:
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        if torch is not None and isinstance(value, torch.Size):
            return {KIND: "size", "items": list(value)}
        if torch is not None and isinstance(value, torch.dtype):
            return {KIND: "dtype", "name": str(value).removeprefix("torch.")}
        if torch is not None and isinstance(value, torch.device):
            return {KIND: "device", "name": str(value)}
        if numpy is not None and isinstance(
            value, numpy.bytes_
        ):  # arrays of them end at the last byte that is not 0
            return {KIND: "scalar", "dtype": "S", "base64": _base64(bytes(value))}
        if numpy is not None and isinstance(value, numpy.generic):
            if value.dtype.hasobject or value.dtype.names:
                raise self._refused(value, path)
            name = tensors.numpy_name(value.dtype)
            return {KIND: "scalar", "dtype": name, "base64": _base64(value.tobytes())}
        if type(value) in (tuple, set, frozenset):
            return {KIND: type(value).__name__, "items": self._items(value, path)}
        if type(value) is complex:
            return {KIND: "complex", "real": self.json(value.real, path), "imag": self.json(value.imag, path)}
        if type(value) in (bytes, bytearray):
            return {KIND: type(value).__name__, "base64": _base64(bytes(value))}
        raise self._refused(value, path)

    def _sharded(self, value: Any, path: tuple[str, ...]) -> Json:
        name = self._free_name(".".join(path) or "value")
        try:
            piece = shards.piece_of(value)
            if piece is not None:
                plain = shards.as_storable(tensors.as_plain(piece[1].detach()))
                leaf = Leaf(shards.piece_name(name, piece[0]), plain, tensors.describe(plain), is_piece=True)
                self.leaves.append(leaf)
        except Unsaveable as error:
            raise Unsaveable(f"{self._at(path)} is {error}") from None
        dtype = str(value.dtype).removeprefix("torch.")
        return {KIND: "sharded", "name": name, "dtype": dtype, "shape": list(value.shape)}

    def _tensor(self, value: Any, path: tuple[str, ...]) -> Json:
        if shards.is_sharded(value) and (self._with_shards or shards.is_here_whole(value)):
            return self._sharded(value, path)
        if tensors.is_sparse(value):
            whole = sparse.parts(value)
            return {KIND: "sparse", **whole, "parts": self._items(whole["parts"], path)}
        try:
            plain = tensors.as_plain(value)
        except Unsaveable as error:
            raise Unsaveable(f"{self._at(path)} is {error}") from None
        same = tensors.identity(plain)
        array = tensors.describe(plain)
        name = self._names.get(same)
        if name is None:
            name = self._names[same] = self._free_name(shards.plain_name(".".join(path) or "value"))
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
        if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
            return Unsaveable(
                f"{self._at(path)} is a {kind.__module__}.{kind.__qualname__} within a list or a dict: give it by a name of its own, "
                "save_snapshot(…, NAME=…) or register(NAME=…)"
            )
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
        except (*MALFORMED, struct.error) as error:
            raise ValueError(f"a {packed[KIND]!r} is not as it should be: {error!r}") from None

    def _kind(self, kind: Json, packed: dict[str, Json]) -> Any:
        if kind in ("tensor", "sharded"):
            return self._tensor(packed["name"], packed)
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
            return sparse.of_parts({**packed, "parts": [self.value(part) for part in packed["parts"]]})
        if kind in ("size", "dtype", "device"):
            return self._torch(kind, packed)
        raise ValueError(f"a value of kind {kind!r}, which this version of ciuic does not know")

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
        dtype = getattr(torch, packed["name"], None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"this torch has no dtype {packed['name']}")
        return dtype


def _empty_dict(kind: str, factory: str) -> dict[Any, Any]:
    if kind == "ordered":
        return OrderedDict()
    if kind == "counter":
        return Counter()
    if kind == "default":
        return defaultdict(_FACTORIES[factory] if factory else None)
    return {}


def _scalar(dtype: str, data: bytes) -> Any:
    import numpy

    if dtype == "S":
        return numpy.bytes_(data)
    if dtype == "U":
        return numpy.str_(data.decode("utf-8", "surrogatepass"))
    return numpy.frombuffer(data, tensors.numpy_dtype(dtype))[0]


_COLLECTIONS: Final[dict[str, Callable[[Iterable[Any]], Any]]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
