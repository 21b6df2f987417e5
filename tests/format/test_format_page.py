"""Tests of docs/format.md with a reader written from that page alone; ciuic gives only expected values."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash
from blake3 import blake3
from support import golden_recipe as recipe
from support.format_page import PageChunks, Stored, enveloped, u32, u64

GOLDEN = sorted(Path(__file__).parent.glob("golden-[0-9]"))


class Golden(PageChunks):
    """Golden repository, read as docs/format.md describes."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.config = self._config()
        seed = int(self.config["seed"], 16)
        super().__init__(self._by_segments(), self._name, seed, self.config["block_size"])

    def _config(self) -> dict[str, Any]:
        first, second = (self.top / "config").read_bytes().split(b"\n")[:2]
        assert second == b"crc32 %08x" % zlib.crc32(first)
        found: dict[str, Any] = json.loads(first)
        assert found["format"] in (1, 2, 3)
        assert found["hash"] == ("blake3-128" if found["format"] == 3 else "xxh3-128")
        assert len(found.get("key", "")) == (64 if found["format"] == 3 else 0)
        return found

    def _name(self, content: bytes) -> bytes:
        """Return the chunk id of this content."""
        if self.config["hash"] == "blake3-128":
            return blake3(content, key=bytes.fromhex(self.config["key"])).digest(16)
        return xxhash.xxh3_128_digest(content, seed=int(self.config["seed"], 16))

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


@pytest.fixture(params=GOLDEN, ids=lambda path: path.name, scope="module")
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.param)


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
    snapshot = enveloped((golden.top / "snapshots" / "cs-000001").read_bytes(), b"CIUICSNP")
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
    snapshot = enveloped((golden.top / "snapshots" / "cs-000002").read_bytes(), b"CIUICSNP")
    root = snapshot["roots"][0]["entry"]
    assert golden.chunks[root[12]][3] > 0, "several levels, or this proves little"
    assert [entry[0] for entry in golden.entries(root[12])] == recipe.NAMES
    marks = enveloped((golden.top / "marks" / "cs-000002").read_bytes(), b"CIUICMRK")
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
