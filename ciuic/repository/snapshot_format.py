"""Bytes of a snapshot file and of its marks file: a msgpack map in an envelope with length and checksum."""

from __future__ import annotations

import re
import stat
import struct
from typing import Annotated, TypeVar

import msgspec
import xxhash

from ciuic.repository.config import MAX_FILE_BYTES
from ciuic.repository.errors import DamagedSnapshot, UnsupportedFormat
from ciuic.repository.tree_format import attributes_problem
from ciuic.structs import decode_msgpack
from ciuic.types import CHUNK_ID_BYTES, MAX_ITEMS, LeftOut, Pair, RootRecord, SetMember, Snapshot, SnapshotId
from ciuic.units import plural

VERSION = 1
# Magic, version, payload bytes, XXH3-128 of the fields before and the payload.
_HEAD = struct.Struct("<8sIQ16s")
_SNAPSHOT_MAGIC = b"CIUICSNP"
_MARKS_MAGIC = b"CIUICMRK"


_Items = msgspec.Meta(max_length=MAX_ITEMS)


class StoredSnapshot(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Content of a snapshot file, a map with names so that later versions may add keys."""

    id: str
    repository: str
    time_ns: int
    host: str
    roots: Annotated[tuple[RootRecord, ...], _Items]
    tags: Annotated[tuple[str, ...], _Items]
    message: str
    parent: str
    size_bytes: int
    new_bytes: int
    files: int
    pair: Pair | None = None
    set_member: SetMember | None = None
    left_out: Annotated[tuple[LeftOut, ...], _Items] = ()
    incomplete: Annotated[tuple[bytes, ...], _Items] = ()
    placed_ns: int = 0


class StoredMarks(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a marks file: what may change about a snapshot after it was made."""

    id: str
    held: bool = False
    hold_reason: str = ""
    tags: Annotated[tuple[str, ...], _Items] | None = None
    """Tags now; None: as in the snapshot file."""
    hold_uid: int | msgspec.UnsetType = msgspec.UNSET
    """Uid that the hold was made for; not in the file if the hold is that of the repository's owner."""
    message: str | msgspec.UnsetType = msgspec.UNSET
    """Message now; not in the file: as in the snapshot file."""


_MAX_SET_LABEL = 255
_SET_ID = re.compile(r"[0-9a-f]{32}")
_T = TypeVar("_T", StoredSnapshot, StoredMarks)


def encode_snapshot(snapshot: Snapshot, repository_id: str) -> bytes:
    """Return the bytes of a snapshot file. ValueError for a snapshot that could not be read back."""
    stored = StoredSnapshot(
        # msgspec writes only a plain str.
        id=str(snapshot.id),
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
        set_member=snapshot.set_member,
        left_out=snapshot.left_out,
        incomplete=snapshot.incomplete,
        placed_ns=snapshot.placed_ns,
    )
    # Refused here, because a snapshot file that no reader accepts would stop every prune.
    if problem := _problem(stored):
        raise ValueError(f"invalid snapshot: {problem}")
    data = _wrap(_SNAPSHOT_MAGIC, msgspec.msgpack.encode(stored))
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(
            f"invalid snapshot: its roots, tags and message take more than {MAX_FILE_BYTES} bytes"
        )
    return data


def decode_snapshot(id_: str, data: bytes, repository_id: str) -> StoredSnapshot:
    """Return the content of a snapshot file.

    Raises:
        DamagedSnapshot: the file is damaged.
        UnsupportedFormat: a later version of ciuic wrote it.
    """
    stored = _unwrap(id_, _SNAPSHOT_MAGIC, data, StoredSnapshot)
    # A file from another repository names chunks that are not here.
    if stored.repository != repository_id:
        raise DamagedSnapshot(id_, f"it belongs to another repository, {stored.repository}")
    # The checksum guards against decay alone: a crafted file has a right one.
    if problem := _problem(stored):
        raise DamagedSnapshot(id_, problem)
    return stored


def decode_any_snapshot(data: bytes) -> StoredSnapshot:
    """Return the content of a snapshot file of which neither id nor repository are known.

    Raises:
        DamagedSnapshot: the file is damaged.
        UnsupportedFormat: a later version of ciuic wrote it.
    """
    try:
        owner = decode_msgpack(data[_HEAD.size :], _Owner)
    except msgspec.DecodeError as error:
        raise DamagedSnapshot("?", str(error)) from None
    return decode_snapshot(owner.id, data, owner.repository)


class _Owner(msgspec.Struct):
    id: str
    repository: str


def _problem(stored: StoredSnapshot) -> str:
    """Return why this cannot be true of a snapshot; empty when it can."""
    counts = (stored.size_bytes, stored.files, stored.time_ns, stored.placed_ns)
    if any(not 0 <= count < 1 << 63 for count in counts) or abs(stored.new_bytes) >= 1 << 63:
        return "it has an impossible size, number of files or time"
    pair_roots = stored.pair.roots if stored.pair is not None else ()
    if max(map(len, (stored.roots, stored.tags, stored.left_out, stored.incomplete, pair_roots))) > MAX_ITEMS:
        return f"it has more than {MAX_ITEMS} roots or tags"
    for path in [root.path for root in stored.roots] + [root.path for root in stored.left_out]:
        # A restore in place writes to this path, so it must be where it seems to be.
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
        # -1: not recorded (docs/format.md, section 8).
        if not -1 <= root.not_held < 1 << 63:
            return f"the root {root.path!r} has an impossible number of files that are not held"
        if problem := attributes_problem(root.entry):
            return f"the root {root.path!r}: {problem}"
    if stored.set_member is not None and (problem := set_member_problem(stored.set_member)):
        return problem
    return _pair_problem(stored.pair) if stored.pair is not None else ""


def set_member_problem(member: SetMember) -> str:
    """Return why this cannot be a place in a set; empty when it can."""
    if not _SET_ID.fullmatch(member.id):
        return f"{member.id[:64]!r} cannot be the id of a set"
    if not 0 < len(member.members) <= MAX_ITEMS:
        return f"a set cannot have {plural(len(member.members), 'member')}"
    for label in (member.name, *member.members):
        # Shown in tables and compared: one line, and the same everywhere.
        if not 0 < len(label) <= _MAX_SET_LABEL or not label.isprintable():
            return f"{label[:64]!r} cannot be a name in a set"
    if list(member.members) != sorted({*member.members, member.member}):
        return "its members are not in order, or not each once, or it is none of them"
    return ""


def _pair_problem(pair: Pair) -> str:
    """Return why this cannot be a pair: it is looked up by id and path, so both must be well formed."""
    try:
        if pair.id:
            SnapshotId.parse(pair.id)
    except ValueError:
        return f"{pair.id!r} cannot be the id of its paired snapshot"
    if pair.repository and (not pair.repository.startswith("/") or "\0" in pair.repository):
        return f"{pair.repository!r} cannot be the repository of its paired snapshot"
    return "" if 0 <= pair.time_ns < 1 << 63 else "its paired snapshot has an impossible time"


def encode_marks(marks: StoredMarks) -> bytes:
    """Return the bytes of a marks file."""
    return _wrap(_MARKS_MAGIC, msgspec.msgpack.encode(msgspec.structs.replace(marks, id=str(marks.id))))


def decode_marks(id_: str, data: bytes) -> StoredMarks:
    """Return the content of a marks file.

    Raises:
        DamagedSnapshot: the file is damaged.
        UnsupportedFormat: a later version of ciuic wrote it.
    """
    return _unwrap(id_, _MARKS_MAGIC, data, StoredMarks)


def apply_marks(stored: StoredSnapshot, marks: StoredMarks) -> Snapshot:
    """Return the snapshot with its current marks."""
    return Snapshot(
        id=SnapshotId.parse(stored.id),
        time_ns=stored.time_ns,
        host=stored.host,
        roots=stored.roots,
        tags=stored.tags if marks.tags is None else marks.tags,
        message=marks.message if isinstance(marks.message, str) else stored.message,
        parent=stored.parent,
        size_bytes=stored.size_bytes,
        new_bytes=stored.new_bytes,
        files=stored.files,
        pair=stored.pair,
        set_member=stored.set_member,
        left_out=stored.left_out,
        incomplete=stored.incomplete,
        placed_ns=stored.placed_ns,
        held=marks.held,
        hold_reason=marks.hold_reason,
        # UNSET means a hold of the repository's owner; without a hold the uid means nothing.
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
        raise DamagedSnapshot(id_, "the file does not begin with the magic bytes of its kind")
    if (
        len(payload) != length
        or xxhash.xxh3_128_digest(_HEAD.pack(found, version, length, bytes(16)) + payload) != digest
    ):
        raise DamagedSnapshot(id_, "the file does not match its checksum")
    # After the checksum: a damaged version number must not look like a later format.
    if version != VERSION:
        raise UnsupportedFormat(f"snapshot {id_} has format {version}; this ciuic reads format {VERSION}")
    try:
        value = decode_msgpack(payload, kind)
    except msgspec.DecodeError as error:
        raise DamagedSnapshot(id_, str(error)) from None
    if value.id != id_:
        raise DamagedSnapshot(id_, f"the file is that of {value.id}")
    return value
