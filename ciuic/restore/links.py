"""Names that share an inode: the first one restored is what the others are linked to."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import Literal

from ciuic.restore.destination import new_temporary_name, open_below, unlink_if_there
from ciuic.restore.leaf import Leaf

NOT_LINKABLE = (errno.EMLINK, errno.EPERM, errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS)
"""The file system refuses this link: the name becomes a file of its own, which is said."""


class LinkGroup:
    """One inode with several names. State is guarded by Pool.changed."""

    def __init__(self, base: int, names: Sequence[bytes]) -> None:
        self.state: Literal["working", "there", "failed"] = "working"
        self.inode = (0, 0)
        self._base = base
        self._names = names
        """From the descriptor ``base`` (which stays open for the run) to the first name."""

    def link(self, leaf: Leaf) -> None:
        """Gives the leaf's name this inode, in one step. OSError; FileNotFoundError if the first name is another now."""
        folder = open_below(self._base, self._names[:-1])
        temporary = new_temporary_name(leaf.run)
        try:
            st = os.stat(self._names[-1], dir_fd=folder, follow_symlinks=False)
            if (st.st_dev, st.st_ino) != self.inode:
                raise FileNotFoundError(errno.ENOENT, "the file that it shares its content with was replaced")
            os.link(
                self._names[-1],
                temporary,
                src_dir_fd=folder,
                dst_dir_fd=leaf.folder.fd,
                follow_symlinks=False,
            )
        finally:
            os.close(folder)
        try:
            leaf.place(temporary)
        except BaseException:
            unlink_if_there(leaf.folder.fd, temporary)
            raise
        leaf.inode = self.inode
