"""Decoders of chunks, trees, block maps and snapshot files, written from docs/format.md alone: nothing of ciuic is imported."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
import xxhash
import zstandard

HOLE = bytes(16)


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


class PageChunks:
    """Chunks by their ids, and the trees and files that are made of them.

    Args:
        stored: Chunks as their records store them.
        name: Names content: section 3, *Identity*.
        seed: Seed of tree borders.
        block_size: Bytes in a block of a file.
    """

    def __init__(
        self, stored: Mapping[bytes, Stored], name: Callable[[bytes], bytes], seed: int, block_size: int
    ) -> None:
        self.stored = stored
        self.name_of = name
        self.seed = seed
        self.block_size = block_size

    @cached_property
    def chunks(self) -> dict[bytes, bytes]:
        """Content of every chunk."""
        return {id_: self.content(id_) for id_ in self.stored}

    def content(self, id_: bytes) -> bytes:
        payload, length, flags, base = self.stored[id_]
        if flags & 2:
            content = from_planes(payload, length, self.content(base) if flags & 4 else None)
        else:
            content = zstandard.ZstdDecompressor().decompress(payload) if flags == 1 else payload
        assert len(content) == length
        assert self.name_of(content) == id_
        return content

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
            data[number * self.block_size : number * self.block_size + len(block)] = block
        return bytes(data)

    def extract(self, root: dict[str, Any], place: str) -> None:
        """Write directories, files, links and symbolic links of a root; other kinds and attributes are left out."""
        links = {entry[0]: entry for entry in self.entries(root["links"], b"l")}
        self._extract(root["entry"][12], os.fsencode(place), links)

    def _extract(self, tree: bytes, place: bytes, links: dict[bytes, list[Any]]) -> None:
        os.mkdir(place)
        for entry in self.entries(tree):
            path = place + b"/" + entry[0]
            kind = entry[1] & 0o170000
            if kind == 0o040000:
                self._extract(entry[12], path, links)
            elif kind == 0o120000:
                os.symlink(entry[14], path)
            elif kind == 0o100000:
                with open(path, "xb") as file:
                    file.write(self.content_of(links[entry[11].to_bytes(8, "big")] if entry[11] else entry))


def enveloped(data: bytes, magic: bytes) -> dict[str, Any]:
    """Sections 8 and 9: open a snapshot file or a marks file."""
    assert data[:8] == magic
    assert u32(data, 8) == 1
    assert u64(data, 12) == len(data) - 36
    assert data[20:36] == xxhash.xxh3_128_digest(data[:20] + bytes(16) + data[36:])
    payload: dict[str, Any] = msgspec.msgpack.decode(data[36:])
    return payload
