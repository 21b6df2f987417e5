"""Notes of renames and removals in the session's journal, before the system call and after its failure (journal/records.py)."""

from __future__ import annotations

import os
import stat

from ciuic.fuse_layer.journal import records
from ciuic.fuse_layer.journal.journal_writer import JournalWriter
from ciuic.fuse_layer.journal.records import ChangedInodes, ChangedNames
from ciuic.fuse_layer.state.node import Node


def note_changing(
    journal: JournalWriter | None,
    parent: Node,
    name: bytes,
    ino: int,
    *,
    to: tuple[Node, bytes] | None = None,
    replaced: int = 0,
    exchange: bool = False,
    goes: tuple[Node, os.stat_result] | None = None,
) -> None:
    """Note that a name is about to be renamed or removed, before the system call that does it.

    Args:
        journal: journal of the session; None where there can be no successor.
        parent: directory of the name.
        name: name that changes.
        ino: inode number that the name leads to.
        to: directory and name after a rename; None for a removal.
        replaced: inode number under the new name, 0 where that is free.
        exchange: both names stay, and exchange their inodes.
        goes: node and attributes of the inode that loses its name, where the kernel remembers it.
    """
    if journal is None:
        return
    if goes is not None and stat.S_ISDIR(goes[1].st_mode):
        # Mode and owner end with the directory, and a program that has it open may still ask for them.
        st = goes[1]
        journal.append(records.emptied_record(goes[0].id, st.st_mode, st.st_uid, st.st_gid))
    inodes = ChangedInodes(ino, replaced, exchange)
    journal.append(records.changing_record(_names(parent, name, to), inodes))


def note_unchanged(
    journal: JournalWriter | None, parent: Node, name: bytes, *, to: tuple[Node, bytes] | None = None
) -> None:
    """Note that the file system refused the change that ``note_changing`` announced."""
    # Without this record a successor, after the name was renamed later, would take it for removed: the file
    # would get a second node, whose attributes the kernel keeps apart from those of the first.
    note_settled(journal, _names(parent, name, to))


def note_settled(journal: JournalWriter | None, names: ChangedNames) -> None:
    """Note that the outcome of a change of these names is known."""
    if journal is not None:
        journal.append(records.unchanged_record(names))


def _names(parent: Node, name: bytes, to: tuple[Node, bytes] | None) -> ChangedNames:
    if to is None:
        return ChangedNames(parent.id, name)
    return ChangedNames(parent.id, name, to[0].id, to[1])
