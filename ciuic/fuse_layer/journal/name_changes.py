"""Write-ahead records of changes of names: renames and removals that a worker had begun when it died.

A rename takes effect in the backing directory before the node table and the journal know of it. A worker that
is killed in between leaves a successor with a table that has the old name, and the kernel never asks for a
name again that it knows: the job would get ENOENT or ESTALE for a file that is there. The record is therefore
written before the system call, and a successor compares it with the directory before it answers anything
(settling.py).

A record is dropped when the outcome is in the journal, also when the change was refused. A record that stays,
because the worker died between the two, is older than any other of its name: settling.py takes the newest
first.
"""

from __future__ import annotations

import struct
from collections.abc import MutableMapping
from typing import Final, NamedTuple

_FIELDS: Final = struct.Struct("<QQQQBH")
"""parent, inode, new parent, inode replaced, exchange, length of the name; name, new name"""


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


def encode(names: ChangedNames, inodes: ChangedInodes) -> bytes:
    """Encode the body of a record."""
    fields = _FIELDS.pack(
        names.parent, inodes.ino, names.new_parent, inodes.replaced, inodes.exchange, len(names.name)
    )
    return fields + names.name + names.new_name


def decode(body: bytes) -> tuple[ChangedNames, ChangedInodes]:
    """Decode the body of a record."""
    parent, ino, new_parent, replaced, exchange, length = _FIELDS.unpack_from(body)
    rest = body[_FIELDS.size :]
    return ChangedNames(parent, rest[:length], new_parent, rest[length:]), ChangedInodes(
        ino, replaced, bool(exchange)
    )
