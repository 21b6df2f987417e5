"""Structure of one array of numpy: a header with type and shape, and the numbers.

References:
    https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
"""

from __future__ import annotations

import ast
import math
import re
from typing import Any, Final

from ciuic.verdicts.model import BoundedReader, NotJudged, Numbers, OtherFormat, Piece, Structure, TornContent

_MAGIC: Final = b"\x93NUMPY"
_MAX_HEADER_BYTES: Final = 10_000
"""Limit of numpy's own reader (max_header_size)."""
_MAX_DEPTH: Final = 8
_MAX_NUMBER: Final = 1 << 62
_KINDS: Final = {"f2": "F16", "f4": "F32", "f8": "F64", "c8": "F32", "c16": "F64"}
_TYPE: Final = re.compile(r"[<>|=]?([?biufcmMSUV])(\d{1,9})(?:\[[^]]{1,20}\])?\Z", re.ASCII)


def read_npy(reader: BoundedReader) -> Structure:
    """Return the structure; raise TornContent, OtherFormat or NotJudged."""
    head = reader.up_to(0, 10, "the beginning")
    if head[:6] != _MAGIC:
        # numpy writes its head first: another beginning is that of raw numbers, which memmap gives this name too.
        if reader.has_suffix(".npy") and (not head.strip(b"\0") or _MAGIC.startswith(head)):
            raise TornContent("it does not begin as an array of numpy")
        raise OtherFormat
    width = 2 if reader.at(6, 1, "its header")[0] == 1 else 4
    length = int.from_bytes(reader.at(8, width, "its header"), "little")
    if length > _MAX_HEADER_BYTES:
        raise NotJudged("its header is longer than numpy reads")
    start = 8 + width + length
    item_bytes, shape, described = _described(reader.at(8 + width, length, "its header"))
    items = math.prod(shape)
    if item_bytes >= _MAX_NUMBER or items >= _MAX_NUMBER:
        raise TornContent("its header has an impossible shape")
    end = start + item_bytes * items
    if end != reader.size_bytes:
        raise TornContent(f"its header promises {end} bytes, the file has {reader.size_bytes}")
    # A float ends with its exponent, which is zero in hardly any number.
    is_float = described[:2] in ("<f", "<c")
    last_item = (end - (1 if is_float else item_bytes), end) if end > start else None
    numbers = [Numbers(start, end, kind, described[0] == ">")] if (kind := _KINDS.get(described[1:])) else []
    known = described[1:2] in tuple("biumMSU") or bool(numbers)
    content = f"an array of {items} items"
    return Structure("npy", content, (Piece(start, end),), last_item, (lambda: numbers) if known else None)


def _described(header: bytes) -> tuple[int, tuple[int, ...], str]:
    """Return the bytes of one item, the shape, and the type; empty for a record."""
    try:
        # Literals alone: nothing is evaluated. The parser's own limits end deep nesting.
        value = ast.literal_eval(header.decode("utf-8").strip())
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise TornContent("its header is not that of an array") from None
    if not isinstance(value, dict) or not isinstance(value.get("shape"), tuple) or "descr" not in value:
        raise TornContent("its header is not that of an array")
    shape = value["shape"]
    if not all(type(size) is int and 0 <= size < _MAX_NUMBER for size in shape) or len(shape) > 64:
        raise TornContent("its header has an impossible shape")
    described = value["descr"]
    return _item_bytes(described, 0), shape, described if isinstance(described, str) else ""


def _item_bytes(described: Any, depth: int) -> int:
    """Return the bytes of one item of this type."""
    if isinstance(described, str):
        found = _TYPE.match(described)
        if found is None:
            # "|O": pickled objects follow, whose length nothing tells.
            raise NotJudged(f"its type {ascii(described)[:40]} is not known here")
        return int(found[2]) * (4 if found[1] == "U" else 1)
    if not isinstance(described, list) or depth == _MAX_DEPTH:
        raise NotJudged("its type is not known here")
    size = 0
    for field in described:
        if not isinstance(field, tuple) or len(field) not in (2, 3):
            raise NotJudged("its type is not known here")
        times = field[2] if len(field) == 3 else ()
        times = times if isinstance(times, tuple) else (times,)
        if not all(type(number) is int and 0 <= number < 1 << 32 for number in times) or len(times) > 64:
            raise NotJudged("its type is not known here")
        size += _item_bytes(field[1], depth + 1) * math.prod(times)
    return size
