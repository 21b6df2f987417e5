"""Entries of inodes as of the cut, with content that is taken over from the base or read.

This module alone decides whether content must be read, and whether what was read is the content of the cut.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from typing import Final

import msgspec

from ciuic.daemon.capture.base_snapshot import Base
from ciuic.daemon.capture.content import EMPTY_MAP, ContentReader, Stored
from ciuic.daemon.capture.view import BackingUnreadable, PinnedInode
from ciuic.fuse_layer.sealed_format import Sealed, Unheld
from ciuic.repository import Writer
from ciuic.repository.format.tree_format import attributes_problem
from ciuic.types import (
    FLAG_MOUNTPOINT,
    FLAG_NOT_HELD,
    FLAG_OPEN_FOR_WRITING,
    Entry,
    MapRef,
    TreeRef,
    not_held,
    recorded_time,
)

# Distance from the older cut within which a ctime may hide a later change, because file system clocks tick
# coarsely.
RACY_NS: Final = 1_000_000_000


class EntryMaker:
    """Maker of the entries of one root."""

    def __init__(
        self, writer: Writer, content: ContentReader, base: Base | None, sealed: Sealed | None
    ) -> None:
        self._writer = writer
        self._content = content
        self._trusted = base is not None and base.trusted
        self._settled_before_ns = base.time_ns - RACY_NS if base is not None else 0
        self._changes = sealed.changes if sealed is not None else None
        self._open_for_write = frozenset(sealed.head.open_for_write) if sealed is not None else frozenset()
        self._cut_ns = sealed.head.cut_ns if sealed is not None else time.time_ns()
        self._unheld = _unheld_of(sealed) if sealed is not None else {}
        self.not_held = 0
        """Number of files whose content may be later than the cut."""

    def leaf(self, name: bytes, inode: PinnedInode, previous: Entry | None) -> Entry:
        """Return the entry of anything but a directory.

        Args:
            name: its name in the entry.
            inode: the inode.
            previous: entry of the same inode in the base; None where there is none.

        Raises:
            BackingUnreadable: it cannot be read.
        """
        flags = FLAG_OPEN_FOR_WRITING if inode.ino in self._open_for_write else 0
        stored = Stored(EMPTY_MAP, False)
        if inode.is_file:
            stored = self._file_content(inode, previous)
            flags |= self._not_held(inode, stored)
        entry = self._attributes(name, inode, flags)
        return msgspec.structs.replace(
            entry, content=stored.map.content, map_height=stored.map.map_height, target=inode.target
        )

    def _not_held(self, inode: PinnedInode, stored: Stored) -> int:
        """Return the flags of a file that was read just now.

        Return 0 where its content is proved to be that of the cut.
        """
        unheld = self._unheld.get(inode.ino)
        if not stored.changed_unseen and (unheld is None or _is_as_held(inode, unheld)):
            return 0
        self.not_held += 1
        until_ns = (
            unheld.until_ns if unheld is not None and not stored.changed_unseen else 0
        ) or time.time_ns()
        # Rounded up: the entry says by how much its content may be later at most.
        return not_held(-(-(until_ns - self._cut_ns) // 1_000_000))

    def directory(self, name: bytes, inode: PinnedInode) -> Entry:
        """Return the entry of a directory without its tree. May raise BackingUnreadable."""
        return self._attributes(name, inode, 0)

    def with_tree(self, directory: Entry, tree: TreeRef) -> Entry:
        """Return a directory's entry with its tree."""
        return msgspec.structs.replace(
            directory, content=tree.id, total_files=tree.total_files, total_bytes=tree.total_bytes
        )

    def mountpoint(self, name: bytes, inode: PinnedInode) -> Entry:
        """Return the entry of a mount point: an empty directory (or file) with a flag.

        Its inode number is 0, because the number belongs to the other file system and could be confused with
        one of the root's.
        """
        return msgspec.structs.replace(
            self._attributes(name, inode, FLAG_MOUNTPOINT), ino=0, size_bytes=0, total_files=0
        )

    def _attributes(self, name: bytes, inode: PinnedInode, flags: int) -> Entry:
        st = inode.stat
        try:
            xattrs, xattrs_flag = self._writer.put_xattrs(inode.xattrs.items()) if inode.xattrs else ((), 0)
        # More than a chunk holds: XFS and others let an owner set any number of attributes.
        except ValueError as error:
            raise BackingUnreadable(OSError(errno.E2BIG, f"extended attributes: {error}")) from error
        size_bytes = st.size if inode.is_file else len(inode.target)
        is_device = stat.S_ISCHR(st.mode) or stat.S_ISBLK(st.mode)
        entry = Entry(
            name=name,
            mode=st.mode,
            uid=st.uid,
            gid=st.gid,
            rdev=st.rdev if is_device else 0,
            ino=inode.ino,
            size_bytes=size_bytes,
            mtime_ns=st.mtime_ns,
            ctime_ns=st.ctime_ns,
            atime_ns=st.atime_ns,
            flags=flags | xattrs_flag,
            xattrs=xattrs,
        )
        # Found out later, it would cost the whole batch of names and with it the root.
        if problem := attributes_problem(entry):
            raise BackingUnreadable(OSError(errno.EOVERFLOW, problem))
        return entry

    def _file_content(self, inode: PinnedInode, previous: Entry | None) -> Stored:
        if inode.stat.size == 0:
            return Stored(EMPTY_MAP, False)
        change = self._changes.get(inode.ino) if self._changes is not None else None
        if previous is None:
            return self._whole(inode)
        taken_over = Stored(MapRef(previous.content, previous.map_height), False)
        if not self._trusted:
            if change is None and self._is_same(inode, previous):
                return taken_over
            return self._whole(inode)
        data = change.data if change is not None else 0
        if isinstance(data, bytes):
            return self._content.changed(inode, previous, data)
        # No block changed. A size that differs without one would contradict the tracking, so the file is
        # read.
        if data == 0 and inode.stat.size == previous.size_bytes:
            return taken_over
        return self._whole(inode)

    def _whole(self, inode: PinnedInode) -> Stored:
        # A file that is open for writing is probably written further, and each write to a shared extent needs
        # new space.
        return self._content.whole(inode, may_share=inode.ino not in self._open_for_write)

    def _is_same(self, inode: PinnedInode, previous: Entry) -> bool:
        st = inode.stat
        return (
            (st.size, st.mtime_ns, st.ctime_ns, inode.ino)
            == (previous.size_bytes, previous.mtime_ns, previous.ctime_ns, previous.ino)
            and st.ctime_ns <= self._settled_before_ns
            # Equal times prove nothing of such a file: a store through a mapping moves them when its page
            # fault begins, not when it lands (docs/decisions/sharing-extents.md).
            and not previous.flags & (FLAG_OPEN_FOR_WRITING | FLAG_NOT_HELD)
        )


