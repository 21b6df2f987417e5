"""Conversion of JSON and tensors back to a state; `structure` has the table of kinds.

Guarantees: reading executes nothing, and a kind that is not in the table is an error.
"""

from __future__ import annotations

import base64
import struct
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Final

from ciuic.training.format import sparse, tensors, value_types
from ciuic.training.format.structure import FACTORIES, KIND, Json
from ciuic.training.util.documents import MALFORMED


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
            raise ValueError(f"a {packed[KIND]!r} is malformed: {error!r}") from None

    def _kind(self, kind: Json, packed: dict[str, Json]) -> Any:
        if kind in ("tensor", "sharded"):
            found = self._tensor(packed["name"], packed)
            return self._parameter(found, packed) if "parameter" in packed else found
        if kind == "value":
            return value_types.from_plain(packed["type"], self.value(packed["value"]))
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
            return sparse.from_parts({**packed, "parts": [self.value(part) for part in packed["parts"]]})
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
        # Checked, because the name may be that of anything in torch.
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
