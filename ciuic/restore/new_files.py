"""Anything but a directory: created under a temporary name, filled and synced, then renamed or linked.

Guarantees: the final name leads at every moment to what was there or to what the snapshot has. The temporary file is gone
when an attempt ends, however it ends. Several threads may write one large file; the last one to finish renames it. Names that
share an inode share a `LinkGroup`: the first restored one is what the others are linked to.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

from ciuic.errors import Damaged
from ciuic.repository.lookup import join
from ciuic.restore import attributes
from ciuic.restore.attributes import Xattrs
from ciuic.restore.content import start_writing_out
from ciuic.restore.destination import (
    Remover,
    new_temporary_name,
    open_below,
    proc_path,
    rename_new,
    unlink_if_there,
)
from ciuic.restore.pool import RunStopped
from ciuic.system.disk import MAX_KEPT_BYTES, PIN, READ_FILE
from ciuic.types import Entry

if TYPE_CHECKING:
    from ciuic.restore.destination_directories import Folder
    from ciuic.restore.model import Action


class NonDirectory:
    """A name to be restored. ``end(file, action, problems, error)`` is called exactly once, from any thread."""

    def __init__(
        self,
        folder: Folder,
        entry: Entry,
        path: bytes,
        existing: os.stat_result | None,
        end: Callable[[NonDirectory, Action, list[str], BaseException | None], None],
        *,
        xattrs: Xattrs = (),
        run: str,
        make_remover: Callable[[], Remover],
        content_believed: bool = False,
        dry_run: bool = False,
    ) -> None:
        self.folder = folder
        self.entry = entry
        self._path = path if len(path) <= MAX_KEPT_BYTES else b""
        self.existing = existing
        """Status of what has the name before the restore; None if nothing has."""
        self.end = end
        self.xattrs = xattrs
        self.run = run
        self.make_remover = make_remover
        self.content_believed = content_believed
        """Same type, size and time are taken as proof that what exists has the right content."""
        self.dry_run = dry_run
        self.group: LinkGroup | None = None
        """The link group of which this is the first name."""
        self.inode: tuple[int, int] | None = None
        """(device, inode) under the final name, once it is there."""
        self.counted_bytes = 0
        """Bytes of its size that the progress has counted already."""
        self.ended = False
        """True after `end` was called."""
        self._problems: list[str] = []
        self._made: tuple[int, int] | None = None
        """(device, inode) of the new file, from `dress`: asked again after the sync, an overlay would be asked, too."""
        self._temporary = b""
        self._place = -1
        """Descriptor of the directory of the temporary name; `folder` keeps it open."""
        self._fd = -1

    @property
    def path(self) -> bytes:
        """Absolute path. A long one is rebuilt on each call, because many files wait at a time."""
        return self._path or join(self.folder.path, self.entry.name)

    # -- what exists already

    def keep(
        self, *, content_equal: Callable[[int], bool] | None, compared: tuple[int, int] | None = None
    ) -> bool:
        """Keep what exists if it is right, correct its attributes if only they differ, and call `end`.

        Args:
            content_equal: compares the content of a regular file, given its descriptor. None: the content is believed.
            compared: (device, inode) whose content was compared before.

        Returns:
            False if it must be replaced; `end` was not called then.
        """
        assert self.existing is not None
        if stat.S_IFMT(self.existing.st_mode) != stat.S_IFMT(self.entry.mode):
            return False
        # O_PATH where nothing is read: opening a device or a pipe could have effects, and needs a permission.
        fd = os.open(
            self.entry.name,
            READ_FILE if self.entry.is_file and content_equal else PIN,
            dir_fd=self.folder.fd,
        )
        try:
            now = os.fstat(fd)
            at: int | bytes = proc_path(fd)
            if not self._same_kind(now) or not self._same_target(fd, now):
                return False
            # Only a regular file has content that identifies it. Anything else with another owner may have been moved here by
            # that owner, and correcting its owner would give it away.
            if not self.entry.is_file and now.st_uid != self.entry.uid:
                return False
            differs = attributes.differ(at, now, self.entry, self.xattrs)
            # The inode's other name may lie outside the destination: its attributes are not ours to change, and a file that had
            # no other name at the snapshot must not share one. `existing` is asked too, because that other name may have been
            # removed by this restore since: the outcome must not depend on which thread was first.
            if max(now.st_nlink, self.existing.st_nlink) > 1 and (differs or not self.entry.link):
                return False
            # Anybody can give a file the expected size and time. Content that is only believed does not prove that the file is
            # the recorded owner's, so a file of another owner is replaced, not given away.
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
        # fsync(2) refuses O_PATH descriptors, so the file is opened again.
        try:
            fd = os.open(name, READ_FILE, dir_fd=self.folder.fd)
        except PermissionError:
            # The restored mode shuts the caller out as well; the sync of the directory has to do.
            return
        try:
            # `done` promises durable attributes; nothing was renamed, so no later sync of the file comes.
            os.fsync(fd)
        finally:
            os.close(fd)

    # -- a new file

    @property
    def fd(self) -> int:
        """Descriptor of the new file; -1 while there is none."""
        return self._fd

    def make(self, *, readable: bool = False) -> int:
        """Create the file, without content, under a temporary name; return its descriptor. OSError.

        It is opened for writing only unless ``readable``: an overlay passes a file that nobody can read straight to the disk.
        """
        name = new_temporary_name(self.run)
        entry, folder = self.entry, self.folder.workplace(self.run)
        self._place = folder
        if entry.is_file:
            access = os.O_RDWR if readable else os.O_WRONLY
            # Mode 0600 until the attributes are set: content must not be readable with the wrong owner or group.
            flags = access | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self._fd = os.open(name, flags, 0o600, dir_fd=folder)
            self._temporary = name
            return self._fd
        if entry.is_symlink:
            os.symlink(entry.target, name, dir_fd=folder)
        else:
            # Without rights for others until owner and attributes are set, as for a file.
            os.mknod(name, stat.S_IFMT(entry.mode) | 0o600, entry.rdev, dir_fd=folder)
        self._temporary = name
        # Opened by name, which is safe in a workplace: no other user can replace names there.
        self._fd = os.open(name, PIN, dir_fd=folder)
        return self._fd

    def dress(self) -> None:
        """Set size and attributes after all content was written, and start writing the content to the disk."""
        fd = self._fd
        try:
            now = os.fstat(fd)
            self._made = (now.st_dev, now.st_ino)
            # ftruncate only where the size is wrong: on XFS it waits until what was written is on the disk, file by file.
            if self.entry.is_file and now.st_size != self.entry.size_bytes:
                os.ftruncate(fd, self.entry.size_bytes)
            at: int | bytes = fd if self.entry.is_file else proc_path(fd)
            self._problems = attributes.apply(at, now, self.entry, self.xattrs)
            if self.entry.is_file:
                start_writing_out(fd, 0, self.entry.size_bytes)
        except BaseException as error:
            self.fail(error)

    def link(self, name: bytes, directory: int) -> None:
        """Give the new file one more name in another directory, before it gets its own. OSError."""
        os.link(self._temporary, name, src_dir_fd=self._place, dst_dir_fd=directory, follow_symlinks=False)

    def finish(self, *, durable: bool = True) -> None:
        """Sync the new file, then rename it: in this order, so that the name never leads to less than all of it.

        Not ``durable``: the caller syncs it later, and uses its name for nothing before.
        """
        fd = self._fd
        try:
            if self.entry.is_file and durable:
                os.fsync(fd)
            self.inode = self._made
            self.place(self._place, self._temporary)
            # Before the close, which may fail: `discard` must not touch the file any more, which has its name.
            self._fd, self._temporary = -1, b""
            os.close(fd)
        except BaseException as error:
            self.fail(error)
            return
        self.done("restored", self._problems)

    def done(self, action: Action, problems: list[str]) -> None:
        """Report success; ``problems`` names attributes that could not be set. An unfinished new file is discarded."""
        self.discard()
        self.ended = True
        self.end(self, action, problems, None)

    def fail(self, error: BaseException) -> None:
        """Clean up and report the error; raise it unless the disk, the repository or a stopped run explains it."""
        self.discard()
        self.ended = True
        self.end(self, "failed", [], error)
        if not isinstance(error, OSError | Damaged | RunStopped):
            raise error

    def place(self, source: int, temporary: bytes) -> None:
        """Rename the temporary name in the directory ``source`` to the final one.

        One atomic step, unless a directory has to be removed for it.
        """
        folder, name = self.folder.fd, self.entry.name
        if self.existing is None:
            # Not a plain rename: what appeared meanwhile must not be replaced without having been asked about.
            rename_new(source, temporary, folder, name)
        elif not stat.S_ISDIR(self.existing.st_mode):
            os.rename(temporary, name, src_dir_fd=source, dst_dir_fd=folder)
        else:
            self._replace_directory(source, temporary)

    def _replace_directory(self, source: int, temporary: bytes) -> None:
        folder, name = self.folder.fd, self.entry.name
        # A dry run first: a directory with something in it that must stay is left whole, not emptied by half.
        rehearsal = self.make_remover()
        rehearsal.dry_run = True
        if not rehearsal.remove(folder, name, self.path, self.path):
            reason = (
                rehearsal.failures[0][1] if rehearsal.failures else "it contains something that must stay"
            )
            raise OSError(errno.ENOTEMPTY, f"a directory in its place cannot be removed: {reason}")
        # rename(2) replaces no directory that has entries, and none by a file, so it is moved aside and removed afterwards.
        aside = new_temporary_name(self.run)
        os.rename(name, aside, src_dir_fd=folder, dst_dir_fd=folder)
        try:
            rename_new(source, temporary, folder, name)
        except OSError:
            rename_new(folder, aside, folder, name)
            raise
        remover = self.make_remover()
        if not remover.remove(folder, aside, self.path, self.path):
            text = f"restored, but the directory in its place could not be removed and is named {os.fsdecode(aside)} now"
            raise OSError(errno.ENOTEMPTY, text)

    def discard(self) -> None:
        """Close and remove the new file, if there is one."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._temporary:
            # A directory that takes new names and gives none back (chattr +a) keeps this one. The file has failed
            # for the same reason already; an error here would end the restore of all others.
            with suppress(PermissionError):
                unlink_if_there(self._place, self._temporary)
            self._temporary = b""


