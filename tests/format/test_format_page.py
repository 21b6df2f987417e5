"""A reader written from docs/format.md alone: nothing of ciuic is imported here but the recipe of the
expected values.
"""

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
import zstandard
from support import golden_recipe as recipe

TOP = Path(__file__).parent / "golden-1"
HOLE = bytes(16)


def config() -> dict[str, Any]:
    first, second = (TOP / "config").read_bytes().split(b"\n")[:2]
    assert second == b"crc32 %08x" % zlib.crc32(first)
    found: dict[str, Any] = json.loads(first)
    return found


SEED = int(config()["seed"], 16)


def u32(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "little")


def u64(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 8], "little")


def records(pack: bytes, at: int, count: int) -> Iterator[tuple[bytes, bytes]]:
    """(id, content) of records at this place."""
    for start in range(at, at + 48 * count, 48):
        id_, offset, stored, length, flags, zero, checksum = struct.unpack_from("<16sQIIIIQ", pack, start)
        payload = pack[offset : offset + stored]
        assert zero == 0
        assert checksum == xxhash.xxh3_64_intdigest(payload)
        if not flags and stored >= 65536:
            assert offset % 4096 == 0
        content = zstandard.ZstdDecompressor().decompress(payload) if flags == 1 else payload
        assert len(content) == length
        assert xxhash.xxh3_128_digest(content, seed=SEED) == id_
        yield id_, content


