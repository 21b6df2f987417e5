"""Values of a state as others can read them: tensors of torch and plain values, nothing else.

`torch.load(weights_only=True)` opens what `as_plain` returns, in any program:

=============================  ================================================================================
in the state                   in the file
=============================  ================================================================================
array of NumPy                 tensor; of text or of dates: nested lists
scalar of NumPy                number, str or bytes
Path, UUID, Decimal, Fraction  str
datetime, date, time           str (ISO 8601)
timezone, ZoneInfo             str
timedelta                      float, in seconds
range, slice                   tuple of start, stop and step
deque                          list
frozenset                      tuple
defaultdict                    dict
bytearray                      bytes; empty ones, and empty bytes: an empty str
torch.Generator                dict with ``device`` and ``state``
class of the program           what its ``to_plain`` returned: of an Enum the name (of flags the value), of a
                               named tuple the tuple, of a dataclass a dict of its fields
=============================  ================================================================================
"""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import json
import pathlib
import sys
import uuid
import zoneinfo
from collections.abc import Callable, Mapping
from typing import Any, Final

from ciuic.training.format import value_types
from ciuic.training.format.structure import KIND

# The pickle of torch.load has no opcode for integers of more than 255 bytes.
_MAX_INT_BITS: Final = 2000
_TEXTS: Final = (uuid.UUID, decimal.Decimal, fractions.Fraction, datetime.timezone, zoneinfo.ZoneInfo)


def without_classes(packed: Any) -> Any:
    """Replace values of the program's own classes, in what `structure.pack` has written, by their content.

    So a state can be read by a program that has none of these classes.
    """
    if isinstance(packed, list):
        return [without_classes(item) for item in packed]
    if not isinstance(packed, dict):
        return packed
    found = {key: without_classes(item) for key, item in packed.items()}
    kind = found.get(KIND)
    if kind == "value" and not value_types.is_standard(str(found["type"])):
        content = found["value"]
        # A named tuple's content is a list, and must stay hashable.
        return {KIND: "tuple", "items": content} if isinstance(content, list) else content
    if kind in ("set", "frozenset"):
        found["items"] = [_hashable(item) for item in found["items"]]
    if kind == "dict":
        found["items"] = [[_hashable(key), item] for key, item in found["items"]]
    return found


def _hashable(packed: Any) -> Any:
    """Return what can be a key: of a dataclass the JSON text of its fields."""
    return json.dumps(packed) if isinstance(packed, dict) and KIND not in packed else packed


def as_plain(value: Any) -> Any:
    """Return a state as tensors of torch and plain values (see the table above). Copies no large tensor.

    Equal objects stay one object: tied weights are tied in the result.

    Raises:
        TypeError: A value is of a class that is not known.
    """
    return _Converter().plain(value)


class _Converter:
    def __init__(self) -> None:
        self._arrays: dict[int, Any] = {}
        """Tensors made of arrays, by the identity of the array: tied ones become one tensor."""
        self._kept: list[Any] = []

    def plain(self, value: Any) -> Any:
        # Before all others: a registered class may be derived from any of them.
        convert = _conversion(value)
        if convert is not None:
            return self.plain(convert(value))
        if value is None or isinstance(value, (bool, str, bytes)) or type(value) in (float, complex):
            return _plain_text(value)
        if isinstance(value, int):
            return int(value) if value.bit_length() <= _MAX_INT_BITS else hex(value)
        if isinstance(value, Mapping):
            return self._mapping(value)
        if isinstance(value, bytearray):
            return _plain_text(bytes(value))
        return self._other(value)

    def _mapping(self, value: Mapping[Any, Any]) -> Any:
        kind: Any = type(value) if type(value) in (collections.OrderedDict, collections.Counter) else dict
        made: dict[Any, Any] = kind()
        for key, item in value.items():
            made[self._key(key)] = self.plain(item)
        # torch converts the state of a module by the versions in this attribute.
        if kind is collections.OrderedDict and hasattr(value, "_metadata"):
            made._metadata = self.plain(value._metadata)  # type: ignore[attr-defined]
        return made

    def _key(self, value: Any) -> Any:
        """Return what can be a key: of a dataclass the JSON text of its fields."""
        found = self.plain(value)
        return json.dumps(found) if isinstance(found, dict) else found

    def _other(self, value: Any) -> Any:
        import torch  # type: ignore[import-not-found, unused-ignore]

        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, (torch.Size, torch.dtype, torch.device)):
            return value
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.ndarray):
            return self._array(value)
        if numpy is not None and isinstance(value, numpy.generic):
            return self.plain(value.item())
        if isinstance(value, (tuple, frozenset)):
            of = self.plain if isinstance(value, tuple) else self._key
            return tuple(of(item) for item in value)
        if isinstance(value, (list, collections.deque)):
            return [self.plain(item) for item in value]
        if isinstance(value, set):
            return {self._key(item) for item in value}
        raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__} cannot be a plain value")

    def _tensor(self, value: Any) -> Any:
        if value.layout is not sys.modules["torch"].strided:
            return value
        size_bytes = value.numel() * value.element_size()
        # torch.save writes the whole storage: that of one tensor of many would bring the others along.
        if value.untyped_storage().nbytes() <= size_bytes + (64 << 10):
            return value
        return self._once(value, lambda: value.clone())

    def _array(self, value: Any) -> Any:
        import torch

        # torch has neither text nor dates, and no numbers of the other byte order.
        if value.dtype.kind not in "biufc":
            return self.plain(value.tolist())
        native = value if value.dtype.isnative else value.astype(value.dtype.newbyteorder("="))
        try:
            return self._once(value, lambda: torch.from_numpy(native.copy()))
        except TypeError:  # such as float128
            return self.plain(value.tolist())

    def _once(self, value: Any, make: Callable[[], Any]) -> Any:
        if id(value) not in self._arrays:
            self._arrays[id(value)] = make()
            # An identity is unique only as long as the object lives.
            self._kept.append(value)
        return self._arrays[id(value)]


def _plain_text(value: Any) -> Any:
    """Return texts and bytes of exactly these types: NumPy's are derived from them."""
    if isinstance(value, str):
        return str(value)
    # The pickle of torch.load has no empty bytes: protocol 2 writes them as a call of the type.
    return (bytes(value) or "") if isinstance(value, bytes) else value


def _conversion(value: Any) -> Callable[[Any], Any] | None:
    if isinstance(value, (pathlib.PurePath, *_TEXTS)):
        return str
    if isinstance(value, (datetime.date, datetime.time)):
        return lambda one: one.isoformat()
    if isinstance(value, datetime.timedelta):
        return datetime.timedelta.total_seconds
    if isinstance(value, (range, slice)):
        return lambda one: (one.start, one.stop, one.step)
    if isinstance(value, collections.deque):
        return list
    found = value_types.type_of(value)
    if found is None:
        return None
    # A named tuple's content is a list, as in `without_classes`.
    return lambda one: _tupled(found.to_plain(one))


def _tupled(content: Any) -> Any:
    return tuple(content) if isinstance(content, list) else content
