"""Property tests of a remote's bytes: what was altered, cut, moved or forged never gives wrong content."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from ciuic.errors import Damaged, UsageError
from ciuic.remote import object_names
from ciuic.remote.errors import DamagedRemote
from ciuic.remote.objects.model import NoSuchObject, ObjectInfo
from ciuic.remote.pack import (
    HEADER_BYTES,
    MAX_PACK_BYTES,
    MAX_ROWS,
    ROW_BYTES,
    TAIL_GUESS_BYTES,
    TRAILER_BYTES,
    PackLayout,
    RemotePackReader,
    RemotePackWriter,
)
from ciuic.remote.sealing.sealer import MasterKey, Sealer
from ciuic.repository.errors import UnsupportedFormat
from ciuic.repository.identity import Bytes
from ciuic.repository.model import PackRecord
from ciuic.types import ChunkId


class ObjectsInDict:
    """`Objects` over a dict; each object as bytes. Times are 0."""

    url = "memory://test"

    def __init__(self, objects: dict[str, bytes] | None = None) -> None:
        self.objects = {} if objects is None else objects
        self.requests: list[str] = []

    def put(self, name: str, data: Sequence[Bytes]) -> None:
        self.requests.append("put")
        self.objects[name] = b"".join(data)

    def create(self, name: str, data: bytes) -> bool:
        self.requests.append("create")
        return self.objects.setdefault(name, data) is data

    def get(self, name: str) -> bytes:
        self.requests.append("get")
        return self._found(name)

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        self.requests.append("get_ranges")
        data = self._found(name)
        return [data[offset : offset + length] for offset, length in ranges]

    def tail(self, name: str, length: int) -> tuple[int, bytes]:
        self.requests.append("tail")
        data = self._found(name)
        return len(data), data[max(0, len(data) - length) :]

    def info(self, name: str) -> ObjectInfo | None:
        self.requests.append("info")
        return ObjectInfo(name, len(self.objects[name]), 0) if name in self.objects else None

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        self.requests.append("list")
        for name in sorted(self.objects):
            if name.startswith(prefix) and name > after:
                yield ObjectInfo(name, len(self.objects[name]), 0)

    def delete(self, names: Iterable[str]) -> None:
        self.requests.append("delete")
        for name in names:
            self.objects.pop(name, None)

    def reconnect(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _found(self, name: str) -> bytes:
        try:
            return self.objects[name]
        except KeyError:
            raise NoSuchObject(name) from None


REMOTE_ID = b"r" * 16
KEY = MasterKey(b"k" * 32)
SEALERS = {"sealed": Sealer(REMOTE_ID, KEY), "clear": Sealer(REMOTE_ID, None)}
_BOTH = pytest.mark.parametrize("kind", SEALERS)
_ANY_ID = st.binary(min_size=16, max_size=16).filter(any)


class Chunk(NamedTuple):
    record: PackRecord
    stored: bytes


def chunk(stored: bytes, *, id_: bytes = b"i" * 16, flags: int = 0, raw: int = 0, base: bytes = b"") -> Chunk:
    record = PackRecord(
        ChunkId(id_),
        99,
        len(stored),
        raw if flags else len(stored),
        flags,
        xxhash.xxh3_64_intdigest(stored),
        ChunkId(base) if base else b"",
    )
    return Chunk(record, stored)


@st.composite
def chunks(draw: st.DrawFn) -> Chunk:
    stored = draw(st.binary(max_size=200) | st.integers(1, 40_000).map(os.urandom))
    flags = draw(st.sampled_from((0, 1, 2, 6)))
    base = draw(_ANY_ID) if flags == 6 else b""
    return chunk(stored, id_=draw(_ANY_ID), flags=flags, raw=draw(st.integers(0, 1 << 24)), base=base)


def packed(sealer: Sealer, added: list[Chunk], ref: str) -> bytes:
    writer = RemotePackWriter(sealer, ref, capacity_bytes=2 << 20)
    for one in added:
        assert writer.add(one.record, one.stored) is not None
    size = writer.size_bytes
    parts = writer.finish()
    assert sum(map(len, parts)) == size == writer.size_bytes
    return b"".join(parts)


def contents(reader: RemotePackReader, data: bytes) -> list[Chunk]:
    """Read a pack as a restore does: its table from the end, then ranges."""
    objects = ObjectsInDict({reader.name: data})
    records = reader.read_table(objects)
    found = reader.read_records(objects, records)
    return [
        Chunk(structs.replace(record, offset=99), stored)
        for record, stored in zip(records, found, strict=True)
    ]


def refused(read: Callable[[], object]) -> bool:
    """Return whether the read is refused with words; raise anything else."""
    try:
        read()
    except (DamagedRemote, UnsupportedFormat):
        return True
    return False


@_BOTH
@given(added=st.lists(chunks(), min_size=1, max_size=12), pack_kind=st.sampled_from(("data", "meta")))
def test_packs_are_read_as_they_were_written(kind: str, added: list[Chunk], pack_kind: str) -> None:
    """Every record and its stored bytes come out of a pack as they went in."""
    sealer = SEALERS[kind]
    ref = object_names.new_pack_ref("data" if pack_kind == "data" else "meta")
    data = packed(sealer, added, ref)
    reader = RemotePackReader(sealer, ref)
    assert contents(reader, data) == added
    assert [structs.replace(record, offset=99) for record in reader.check(data)] == [
        one.record for one in added
    ]
    out = bytearray(max(len(one.stored) for one in added))
    tag_bytes = reader.layout.seal.tag_bytes
    for record, one in zip(reader.check(data), added, strict=True):
        with memoryview(out)[: record.stored_bytes] as view:
            sealed = data[record.offset : record.offset + record.stored_bytes + tag_bytes]
            reader.layout.seal.open_into(record.offset, sealed, view)
            assert view == one.stored


SMALL = [chunk(b"first", id_=b"1" * 16), chunk(b"other", id_=b"2" * 16), chunk(b"", flags=1, id_=b"3" * 16)]
REF = object_names.pack_ref("data", bytes(range(16)))


@_BOTH
def test_every_flipped_bit_of_a_pack_is_refused(kind: str) -> None:
    """A check notices each bit that flips; a restore refuses the pack or reads the right content."""
    sealer = SEALERS[kind]
    data = packed(sealer, SMALL, REF)
    reader = RemotePackReader(sealer, REF)
    for at in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[at] ^= 1 << bit
            altered = bytes(flipped)
            assert refused(lambda altered=altered: reader.check(altered)), (at, bit)  # type: ignore[misc]
            try:
                assert contents(reader, altered) == SMALL, (at, bit)
            except (DamagedRemote, UnsupportedFormat):
                pass
            else:
                # A restore does not read the header, which the pack's name determines.
                assert at < HEADER_BYTES, (at, bit)


@_BOTH
def test_every_cut_of_a_pack_is_refused(kind: str) -> None:
    """A pack that was cut, extended or emptied is refused at every length."""
    sealer = SEALERS[kind]
    data = packed(sealer, SMALL, REF)
    reader = RemotePackReader(sealer, REF)
    for length in range(len(data)):
        for altered in (
            data[:length],
            data[: length - 1] + data[length:],
            data[:length] + b"\0" + data[length:],
        ):
            if altered == data:
                continue
            assert refused(lambda altered=altered: reader.check(altered)), length  # type: ignore[misc]
            try:
                assert contents(reader, altered) == SMALL, length
            except (DamagedRemote, UnsupportedFormat):
                continue
            raise AssertionError(length)


def forged(layout: PackLayout, data: bytes, table: bytes, count: int, offset: int) -> bytes:
    """Return the pack with this table as it is stored and a right checksum, which needs no key."""
    trailer = struct.pack("<8sIIQ", b"CIUICRPT", count, 0, offset)
    checksum = xxhash.xxh3_64_intdigest(layout.header + table + trailer)
    return data[:offset] + table + trailer + struct.pack("<Q", checksum)


def test_moved_records_and_cut_tables_do_not_open() -> None:
    """In a sealed pack, records that changed places and tables with fewer rows are refused.

    Also if whoever did it wrote a checksum that fits.
    """
    sealer = SEALERS["sealed"]
    data = packed(sealer, SMALL, REF)
    reader = RemotePackReader(sealer, REF)
    first, second, _ = reader.check(data)
    length = first.stored_bytes + 16
    one, two = data[first.offset : first.offset + length], data[second.offset : second.offset + length]
    swapped = data[:HEADER_BYTES] + two + one + data[second.offset + length :]
    assert len(swapped) == len(data)
    assert refused(lambda: reader.check(swapped))
    assert refused(lambda: contents(reader, swapped))
    for record, sealed in ((first, two), (second, one)):
        assert refused(lambda r=record, s=sealed: reader.layout.open_record(r.offset, 5, s))  # type: ignore[misc]
    trailer = reader.layout.decode_trailer(data, len(data))
    table = data[trailer.table_offset : -TRAILER_BYTES]
    assert contents(reader, forged(reader.layout, data, table, 3, trailer.table_offset)) == SMALL
    for count in (1, 2):
        cut = table[: count * ROW_BYTES + 16]
        assert refused(
            lambda c=cut, n=count: contents(reader, forged(reader.layout, data, c, n, trailer.table_offset))
        )  # type: ignore[misc]
        cut = table[: count * ROW_BYTES] + table[-16:]
        assert refused(
            lambda c=cut, n=count: contents(reader, forged(reader.layout, data, c, n, trailer.table_offset))
        )  # type: ignore[misc]


@_BOTH
def test_a_pack_opens_only_under_its_name_and_key(kind: str) -> None:
    """A pack under another name or kind, of another remote, or with another key is refused."""
    data = packed(SEALERS[kind], SMALL, REF)
    master = KEY if kind == "sealed" else None
    others = [
        (SEALERS[kind], object_names.pack_ref("data", bytes(16))),
        (SEALERS[kind], "m" + REF[1:]),
        (Sealer(b"R" * 16, master), REF),
        (SEALERS["clear" if kind == "sealed" else "sealed"], REF),
        (Sealer(REMOTE_ID, MasterKey(bytes(32))), REF),
    ]
    for sealer, ref in others:
        reader = RemotePackReader(sealer, ref)
        assert refused(lambda reader=reader: reader.check(data))  # type: ignore[misc]
        assert refused(lambda reader=reader: contents(reader, data))  # type: ignore[misc]


@pytest.mark.parametrize(
    ("count", "offset"),
    [(0, 64), (1, 64), (MAX_ROWS + 1, 64), (0xFFFFFFFF, 64), (3, 0), (3, 1 << 63), (3, 2**64 - 1), (2, 100)],
)
def test_a_hostile_end_is_refused_before_anything_is_read(count: int, offset: int) -> None:
    """A trailer that promises too many rows, or a table elsewhere, allocates and reads nothing."""
    sealer = SEALERS["clear"]
    data = packed(sealer, SMALL, REF)
    end = struct.pack("<8sIIQQ", b"CIUICRPT", count, 0, offset, 0)
    objects = ObjectsInDict({object_names.pack_name(REF): data[:-TRAILER_BYTES] + end})
    reader = RemotePackReader(sealer, REF)
    with pytest.raises(DamagedRemote):
        reader.read_table(objects)
    assert objects.requests == ["tail", "get_ranges"] * 3, (
        "the end, and the header to name a later version; each again"
    )


def _row(**fields: object) -> bytes:
    row = {"id": b"x" * 16, "offset": 64, "stored": 5, "raw": 5, "flags": 0, "zero": 0, "base": bytes(16)}
    return struct.pack("<16sQIIII16sQ", *{**row, **fields}.values(), 0)


@pytest.mark.parametrize(
    "fields",
    [
        {"offset": 65},
        {"offset": 2**64 - 1},
        {"stored": 6},
        {"stored": 4, "raw": 4},
        {"stored": 6, "raw": 6},
        {"stored": (16 << 20) + 1, "flags": 1},
        {"stored": 2**32 - 1},
        {"raw": (16 << 20) + 1, "flags": 1},
        {"raw": 4},
        {"flags": 3},
        {"flags": 4},
        {"flags": 6},
        {"flags": 8},
        {"flags": 1 << 31},
        {"zero": 1},
        {"base": b"b" * 16},
        {"flags": 1, "base": b"b" * 16},
    ],
    ids=str,
)
def test_an_impossible_row_is_refused(fields: dict[str, object]) -> None:
    """Rows whose fields contradict each other are refused, also with a right checksum."""
    sealer = SEALERS["clear"]
    layout = PackLayout(sealer, REF, object_names.pack_name(REF))
    data = layout.header + b"12345"
    reader = RemotePackReader(sealer, REF)
    whole = forged(layout, data, _row(**fields), 1, 69)
    assert refused(lambda: reader.read_table(ObjectsInDict({reader.name: whole})))


@pytest.mark.parametrize(
    ("offsets", "valid"),
    [((64, 69), True), ((69, 69), False), ((64, 64), False), ((69, 64), False), ((66, 69), False)],
)
def test_records_cover_a_pack_without_overlap(offsets: tuple[int, int], valid: bool) -> None:
    """Rows that leave a gap or overlap are refused; the rows of these tests are valid without a change."""
    layout = PackLayout(SEALERS["clear"], REF, object_names.pack_name(REF))
    rows = b"".join(_row(offset=offset) for offset in offsets)
    whole = forged(layout, layout.header + b"1234512345", rows, 2, 74)
    reader = RemotePackReader(SEALERS["clear"], REF)
    assert refused(lambda: reader.read_table(ObjectsInDict({reader.name: whole}))) is not valid


@_BOTH
def test_a_table_has_a_limit(kind: str) -> None:
    """A pack of the largest size with more rows than the page allows is refused, one with as many is not."""
    layout = PackLayout(SEALERS[kind], REF, object_names.pack_name(REF))
    for rows, valid in ((MAX_ROWS, True), (MAX_ROWS + 1, False)):
        size = 64 + rows * ROW_BYTES + layout.seal.tag_bytes + TRAILER_BYTES
        tail = struct.pack("<8sIIQQ", b"CIUICRPT", rows, 0, 64, 0)
        assert refused(lambda tail=tail, size=size: layout.decode_trailer(tail, size)) is not valid  # type: ignore[misc]
        more = MAX_PACK_BYTES + 1
        tail = struct.pack("<8sIIQQ", b"CIUICRPT", 1, 0, more - layout.seal.tag_bytes - 96, 0)
        assert refused(lambda tail=tail, size=more: layout.decode_trailer(tail, size))  # type: ignore[misc]


@_BOTH
def test_a_long_table_takes_a_second_request(kind: str) -> None:
    """The table of a pack with many small records is read completely, in two requests."""
    sealer = SEALERS[kind]
    added = [chunk(b"%d" % n, id_=b"%016d" % n) for n in range(TAIL_GUESS_BYTES // ROW_BYTES + 5)]
    data = packed(sealer, added, REF)
    objects = ObjectsInDict({object_names.pack_name(REF): data})
    records = RemotePackReader(sealer, REF).read_table(objects)
    assert [record.id for record in records] == [one.record.id for one in added]
    assert objects.requests == ["tail", "get_ranges"]


def test_a_later_version_of_a_pack_is_named() -> None:
    """A pack of a later version is no damage, also where only its end is read."""
    data = bytearray(packed(SEALERS["sealed"], SMALL, REF))
    data[8] = 2
    reader = RemotePackReader(SEALERS["sealed"], REF)
    with pytest.raises(UnsupportedFormat, match="version 2"):
        reader.check(bytes(data))
    data[-1] ^= 1
    with pytest.raises(UnsupportedFormat, match="version 2"):
        reader.read_table(ObjectsInDict({reader.name: bytes(data)}))


@_BOTH
def test_a_full_pack_takes_no_more(kind: str) -> None:
    """A record that does not fit is refused, the pack is as it was, and never larger than asked for."""
    writer = RemotePackWriter(SEALERS[kind], REF, capacity_bytes=4096)
    one = chunk(os.urandom(700))
    while writer.add(one.record, one.stored) is not None:
        pass
    count, size = len(writer.records), writer.size_bytes
    assert not writer.fits(700)
    small = chunk(b"")
    while writer.add(small.record, small.stored) is not None:
        count += 1
    assert size <= writer.size_bytes == len(writer.finish()[0]) <= 4096
    assert len(RemotePackReader(SEALERS[kind], REF).check(bytes(writer.finish()[0]))) == count
    with pytest.raises(UsageError, match="finished"):
        writer.add(small.record, small.stored)


def test_a_buffer_is_used_again() -> None:
    """A second pack in the buffer of the first has nothing of it."""
    first = RemotePackWriter(SEALERS["clear"], REF, capacity_bytes=1 << 16)
    first.add(chunk(b"a" * 20_000).record, b"a" * 20_000)
    first.finish()
    other = object_names.new_pack_ref("data")
    second = RemotePackWriter(SEALERS["clear"], other, buffer=first.buffer)
    second.add(SMALL[0].record, SMALL[0].stored)
    data = b"".join(second.finish())
    assert contents(RemotePackReader(SEALERS["clear"], other), data) == SMALL[:1]
    assert b"aa" not in data


@pytest.mark.parametrize("stored", [b"firsT", b"first!", b""])
def test_what_does_not_match_its_record_is_not_sent(stored: bytes) -> None:
    """Stored bytes that decayed on the local disk are refused before they are sealed."""
    writer = RemotePackWriter(SEALERS["sealed"], REF, capacity_bytes=4096)
    with pytest.raises(ValueError, match="do not match"):
        writer.add(SMALL[0].record, stored)
    assert writer.records == []
    with pytest.raises(ValueError, match="no record"):
        writer.finish()


@_BOTH
@given(content=st.binary(max_size=300), name=st.sampled_from(("gc/0000000001", "manifests/é")))
def test_objects_open_as_they_were_sealed(kind: str, content: bytes, name: str) -> None:
    """An object's content comes back, and each sealing gives other bytes."""
    sealer = SEALERS[kind]
    data = sealer.seal(name, content)
    assert sealer.open(name, data) == content
    assert sealer.seal(name, content) != data


