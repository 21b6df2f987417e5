"""Structure of safetensors: a length, a JSON header, and the tensors without gaps.

References:
    https://huggingface.co/docs/safetensors (format)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import msgspec

from ciuic.structs import json_decoder
from ciuic.units import plural
from ciuic.verdicts.model import BoundedReader, NotJudged, Numbers, OtherFormat, Piece, Structure, TornContent
from ciuic.verdicts.not_finite import KINDS

FORMAT: Final = "safetensors"
_MAX_HEADER_BYTES: Final = 100_000_000
"""The format's own limit."""
_MAX_TENSORS: Final = 1 << 18
_MAX_NUMBER: Final = 1 << 62
_BITS: Final = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


class _Tensor(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


_header = json_decoder(dict[str, msgspec.Raw])
_tensor = json_decoder(_Tensor)
_metadata = json_decoder(dict[str, str])


def read_safetensors(reader: BoundedReader) -> Structure:
    """Return the structure; raise TornContent, OtherFormat or NotJudged."""
    named = reader.has_suffix(".safetensors")
    if not named and not _looks_like_it(reader):
        raise OtherFormat
    if named and reader.starts_with_zeros():
        raise TornContent("it begins with zeros: its header was never written")
    length = int.from_bytes(reader.at(0, 8, "the length of its header"), "little")
    if length > _MAX_HEADER_BYTES:
        raise TornContent(f"the length of its header is {length}, more than the format allows")
    text = reader.at(8, length, "its header")
    try:
        tensors = _decode(text)
    except (msgspec.DecodeError, OverflowError) as error:
        raise TornContent(f"its header is not the JSON of tensors: {error}") from None
    end, last = _check_tiling(tensors)
    start = 8 + length
    if start + end != reader.size_bytes:
        raise TornContent(f"its header promises {start + end} bytes, the file has {reader.size_bytes}")
    last_item = None
    if last is not None and end:
        # A float ends with its exponent, which is zero in hardly any number: its last byte shows more than all of it.
        size = 1 if last.dtype[0] in "FBC" else max(1, _BITS[last.dtype] // 8)
        last_item = (start + end - size, start + end)

    def numbers() -> Iterator[Numbers]:
        for tensor in tensors:
            kind = "F32" if tensor.dtype == "C64" else tensor.dtype
            if kind in KINDS:
                begin, stop = tensor.data_offsets
                yield Numbers(start + begin, start + stop, kind)
            elif kind[0] == "F":
                raise NotJudged(f"numbers of {kind} are not counted")

    return Structure(FORMAT, plural(len(tensors), "tensor"), (Piece(start, start + end),), last_item, numbers)


def _looks_like_it(reader: BoundedReader) -> bool:
    head = reader.up_to(0, 9, "the beginning")
    return len(head) == 9 and head[8:] == b"{" and int.from_bytes(head[:8], "little") <= _MAX_HEADER_BYTES


def _decode(text: bytes) -> list[_Tensor]:
    if text[:1] != b"{":
        raise TornContent("its header does not begin with {")
    items = _header.decode(text)
    if len(items) > _MAX_TENSORS:
        raise NotJudged(f"it has more than {_MAX_TENSORS} tensors")
    described = items.pop("__metadata__", None)
    if described is not None:
        _metadata.decode(described)
    return [_tensor.decode(raw) for raw in items.values()]


def _check_tiling(tensors: list[_Tensor]) -> tuple[int, _Tensor | None]:
    """Return the end of the data and the last tensor that has bytes."""
    at, last = 0, None
    for tensor in sorted(tensors, key=lambda one: one.data_offsets):
        start, stop = tensor.data_offsets
        if start != at or not start <= stop < _MAX_NUMBER:
            raise TornContent("its tensors do not follow one another")
        if tensor.dtype not in _BITS:
            raise NotJudged("it has a type of numbers that is not known here")
        if len(tensor.shape) > 64 or any(not 0 <= size < _MAX_NUMBER for size in tensor.shape):
            raise TornContent("a tensor has an impossible shape")
        if math.prod(tensor.shape) * _BITS[tensor.dtype] != 8 * (stop - start):
            raise TornContent("a tensor has another size than its shape says")
        at = stop
        last = tensor if stop > start else last
    return at, last
