"""Records of a session's journal, from which the successor of a killed worker goes on with the session.

The kernel refers to nodes and handles by the numbers it was given, for as long as the mount lives; a new
process has to know their meaning. Every change to the tables of nodes and handles is therefore appended to a
file in the runtime directory (memory, which outlives the process and not the machine) before the kernel is
told of it. journal_writer.py writes the files, inherited_session.py has the tables.

A record is u32 length, u8 kind, fixed fields, then names; all integers are little-endian. The docstring beside
each structure lists its fields, and what follows them.

Invariants:

* Applying the records of the files in the order of their numbers to the archive gives the tables as they
  were; a last record that was cut short was never told to the kernel.
* Files that are full are taken into the archive beside the work and removed, so that the part that a successor
  has to read before it serves is short however many nodes there are. It asks for nodes when it needs them.
* A rename takes effect in the backing directory before the node table and the journal know of it. A worker
  that is killed in between leaves a successor with a table that has the old name, and the kernel never asks for
  a name again that it knows: the job would get ENOENT or ESTALE for a file that is there. A record of the change
  is therefore written before the system call, and a successor compares it with the directory before it answers
  anything (core/names.py). It is dropped when the outcome is in the journal, also when the change was
  refused. One that stays, because the worker died between the two, is older than any other of its name: the
  newest is taken first.
"""

from __future__ import annotations

import os
import struct
from collections.abc import MutableMapping
from typing import Final, NamedTuple

from ciuic.fuse_layer import fuse_protocol

LENGTH = struct.Struct("<I")
KIND = struct.Struct("<B")
# A successor of another version reads these numbers: none changes its meaning. A greater one than the last
# ends the reading, as a record that was cut short does.
BEGIN, NODE, NAME, RENAMED, UNLINKED, DROPPED, REPLACED = 1, 2, 3, 4, 5, 6, 7
OPENED, CLOSED, DIR_OPENED, DIR_CLOSED, LISTING = 8, 9, 10, 11, 12
INTENT, LINGERS, LINGERS_NOT, CHANGING, EMPTIED, UNCHANGED = 13, 14, 15, 16, 17, 18
BEGIN_FIELDS = struct.Struct("<IIQI")
"""version, minor, flags, max_write_bytes"""
NODE_FIELDS = struct.Struct("<QQQQI")
"""id, dev, ino, parent (0: none), kind; name"""
NAME_FIELDS = struct.Struct("<QQB")
"""id, parent, several; name"""
RENAMED_FIELDS = struct.Struct("<QQQH")
"""id, parent, new parent, length of the old name; old name, new name"""
UNLINKED_FIELDS = struct.Struct("<QQB")
"""id, parent, gone; name"""
REPLACED_FIELDS = struct.Struct("<QQQ")
"""id, dev, ino"""
OPENED_FIELDS = struct.Struct("<QQQIII")
"""handle, node, unique of the request, flags of the open, open_flags of the answer, backing id (0: none)"""
EMPTIED_FIELDS = struct.Struct("<QIII")
"""id, mode, uid, gid"""
USER = struct.Struct("<I")
"""uid of the user who opened it, behind the fields of an open file or directory; absent in records of older
versions"""
PAIR = struct.Struct("<QQ")
TRIPLE = struct.Struct("<QQQ")
ONE = struct.Struct("<Q")
_CHANGE_FIELDS: Final = struct.Struct("<QQQQBH")
"""parent, inode, new parent, inode replaced, exchange, length of the name; name, new name"""
# A successor reads every version since the first: the worker that it follows may be of an older release.
VERSION: Final = 5
INTENTS_KEPT: Final = 1024
"""Limit of intents that the archive keeps: more than requests that can be in work at once."""


class ChangedNames(NamedTuple):
    """Names that change: node ids of directories, and names in them."""

    parent: int
    name: bytes
    new_parent: int = 0
    """Directory of the new name; 0 where the name is removed."""
    new_name: bytes = b""


class ChangedInodes(NamedTuple):
    """Inodes that the names lead to before the change."""

    ino: int
    replaced: int = 0
    """Inode number under the new name; 0 where that is free."""
    exchange: bool = False


Changes = MutableMapping[ChangedNames, ChangedInodes]


def _encode_change(names: ChangedNames, inodes: ChangedInodes) -> bytes:
    """Encode the body of a record."""
    fields = _CHANGE_FIELDS.pack(
        names.parent, inodes.ino, names.new_parent, inodes.replaced, inodes.exchange, len(names.name)
    )
    return fields + names.name + names.new_name


def decode_change(body: bytes) -> tuple[ChangedNames, ChangedInodes]:
    """Decode the body of a record."""
    parent, ino, new_parent, replaced, exchange, length = _CHANGE_FIELDS.unpack_from(body)
    rest = body[_CHANGE_FIELDS.size :]
    return ChangedNames(parent, rest[:length], new_parent, rest[length:]), ChangedInodes(
        ino, replaced, bool(exchange)
    )


