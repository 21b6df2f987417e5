"""Structure of zip archives: torch's checkpoints, npz, Keras.

The directory at the end is written last, and has a CRC-32 of each member. Compressed members are checked by their position alone.

References:
    APPNOTE.TXT 6.3.10, sections 4.3.7 to 4.3.16 and 4.5.3
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from ciuic.units import plural
from ciuic.verdicts.formats.npy import read_npy
from ciuic.verdicts.formats.pickles import NUMBERS, UNTYPED, PickleStream, Storages
from ciuic.verdicts.model import (
    MAX_HEADER_BYTES,
    BoundedReader,
    NotJudged,
    Numbers,
    OtherFormat,
    Piece,
    Structure,
    TornContent,
)

SUFFIXES: Final = (".npz", ".keras")
_LOCAL: Final = b"PK\3\4"
_END: Final = struct.Struct("<4s4H2LH")
_END64: Final = struct.Struct("<4sQ2H2L4Q")
_LOCATOR: Final = struct.Struct("<4sLQL")
_ENTRY: Final = struct.Struct("<4s6H3L5H2L")
_LOCAL_HEADER: Final = struct.Struct("<4s5H3L2H")
_MAX_COMMENT_BYTES: Final = 65535
_MAX_MEMBERS: Final = 1 << 17
_MAX_LOCAL_HEADERS: Final = 256
"""Local headers that are read. More of them prove little: holes show without reading."""
_MAX_CHECKED_BYTES: Final = 4 << 20
_FULL_16: Final = 0xFFFF
_FULL_32: Final = 0xFFFFFFFF


class _Member(NamedTuple):
    name: bytes
    method: int
    crc32: int
    stored_bytes: int
    header_offset: int


def read_zip(reader: BoundedReader) -> Structure:
    """Return the structure; raise TornContent, OtherFormat or NotJudged."""
    if reader.up_to(0, 4, "the beginning") != _LOCAL:
        if reader.has_suffix(*SUFFIXES):
            raise TornContent("it does not begin as a zip archive")
        raise OtherFormat
    directory_start, directory_bytes, count = _find_directory(reader)
    members = list(_members(reader, directory_start, directory_bytes, count))
    if not members:
        raise TornContent("it has no members")
    starts = _check_local_headers(reader, members)
    pieces = []
    by_offset = sorted(members, key=lambda member: member.header_offset)
    for member, following in zip(by_offset, [*by_offset[1:], None], strict=True):
        stop = directory_start if following is None else following.header_offset
        start = starts.get(member.header_offset)
        # A CRC of 0 is none: torch writes it after `set_crc32_options(False)`.
        if start is None or member.method or not member.crc32:
            pieces.append(Piece(member.header_offset, stop))
        else:
            pieces.append(Piece(start, start + member.stored_bytes, member.crc32))
    _check_small(reader, pieces)
    kind = _kind(members)
    numbers = (lambda: _numbers(reader, members)) if kind in ("torch", "npz") else None
    return Structure(kind, plural(len(members), "member"), tuple(pieces), numbers=numbers)


def _find_directory(reader: BoundedReader) -> tuple[int, int, int]:
    """Return (offset, length, members) of the central directory."""
    size = reader.size_bytes
    torn = TornContent("the directory at its end is missing")
    at = size - _END.size
    if at < 0:
        raise torn
    tail = reader.at(at, _END.size, "its end")
    # A comment is rare: the whole range in which it could lie is read only without the plain end.
    if tail[:4] != b"PK\5\6" or tail[-2:] != b"\0\0":
        start = max(0, size - _END.size - _MAX_COMMENT_BYTES)
        tail = reader.at(start, size - start, "its end")
        found = tail.rfind(b"PK\5\6")
        if found < 0 or len(tail) - found < _END.size:
            raise torn
        at, tail = start + found, tail[found : found + _END.size]
    _, disk, first_disk, _, count, length, offset, comment = _END.unpack(tail)
    if at + _END.size + comment != size:
        raise torn
    if disk or first_disk:
        raise NotJudged("it is one part of several")
    # torch writes the 64-bit record in any case.
    end, length, offset, count = _zip64(reader, at, (at, length, offset, count))
    if offset + length != end:
        raise TornContent("its directory is not where its end says")
    if length > MAX_HEADER_BYTES or count > _MAX_MEMBERS:
        raise NotJudged("its directory is larger than what is read for a verdict")
    return offset, length, count


def _zip64(reader: BoundedReader, at: int, plain: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    where = at - _LOCATOR.size
    if where < 0:
        return plain
    signature, _, offset, _ = _LOCATOR.unpack(reader.at(where, _LOCATOR.size, "its end"))
    if signature != b"PK\6\7":
        return plain
    fields = _END64.unpack(reader.at(offset, _END64.size, "its end"))
    # The record may have been extended; its size does not count the first 12 bytes.
    if fields[0] != b"PK\6\6" or offset + 12 + fields[1] != where:
        raise TornContent("the end of its directory is damaged")
    wide = (fields[8], fields[9], fields[7])
    # The plain end, which is written after this record, has the same values where they fit.
    for value, plain_value, full in zip(wide, plain[1:], (_FULL_32, _FULL_32, _FULL_16), strict=True):
        if plain_value not in (value, full):
            raise TornContent("the end of its directory is damaged")
    return offset, *wide


def _members(reader: BoundedReader, offset: int, length: int, count: int) -> Iterator[_Member]:
    data = reader.at(offset, length, "its directory")
    at = 0
    for _ in range(count):
        if at + _ENTRY.size > length:
            raise TornContent("its directory is shorter than its end says")
        fields = _ENTRY.unpack_from(data, at)
        method, crc32, stored, size = fields[4], *fields[7:10]
        name_bytes, extra_bytes, comment_bytes = fields[10:13]
        at += _ENTRY.size
        following = at + name_bytes + extra_bytes + comment_bytes
        if fields[0] != b"PK\1\2" or following > length:
            raise TornContent("its directory is damaged")
        name, extra = data[at : at + name_bytes], data[at + name_bytes : following - comment_bytes]
        at = following
        size, stored, header = _wide(extra, (size, stored, fields[16]))
        if header + _LOCAL_HEADER.size + len(name) + stored > offset or (not method and stored != size):
            raise TornContent("a member does not lie where the directory says")
        yield _Member(name, method, crc32, stored, header)
    if at != length:
        raise TornContent("its directory is longer than its end says")


def _wide(extra: bytes, plain: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return (size, stored, offset) with the 64-bit values of the extra field of zip64."""
    values = list(plain)
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        inner = extra[at + 4 : at + 4 + length]
        at += 4 + length
        if kind != 1:
            continue
        for index, value in enumerate(values):
            if value == _FULL_32:
                if len(inner) < 8:
                    raise TornContent("its directory is damaged")
                values[index], inner = int.from_bytes(inner[:8], "little"), inner[8:]
    return values[0], values[1], values[2]


