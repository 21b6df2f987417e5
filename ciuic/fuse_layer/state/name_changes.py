"""Renames and removals in the session's journal: noted before the system call, settled by a successor (journal/records.py).

A successor compares changes that a killed worker had begun with the directory, and corrects its node table.
Guarantee: afterwards the table binds no name of an interrupted rename or removal to an inode that the
directory has elsewhere. It holds before the first request is answered: a repeated request that finds its work
done then has nothing left to do.

The kernel keeps the directories of such a request locked until it is answered, so nothing else can have
changed these names since.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable

import structlog

from ciuic.fuse_layer.journal import records
from ciuic.fuse_layer.journal.journal_writer import JournalWriter
from ciuic.fuse_layer.journal.records import ChangedInodes, ChangedNames, Changes
from ciuic.fuse_layer.state.node_table import Node, NodeTable

log = structlog.get_logger(__name__)

_MAX_ROUNDS = 8
"""Limit of rounds. A directory may be reached only when a rename of one above it is settled; interrupted
renames nest no deeper than there are threads of a job that rename ancestors of each other's directories at
one instant."""


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
    _note_settled(journal, _names(parent, name, to))


def _note_settled(journal: JournalWriter | None, names: ChangedNames) -> None:
    """Note that the outcome of a change of these names is known."""
    if journal is not None:
        journal.append(records.unchanged_record(names))


def _names(parent: Node, name: bytes, to: tuple[Node, bytes] | None) -> ChangedNames:
    if to is None:
        return ChangedNames(parent.id, name)
    return ChangedNames(parent.id, name, to[0].id, to[1])


def settle(nodes: NodeTable, changes: Changes, is_gone: Callable[[Node], bool]) -> None:
    """Apply every change that took effect; ``is_gone`` tells whether no name leads to a node any more.

    The newest first: an older one of the same name was refused, and its worker died before it could say so. A
    rename that took effect moves the node away from that name, so that the older record finds nothing to do.
    """
    waiting = list(changes.items())[::-1]
    for _ in range(_MAX_ROUNDS):
        missed = [(names, inodes) for names, inodes in waiting if not _settled(nodes, names, inodes, is_gone)]
        if len(missed) == len(waiting):
            break
        waiting = missed
    for names in changes:
        _note_settled(nodes.journal, names)
    if waiting:
        # A directory of theirs was removed later, or never was: no request can name them.
        log.info("name_changes_not_settled", count=len(waiting))


def _settled(
    nodes: NodeTable, names: ChangedNames, inodes: ChangedInodes, is_gone: Callable[[Node], bool]
) -> bool:
    """Settle one change; return False after an error."""
    # A successor that could not start would cost the job more than one stale name.
    try:
        return _settle_one(nodes, names, inodes, is_gone)
    except OSError:
        return False


def _settle_one(
    nodes: NodeTable, names: ChangedNames, inodes: ChangedInodes, is_gone: Callable[[Node], bool]
) -> bool:
    """Settle one change; return False where a directory cannot be reached (yet)."""
    try:
        parent = nodes.get(names.parent)
        here = _ino(nodes, parent, names.name)
        if not names.new_parent:
            if here != inodes.ino:
                _removed(nodes, inodes.ino, parent, names.name, is_gone)
            return True
        new_parent = nodes.get(names.new_parent)
        there = _ino(nodes, new_parent, names.new_name)
    except OSError:
        return False
    # The inode that was under the new name goes first: the record of the rename itself marks the change as
    # settled, and this worker may die before it is written.
    if inodes.replaced and there != inodes.replaced:
        replaced = nodes.by_ino(inodes.replaced)
        if inodes.exchange and here == inodes.replaced and replaced is not None:
            if (new_parent, names.new_name) in replaced.names():
                nodes.renamed(replaced, new_parent, names.new_name, parent, names.name)
        else:
            _removed(nodes, inodes.replaced, new_parent, names.new_name, is_gone)
    moved = nodes.by_ino(inodes.ino)
    if (
        there == inodes.ino
        and here != inodes.ino
        and moved is not None
        and (parent, names.name) in moved.names()
    ):
        nodes.renamed(moved, parent, names.name, new_parent, names.new_name)
    return True


def _removed(nodes: NodeTable, ino: int, parent: Node, name: bytes, is_gone: Callable[[Node], bool]) -> None:
    node = nodes.by_ino(ino)
    if node is not None and (parent, name) in node.names():
        gone = node.is_dir or (len(node.names()) == 1 and is_gone(node))
        nodes.unlinked(node, parent, name, gone=gone, keep=None)


def _ino(nodes: NodeTable, parent: Node, name: bytes) -> int:
    """Return the inode number under a name now, 0 when it is free.

    Raises:
        OSError: the directory cannot be reached.
    """
    directory = nodes.directory(parent)
    try:
        return os.stat(name, dir_fd=directory.fd, follow_symlinks=False).st_ino
    except FileNotFoundError:
        return 0
