"""Documents of JSON or msgpack in sealed objects: encode, and decode with checks.

Both directions check the types, patterns and limits that the struct of the document declares.
"""

from __future__ import annotations

from typing import Any, Final, TypeVar

import msgspec

from ciuic.remote.errors import DamagedRemote
from ciuic.remote.sealing.sealer import Sealer

_T = TypeVar("_T")
MAX_DOCUMENT_BYTES: Final = 64 << 20
"""Limit of a document's object: a manifest with the largest snapshot file, marks file and list of packs."""


def encode_document(sealer: Sealer, name: str, value: object, kind: Any, *, msgpack: bool = False) -> bytes:
    """Return the bytes of the object ``name``.

    Raises:
        ValueError: ``value`` could not be read back as ``kind``.
    """
    content = msgspec.msgpack.encode(value) if msgpack else msgspec.json.encode(value)
    # Refused here, because an object that no reader accepts would stop every collector.
    try:
        _decode(content, kind, msgpack=msgpack)
    except msgspec.DecodeError as error:
        raise ValueError(f"{name} could not be read back: {error}") from None
    sealed = sealer.seal(name, content)
    if len(sealed) > MAX_DOCUMENT_BYTES:
        raise ValueError(f"{name} would have {len(sealed)} bytes; {MAX_DOCUMENT_BYTES} are the limit")
    return sealed


def decode_document(sealer: Sealer, name: str, data: bytes, kind: type[_T], *, msgpack: bool = False) -> _T:
    """Return the document in the object ``name``.

    Raises:
        DamagedRemote: the object does not open, or is no document of this kind.
        UnsupportedFormat: a later version of ciuic wrote it.
    """
    # Before it is opened: decoded, a document takes ten times as much.
    if len(data) > MAX_DOCUMENT_BYTES:
        raise DamagedRemote(name, f"it has {len(data)} bytes; {MAX_DOCUMENT_BYTES} are the limit")
    content = sealer.open(name, data)
    try:
        value: _T = _decode(content, kind, msgpack=msgpack)
    # msgspec raises the latter two for bytes that are no text, and for values nested without end.
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedRemote(name, str(error)) from None
    return value


def _decode(content: bytes, kind: Any, *, msgpack: bool) -> Any:
    return msgspec.msgpack.decode(content, type=kind) if msgpack else msgspec.json.decode(content, type=kind)
