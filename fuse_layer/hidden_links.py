"""Hard links of ours that keep inodes alive, and what stat must not count because of them.

Two directories of them: in one the inodes that sealed epochs still need and the job has removed, replaced or renamed; in the other
those that programs have open and no name leads to, so that a successor of this process can open them again. Guarantees: the job never
sees a link count with ours in it; what cannot be linked is the caller's to judge for the first, and dies with this process
for the second, as it would without us.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from ciuic.fuse_layer.ways import Descriptor
from ciuic.state_directory import own_directory

ORPHANS_DIR: Final = b"open"
_PIN_FLAGS: Final = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


class HiddenLinks:
    """Of one root; ``hold`` is the directory for what sealed epochs need. Thread-safe."""

    def __init__(self, hold: Descriptor) -> None:
        self._hold = hold
        self.held: set[int] = set()
        """Inodes that sealed epochs keep alive."""
        self._orphanage: Descriptor | None = None
        self._orphans: set[int] = set()
        self._pinned: dict[int, Descriptor] = {}
        """Descriptors of orphans whose links another session may remove."""
        self._lock = threading.Lock()
        self._version = 0
        """Odd while a link comes or goes."""

    # -- what sealed epochs need ----------------------------------------------------------------------

    def hold(self, dir_fd: int, name: bytes, st: os.stat_result) -> int:
        """The inode that the name leads to stays alive; the bytes of disk that takes, 0 where it did already."""
        if st.st_ino in self.held:
            return 0
        with self._lock:
            if st.st_ino in self.held:
                return 0
            self._version += 1
            try:
                target = b"%d" % st.st_ino
                os.link(name, target, src_dir_fd=dir_fd, dst_dir_fd=self._hold.fd, follow_symlinks=False)
                self.held.add(st.st_ino)
            finally:
                self._version += 1
        return st.st_blocks * 512

    def let_all_go(self, needed: Callable[[], bool]) -> None:
        """Drop the links that keep sealed epochs' inodes, for as long as no newer epoch needs any."""
        for name in os.listdir(self._hold.fd):
            self._let_go(int(name), needed)

    def _let_go(self, ino: int, needed: Callable[[], bool]) -> None:
        """The space is freed outside the lock, where it may take its time."""
        name = b"%d" % ino
        try:
            alive = Descriptor(os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._hold.fd))
            with self._lock:
                if needed():
                    return  # a new epoch was sealed meanwhile and may rely on the link
                self._version += 1
                try:
                    os.unlink(name, dir_fd=self._hold.fd)
                    self.held.discard(ino)
                finally:
                    self._version += 1
            del alive
        except FileNotFoundError:
            self.held.discard(ino)

    def links(self, read: Callable[[], os.stat_result]) -> tuple[os.stat_result, int]:
        """The result of ``read`` and the link count without our hold link, consistent with each other."""
        for _ in range(3):
            version = self._version
            st = read()
            nlink = self._visible(st)
            if version == self._version and not version & 1:
                return st, nlink
        with self._lock:
            st = read()
            return st, self._visible(st)

    def _visible(self, st: os.stat_result) -> int:
        """Link count for the job. A session that began since this one was detached has removed the links of its orphans."""
        return max(st.st_nlink - self.of(st.st_ino), 0)

    def of(self, ino: int) -> int:
        """How many of its links are ours."""
        return (ino in self.held) + (ino in self._orphans)

    # -- keeping what is open alive -------------------------------------------------------------------

    def keep_orphans_in(self, state_fd: int, *, inherited: bool) -> None:
        """From now on ``keep_orphan`` may be used; ``inherited``: a predecessor's are still needed."""
        if not inherited:
            self._orphanage = fresh_directory(state_fd, ORPHANS_DIR)
            return
        # Made if missing: its absence costs removed files that were open, not the session.
        self._orphanage = Descriptor(own_directory(state_fd, ORPHANS_DIR))
        self._orphans = {int(name) for name in os.listdir(self._orphanage.fd)}

    def keep_orphan(self, ino: int, path: bytes, dir_fd: int | None, *, follow: bool) -> None:
        """A file that programs have open is about to lose its last name, or never had one: a hard link of ours lets a
        successor of this process open it again. Where there can be none, it dies with this process, as before."""
        if self._orphanage is None or ino in self._orphans:
            return
        with self._lock, suppress(OSError):
            self._version += 1
            try:
                os.link(
                    path,
                    b"%d" % ino,
                    src_dir_fd=dir_fd,
                    dst_dir_fd=self._orphanage.fd,
                    follow_symlinks=follow,
                )
                self._orphans.add(ino)
            finally:
                self._version += 1

    def pin_orphans(self) -> None:
        """Keep what is open and removed by descriptors as well: from now on another session may begin, and empty the directory."""
        for ino in list(self._orphans):
            # Out of descriptors, attributes of a removed pipe or socket may be lost; files are open besides. Under the lock: a pin
            # that outlived its orphan would keep the space.
            with self._lock, suppress(OSError):
                if ino in self._orphans:
                    self._pinned[ino] = Descriptor(self.open_orphan(ino, _PIN_FLAGS))

    def let_orphan_go(self, ino: int) -> None:
        """Nobody has it open any more, or it has a name again."""
        if ino not in self._orphans or self._orphanage is None:
            return
        with self._lock:
            self._version += 1
            try:
                with suppress(OSError):  # emptied when a session begins
                    os.unlink(b"%d" % ino, dir_fd=self._orphanage.fd)
                self._orphans.discard(ino)
                self._pinned.pop(ino, None)
            finally:
                self._version += 1

    def let_orphans_go(self) -> None:
        """The session is over, and has no successor: nothing of it stays on the disk."""
        for ino in list(self._orphans):
            self.let_orphan_go(ino)

    def find_orphan(self, ino: int) -> Descriptor | None:
        """An O_PATH descriptor of what was kept; None when it was not."""
        if ino not in self._orphans:
            return None
        pinned = self._pinned.get(ino)
        if pinned is not None:
            return pinned
        try:
            return Descriptor(self.open_orphan(ino, _PIN_FLAGS))
        except FileNotFoundError:
            return None

    def open_orphan(self, ino: int, flags: int) -> int:
        """OSError when it was not kept."""
        if self._orphanage is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return os.open(b"%d" % ino, flags, dir_fd=self._orphanage.fd)


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
