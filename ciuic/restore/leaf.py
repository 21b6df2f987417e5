"""One thing that is not a directory: made under a temporary name, whole and synced, then given its own.

Guarantees: under the final name there is at every moment either what was there or what the snapshot has; the temporary
file is gone when an attempt ends, however it ends. Several threads may write one large file; the last one to finish
gives it its name.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from typing import TYPE_CHECKING

from ciuic.errors import Damaged
from ciuic.linked_path import MAX_KEPT_BYTES
from ciuic.lookup import join
from ciuic.restore import attributes
from ciuic.restore.attributes import Xattrs
from ciuic.restore.content import start_writing_out
from ciuic.restore.destination import (
    Remover,
    new_temporary_name,
    proc_path,
    rename_new,
    unlink_if_there,
)
from ciuic.restore.pool import Stopped
from ciuic.types import Entry

if TYPE_CHECKING:
    from ciuic.restore.folders import Folder
    from ciuic.restore.links import LinkGroup
    from ciuic.restore.model import Action

READ_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_INODE = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


class Leaf:
    """A name to be restored. ``end(leaf, action, problems, error)`` is called exactly once, from any thread."""

    def __init__(
        self,
        folder: Folder,
        entry: Entry,
        path: bytes,
        existing: os.stat_result | None,
        end: Callable[[Leaf, Action, list[str], BaseException | None], None],
        *,
        xattrs: Xattrs = (),
        run: str,
        make_remover: Callable[[], Remover],
        dry_run: bool = False,
    ) -> None:
        self.folder = folder
        self.entry = entry
        self._path = path if len(path) <= MAX_KEPT_BYTES else b""
        self.existing = existing
        self.end = end
        self.xattrs = xattrs
        self.run = run
        self.make_remover = make_remover
        self.dry_run = dry_run
        self.group: LinkGroup | None = None
        self.inode: tuple[int, int] | None = None
        """(device, inode) under the final name, when it is there."""
        self.counted_bytes = 0
        """Of its size, already in the progress."""
        self.ended = False
        """Whether `end` was called."""
        self._problems: list[str] = []
        self._temporary = b""
        self._place = -1
        """Descriptor of the directory that the temporary name is in; the folder keeps it open."""
        self._fd = -1

    @property
    def path(self) -> bytes:
        """Absolute. A long one is put together anew: many wait at a time."""
        return self._path or join(self.folder.path, self.entry.name)

    # -- what is there already

    def keep(
        self, *, content_equal: Callable[[int], bool] | None, compared: tuple[int, int] | None = None
    ) -> bool:
        """Whether what is there is right; its attributes are put right where only they differ, and `end` is called.

        ``content_equal(fd)`` decides about a regular file's content; None believes it, or knows it of the inode
        ``compared``.
        """
        assert self.existing is not None
        if stat.S_IFMT(self.existing.st_mode) != stat.S_IFMT(self.entry.mode):
            return False
        fd = os.open(
            self.entry.name,
            READ_FILE if self.entry.is_file and content_equal else _INODE,
            dir_fd=self.folder.fd,
        )
        try:
            now = os.fstat(fd)
            at: int | bytes = proc_path(fd)
            if not self._same_kind(now) or not self._same_target(fd, now):
                return False
            # What is no file has no content to know it by: one of somebody else may have been moved here, and would be given away.
            if not self.entry.is_file and now.st_uid != self.entry.uid:
                return False
            differs = attributes.differ(at, now, self.entry, self.xattrs)
            # Another name may show this inode: it is not ours to change (and here it must not have another name).
            # That name may have been removed since the walk saw this one: what is done must not depend on who was first.
            if max(now.st_nlink, self.existing.st_nlink) > 1 and (differs or not self.entry.link):
                return False
            # Size and time can be made to agree: believed alone they must not give somebody else's file away.
            believed = content_equal is None and compared != (now.st_dev, now.st_ino)
            if believed and self.entry.is_file and now.st_uid != self.entry.uid:
                return False
            if content_equal is not None and self.entry.is_file and not content_equal(fd):
                return False
            self.inode = (now.st_dev, now.st_ino)
            problems: list[str] = []
            if differs and not self.dry_run:
                problems = attributes.apply(at, now, self.entry, self.xattrs)
                if self.entry.is_file:
                    self._sync_name(self.entry.name)
        finally:
            os.close(fd)
        self.done("attributes" if differs else "skipped", problems)
        return True

    def _same_kind(self, now: os.stat_result) -> bool:
        mode = self.entry.mode
        if stat.S_IFMT(now.st_mode) != stat.S_IFMT(mode):
            return False
        if stat.S_ISREG(mode):
            return now.st_size == self.entry.size_bytes
        return now.st_rdev == self.entry.rdev or not (stat.S_ISCHR(mode) or stat.S_ISBLK(mode))

    def _same_target(self, fd: int, now: os.stat_result) -> bool:
        return not stat.S_ISLNK(now.st_mode) or os.readlink(b"", dir_fd=fd) == self.entry.target

    def _sync_name(self, name: bytes) -> None:
        try:
            fd = os.open(name, READ_FILE, dir_fd=self.folder.fd)
        except PermissionError:  # a mode that shuts us out too: the directory's sync has to do
            return
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    # -- making it

    @property
    def fd(self) -> int:
        """Of the new file, -1 when there is none (any more)."""
        return self._fd

    def make(self, *, readable: bool = False) -> int:
        """It, new and without content, under a temporary name; its descriptor. OSError.

        Not ``readable``, because what an overlay need not let anybody read meanwhile goes past it to the disk.
        """
        name = new_temporary_name(self.run)
        entry, folder = self.entry, self.folder.workplace(self.run)
        self._place = folder
        if entry.is_file:
            access = os.O_RDWR if readable else os.O_WRONLY
            flags = access | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self._fd = os.open(name, flags, 0o600, dir_fd=folder)
            self._temporary = name
            return self._fd
        if entry.is_symlink:
            os.symlink(entry.target, name, dir_fd=folder)
        else:
            os.mknod(name, stat.S_IFMT(entry.mode) | 0o600, entry.rdev, dir_fd=folder)
        self._temporary = name
        self._fd = os.open(name, _INODE, dir_fd=folder)
        return self._fd

    def dress(self) -> None:
        """All content is written: size and attributes, and what is written is sent on its way to the disk."""
        fd = self._fd
        try:
            now = os.fstat(fd)
            # Only where it must be: on XFS it waits until what was written is on the disk, for each file alone.
            if self.entry.is_file and now.st_size != self.entry.size_bytes:
                os.ftruncate(fd, self.entry.size_bytes)
            at: int | bytes = fd if self.entry.is_file else proc_path(fd)
            self._problems = attributes.apply(at, now, self.entry, self.xattrs)
            if self.entry.is_file:
                start_writing_out(fd, 0, self.entry.size_bytes)
        except BaseException as error:
            self.fail(error)

    def finish(self) -> None:
        """Synced, then named: in this order, so that the name never shows anything less."""
        fd = self._fd
        try:
            if self.entry.is_file:
                os.fsync(fd)
            st = os.fstat(fd)
            self.inode = (st.st_dev, st.st_ino)
            self.place(self._place, self._temporary)
            self._fd, self._temporary = -1, b""
            os.close(fd)
        except BaseException as error:
            self.fail(error)
            return
        self.done("restored", self._problems)

    def done(self, action: Action, problems: list[str]) -> None:
        """Reports that all is well; attributes that could not be set are ``problems``. A file begun is not needed then."""
        self.discard()
        self.ended = True
        self.end(self, action, problems, None)

    def fail(self, error: BaseException) -> None:
        """Cleans up and reports; what is neither the disk's nor the repository's fault goes on up."""
        self.discard()
        self.ended = True
        self.end(self, "failed", [], error)
        if not isinstance(error, OSError | Damaged | Stopped):
            raise error

    def place(self, source: int, temporary: bytes) -> None:
        """Gives what has the temporary name in ``source`` its own, in one step where nothing or no directory is in the way."""
        folder, name = self.folder.fd, self.entry.name
        if self.existing is None:
            rename_new(source, temporary, folder, name)
        elif not stat.S_ISDIR(self.existing.st_mode):
            os.rename(temporary, name, src_dir_fd=source, dst_dir_fd=folder)
        else:
            self._replace_directory(source, temporary)

    def _replace_directory(self, source: int, temporary: bytes) -> None:
        folder, name = self.folder.fd, self.entry.name
        rehearsal = self.make_remover()
        rehearsal.dry_run = True
        if not rehearsal.remove(folder, name, self.path, self.path):
            reason = rehearsal.failures[0][1] if rehearsal.failures else "it holds something that must stay"
            raise OSError(errno.ENOTEMPTY, f"a directory is in the way that cannot be removed: {reason}")
        aside = new_temporary_name(self.run)
        os.rename(name, aside, src_dir_fd=folder, dst_dir_fd=folder)
        try:
            rename_new(source, temporary, folder, name)
        except OSError:
            rename_new(folder, aside, folder, name)
            raise
        remover = self.make_remover()
        if not remover.remove(folder, aside, self.path, self.path):
            text = f"restored, but the directory that was there could not be removed: it is {os.fsdecode(aside)} now"
            raise OSError(errno.ENOTEMPTY, text)

    def discard(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._temporary:
            unlink_if_there(self._place, self._temporary)
            self._temporary = b""