def chunks_by_segments() -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    for path in sorted((TOP / "packs").iterdir()):
        pack = path.read_bytes()
        assert pack[:8] == b"CIUICPAK"
        assert struct.unpack_from("<HBBIQ", pack, 8)[4] == int(path.stem, 16)
        assert pack[24:40].hex() == config()["id"]
        assert u64(pack, 56) == xxhash.xxh3_64_intdigest(pack[:56])
        at = 4096
        while pack[at : at + 8] == b"CIUICSEG":
            count = u32(pack, at + 8)
            table_end = at + 32 + 48 * count
            assert u64(pack, at + 16) == at
            assert u64(pack, table_end) == xxhash.xxh3_64_intdigest(pack[at:table_end])
            found.update(records(pack, at + 32, count))
            at = -(-(table_end + 8 + u64(pack, at + 24)) // 4096) * 4096
    return found


def chunks_by_footers() -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    for path in (TOP / "packs").iterdir():
        pack = path.read_bytes()
        if pack[-32:-24] == b"CIUICFOO":
            offset, count = u64(pack, len(pack) - 16), u32(pack, len(pack) - 24)
            assert u64(pack, len(pack) - 8) == xxhash.xxh3_64_intdigest(pack[offset:-8] + bytes(8))
            found.update(records(pack, offset, count))
    return found


CHUNKS = chunks_by_segments()


def enveloped(path: Path, magic: bytes) -> dict[str, Any]:
    data = path.read_bytes()
    assert data[:8] == magic
    assert u32(data, 8) == 1
    assert u64(data, 12) == len(data) - 36
    assert data[20:36] == xxhash.xxh3_128_digest(data[:20] + bytes(16) + data[36:])
    payload: dict[str, Any] = msgspec.msgpack.decode(data[36:])
    return payload


def ends_node(name: bytes, level: int) -> bool:
    return level <= 8 and not xxhash.xxh3_64_intdigest(name, seed=SEED) & ((1 << 6 * (level + 1)) - 1)


def entries(tree: bytes, kind: bytes = b"d", last_of_level: bool = True) -> Iterator[list[Any]]:
    if not tree:
        return
    node = CHUNKS[tree]
    assert node[:3] == b"CT" + kind
    items = msgspec.msgpack.decode(node[4:])
    level = node[3]
    names = [item[0] for item in items]
    assert names == sorted(set(names))
    assert not any(ends_node(name, level) for name in names[:-1])
    assert last_of_level or ends_node(names[-1], level)
    if level == 0:
        yield from items
        return
    for item in items:
        below = list(entries(item[1], kind, last_of_level and item is items[-1]))
        assert below[-1][0] == item[0]
        yield from below


def blocks(content: bytes, height: int, first: int = 0) -> Iterator[tuple[int, bytes]]:
    if not content or content == HOLE:
        return
    if height == 0:
        yield first, CHUNKS[content]
        return
    node = CHUNKS[content]
    assert node[:4] == b"CBM" + bytes([height])
    assert node[-16:] != HOLE
    for number in range((len(node) - 4) // 16):
        child = node[4 + 16 * number : 20 + 16 * number]
        yield from blocks(child, height - 1, first + number * 1024 ** (height - 1))


def content_of(entry: list[Any]) -> bytes:
    data = bytearray(entry[6])
    for number, block in blocks(entry[12], entry[13]):
        data[number * recipe.BLOCK : number * recipe.BLOCK + len(block)] = block
    return bytes(data)


def test_footers_list_what_segments_hold() -> None:
    """A sealed pack can be read from its footer alone, with the same result."""
    by_footer = chunks_by_footers()
    assert by_footer
    assert by_footer.items() <= CHUNKS.items()


def test_the_snapshot_can_be_read_by_the_page() -> None:
    """Entries, contents, links, attributes and totals of the first golden snapshot come out as the recipe has
    them.
    """
    snapshot = enveloped(TOP / "snapshots" / "cs-000001", b"CIUICSNP")
    assert (snapshot["id"], snapshot["time_ns"], snapshot["repository"]) == (
        "cs-000001",
        recipe.TIME_NS,
        config()["id"],
    )
    root = snapshot["roots"][0]
    assert root["path"] == b"/srv/training"
    found = {entry[0]: entry for entry in entries(root["entry"][12])}
    assert content_of(found[b"raw.bin"]) == recipe.RAW
    assert content_of(found[b"train.log"]) == recipe.TEXT
    assert found[b"train.log"][10] == 1
    sparse = found[b"sparse"]
    assert [(number, block[:1]) for number, block in blocks(sparse[12], sparse[13])] == [
        (0, b"\1"),
        (2000, b"\2"),
    ]
    assert found[b"raw.bin"][10] == 4
    listed = CHUNKS[found[b"raw.bin"][15][0][1]]
    assert listed[:4] == b"CX\0\0"
    assert [tuple(pair) for pair in msgspec.msgpack.decode(listed[4:])] == list(recipe.XATTRS_LONG)
    links = {int.from_bytes(entry[0], "big"): entry for entry in entries(root["links"], b"l")}
    assert content_of(links[found[b"link-a"][11]]) == b"linked\n"
    assert found[b"to"][14] == b"../elsewhere\xff"
    assert (snapshot["files"], root["entry"][16], root["links_files"]) == (10, 9, 1)


def test_a_large_directory_is_cut_where_the_page_says() -> None:
    """The second snapshot's 400 names come out in order, through nodes whose borders follow the rule."""
    snapshot = enveloped(TOP / "snapshots" / "cs-000002", b"CIUICSNP")
    root = snapshot["roots"][0]["entry"]
    assert CHUNKS[root[12]][3] > 0, "several levels, or this proves little"
    assert [entry[0] for entry in entries(root[12])] == recipe.NAMES
    marks = enveloped(TOP / "marks" / "cs-000002", b"CIUICMRK")
    assert marks == {"id": "cs-000002", "held": True, "hold_reason": "kept", "tags": ["marked"]}


@pytest.mark.parametrize(
    ("blocks_in_segment", "size"), [(1, 266_240), (16, 4_198_400)], ids=["one block", "sixteen"]
)
def test_the_worked_sizes_are_true(tmp_path: Path, blocks_in_segment: int, size: int) -> None:
    """The page's examples of segment sizes are what a writer writes."""
    import os

    from ciuic.repository import Repository

    with Repository.create(tmp_path / "r") as repository, repository.writer() as writer:
        for _ in range(blocks_in_segment):
            writer.put_chunk(os.urandom(262144))
        writer.flush()
        assert writer.new_bytes == 4096 + size
