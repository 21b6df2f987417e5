"""The bytes of a snapshot file and of its marks file: an envelope with length and checksum around a msgpack
map.
"""

from __future__ import annotations

import stat
import struct
from typing import TypeVar

import msgspec
import xxhash

from ciuic.repository.config import MAX_FILE_BYTES
from ciuic.repository.errors import DamagedSnapshot, UnsupportedFormat
from ciuic.repository.treeformat import attributes_problem
from ciuic.types import CHUNK_ID_BYTES, LeftOut, Pair, RootRecord, Snapshot, SnapshotId

VERSION = 1
_HEAD = struct.Struct(
    "<8sIQ16s"
)  # magic, version, payload bytes, XXH3-128 of the fields before and the payload
_SNAPSHOT_MAGIC = b"CIUICSNP"
_MARKS_MAGIC = b"CIUICMRK"


class StoredSnapshot(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a snapshot file holds. A map with names, so that later versions may add."""

    id: str
    repository: str
    time_ns: int
    host: str
    roots: tuple[RootRecord, ...]
    tags: tuple[str, ...]
    message: str
    parent: str
    size_bytes: int
    new_bytes: int
    files: int
    pair: Pair | None = None
    left_out: tuple[LeftOut, ...] = ()
    incomplete: tuple[bytes, ...] = ()


class Marks(msgspec.Struct, frozen=True, kw_only=True):
    """What may change about a snapshot after it was made."""

    id: str
    held: bool = False
    hold_reason: str = ""
    tags: tuple[str, ...] | None = None
    """None: as the snapshot file says."""
    hold_uid: int | msgspec.UnsetType = msgspec.UNSET
    """The user that the hold was made for; not in the file where it is the hold of whoever owns the repository."""


_T = TypeVar("_T", StoredSnapshot, Marks)


def encode_snapshot(snapshot: Snapshot, repository_id: str) -> bytes:
    """ValueError for what could not be read back."""
    stored = StoredSnapshot(
        id=str(snapshot.id),  # msgspec writes plain str only
        repository=repository_id,
        time_ns=snapshot.time_ns,
        host=snapshot.host,
        roots=snapshot.roots,
        tags=snapshot.tags,
        message=snapshot.message,
        parent=str(snapshot.parent),
        size_bytes=snapshot.size_bytes,
        new_bytes=snapshot.new_bytes,
        files=snapshot.files,
        pair=snapshot.pair,
        left_out=snapshot.left_out,
        incomplete=snapshot.incomplete,
    )
    if problem := _problem(stored):
        raise ValueError(f"no such snapshot can be: {problem}")
    data = _wrap(_SNAPSHOT_MAGIC, msgspec.msgpack.encode(stored))
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(
            f"no such snapshot can be: its roots, tags and message take more than {MAX_FILE_BYTES} bytes"
        )
    return data


def decode_snapshot(id_: str, data: bytes, repository_id: str) -> StoredSnapshot:
    """DamagedSnapshot, UnsupportedFormat."""
    stored = _unwrap(id_, _SNAPSHOT_MAGIC, data, StoredSnapshot)
    if stored.repository != repository_id:
        raise DamagedSnapshot(id_, f"it belongs to another repository, {stored.repository}")
    if problem := _problem(stored):
        raise DamagedSnapshot(id_, problem)
    return stored


def _problem(stored: StoredSnapshot) -> str:
    """Why this cannot be true of a snapshot; empty when it can."""
    counts = (stored.size_bytes, stored.files, stored.time_ns)
    if any(not 0 <= count < 1 << 63 for count in counts) or abs(stored.new_bytes) >= 1 << 63:
        return "it has an impossible size, number of files or time"
    for path in [root.path for root in stored.roots] + [root.path for root in stored.left_out]:
        parts = path.split(b"/")
        if not path.startswith(b"/") or b"\0" in path or b".." in parts or b"." in parts:
            return f"{path!r} cannot be the path of a root"
    for root in stored.roots:
        if len(root.links) not in (0, CHUNK_ID_BYTES):
            return f"the id of a link table has {len(root.links)} bytes"
        if root.entry.link or not stat.S_ISDIR(root.entry.mode & 0o170000):
            return f"the root {root.path!r} is no directory"
        if not 0 <= root.depth < 1 << 63:
            return f"the root {root.path!r} has an impossible depth"
        if not -1 <= root.not_held < 1 << 63:
            return f"the root {root.path!r} has an impossible number of files that are not held"
        if problem := attributes_problem(root.entry):
            return f"the root {root.path!r}: {problem}"
    return _pair_problem(stored.pair) if stored.pair is not None else ""


def _pair_problem(pair: Pair) -> str:
    """It is looked up by id and path, so they must be what they look like."""
    try:
        if pair.id:
            SnapshotId.parse(pair.id)
    except ValueError:
        return f"{pair.id!r} cannot be the id of its other half"
    if pair.repository and (not pair.repository.startswith("/") or "\0" in pair.repository):
        return f"{pair.repository!r} cannot be the repository of its other half"
    return "" if 0 <= pair.time_ns < 1 << 63 else "its other half has an impossible time"


def encode_marks(marks: Marks) -> bytes:
    return _wrap(_MARKS_MAGIC, msgspec.msgpack.encode(msgspec.structs.replace(marks, id=str(marks.id))))


def decode_marks(id_: str, data: bytes) -> Marks:
    """DamagedSnapshot, UnsupportedFormat."""
    return _unwrap(id_, _MARKS_MAGIC, data, Marks)


def apply_marks(stored: StoredSnapshot, marks: Marks) -> Snapshot:
    """The snapshot as it is now."""
    return Snapshot(
        id=SnapshotId.parse(stored.id),
        time_ns=stored.time_ns,
        host=stored.host,
        roots=stored.roots,
        tags=stored.tags if marks.tags is None else marks.tags,
        message=stored.message,
        parent=stored.parent,
        size_bytes=stored.size_bytes,
        new_bytes=stored.new_bytes,
        files=stored.files,
        pair=stored.pair,
        left_out=stored.left_out,
        incomplete=stored.incomplete,
        held=marks.held,
        hold_reason=marks.hold_reason,
        hold_uid=marks.hold_uid if marks.held and isinstance(marks.hold_uid, int) else None,
    )


def _wrap(magic: bytes, payload: bytes) -> bytes:
    head = _HEAD.pack(magic, VERSION, len(payload), bytes(16))
    digest = xxhash.xxh3_128_digest(head + payload)
    return _HEAD.pack(magic, VERSION, len(payload), digest) + payload


def _unwrap(id_: str, magic: bytes, data: bytes, kind: type[_T]) -> _T:
    if len(data) < _HEAD.size:
        raise DamagedSnapshot(id_, "the file is cut short")
    found, version, length, digest = _HEAD.unpack_from(data)
    payload = data[_HEAD.size :]
    if found != magic:
        raise DamagedSnapshot(id_, "the file does not begin as it must")
    if (
        len(payload) != length
        or xxhash.xxh3_128_digest(_HEAD.pack(found, version, length, bytes(16)) + payload) != digest
    ):
        raise DamagedSnapshot(id_, "the file does not match its checksum")
    if version != VERSION:
        raise UnsupportedFormat(f"snapshot {id_} has format {version}; this ciuic reads format {VERSION}")
    try:
        value = msgspec.msgpack.decode(payload, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedSnapshot(id_, str(error)) from None
    if value.id != id_:
        raise DamagedSnapshot(id_, f"the file is that of {value.id}")
    return value
