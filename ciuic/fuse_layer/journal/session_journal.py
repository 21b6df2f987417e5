"""Records of a session's journal, from which the successor of a killed worker goes on with the session.

The kernel refers to nodes and handles by the numbers it was given, for as long as the mount lives; a new
process has to know their meaning. Every change to the tables of nodes and handles is therefore appended to a
file in the runtime directory (memory, which outlives the process and not the machine) before the kernel is
told of it.

Invariants:

* Applying the records of the files in the order of their numbers to the archive gives the tables as they
  were; a last record that was cut short was never told to the kernel.
* Files that are full are taken into the archive (journal_archive.py) beside the work and removed, so that the
  part that a successor has to read before it serves is short however many nodes there are. It asks for nodes
  when it needs them.

journal_writer.py writes the files, inherited_session.py has the tables, record_format.py the bytes.
"""

from __future__ import annotations

import os
from typing import Final, NamedTuple

from ciuic.fuse_layer.formats import fuse_protocol
from ciuic.fuse_layer.journal import name_changes
from ciuic.fuse_layer.journal import record_format as f
from ciuic.fuse_layer.journal.name_changes import ChangedInodes, ChangedNames

# A successor reads every version since the first: the worker that it follows may be of an older release.
VERSION: Final = 5
INTENTS_KEPT: Final = 1024
"""Limit of intents that the archive keeps: more than requests that can be in work at once."""


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
        """True if writes through it may reach the backing file past the worker (kernel/modes.py)."""
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
    return f.LENGTH.pack(1 + len(fields) + len(rest)) + f.KIND.pack(kind) + fields + rest


def begin_record(minor: int, flags: int, max_write_bytes: int) -> bytes:
    """Encode the terms that were negotiated with the kernel; first record of a file."""
    return _record(f.BEGIN, f.BEGIN_FIELDS.pack(VERSION, minor, flags, max_write_bytes))


def node_record(node_id: int, dev: int, ino: int, parent: int, kind: int, name: bytes) -> bytes:
    """Encode a node, which replaces whatever had this id before. ``parent`` 0: it has no name."""
    return _record(f.NODE, f.NODE_FIELDS.pack(node_id, dev, ino, parent, kind), name)


def name_record(node_id: int, parent: int, name: bytes, *, several: bool) -> bytes:
    """Encode a name that leads to the node: one more, or (not ``several``) instead of all others."""
    return _record(f.NAME, f.NAME_FIELDS.pack(node_id, parent, several), name)


def renamed_record(node_id: int, parent: int, name: bytes, new_parent: int, new_name: bytes) -> bytes:
    """Encode that a name of the node has moved; settles its ``changing_record``."""
    fields = f.RENAMED_FIELDS.pack(node_id, parent, new_parent, len(name))
    return _record(f.RENAMED, fields, name + new_name)


def unlinked_record(node_id: int, parent: int, name: bytes, *, gone: bool) -> bytes:
    """Encode that the node has lost a name, the last one if ``gone``; settles its ``changing_record``."""
    return _record(f.UNLINKED, f.UNLINKED_FIELDS.pack(node_id, parent, gone), name)


def emptied_record(node_id: int, mode: int, uid: int, gid: int) -> bytes:
    """Encode the last mode, owner and group of a directory that is being removed and that a program may have open."""
    return _record(f.EMPTIED, f.EMPTIED_FIELDS.pack(node_id, mode, uid, gid))


def dropped_record(node_id: int) -> bytes:
    """Encode that the kernel has forgotten the node."""
    return _record(f.DROPPED, f.ONE.pack(node_id))


def replaced_record(node_id: int, dev: int, ino: int) -> bytes:
    """Encode that the node stands for another inode now."""
    return _record(f.REPLACED, f.REPLACED_FIELDS.pack(node_id, dev, ino))


def opened_record(opened: OpenedFile) -> bytes:
    """Encode an open file."""
    return _record(f.OPENED, f.OPENED_FIELDS.pack(*opened[:-1]), f.USER.pack(opened.uid))


def closed_record(handle: int) -> bytes:
    """Encode that a file's handle is closed."""
    return _record(f.CLOSED, f.ONE.pack(handle))


def directory_opened_record(opened: OpenedDirectory) -> bytes:
    """Encode an open directory."""
    return _record(f.DIR_OPENED, f.TRIPLE.pack(*opened[:-1]), f.USER.pack(opened.uid))


def directory_closed_record(handle: int) -> bytes:
    """Encode that a directory's handle is closed."""
    return _record(f.DIR_CLOSED, f.ONE.pack(handle))


def listing_record(handle: int, names: list[bytes]) -> bytes:
    """Encode the names that offsets of a directory handle count; none where they are too many to be kept."""
    return _record(f.LISTING, f.ONE.pack(handle), b"\0".join(names))


def intent_record(unique: int, number: int) -> bytes:
    """Encode that a request which must not be repeated is about to be carried out.

    Args:
        unique: number of the request.
        number: state before it (an inode number, a size) from which a successor tells whether it was carried
            out.
    """
    return _record(f.INTENT, f.PAIR.pack(unique, number))


def changing_record(names: ChangedNames, inodes: ChangedInodes) -> bytes:
    """Encode that names are about to change (name_changes.py)."""
    return _record(f.CHANGING, name_changes.encode(names, inodes))


def unchanged_record(names: ChangedNames) -> bytes:
    """Encode that the change of these names was refused, or that its outcome is known."""
    return _record(f.UNCHANGED, name_changes.encode(names, ChangedInodes(0)))


def lingers_record(node_id: int, *, lingers: bool) -> bytes:
    """Encode whether a mapping may go on writing to the node without a handle."""
    return _record(f.LINGERS if lingers else f.LINGERS_NOT, f.ONE.pack(node_id))
