"""Hard links: the first restored name of an inode is what the other names are linked to."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence

from ciuic.restore.files.destination import new_temporary_name, unlink_if_there
from ciuic.restore.files.large import Feeder
from ciuic.restore.files.link_group import LinkGroup
from ciuic.restore.files.non_directory import NonDirectory
from ciuic.restore.files.pool import Pool
from ciuic.restore.files.result_counter import ResultCounter
from ciuic.restore.files.small import SmallFiles

NOT_LINKABLE = (errno.EMLINK, errno.EPERM, errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS)
"""The file system refuses this link: the name becomes a file of its own, and a problem is reported."""


class Linker:
    """All link groups of a run; for the thread of the walk."""

    def __init__(
        self, pool: Pool, small: SmallFiles, feeder: Feeder, counter: ResultCounter, *, dry_run: bool
    ) -> None:
        self._pool = pool
        self._small = small
        self._feeder = feeder
        self._counter = counter
        self._dry_run = dry_run
        self._groups: dict[tuple[bytes, int], LinkGroup] = {}

    def link(self, file: NonDirectory, root: bytes, base: int, names: Callable[[], Sequence[bytes]]) -> bool:
        """Return whether the file is settled: linked to a name that was restored before, or failed.

        If not, it is the first of its names, and the caller restores it.

        Args:
            file: the name to be linked.
            root: path of the snapshot's root; link numbers are unique within a root.
            base: descriptor of a directory above the file.
            names: computes the names that lead from ``base`` to the file. The callable is kept instead of the names, which
                may be thousands.
        """
        # Inode numbers are those of the snapshot: files restored from different roots are never linked.
        key = (root, file.entry.link)
        group = self._groups.get(key)
        if group is not None and self._is_there(group):
            return self._link_to(group, file)
        self._groups[key] = file.group = LinkGroup(base, names)
        return False

    def _is_there(self, group: LinkGroup) -> bool:
        """Wait for the first name; return whether it was restored."""
        if group.state == "working":
            # The first name may still be gathered in a group that no thread has been given.
            self._small.flush()
        while group.state == "working":
            # The first name may be a large file that is to be written again, which only this thread can start.
            self._pool.wait(lambda: group.state != "working" or bool(self._feeder.again))
            self._feeder.write_again()
        return group.state == "there"

    def _link_to(self, group: LinkGroup, file: NonDirectory) -> bool:
        st = file.existing
        # The name is a link to the first one already, as after an earlier restore.
        if st is not None and (st.st_dev, st.st_ino) == group.inode:
            file.done("skipped", [])
            return True
        try:
            if not self._dry_run:
                _make_link(group, file)
        except OSError as error:
            if error.errno not in NOT_LINKABLE:
                file.fail(error)
                return True
            with self._pool.changed:
                problem = f"restored as a separate file: it could not be hard-linked to its other names ({error.strerror})"
                self._counter.problems(file.path, [problem])
            return False
        file.done("linked", [])
        return True


def _make_link(group: LinkGroup, file: NonDirectory) -> None:
    """Give the file's name the group's inode in one step, by a rename from a temporary name. OSError."""
    # By a temporary name, because link(2) replaces nothing, and the final name may exist.
    place = file.folder.workplace(file.run)
    temporary = new_temporary_name(file.run)
    group.link(place, temporary)
    try:
        file.place(place, temporary)
    except BaseException:
        unlink_if_there(place, temporary)
        raise
    file.inode = group.inode
