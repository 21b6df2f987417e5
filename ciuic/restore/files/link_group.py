"""Group of names that share an inode: its state, and how another name is linked.

The module knows nothing of what is restored under the names, so that both ends of a link may import it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from typing import Literal

from ciuic.restore.files.destination import open_below


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
