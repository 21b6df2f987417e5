"""Hidden hard links that keep inodes alive, and link counts without them.

Two directories of the state have such links, and a caller may keep more. One is for inodes that sealed epochs still need and the job
has removed, replaced or renamed (`HeldLinks`). The other is for *orphans*, inodes that programs have open and no name leads to, so
that a successor of this process can open them again. Guarantees: the job never sees a link count with ours in it;
a failed link of the first kind is raised, one of the second kind is ignored: the inode then ends with this
process, as it would without us.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Final

from ciuic.fuse_layer import undo_format
from ciuic.fuse_layer.system.path_handles import Descriptor
from ciuic.protocol.state_directory import own_directory
from ciuic.system.disk import PIN

ORPHANS_DIR: Final = b"open"


class HiddenLinks:
    """Hidden links of one root: those of orphans, and of the caller. Thread-safe."""

    def __init__(self, others: Collection[int] = ()) -> None:
        """Keep no link yet; ``others`` are inodes to which the caller keeps one more, removed by `let_other_go`."""
        self._others = others
        self._orphan_directory: Descriptor | None = None
        self._orphans: set[int] = set()
        self._pinned: dict[int, Descriptor] = {}
        """Descriptors of orphans whose links another session may remove."""
        # Writers of a sequence lock: `links` reads without it, and tries again where `_version` moved.
        self._lock = threading.Lock()
        self._version = 0
        """Counter of changes; odd while a link is made or removed."""

    def links(self, read: Callable[[], os.stat_result]) -> tuple[os.stat_result, int]:
        """Return the result of ``read`` and the link count without hidden links, consistent with each other."""
        # Without the lock first: every answer with attributes comes here, and links change seldom.
        # A program that removes many files moves the version all the time: after three attempts the lock
        # decides.
        for _ in range(3):
            version = self._version
            st = read()
            nlink = self._visible(st) if self._orphans or self._others else st.st_nlink
            if version == self._version and not version & 1:
                return st, nlink
        with self._lock:
            st = read()
            return st, self._visible(st)

    def _visible(self, st: os.stat_result) -> int:
        """Return the link count for the job."""
        # Not below 0: a session that began after this one was detached has removed the links of this one's
        # orphans.
        return max(st.st_nlink - self.of(st.st_ino), 0)

    def of(self, ino: int) -> int:
        """Return how many links of an inode are ours."""
        return (ino in self._orphans) + (ino in self._others)

    def let_other_go(self, remove: Callable[[], None]) -> None:
        """Remove a link of `others`; ``remove`` takes the link and its inode away."""
        with self._lock:
            self._version += 1
            try:
                remove()
            finally:
                self._version += 1

    # -- orphans --------------------------------------------------------------------------------------

    def keep_orphans_in(self, state_fd: int, *, inherited: bool) -> None:
        """Open the directory of orphans; ``inherited``: those of a predecessor are still needed."""
        if not inherited:
            self._orphan_directory = fresh_directory(state_fd, ORPHANS_DIR)
            return
        # It is made if missing: without it removed files that were open are lost, and the session goes on.
        self._orphan_directory = Descriptor(own_directory(state_fd, ORPHANS_DIR))
        self._orphans = {int(name) for name in os.listdir(self._orphan_directory.fd)}

    def keep_orphan(self, ino: int, path: bytes, dir_fd: int | None, *, follow: bool) -> None:
        """Link an open file that is about to lose its last name, or never had one, so that a successor can open it again.

        Where no link can be made the file ends with this process.
        """
        if self._orphan_directory is None or ino in self._orphans:
            return
        with self._lock, suppress(OSError):
            self._version += 1
            try:
                os.link(
                    path,
                    b"%d" % ino,
                    src_dir_fd=dir_fd,
                    dst_dir_fd=self._orphan_directory.fd,
                    follow_symlinks=follow,
                )
                self._orphans.add(ino)
            finally:
                self._version += 1

    def has_orphan(self, ino: int) -> bool:
        """Return whether a link keeps the inode for a successor."""
        return ino in self._orphans

    def pin_orphans(self) -> None:
        """Keep orphans by descriptors as well: from now on another session may begin, and empty the directory."""
        for ino in list(self._orphans):
            # Where descriptors run out, attributes of a removed pipe or socket may be lost; files are open in
            # any case. Under the lock, because a descriptor that outlived its orphan would keep the space.
            with self._lock, suppress(OSError):
                if ino in self._orphans:
                    self._pinned[ino] = Descriptor(self.open_orphan(ino, PIN))

    def let_orphan_go(self, ino: int) -> None:
        """Remove the link of an orphan that no program has open any more, or that has a name again."""
        if ino not in self._orphans or self._orphan_directory is None:
            return
        with self._lock:
            self._version += 1
            try:
                # A session that began meanwhile has emptied the directory.
                with suppress(OSError):
                    os.unlink(b"%d" % ino, dir_fd=self._orphan_directory.fd)
                self._orphans.discard(ino)
                self._pinned.pop(ino, None)
            finally:
                self._version += 1

    def let_orphans_go(self) -> None:
        """Remove the links of all orphans, because the session is over and has no successor."""
        for ino in list(self._orphans):
            self.let_orphan_go(ino)

    def find_orphan(self, ino: int) -> Descriptor | None:
        """Return an O_PATH descriptor of an orphan; None when it was not kept."""
        if ino not in self._orphans:
            return None
        pinned = self._pinned.get(ino)
        if pinned is not None:
            return pinned
        try:
            return Descriptor(self.open_orphan(ino, PIN))
        except FileNotFoundError:
            return None

    def open_orphan(self, ino: int, flags: int) -> int:
        """Open an orphan.

        Raises:
            OSError: it was not kept.
        """
        if self._orphan_directory is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return os.open(b"%d" % ino, flags, dir_fd=self._orphan_directory.fd)


class HeldLinks(HiddenLinks):
    """Hidden links of a tracked root: ``hold`` is the directory for inodes that sealed epochs need."""

    def __init__(self, hold: Descriptor) -> None:
        self.held: set[int] = set()
        """Inodes that sealed epochs keep alive."""
        super().__init__(self.held)
        self._hold = hold

    def were_deleted(self) -> bool:
        """Return whether another program has deleted a directory of links."""
        directories = [self._hold] + ([self._orphan_directory] if self._orphan_directory is not None else [])
        return any(os.fstat(directory.fd).st_nlink == 0 for directory in directories)

    def renew(self, state_fd: int, undo_fd: int) -> None:
        """Make the directories anew. Orphans whose links were deleted end with this process.

        Raises:
            OSError: they cannot be made.
        """
        with self._lock:
            self._version += 1
            try:
                put_in_place(fresh_directory(undo_fd, undo_format.HOLD_DIR.encode()), self._hold)
                self.held.clear()
                if self._orphan_directory is not None:
                    kept = Descriptor(own_directory(state_fd, ORPHANS_DIR))
                    self._orphans = {int(name) for name in os.listdir(kept.fd)}
                    put_in_place(kept, self._orphan_directory)
            finally:
                self._version += 1

    def hold(self, dir_fd: int, name: bytes, st: os.stat_result) -> int:
        """Keep the inode of a name alive; return the bytes of disk that it takes, 0 where it was kept already."""
        if st.st_ino in self.held:
            return 0
        with self._lock:
            if st.st_ino in self.held:
                return 0
            # Odd from before the link until `held` has the inode: a reader of the link count between the two
            # tries again.
            self._version += 1
            try:
                target = b"%d" % st.st_ino
                os.link(name, target, src_dir_fd=dir_fd, dst_dir_fd=self._hold.fd, follow_symlinks=False)
                self.held.add(st.st_ino)
            finally:
                self._version += 1
        return st.st_blocks * 512

    def let_all_go(self, needed: Callable[[], bool]) -> None:
        """Remove the links that keep sealed epochs' inodes, until ``needed`` says that a newer epoch needs them."""
        for name in os.listdir(self._hold.fd):
            self._let_go(int(name), needed)

    def _let_go(self, ino: int, needed: Callable[[], bool]) -> None:
        """Remove one link."""
        name = b"%d" % ino
        try:
            # The descriptor keeps the inode until the lock is released: freeing the blocks of a large file
            # takes time.
            alive = Descriptor(os.open(name, PIN, dir_fd=self._hold.fd))
            with self._lock:
                if needed():
                    # A new epoch was sealed meanwhile, and may rely on the link.
                    return
                self._version += 1
                try:
                    os.unlink(name, dir_fd=self._hold.fd)
                    self.held.discard(ino)
                finally:
                    self._version += 1
            del alive
        except FileNotFoundError:
            self.held.discard(ino)


def put_in_place(made: Descriptor, old: Descriptor) -> None:
    """Let the number of ``old``, which threads may be using just now, stand for another directory."""
    os.dup2(made.fd, old.fd, inheritable=False)


def fresh_directory(parent_fd: int, name: bytes) -> Descriptor:
    """Open the directory ``name``, made if missing and emptied: no session uses what an earlier one saved.

    Raises:
        PermissionError: the name leads to something that ciuic did not make.
    """
    directory = Descriptor(own_directory(parent_fd, name))
    for entry in os.listdir(directory.fd):
        try:
            os.unlink(entry, dir_fd=directory.fd)
        except IsADirectoryError:
            fresh_directory(directory.fd, os.fsencode(entry))
    return directory
