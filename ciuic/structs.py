"""Decoders of msgspec: made once for a type, and by one thread at a time.

msgspec notes what it knows of a Struct at the first use of the type, and runs Python meanwhile: another thread that uses the type
then finds half a note, and the process ends with SIGSEGV (seen with 0.19 to 0.21). No other module makes a decoder.

Guarantees: whatever the bytes are, a decoder returns a value of its type or raises msgspec.DecodeError.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar, overload

import msgspec

_Type = TypeVar("_Type")
_Data = bytes | bytearray | memoryview
# Annotations are evaluated under it, which may import a module that makes decoders.
_lock: Final = threading.RLock()
_json: Final[dict[Any, Decoder[Any]]] = {}
_msgpack: Final[dict[Any, Decoder[Any]]] = {}


class Decoder(Generic[_Type]):
    """Decoder of the documents of one type."""

    __slots__ = ("_decode",)

    def __init__(self, decode: Callable[[Any], _Type]) -> None:
        self._decode = decode

    def decode(self, data: _Data | str) -> _Type:
        """Return the value in a document. msgspec.DecodeError unless it is one of this type."""
        try:
            return self._decode(data)
        # msgspec passes these on as they are: for text that is not UTF-8, and for nesting without end.
        except (UnicodeDecodeError, RecursionError) as error:
            raise msgspec.DecodeError(str(error)) from error


@overload
def json_decoder(type_: type[_Type]) -> Decoder[_Type]: ...
@overload
def json_decoder(type_: Any) -> Decoder[Any]: ...
def json_decoder(type_: Any) -> Decoder[Any]:
    """Return the decoder of JSON documents of this type."""
    return _json.get(type_) or _made(_json, type_, msgspec.json.Decoder)


@overload
def msgpack_decoder(type_: type[_Type]) -> Decoder[_Type]: ...
@overload
def msgpack_decoder(type_: Any) -> Decoder[Any]: ...
def msgpack_decoder(type_: Any) -> Decoder[Any]:
    """Return the decoder of msgpack documents of this type."""
    return _msgpack.get(type_) or _made(_msgpack, type_, msgspec.msgpack.Decoder)


def _made(known: dict[Any, Decoder[Any]], type_: Any, make: Callable[[Any], Any]) -> Decoder[Any]:
    with _lock:
        return known.setdefault(type_, Decoder(make(type_).decode))


@overload
def decode_json(data: _Data | str, type_: type[_Type]) -> _Type: ...
@overload
def decode_json(data: _Data | str, type_: Any) -> Any: ...
def decode_json(data: _Data | str, type_: Any) -> Any:
    """Return the value in a JSON document. msgspec.DecodeError unless it is one of this type."""
    return json_decoder(type_).decode(data)


@overload
def decode_msgpack(data: _Data, type_: type[_Type]) -> _Type: ...
@overload
def decode_msgpack(data: _Data, type_: Any) -> Any: ...
def decode_msgpack(data: _Data, type_: Any) -> Any:
    """Return the value in a msgpack document. msgspec.DecodeError unless it is one of this type."""
    return msgpack_decoder(type_).decode(data)


def convert(value: object, type_: type[_Type], *, strict: bool = True) -> _Type:
    """Return builtin values as this type. msgspec.ValidationError unless they are one."""
    msgpack_decoder(type_)
    return msgspec.convert(value, type_, strict=strict)
