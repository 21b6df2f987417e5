"""Decoders written from docs/format.md and docs/remote-format.md alone: nothing of ciuic is imported.

The reader of a remote reads a directory that has the objects as files, and asserts everything that the page states. Contents of
chunks are decoded as docs/format.md describes, by the caller.
"""

from __future__ import annotations

import base64
import hmac
import json
import os
import re
import struct
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import xxhash
import zstandard
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.argon2 import Argon2id

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


CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


class StoredChunk(NamedTuple):
    """Chunk as a record stores it."""

    payload: bytes
    length: int
    flags: int
    base: bytes
    """Empty for none."""


def hkdf(secret: bytes, salt: bytes, info: bytes, length: int = 32) -> bytes:
    """HKDF-SHA256 as RFC 5869 has it."""
    key = hmac.new(salt, secret, "sha256").digest()
    found = block = b""
    for number in range(1, -(-length // 32) + 1):
        block = hmac.new(key, block + info + bytes([number]), "sha256").digest()
        found += block
    return found[:length]


def crc24(data: bytes) -> int:
    """CRC-24 as the C code in RFC 9580, section 6.1.1."""
    crc = 0xB704CE
    for byte in data:
        crc ^= byte << 16
        for _ in range(8):
            crc <<= 1
            if crc & 0x1000000:
                crc ^= 0x1864CFB
    return crc


def recovery_key(text: str) -> bytes:
    """Section 4: read a recovery key that was typed."""
    typed = re.sub(r"[\s-]", "", text.upper()).removeprefix("CIUIC")
    typed = typed.replace("I", "1").replace("L", "1").replace("O", "0")
    assert len(typed) == 56
    bits = "".join(f"{CROCKFORD.index(character):05b}" for character in typed)
    data = int(bits, 2).to_bytes(35, "big")
    assert crc24(data[:32]) == int.from_bytes(data[32:], "big")
    return data[:32]


def key_text(data: bytes) -> bytes:
    """Section 4: a key file, or what a command prints."""
    text = data.strip().decode()
    return bytes.fromhex(text) if len(text) == 64 else base64.b64decode(text, validate=True)


def checked_json(data: bytes) -> tuple[dict[str, Any], bytes, str]:
    """Section 3: return the fields, the bytes that `check` covers, and the check."""
    body, separator, rest = data.rpartition(b',"check":')
    assert separator
    assert re.fullmatch(rb'"[0-9a-f]+"\}\n?', rest)
    fields: dict[str, Any] = json.loads(data)
    return fields, body, fields.pop("check")


def master_key(slot: str, data: bytes, remote_id: bytes, secret: bytes | str) -> bytes:
    """Section 4: unwrap the master key with a passphrase (str) or 32 bytes."""
    fields, body, check = checked_json(data)
    assert check == xxhash.xxh3_64_hexdigest(body)
    assert (fields["version"], fields["slot"]) == (1, slot)
    kdf = fields["kdf"]
    salt = bytes.fromhex(kdf["salt"])
    if isinstance(secret, str):
        assert fields["kind"] == "passphrase"
        assert kdf["name"] == "argon2id"
        assert 19456 <= kdf["memory_kib"] <= 1 << 20
        key = Argon2id(
            salt=salt,
            length=32,
            iterations=kdf["passes"],
            lanes=kdf["lanes"],
            memory_cost=kdf["memory_kib"],
        ).derive(unicodedata.normalize("NFC", secret).encode())
    else:
        assert fields["kind"] in ("key-file", "command", "recovery")
        assert kdf["name"] == "hkdf-sha256"
        key = hkdf(secret, salt, b"ciuic key slot v1")
    bound = b"ciuic key slot v1\0" + remote_id.hex().encode() + b"\0" + slot.encode() + b"\0"
    wrapped = bytes.fromhex(fields["wrapped"])
    return AESGCM(key).decrypt(wrapped[:12], wrapped[12:], bound)


def remote_id(data: bytes) -> bytes:
    """Section 3: return the id in remote.json, which a key slot is bound to."""
    return bytes.fromhex(checked_json(data)[0]["id"])


class PageRemote:
    """Remote, or repository below ``repositories/``, in a directory."""

    def __init__(self, top: Path, master: bytes | None) -> None:
        self.top = top
        self.master = master
        self.config, body, check = checked_json((top / "remote.json").read_bytes())
        assert self.config["version"] == 1
        assert self.config["sealed"] is (master is not None)
        self.id = bytes.fromhex(self.config["id"])
        assert len(self.id) == 16
        if master is None:
            assert check == xxhash.xxh3_64_hexdigest(body)
        else:
            key = hkdf(master, self.id, b"ciuic remote.json v1")
            assert check == hmac.new(key, body, "sha256").hexdigest()
        self.naming_key, self.border_seed = self._identity()

    def _identity(self) -> tuple[bytes | None, int]:
        if "identity" in self.config:
            assert "naming_key" not in self.config
            assert "border_seed" not in self.config
            fields = json.loads(self.opened("remote.json", base64.b64decode(self.config["identity"])))
        elif self.master is not None:
            assert self.config["hash"] == "blake3-128"
            seed = hkdf(self.master, self.id, b"ciuic border seed v1", 8)
            return hkdf(self.master, self.id, b"ciuic naming key v1"), int.from_bytes(seed, "big")
        else:
            fields = self.config
        key = fields["naming_key"]
        assert (key is None) is (self.config["hash"] == "xxh3-128")
        return None if key is None else bytes.fromhex(key), int(fields["border_seed"], 16)

    def chunk_id(self, content: bytes) -> bytes:
        """Section 3: name content by the hash of remote.json."""
        if self.naming_key is None:
            return xxhash.xxh3_128_digest(content, seed=self.border_seed)
        return blake3(content, key=self.naming_key).digest()[:16]

    def opened(self, name: str, data: bytes) -> bytes:
        """Section 4: open the envelope of an object."""
        magic, version, sealed, zero = struct.unpack_from("<8sHHI", data)
        assert (magic, version, sealed, zero) == (b"CIUICOBJ", 1, int(self.master is not None), 0)
        bound = data[:32] + self.id + name.encode()
        if self.master is not None:
            key = hkdf(self.master, data[16:32], b"ciuic object v1")
            return AESGCM(key).decrypt(bytes(12), data[32:], bound)
        assert data[32:48] == blake3(bound + b"\0" + data[48:]).digest()[:16]
        return data[48:]

    def object(self, name: str) -> bytes:
        """Return the content of an object."""
        return self.opened(name, (self.top / name).read_bytes())

    def names(self, directory: str) -> list[str]:
        """Return the names of the objects below a directory."""
        found = (self.top / directory).rglob("*")
        return sorted(path.relative_to(self.top).as_posix() for path in found if path.is_file())

    def writers(self) -> list[str]:
        """Return all writers."""
        return sorted({name.split("/")[1] for name in self.names("w")})

    def log(self, writer: str) -> list[dict[str, Any]]:
        """Section 6: return the entries of a log that are there, which have no gap."""
        names = self.names(f"w/{writer}")
        first = int(names[0][-10:])
        assert names == [f"w/{writer}/{first + n:010}" for n in range(len(names))]
        entries = [json.loads(self.object(name)) for name in names]
        assert first == 0 or any(entry["kind"] in ("state", "retired") for entry in entries)
        return entries

    def snapshots(self) -> dict[str, str]:
        """Section 6: return manifest and digest of each snapshot that exists."""
        live: dict[str, str] = {}
        removed: set[str] = set()
        for writer in self.writers():
            for entry in since_last_summary(self.log(writer)):
                assert re.fullmatch("[0-9a-f]{32}", entry["nonce"])
                if entry["kind"] == "commit":
                    live[entry["manifest"]] = entry["digest"]
                elif entry["kind"] == "remove":
                    removed.update(entry["manifests"])
                elif entry["kind"] in ("state", "retired"):
                    live.update({manifest: digest for _, _, manifest, digest in entry["live"]})
                    removed.update(entry["removed"])
                else:
                    assert entry["kind"] in ("hello", "fence")
        return {manifest: digest for manifest, digest in live.items() if manifest not in removed}

    def manifest(self, name: str, digest: str) -> dict[str, Any]:
        """Section 7: return a manifest."""
        data = (self.top / name).read_bytes()
        assert blake3(data).hexdigest() == digest
        assert re.fullmatch(r"manifests/[\w.-]{1,64}/\d+-\d+/[\w.-]{1,64}-[0-9a-f]{32}", name, re.ASCII)
        found: dict[str, Any] = msgspec.msgpack.decode(self.opened(name, data))
        return found

    def round(self, number: int, part: str) -> dict[str, Any]:
        """Section 8: return an object of a round; part is empty, ``.final`` or ``.done``."""
        found: dict[str, Any] = json.loads(self.object(f"gc/{number:010}{part}"))
        return found

    def status(self, reporter: str) -> dict[str, Any]:
        """Section 11: return the status of a host."""
        content = self.object(f"status/{reporter}")
        public, signature, body = content[:32], content[32:96], content[96:]
        assert blake3(public).hexdigest()[:32] == reporter
        signed = b"ciuic status v1" + self.id + body
        Ed25519PublicKey.from_public_bytes(public).verify(signature, signed)
        found: dict[str, Any] = json.loads(body)
        return found

    def pack_refs(self) -> list[str]:
        """Section 2: return the references of all packs."""
        found = []
        for name in self.names("packs"):
            _, kind, prefix, digits = name.split("/")
            assert prefix == digits[:2]
            found.append(kind[0] + digits)
        return found

    def pack(self, ref: str) -> Iterator[tuple[bytes, StoredChunk]]:
        """Section 5: yield the chunks of a pack from its table."""
        kind, digits = {"d": "data", "m": "meta"}[ref[0]], ref[1:]
        data = (self.top / "packs" / kind / digits[:2] / digits).read_bytes()
        header, trailer = data[:64], data[-32:]
        sealed = self.master is not None
        assert header == struct.pack(
            "<8sHBBI16s16s16s",
            b"CIUICRPK",
            1,
            1 if kind == "data" else 2,
            int(sealed),
            0,
            bytes.fromhex(digits),
            self.id,
            bytes(16),
        )
        magic, count, zero, offset, checksum = struct.unpack("<8sIIQQ", trailer)
        assert (magic, zero) == (b"CIUICRPT", 0)
        tag = 16 if sealed else 0
        stored_table = data[offset:-32]
        assert len(stored_table) == 64 * count + tag
        assert checksum == xxhash.xxh3_64_intdigest(header + stored_table + trailer[:24])
        key = b""
        if self.master is not None:
            key = hkdf(self.master, bytes.fromhex(digits), b"ciuic pack v1" + self.id)
        table = unsealed(key, offset, stored_table, header + struct.pack("<I", count))
        end = 64
        for row in range(0, 64 * count, 64):
            id_, at, stored, length, flags, zero, base, digest = struct.unpack_from(
                "<16sQIIII16sQ", table, row
            )
            assert (at, zero) == (end, 0)
            assert flags in (0, 1, 2, 6)
            assert (base != bytes(16)) is (flags == 6)
            end = at + stored + tag
            payload = unsealed(key, at, data[at:end], header)
            assert digest == xxhash.xxh3_64_intdigest(payload)
            yield id_, StoredChunk(payload, length, flags, base if flags == 6 else b"")
        assert end == offset

    def chunks(self) -> dict[bytes, StoredChunk]:
        """Return every chunk of every pack."""
        return {id_: stored for ref in self.pack_refs() for id_, stored in self.pack(ref)}


def since_last_summary(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Section 6: leave out what lies before the last entry that sums up those before it."""
    numbers = [n for n, entry in enumerate(entries) if entry["kind"] in ("state", "retired")]
    return entries[numbers[-1] :] if numbers else entries


def unsealed(key: bytes, offset: int, data: bytes, bound: bytes) -> bytes:
    """Section 5: open a record or table; without a key it is stored as it is."""
    return AESGCM(key).decrypt(offset.to_bytes(12, "big"), data, bound) if key else data