class LinkGroup:
    """Group of names that share an inode. Its attributes are guarded by ``Pool.changed``."""

    def __init__(self, base: int, names: Callable[[], Sequence[bytes]]) -> None:
        self.state: Literal["working", "there", "failed"] = "working"
        """State of the first name: being restored, restored, or given up."""
        self.inode = (0, 0)
        """(device, inode) of the first name once it is restored."""
        self._base = base
        self._names = names
        """Computes the names from the descriptor ``base``, which stays open for the run, to the first name."""

    def link(self, place: int, temporary: bytes) -> None:
        """Create a hard link named ``temporary`` in the directory ``place``.

        Raises:
            FileNotFoundError: the first name leads to another inode now.
            OSError: the link cannot be made.
        """
        names = self._names()
        folder = open_below(self._base, names[:-1])
        try:
            # The link is made by name, so a file that somebody put there meanwhile must be told apart by its inode.
            st = os.stat(names[-1], dir_fd=folder, follow_symlinks=False)
            if (st.st_dev, st.st_ino) != self.inode:
                raise FileNotFoundError(errno.ENOENT, "the file to be linked to was replaced meanwhile")
            os.link(names[-1], temporary, src_dir_fd=folder, dst_dir_fd=place, follow_symlinks=False)
        finally:
            os.close(folder)
