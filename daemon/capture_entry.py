"""Entries: what the tree says of one thing at the cut, its content taken over from the base or read.

The one place that decides whether content must be read, and whether what was read is the content of the cut.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from typing import Final

import msgspec

from ciuic.daemon.capture_base import Base
from ciuic.daemon.capture_content import EMPTY_MAP, ContentReader, Stored
from ciuic.daemon.capture_view import Thing, Unreadable
from ciuic.fuse_layer.sealed_format import Sealed, Unheld
from ciuic.repository import Writer
from ciuic.types import (
    FLAG_MOUNTPOINT,
    FLAG_NOT_HELD,
    FLAG_OPEN_FOR_WRITING,
    Entry,
    MapRef,
    TreeRef,
    not_held,
)

RACY_NS: Final = 1_000_000_000
"""A ctime this close to the older cut may hide a later change: clocks tick coarsely."""


class EntryMaker:
    """Makes entries for one root."""

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
        """Files whose content may be later than the cut."""

    def leaf(self, name: bytes, thing: Thing, previous: Entry | None) -> Entry:
        """Anything but a directory. `previous` is the same inode in the base, None if it was not there. Unreadable."""
        flags = FLAG_OPEN_FOR_WRITING if thing.ino in self._open_for_write else 0
        stored = Stored(EMPTY_MAP, False)
        if thing.is_file:
            stored = self._file_content(thing, previous)
            flags |= self._not_held(thing, stored)
        entry = self._attributes(name, thing, flags)
        return msgspec.structs.replace(
            entry, content=stored.map.content, map_height=stored.map.map_height, target=thing.target
        )

    def _not_held(self, thing: Thing, stored: Stored) -> int:
        """Return the flags of a file that was read just now: 0 where its content is proved to be that of the cut."""
        unheld = self._unheld.get(thing.ino)
        if not stored.torn and (unheld is None or _is_as_held(thing, unheld)):
            return 0
        self.not_held += 1
        until_ns = (unheld.until_ns if unheld is not None and not stored.torn else 0) or time.time_ns()
        return not_held(-(-(until_ns - self._cut_ns) // 1_000_000))

    def directory(self, name: bytes, thing: Thing) -> Entry:
        """A directory's entry without what is below it. Unreadable."""
        return self._attributes(name, thing, 0)

    def with_tree(self, directory: Entry, tree: TreeRef) -> Entry:
        """The same with what is below it."""
        return msgspec.structs.replace(
            directory, content=tree.id, total_files=tree.total_files, total_bytes=tree.total_bytes
        )

    def mountpoint(self, name: bytes, thing: Thing) -> Entry:
        """Where another file system is mounted: an empty directory (or file) with a mark.

        Its inode number belongs to that other file system and could be taken for one of ours: 0 instead.
        """
        return msgspec.structs.replace(
            self._attributes(name, thing, FLAG_MOUNTPOINT), ino=0, size_bytes=0, total_files=0
        )

    def _attributes(self, name: bytes, thing: Thing, flags: int) -> Entry:
        st = thing.stat
        try:
            xattrs, xattrs_flag = self._writer.put_xattrs(thing.xattrs.items()) if thing.xattrs else ((), 0)
        except (
            ValueError
        ) as error:  # more than a chunk holds; XFS and others let an owner set as many as he likes
            raise Unreadable(OSError(errno.E2BIG, f"extended attributes: {error}")) from error
        size_bytes = st.size if thing.is_file else len(thing.target)
        is_device = stat.S_ISCHR(st.mode) or stat.S_ISBLK(st.mode)
        return Entry(
            name=name,
            mode=st.mode,
            uid=st.uid,
            gid=st.gid,
            rdev=st.rdev if is_device else 0,
            ino=thing.ino,
            size_bytes=size_bytes,
            mtime_ns=st.mtime_ns,
            ctime_ns=st.ctime_ns,
            atime_ns=st.atime_ns,
            flags=flags | xattrs_flag,
            xattrs=xattrs,
        )

    def _file_content(self, thing: Thing, previous: Entry | None) -> Stored:
        if thing.stat.size == 0:
            return Stored(EMPTY_MAP, False)
        change = self._changes.get(thing.ino) if self._changes is not None else None
        if previous is None:
            return self._whole(thing)
        taken_over = Stored(MapRef(previous.content, previous.map_height), False)
        if not self._trusted:
            if change is None and self._is_same(thing, previous):
                return taken_over
            return self._whole(thing)
        data = change.data if change is not None else 0
        if isinstance(data, bytes):
            return self._content.changed(thing, previous, data)
        if data == 0 and thing.stat.size == previous.size_bytes:
            return taken_over
        return self._whole(thing)

    def _whole(self, thing: Thing) -> Stored:
        # Whoever writes goes on doing so, and in a shared extent that means finding new room for each block.
        return self._content.whole(thing, may_share=thing.ino not in self._open_for_write)

    def _is_same(self, thing: Thing, previous: Entry) -> bool:
        st = thing.stat
        return (
            (st.size, st.mtime_ns, st.ctime_ns, thing.ino)
            == (previous.size_bytes, previous.mtime_ns, previous.ctime_ns, previous.ino)
            and st.ctime_ns <= self._settled_before_ns
            and not previous.flags & (FLAG_OPEN_FOR_WRITING | FLAG_NOT_HELD)
        )


def _unheld_of(sealed: Sealed) -> dict[int, Unheld]:
    """Return the files that are not known to be held, by inode number; of a worker of an older version, all open ones."""
    if sealed.head.unheld is None:
        return {ino: Unheld(ino) for ino in sealed.head.open_for_write}
    return {unheld.ino: unheld for unheld in sealed.head.unheld}


def _is_as_held(thing: Thing, unheld: Unheld) -> bool:
    """Return whether the file, read just now, is proved to be what it was under the hold (fuse_layer/instant.py)."""
    if not unheld.provable:
        return False
    if not unheld.size_bytes:
        return True  # no more than this size is captured
    try:
        st = os.fstat(thing.fd)
    except OSError:
        return False
    return (st.st_size, st.st_mtime_ns, st.st_ctime_ns) == (
        unheld.size_bytes,
        unheld.mtime_ns,
        unheld.ctime_ns,
    )


def without_access_time_change(entry: Entry, old: Entry | None) -> Entry:
    """`old` itself when only the access time differs: reading a file must not make a new tree."""
    if old is not None and msgspec.structs.replace(entry, atime_ns=old.atime_ns) == old:
        return old
    return entry
