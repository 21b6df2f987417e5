"""Decoders of msgspec: made once for a type, and by one thread at a time.

msgspec notes what it knows of a Struct at the first use of the type, and runs Python meanwhile: another thread that uses the type
then finds half a note, and the process ends with SIGSEGV (seen with 0.19 to 0.21). No other module makes a decoder.
"""

from __future__ import annotations

import threading
from typing import Any, Final, TypeVar, overload

import msgspec

_Type = TypeVar("_Type")
# Annotations are evaluated under it, which may import a module that makes decoders.
_lock: Final = threading.RLock()
_json: Final[dict[Any, msgspec.json.Decoder[Any]]] = {}
_msgpack: Final[dict[Any, msgspec.msgpack.Decoder[Any]]] = {}


@overload
def json_decoder(type_: type[_Type]) -> msgspec.json.Decoder[_Type]: ...
@overload
def json_decoder(type_: Any) -> msgspec.json.Decoder[Any]: ...
def json_decoder(type_: Any) -> msgspec.json.Decoder[Any]:
    """Return the decoder of JSON documents of this type."""
    found = _json.get(type_)
    if found is None:
        with _lock:
            found = _json.setdefault(type_, msgspec.json.Decoder(type_))
    return found


@overload
def msgpack_decoder(type_: type[_Type]) -> msgspec.msgpack.Decoder[_Type]: ...
@overload
def msgpack_decoder(type_: Any) -> msgspec.msgpack.Decoder[Any]: ...
def msgpack_decoder(type_: Any) -> msgspec.msgpack.Decoder[Any]:
    """Return the decoder of msgpack documents of this type."""
    found = _msgpack.get(type_)
    if found is None:
        with _lock:
            found = _msgpack.setdefault(type_, msgspec.msgpack.Decoder(type_))
    return found


def decode_json(data: bytes | bytearray | memoryview | str, type_: type[_Type]) -> _Type:
    """Return the value in a JSON document. msgspec.DecodeError unless it is one of this type."""
    return json_decoder(type_).decode(data)


def decode_msgpack(data: bytes | bytearray | memoryview, type_: type[_Type]) -> _Type:
    """Return the value in a msgpack document. msgspec.DecodeError unless it is one of this type."""
    return msgpack_decoder(type_).decode(data)


def convert(value: object, type_: type[_Type], *, strict: bool = True) -> _Type:
    """Return builtin values as this type. msgspec.ValidationError unless they are one."""
    msgpack_decoder(type_)
    return msgspec.convert(value, type_, strict=strict)