def _unheld_of(sealed: Sealed) -> dict[int, Unheld]:
    """Return the files that are not known to be held, by inode number.

    These are all open files for a worker of an older version.
    """
    if sealed.head.unheld is None:
        return {ino: Unheld(ino) for ino in sealed.head.open_for_write}
    return {unheld.ino: unheld for unheld in sealed.head.unheld}


def _is_as_held(inode: PinnedInode, unheld: Unheld) -> bool:
    """Return whether the file, read just now, is proved to be what it was under the hold.

    See fuse_layer/cut/instant.py.
    """
    if not unheld.provable:
        return False
    if not unheld.size_bytes:
        return True  # no more than this size is captured
    try:
        st = os.fstat(inode.fd)
    except OSError:
        return False
    return (st.st_size, recorded_time(st.st_mtime_ns), recorded_time(st.st_ctime_ns)) == (
        unheld.size_bytes,
        unheld.mtime_ns,
        unheld.ctime_ns,
    )


def without_access_time_change(entry: Entry, old: Entry | None) -> Entry:
    """Return `old` when only the access time differs, so that reading a file does not make a new tree.

    Return `entry` otherwise.
    """
    if old is not None and msgspec.structs.replace(entry, atime_ns=old.atime_ns) == old:
        return old
    return entry