def _check_local_headers(reader: BoundedReader, members: list[_Member]) -> dict[int, int]:
    """Return where the content begins, by the offset of the local header, for some of the members."""
    step = -(-len(members) // _MAX_LOCAL_HEADERS)
    starts = {}
    # The last ones as well: they were written last.
    for member in {*members[::step], members[-1]}:
        header = reader.at(member.header_offset, _LOCAL_HEADER.size, "a member")
        fields = _LOCAL_HEADER.unpack(header)
        if fields[0] != _LOCAL:
            raise TornContent("a member is not there")
        starts[member.header_offset] = member.header_offset + _LOCAL_HEADER.size + fields[9] + fields[10]
    return starts


def _numbers(reader: BoundedReader, members: list[_Member]) -> Iterator[Numbers]:
    """Yield the floating numbers of an archive of torch or numpy."""
    pickle = next((one for one in members if (b"/" + one.name).endswith(b"/data.pkl")), None)
    if pickle is None:
        for array in members:
            inside = _content(reader, array)
            for one in _of_array(inside):
                yield one._replace(start=inside.start + one.start, stop=inside.start + one.stop)
        return
    storages = Storages()
    for code in PickleStream(_content(reader, pickle)).opcodes():
        storages.see(code)
    top = pickle.name.removesuffix(b"data.pkl")
    by_name = {member.name: member for member in members}
    stored = {name.removeprefix(top + b"data/") for name in by_name if name.startswith(top + b"data/")}
    if UNTYPED in storages.kinds.values() or not stored <= storages.kinds.keys():
        raise NotJudged("only a tensor says what is in one of its storages")
    order = by_name.get(top + b"byteorder")
    is_big_endian = order is not None and _content(reader, order).up_to(0, 3, "its byte order") == b"big"
    for key, kind in storages.kinds.items():
        member = by_name.get(top + b"data/" + key)
        if member is not None and kind in NUMBERS:
            inside = _content(reader, member)
            yield Numbers(inside.start, inside.start + inside.size_bytes, NUMBERS[kind], is_big_endian)


class _Inside(BoundedReader):
    """A member that is stored as it is, within the limits of its archive."""

    def __init__(self, reader: BoundedReader, start: int, size_bytes: int) -> None:
        super().__init__(lambda offset, length: reader.at(start + offset, length, "a member"), size_bytes)
        self.start = start


def _content(reader: BoundedReader, member: _Member) -> _Inside:
    if member.method:
        raise NotJudged("a member is compressed")
    header = reader.at(member.header_offset, _LOCAL_HEADER.size, "a member")
    fields = _LOCAL_HEADER.unpack(header)
    start = member.header_offset + _LOCAL_HEADER.size + fields[9] + fields[10]
    return _Inside(reader, start, member.stored_bytes)


def _of_array(inside: _Inside) -> Iterable[Numbers]:
    try:
        found = read_npy(inside).numbers
    except OtherFormat:
        found = None
    if found is None:
        raise NotJudged("an array has a type whose numbers are not known here")
    return found()


def _check_small(reader: BoundedReader, pieces: list[Piece]) -> None:
    """Check the CRCs of small members: the pickle of torch, the array of a counter."""
    left_bytes = _MAX_CHECKED_BYTES
    for piece in sorted(
        (one for one in pieces if one.crc32 is not None), key=lambda one: one.stop - one.start
    ):
        length = piece.stop - piece.start
        left_bytes -= length
        if left_bytes < 0:
            return
        if zlib.crc32(reader.at(piece.start, length, "a member")) != piece.crc32:
            raise TornContent("a member does not match its checksum")


def _kind(members: list[_Member]) -> str:
    names = {member.name for member in members}
    if any(name == b"data.pkl" or name.endswith(b"/data.pkl") for name in names):
        return "torch"
    if all(name.endswith(b".npy") for name in names):
        return "npz"
    if b"model.weights.h5" in names:
        return "keras"
    return "zip"