@_BOTH
def test_altered_and_moved_objects_do_not_open(kind: str) -> None:
    """Each flipped bit, each cut, another name, remote, key or kind of remote is refused."""
    sealer = SEALERS[kind]
    data = sealer.seal("w/a/1", b"content of it")
    for at in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[at] ^= 1 << bit
            assert refused(lambda flipped=flipped: sealer.open("w/a/1", bytes(flipped))), (at, bit)  # type: ignore[misc]
        assert refused(lambda at=at: sealer.open("w/a/1", data[:at])), at  # type: ignore[misc]
    master = KEY if kind == "sealed" else None
    others = [
        (sealer, "w/a/2"),
        (Sealer(b"R" * 16, master), "w/a/1"),
        (SEALERS["clear" if kind == "sealed" else "sealed"], "w/a/1"),
        (Sealer(REMOTE_ID, MasterKey(bytes(32))), "w/a/1"),
    ]
    for other, name in others:
        with pytest.raises(Damaged, match=name):
            other.open(name, data)


@settings(max_examples=20)
@given(seed=st.integers(0, 1 << 30))
def test_sealed_bytes_have_nothing_of_the_plaintext(seed: int) -> None:
    """No run of 64 bytes and no name of the content is in sealed packs and objects; in clear ones both are."""
    words = b" ".join(b"/srv/training/run-%d/weights-%d.safetensors" % (seed, n) for n in range(200))
    plain = [words, bytes(5000), os.urandom(3000)]
    for kind, sealer in SEALERS.items():
        added = [chunk(one, id_=bytes([65 + n]) * 16) for n, one in enumerate(plain)]
        stored = packed(sealer, added, object_names.new_pack_ref("data"))
        stored += sealer.seal("manifests/a", words)
        runs = {one[at : at + 64] for one in plain for at in range(len(one) - 63)}
        found = any(stored[at : at + 64] in runs for at in range(HEADER_BYTES, len(stored) - 63))
        assert found is (kind == "clear")
        for name in (b"safetensors", b"/srv/training", b"run-%d" % seed, b"A" * 16):
            assert (name in stored) is (kind == "clear")


def test_no_two_records_have_one_nonce(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every record and the table of a pack are sealed at offsets of their own, empty records too."""
    used: list[int] = []
    from ciuic.remote.sealing import sealer as module

    nonce = module._nonce

    def noted(offset: int) -> bytes:
        used.append(offset)
        return nonce(offset)

    monkeypatch.setattr(module, "_nonce", noted)
    packed(SEALERS["sealed"], [chunk(b"", id_=b"%016d" % n) for n in range(5)] + SMALL, REF)
    assert len(used) == 9
    assert len(set(used)) == 9
