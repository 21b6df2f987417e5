"""Tests of docs/format.md with a reader written from that page alone; ciuic gives only expected values."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import xxhash
import zstandard
from blake3 import blake3
from support import golden_recipe as recipe

HOLE = bytes(16)
GOLDEN = sorted(Path(__file__).parent.glob("golden-*"))


def u32(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "little")


def u64(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 8], "little")


class Stored(NamedTuple):
    """Chunk as a record stores it."""

    payload: bytes
    length: int
    flags: int
    base: bytes


def wide(base: bytes, at: int, kind: int) -> int:
    """Return the float32 whose upper 16 bits are given."""
    if not 0 <= at < len(base) // 2:
        return 0
    half = int.from_bytes(base[2 * at : 2 * at + 2], "little")
    if kind == 1:
        return half << 16
    if half & 0x7C00 == 0x7C00:
        return half >> 15 << 31 | 255 << 23 | (half & 1023) << 13
    return int.from_bytes(struct.pack("<f", *struct.unpack("<e", half.to_bytes(2, "little"))), "little")


def from_planes(payload: bytes, length: int, base: bytes | None) -> bytes:
    """Decode byte planes number by number."""
    width = payload[0]
    assert width in (2, 4, 8)
    kind = payload[1]
    assert payload[2:4] == bytes(2)
    assert kind == 0 or (kind in (1, 2) and width == 4 and base is not None)
    count, rest = divmod(length, width)
    at = 4 + 4 * width + (4 if kind else 0)
    at_start = 4 + 4 * width
    planes = []
    for number in range(width):
        packed = payload[at : at + u32(payload, 4 + 4 * number)]
        at += len(packed)
        planes.append(packed if len(packed) == count else zstandard.ZstdDecompressor().decompress(packed))
        assert len(planes[-1]) == count
    assert len(payload) - at == rest
    bits = 8 * width
    content = bytearray()
    for number, digits in enumerate(zip(*planes, strict=True)):
        value = int.from_bytes(bytes(digits), "little")
        if kind:
            assert base is not None
            start = int.from_bytes(payload[at_start : at_start + 4], "little", signed=True)
            value += wide(base, start + number, kind) - (0x8000 if kind == 1 else 0x1000)
            content += (value % 2**32).to_bytes(4, "little")
            continue
        if base is not None:
            change = value // 2 if value % 2 == 0 else -(value + 1) // 2
            before = int.from_bytes(base[number * width : (number + 1) * width], "little")
            turned = (before << 1 | before >> (bits - 1)) % 2**bits
            value = (turned + change) % 2**bits
        content += (value >> 1 | (value & 1) << (bits - 1)).to_bytes(width, "little")
    return bytes(content) + payload[at:]


class Golden:
    """Golden repository, read as docs/format.md describes."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.config = self._config()
        self.seed = int(self.config["seed"], 16)
        self.stored = self._by_segments()
        self.chunks = {id_: self.content(id_) for id_ in self.stored}

    def _config(self) -> dict[str, Any]:
        first, second = (self.top / "config").read_bytes().split(b"\n")[:2]
        assert second == b"crc32 %08x" % zlib.crc32(first)
        found: dict[str, Any] = json.loads(first)
        assert found["format"] in (1, 2, 3)
        assert found["hash"] == ("blake3-128" if found["format"] == 3 else "xxh3-128")
        assert len(found.get("key", "")) == (64 if found["format"] == 3 else 0)
        return found

    def content(self, id_: bytes) -> bytes:
        payload, length, flags, base = self.stored[id_]
        if flags & 2:
            content = from_planes(payload, length, self.content(base) if flags & 4 else None)
        else:
            content = zstandard.ZstdDecompressor().decompress(payload) if flags == 1 else payload
        assert len(content) == length
        assert self.name_of(content) == id_
        return content

    def name_of(self, content: bytes) -> bytes:
        """Return the chunk id of this content."""
        if self.config["hash"] == "blake3-128":
            return blake3(content, key=bytes.fromhex(self.config["key"])).digest(16)
        return xxhash.xxh3_128_digest(content, seed=self.seed)

    def records(self, pack: bytes, at: int, count: int) -> Iterator[tuple[bytes, Stored]]:
        """Return (id, stored bytes) of the records at an offset."""
        waiting: tuple[bytes, Stored] | None = None
        for start in range(at, at + 48 * count, 48):
            id_, offset, stored, length, flags, zero, checksum = struct.unpack_from("<16sQIIIIQ", pack, start)
            payload = pack[offset : offset + stored]
            assert zero == 0
            assert checksum == xxhash.xxh3_64_intdigest(payload)
            if not flags and stored >= 65536:
                assert offset % 4096 == 0
            assert flags in ((8,) if waiting else (0, 1) if self.config["format"] == 1 else (0, 1, 2, 6))
            if waiting:
                yield waiting[0], waiting[1]._replace(base=id_)
                waiting = None
            elif flags == 6:
                waiting = id_, Stored(payload, length, flags, b"")
            else:
                yield id_, Stored(payload, length, flags, b"")
        assert waiting is None

    def _by_segments(self) -> dict[bytes, Stored]:
        found: dict[bytes, Stored] = {}
        for path in sorted((self.top / "packs").iterdir()):
            pack = path.read_bytes()
            assert pack[:8] == b"CIUICPAK"
            assert struct.unpack_from("<HBBIQ", pack, 8)[4] == int(path.stem, 16)
            assert pack[11] == (2 if self.config["format"] == 3 else 1)
            assert pack[24:40].hex() == self.config["id"]
            assert u64(pack, 56) == xxhash.xxh3_64_intdigest(pack[:56])
            at = 4096
            while pack[at : at + 8] == b"CIUICSEG":
                count = u32(pack, at + 8)
                table_end = at + 32 + 48 * count
                assert u64(pack, at + 16) == at
                assert u64(pack, table_end) == xxhash.xxh3_64_intdigest(pack[at:table_end])
                found.update(self.records(pack, at + 32, count))
                at = -(-(table_end + 8 + u64(pack, at + 24)) // 4096) * 4096
        return found

    def by_footers(self) -> dict[bytes, Stored]:
        found: dict[bytes, Stored] = {}
        for path in (self.top / "packs").iterdir():
            pack = path.read_bytes()
            if pack[-32:-24] == b"CIUICFOO":
                offset, count = u64(pack, len(pack) - 16), u32(pack, len(pack) - 24)
                assert u64(pack, len(pack) - 8) == xxhash.xxh3_64_intdigest(pack[offset:-8] + bytes(8))
                found.update(self.records(pack, offset, count))
        return found

    def ends_node(self, name: bytes, level: int) -> bool:
        digest = xxhash.xxh3_64_intdigest(name, seed=self.seed)
        return level <= 8 and not digest & ((1 << 6 * (level + 1)) - 1)

    def entries(self, tree: bytes, kind: bytes = b"d", last_of_level: bool = True) -> Iterator[list[Any]]:
        if not tree:
            return
        node = self.chunks[tree]
        assert node[:3] == b"CT" + kind
        items = msgspec.msgpack.decode(node[4:])
        level = node[3]
        names = [item[0] for item in items]
        assert names == sorted(set(names))
        assert not any(self.ends_node(name, level) for name in names[:-1])
        assert last_of_level or self.ends_node(names[-1], level)
        if level == 0:
            yield from items
            return
        for item in items:
            below = list(self.entries(item[1], kind, last_of_level and item is items[-1]))
            assert below[-1][0] == item[0]
            yield from below

    def blocks(self, content: bytes, height: int, first: int = 0) -> Iterator[tuple[int, bytes]]:
        if not content or content == HOLE:
            return
        if height == 0:
            yield first, self.chunks[content]
            return
        node = self.chunks[content]
        assert node[:4] == b"CBM" + bytes([height])
        assert node[-16:] != HOLE
        for number in range((len(node) - 4) // 16):
            child = node[4 + 16 * number : 20 + 16 * number]
            yield from self.blocks(child, height - 1, first + number * 1024 ** (height - 1))

    def content_of(self, entry: list[Any]) -> bytes:
        data = bytearray(entry[6])
        for number, block in self.blocks(entry[12], entry[13]):
            data[number * recipe.BLOCK : number * recipe.BLOCK + len(block)] = block
        return bytes(data)


@pytest.fixture(params=GOLDEN, ids=lambda path: path.name, scope="module")
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.param)


def enveloped(path: Path, magic: bytes) -> dict[str, Any]:
    data = path.read_bytes()
    assert data[:8] == magic
    assert u32(data, 8) == 1
    assert u64(data, 12) == len(data) - 36
    assert data[20:36] == xxhash.xxh3_128_digest(data[:20] + bytes(16) + data[36:])
    payload: dict[str, Any] = msgspec.msgpack.decode(data[36:])
    return payload


@pytest.mark.parametrize("name", ["golden-2", "golden-3"])
def test_later_formats_have_planes_and_differences(name: str) -> None:
    """The golden repositories from format 2 on have byte planes and differences, so their tests cover them."""
    found = Golden(Path(__file__).parent / name)
    assert {stored.flags for stored in found.stored.values()} == {0, 1, 2, 6}
    assert {stored.payload[1] for stored in found.stored.values() if stored.flags == 6} == {0, 1, 2}
    assert {recipe.MASTERS, recipe.WIDE_HALVES} <= set(found.chunks.values())


def test_a_sealed_pack_can_be_read_from_its_footer(golden: Golden) -> None:
    """A sealed pack can be read from its footer alone, with the same result."""
    by_footer = golden.by_footers()
    assert by_footer
    assert by_footer.items() <= golden.stored.items()


def test_the_snapshot_can_be_read_by_the_page(golden: Golden) -> None:
    """Entries, contents, links, attributes and totals of the first golden snapshot match the recipe."""
    snapshot = enveloped(golden.top / "snapshots" / "cs-000001", b"CIUICSNP")
    assert (snapshot["id"], snapshot["time_ns"], snapshot["repository"]) == (
        "cs-000001",
        recipe.TIME_NS,
        golden.config["id"],
    )
    root = snapshot["roots"][0]
    assert root["path"] == b"/srv/training"
    found = {entry[0]: entry for entry in golden.entries(root["entry"][12])}
    assert golden.content_of(found[b"raw.bin"]) == recipe.RAW
    assert golden.content_of(found[b"train.log"]) == recipe.TEXT
    assert found[b"train.log"][10] == 1
    sparse = found[b"sparse"]
    assert [(number, block[:1]) for number, block in golden.blocks(sparse[12], sparse[13])] == [
        (0, b"\1"),
        (2000, b"\2"),
    ]
    assert found[b"raw.bin"][10] == 4
    listed = golden.chunks[found[b"raw.bin"][15][0][1]]
    assert listed[:4] == b"CX\0\0"
    assert [tuple(pair) for pair in msgspec.msgpack.decode(listed[4:])] == list(recipe.XATTRS_LONG)
    links = {int.from_bytes(entry[0], "big"): entry for entry in golden.entries(root["links"], b"l")}
    assert golden.content_of(links[found[b"link-a"][11]]) == b"linked\n"
    assert found[b"to"][14] == b"../elsewhere\xff"
    assert (snapshot["files"], root["entry"][16], root["links_files"]) == (10, 9, 1)


def test_a_large_directory_is_split_by_the_documented_rule(golden: Golden) -> None:
    """The second snapshot's 400 names come out in order, through nodes whose borders follow the rule."""
    snapshot = enveloped(golden.top / "snapshots" / "cs-000002", b"CIUICSNP")
    root = snapshot["roots"][0]["entry"]
    assert golden.chunks[root[12]][3] > 0, "several levels, or this proves little"
    assert [entry[0] for entry in golden.entries(root[12])] == recipe.NAMES
    marks = enveloped(golden.top / "marks" / "cs-000002", b"CIUICMRK")
    assert marks == {"id": "cs-000002", "held": True, "hold_reason": "kept", "tags": ["marked"]}


@pytest.mark.parametrize(
    ("blocks_in_segment", "size"), [(1, 266_240), (16, 4_198_400)], ids=["one block", "sixteen"]
)
def test_worked_sizes_are_right(tmp_path: Path, blocks_in_segment: int, size: int) -> None:
    """The segment sizes in the page's examples are what a writer writes."""
    import os

    from ciuic.repository import Repository

    with Repository.create(tmp_path / "r") as repository, repository.writer() as writer:
        for _ in range(blocks_in_segment):
            writer.put_chunk(os.urandom(262144))
        writer.flush()
        assert writer.new_bytes == 4096 + size
