"""Placeholders: files of a restore with everything but their content.

Guarantee: a placeholder has its hidden link before it has its own name, so it never looks complete.
"""

from __future__ import annotations

import errno
import os
from typing import Final

from ciuic.lazy.pending import PendingFiles
from ciuic.lazy.pending_file import PendingName
from ciuic.restore import attributes
from ciuic.restore.destination import unlink_if_there
from ciuic.restore.new_files import NonDirectory

# Writing removes file capabilities, also when root writes (capabilities(7)).
_LOST_BY_WRITING: Final = b"security.capability"
# Errors of link(2) that say nothing about the file: no more links to it, or none at all on this file system.
_NOT_LINKABLE: Final = (errno.EMLINK, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)

_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class SkeletonFiles:
    """`Placeholders` of a restore, for the thread of its walk."""

    def __init__(self, pending: PendingFiles) -> None:
        self._pending = pending
        self._number = 0

    def take(self, file: NonDirectory) -> bool:
        """Make the file without its content; False for a file that has none, or must be restored whole."""
        entry = file.entry
        # A file without blocks is all hole: it is complete with its size.
        if not entry.is_file or not entry.content or file.existing is not None:
            return False
        if any(name == _LOST_BY_WRITING for name, _ in file.xattrs):
            return False
        self._number += 1
        shape = PendingName(self._number, entry.content, entry.map_height, entry.size_bytes, entry.mtime_ns)
        link, pending = shape.encode(), self._pending.directory
        try:
            # Only root may enter either directory, so no temporary name is needed.
            fd = os.open(link, _NEW, 0o600, dir_fd=pending)
            try:
                os.ftruncate(fd, entry.size_bytes)
                st = os.fstat(fd)
                problems = attributes.apply(fd, st, entry, file.xattrs)
            finally:
                os.close(fd)
            os.link(link, entry.name, src_dir_fd=pending, dst_dir_fd=file.folder.fd, follow_symlinks=False)
        except OSError as error:
            unlink_if_there(pending, link)
            if error.errno in _NOT_LINKABLE:
                return False
            file.fail(error)
            return True
        self._pending.add(shape, st.st_ino, is_new=True)
        file.inode = (st.st_dev, st.st_ino)
        file.done("restored", problems)
        return True