class OpenedFile(NamedTuple):
    """An open file."""

    handle: int
    node: int
    unique: int
    """Number of the request that opened it, without UNIQUE_RESEND."""
    flags: int
    """Flags of the program's open(2)."""
    open_flags: int
    """Flags of the answer to the kernel."""
    backing_id: int
    """Backing id of the answer; 0 without passthrough."""
    uid: int = 0
    """User who opened it; 0 also where a predecessor did not record it."""

    @property
    def unseen(self) -> bool:
        """True if writes through it may reach the backing file past the worker (kernel/driver.py)."""
        # Told from the flags of the answer, because a predecessor's plan is not recorded.
        if not self.open_flags & fuse_protocol.FOPEN_PASSTHROUGH:
            return False
        if self.open_flags & fuse_protocol.FOPEN_DIRECT_IO:
            return self.flags & os.O_ACCMODE == os.O_RDWR
        return self.flags & os.O_ACCMODE != os.O_RDONLY


class OpenedDirectory(NamedTuple):
    """An open directory; fields as of a file."""

    handle: int
    node: int
    unique: int
    uid: int = 0


def _record(kind: int, fields: bytes, rest: bytes = b"") -> bytes:
    return LENGTH.pack(1 + len(fields) + len(rest)) + KIND.pack(kind) + fields + rest


def begin_record(minor: int, flags: int, max_write_bytes: int) -> bytes:
    """Encode the terms that were negotiated with the kernel; first record of a file."""
    return _record(BEGIN, BEGIN_FIELDS.pack(VERSION, minor, flags, max_write_bytes))


def node_record(node_id: int, dev: int, ino: int, parent: int, kind: int, name: bytes) -> bytes:
    """Encode a node, which replaces whatever had this id before. ``parent`` 0: it has no name."""
    return _record(NODE, NODE_FIELDS.pack(node_id, dev, ino, parent, kind), name)


def name_record(node_id: int, parent: int, name: bytes, *, several: bool) -> bytes:
    """Encode a name that leads to the node: one more, or (not ``several``) instead of all others."""
    return _record(NAME, NAME_FIELDS.pack(node_id, parent, several), name)


def renamed_record(node_id: int, parent: int, name: bytes, new_parent: int, new_name: bytes) -> bytes:
    """Encode that a name of the node has moved; settles its ``changing_record``."""
    fields = RENAMED_FIELDS.pack(node_id, parent, new_parent, len(name))
    return _record(RENAMED, fields, name + new_name)


def unlinked_record(node_id: int, parent: int, name: bytes, *, gone: bool) -> bytes:
    """Encode that the node has lost a name, the last one if ``gone``; settles its ``changing_record``."""
    return _record(UNLINKED, UNLINKED_FIELDS.pack(node_id, parent, gone), name)


def emptied_record(node_id: int, mode: int, uid: int, gid: int) -> bytes:
    """Encode the last mode, owner and group of a directory that is being removed and that a program may have open."""
    return _record(EMPTIED, EMPTIED_FIELDS.pack(node_id, mode, uid, gid))


def dropped_record(node_id: int) -> bytes:
    """Encode that the kernel has forgotten the node."""
    return _record(DROPPED, ONE.pack(node_id))


def replaced_record(node_id: int, dev: int, ino: int) -> bytes:
    """Encode that the node stands for another inode now."""
    return _record(REPLACED, REPLACED_FIELDS.pack(node_id, dev, ino))


def opened_record(opened: OpenedFile) -> bytes:
    """Encode an open file."""
    return _record(OPENED, OPENED_FIELDS.pack(*opened[:-1]), USER.pack(opened.uid))


def closed_record(handle: int) -> bytes:
    """Encode that a file's handle is closed."""
    return _record(CLOSED, ONE.pack(handle))


def directory_opened_record(opened: OpenedDirectory) -> bytes:
    """Encode an open directory."""
    return _record(DIR_OPENED, TRIPLE.pack(*opened[:-1]), USER.pack(opened.uid))


def directory_closed_record(handle: int) -> bytes:
    """Encode that a directory's handle is closed."""
    return _record(DIR_CLOSED, ONE.pack(handle))


def listing_record(handle: int, names: list[bytes]) -> bytes:
    """Encode the names that offsets of a directory handle count; none where they are too many to be kept."""
    return _record(LISTING, ONE.pack(handle), b"\0".join(names))


def intent_record(unique: int, number: int) -> bytes:
    """Encode that a request which must not be repeated is about to be carried out.

    Args:
        unique: number of the request.
        number: state before it (an inode number, a size) from which a successor tells whether it was carried
            out.
    """
    return _record(INTENT, PAIR.pack(unique, number))


def changing_record(names: ChangedNames, inodes: ChangedInodes) -> bytes:
    """Encode that names are about to change."""
    return _record(CHANGING, _encode_change(names, inodes))


def unchanged_record(names: ChangedNames) -> bytes:
    """Encode that the change of these names was refused, or that its outcome is known."""
    return _record(UNCHANGED, _encode_change(names, ChangedInodes(0)))


def lingers_record(node_id: int, *, lingers: bool) -> bytes:
    """Encode whether a mapping may go on writing to the node without a handle."""
    return _record(LINGERS if lingers else LINGERS_NOT, ONE.pack(node_id))
