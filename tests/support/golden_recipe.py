"""Contents of the golden repositories: values that no later version may read, name or store differently."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable

from ciuic.repository import Writer
from ciuic.repository.byte_planes import Widening
from ciuic.repository.byte_planes_math import BFLOAT16, FLOAT16
from ciuic.repository.compression import Codec, Content, TwinBase
from ciuic.repository.identity import Identity
from ciuic.types import Entry, RootRecord, SnapshotDraft, SnapshotId

IDENTITY = Identity("blake3-128", bytes(range(32)), 0x0123456789ABCDEF)
"""Identity of the golden repositories from format 3 on."""
BLOCK = 65536
TIME_NS = 1_686_841_200_123_456_789
XATTRS_SHORT = ((b"user.note", b"short"),)
XATTRS_LONG = ((b"security.long", bytes(range(256)) * 8), (b"user.note", b"long"))
SPARSE_BLOCKS = 3000
"""Two levels of block map."""
RAW = random.Random(1).randbytes(BLOCK)
TEXT = b"".join(b"step %06d loss 0.%06d\n" % (step, step * 7919 % 10**6) for step in range(4000))
NAMES = [b"many-%03d" % number for number in range(400)]
HALVES = struct.pack("<4096H", *(place * 40503 % 65536 for place in range(4096)))
"""Arbitrary 16-bit values."""
MASTERS = struct.pack(
    "<3000I", *((place * 40503 % 65536 << 16) + place * 7919 % 65536 for place in range(-5, 2995))
)
"""Masters whose upper halves are the bfloat16 numbers of the same places, shifted by five places."""
WIDE_HALVES = struct.pack("<3000f", *(place / 3000 for place in range(3000)))
"""Numbers for float16."""
ODD_NAME = b"not utf-8 \xff\n|" + b"x" * 200


def _file(writer: Writer, name: bytes, blocks: dict[int, bytes], size_bytes: int, **facts: object) -> Entry:
    ids = {at: writer.put_chunk(data) for at, data in blocks.items()}
    ref = writer.update_block_map((b"", 0), -(-size_bytes // BLOCK), ids)
    return Entry(
        name=name,
        mode=0o100640,
        uid=1000,
        gid=100,
        size_bytes=size_bytes,
        mtime_ns=TIME_NS,
        ctime_ns=TIME_NS + 1,
        atime_ns=TIME_NS - 1,
        content=ref.content,
        map_height=ref.map_height,
        **facts,  # type: ignore[arg-type]
    )


def _tree(writer: Writer, entries: Iterable[Entry]) -> Entry:
    ref = writer.update_tree(b"", {entry.name: entry for entry in entries})
    return Entry(
        name=b"",
        mode=0o42755,
        uid=1000,
        gid=100,
        ino=2,
        mtime_ns=TIME_NS,
        content=ref.id,
        total_files=ref.total_files,
        total_bytes=ref.total_bytes,
    )


def _renamed(entry: Entry, name: bytes) -> Entry:
    import msgspec

    return msgspec.structs.replace(entry, name=name)


def first_draft(writer: Writer) -> SnapshotDraft:
    """Return a root with every kind of entry: snapshot cs-000001."""
    text_blocks = {at: TEXT[at * BLOCK : (at + 1) * BLOCK] for at in range(-(-len(TEXT) // BLOCK))}
    long_xattrs, long_flag = writer.put_xattrs(XATTRS_LONG)
    short_xattrs, _ = writer.put_xattrs(XATTRS_SHORT)
    linked = _file(writer, (77).to_bytes(8, "big"), {0: b"linked\n"}, 7, ino=77)
    links = writer.update_tree(b"", {linked.name: linked}, links=True)
    below = _tree(writer, [_file(writer, ODD_NAME, {0: b"odd\n"}, 4, xattrs=short_xattrs)])
    entries = [
        _file(writer, b"raw.bin", {0: RAW}, BLOCK, flags=long_flag, xattrs=long_xattrs),
        _file(writer, b"train.log", text_blocks, len(TEXT), flags=1),
        _file(writer, b"sparse", {0: b"\1" * BLOCK, 2000: b"\2" * BLOCK}, SPARSE_BLOCKS * BLOCK),
        _file(writer, b"hole", {}, 10 * BLOCK),
        _file(writer, b"empty", {}, 0),
        Entry(name=b"link-a", mode=0o100644, link=77, ino=77),
        Entry(name=b"link-b", mode=0o100644, link=77, ino=77),
        Entry(name=b"to", mode=0o120777, target=b"../elsewhere\xff", mtime_ns=TIME_NS),
        Entry(name=b"fifo", mode=0o10600, mtime_ns=-1),
        Entry(name=b"null", mode=0o20666, rdev=0x103),
        _renamed(below, b"below"),
        Entry(name=b"mnt", mode=0o40755, flags=2),
    ]
    root = RootRecord(
        path=b"/srv/training",
        entry=_tree(writer, entries),
        links=links.id,
        links_files=links.total_files,
        links_bytes=links.total_bytes,
        session="00112233445566778899aabbccddeeff",
        epoch=5,
        mode="tracked",
        excludes_digest="e0",
    )
    return SnapshotDraft(
        id=SnapshotId("cs-000001"),
        time_ns=TIME_NS,
        host="gpu-1",
        roots=(root,),
        tags=("first", "golden"),
        message="every kind of entry",
    )


def put_coded(writer: Writer) -> None:
    """Store the two blocks of the text as planes and as a difference: features of format 2."""
    first, second = TEXT[:BLOCK], TEXT[BLOCK:]
    writer.put_chunks([Content(first, codec=Codec("planes", 2))])
    base = writer.put_chunks([Content(TEXT[: len(second)], codec=Codec("planes", 8))])[0]
    writer.put_chunks([Content(second, codec=Codec("difference", 4, base))])


def put_relative_to_twins(writer: Writer) -> None:
    """Store 4-byte numbers beside 2-byte ones, which no snapshot has.

    In golden-2 they came later than the rest.
    """
    half_floats = struct.pack("<3000e", *(number for (number,) in struct.iter_unpack("<f", WIDE_HALVES)))
    for data, base, widening in (
        (MASTERS, HALVES, Widening(BFLOAT16, -5)),
        (WIDE_HALVES, half_floats, Widening(FLOAT16, 0)),
    ):
        chunk = writer.put_chunks([Content(base, codec=Codec("raw"))])[0]
        writer.put_chunks([Content(data, codec=Codec("twin", 4, twin=TwinBase(chunk, widening)))])


def second_draft(writer: Writer) -> SnapshotDraft:
    """Return two roots, one with a tree of several levels: snapshot cs-000002."""
    many = _tree(writer, [_file(writer, name, {0: b"%s\n" % name}, len(name) + 1) for name in NAMES])
    empty = Entry(name=b"", mode=0o40700)
    roots = (
        RootRecord(path=b"/srv/state", entry=many),
        RootRecord(path=b"/srv/empty", entry=empty, mode="offline"),
    )
    return SnapshotDraft(
        id=SnapshotId("cs-000002"),
        time_ns=TIME_NS + 3600 * 10**9,
        host="gpu-1",
        roots=roots,
        parent="cs-000001",
    )
