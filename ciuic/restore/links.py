"""Names that share an inode: the first one restored is what the others are linked to."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from typing import Literal

from ciuic.restore.destination import new_temporary_name, open_below, unlink_if_there
from ciuic.restore.large import Feeder
from ciuic.restore.leaf import Leaf
from ciuic.restore.pool import Pool
from ciuic.restore.small import SmallFiles
from ciuic.restore.tally import Tally

NOT_LINKABLE = (errno.EMLINK, errno.EPERM, errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS)
"""The file system refuses this link: the name becomes a file of its own, which is said."""


class LinkGroup:
    """One inode with several names. State is guarded by Pool.changed."""

    def __init__(self, base: int, names: Callable[[], Sequence[bytes]]) -> None:
        self.state: Literal["working", "there", "failed"] = "working"
        self.inode = (0, 0)
        self._base = base
        self._names = names
        """From the descriptor ``base`` (which stays open for the run) to the first name."""

    def link(self, leaf: Leaf) -> None:
        """Gives the leaf's name this inode, in one step. OSError; FileNotFoundError if the first name is another now."""
        names = self._names()
        folder = open_below(self._base, names[:-1])
        place = leaf.folder.workplace(leaf.run)
        temporary = new_temporary_name(leaf.run)
        try:
            st = os.stat(names[-1], dir_fd=folder, follow_symlinks=False)
            if (st.st_dev, st.st_ino) != self.inode:
                raise FileNotFoundError(errno.ENOENT, "the file that it shares its content with was replaced")
            os.link(
                names[-1],
                temporary,
                src_dir_fd=folder,
                dst_dir_fd=place,
                follow_symlinks=False,
            )
        finally:
            os.close(folder)
        try:
            leaf.place(place, temporary)
        except BaseException:
            unlink_if_there(place, temporary)
            raise
        leaf.inode = self.inode


class Linker:
    """All groups of a run; for the walk's thread."""

    def __init__(self, pool: Pool, small: SmallFiles, feeder: Feeder, tally: Tally, *, dry_run: bool) -> None:
        self._pool = pool
        self._small = small
        self._feeder = feeder
        self._tally = tally
        self._dry_run = dry_run
        self._groups: dict[tuple[bytes, int], LinkGroup] = {}

    def link(self, leaf: Leaf, root: bytes, base: int, names: Callable[[], Sequence[bytes]]) -> bool:
        """Whether the leaf is dealt with: as another name of what was restored already, or failed.

        If not, it is the first of its names and is to be restored. ``names`` gives the names that lead to it from the descriptor
        ``base``; it is kept instead of them, which may be thousands.
        """
        key = (root, leaf.entry.link)
        group = self._groups.get(key)
        if group is not None and self._is_there(group):
            return self._link_to(group, leaf)
        self._groups[key] = leaf.group = LinkGroup(base, names)
        return False

    def _is_there(self, group: LinkGroup) -> bool:
        if group.state == "working":
            self._small.flush()
        while group.state == "working":
            self._pool.wait(lambda: group.state != "working" or bool(self._feeder.again))
            self._feeder.write_again()
        return group.state == "there"

    def _link_to(self, group: LinkGroup, leaf: Leaf) -> bool:
        st = leaf.existing
        if st is not None and (st.st_dev, st.st_ino) == group.inode:
            leaf.done("skipped", [])
            return True
        try:
            if not self._dry_run:
                group.link(leaf)
        except OSError as error:
            if error.errno not in NOT_LINKABLE:
                leaf.fail(error)
                return True
            with self._pool.changed:
                problem = f"a file of its own: it could not be linked to the others ({error.strerror})"
                self._tally.problems(leaf.path, [problem])
            return False
        leaf.done("linked", [])
        return True
