"""Check that no other user may change what a path leads to: owner and mode of the file and of every directory above, as sshd does.

Guarantees: a path without a flaw can be renamed, replaced or written by root and this process's own user alone, so it leads to the
same file at every later use. Symbolic links are followed one by one, and each directory that they lead through is checked. Where an
ACL is present, the group bits of the mode are its mask (acl(5)), so that an entry for a named user counts as well. The caller
decides what is done about a flaw.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from typing import Final, NamedTuple

# Write permission of group and others: the bits that StrictModes of sshd refuses.
_OTHERS_MAY_WRITE: Final = 0o022
# The kernel follows as many in one path (path_resolution(7)).
_MAX_LINKS: Final = 40


class Flaw(NamedTuple):
    """The first file or directory of a path that other users may change."""

    path: str
    uid: int
    mode: int
    """Type and permissions, as ``st_mode``."""
    reason: str

    @property
    def found(self) -> str:
        """Description with path, owner, mode and reason."""
        kind = "directory" if stat.S_ISDIR(self.mode) else "link" if stat.S_ISLNK(self.mode) else "file"
        return (
            f"{kind} {self.path} (owner uid {self.uid}, mode {stat.S_IMODE(self.mode):04o}) is {self.reason}"
        )

    @property
    def remedy(self) -> str:
        """Shell commands that remove the flaw."""
        # Imported here, so that commands that find no flaw do not pay for it.
        import shlex

        name = shlex.quote(self.path)
        if stat.S_ISLNK(self.mode):
            return f"chown -h root:root {name}"
        return f"chown root:root {name}; chmod go-w {name}"


def find_flaw(path: str | os.PathLike[str], *, owners: Iterable[int] = ()) -> Flaw | None:
    """Return the first flaw of ``path`` or of a directory above it; None if there is none.

    A file that does not exist yet has no flaw of its own. A directory with the sticky bit, such as /tmp, is accepted above the path:
    its entries can be renamed by their owners alone, and each entry's owner is checked.

    Args:
        path: file or directory to check.
        owners: uids that may own the path and directories above, besides root and this process's own.

    Raises:
        OSError: a component could not be examined.
    """
    trusted = {0, os.geteuid(), *owners}
    # Not abspath(): it takes ".." for the parent in the name, the kernel for that of what a link leads to.
    whole = os.fspath(path) if os.path.isabs(path) else os.path.join(os.getcwd(), path)
    pending = whole.split("/")[::-1]
    current, links = "/", 0
    status = os.lstat(current)
    flaw = _flaw_of(current, status, trusted)
    while pending and flaw is None:
        name = pending.pop()
        if name in ("", "."):
            continue
        # `current` has no symbolic link in it, so its parent is the one in its name.
        if name == "..":
            current = os.path.dirname(current)
            status = os.lstat(current)
            continue
        here = os.path.join(current, name)
        try:
            found = os.lstat(here)
        except FileNotFoundError:
            return None
        flaw = _flaw_of(here, found, trusted)
        if not stat.S_ISLNK(found.st_mode):
            current, status = here, found
            continue
        links += 1
        if links > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fspath(path))
        target = os.readlink(here)
        if target.startswith("/"):
            current, status = "/", os.lstat("/")
        pending.extend(target.split("/")[::-1])
    # Only now is it known which component is the last: "." or ".." may follow it, or a link may lead to it.
    return flaw or _flaw_of(current, status, trusted, is_last=True)


def temporary_directory() -> str:
    """Return the directory for temporary files: TMPDIR or the usual ones, the first in which no other user can replace what is made.

    Raises:
        OSError: There is none.
    """
    from tempfile import gettempdir

    for directory in (gettempdir(), "/var/tmp", "/tmp"):
        # A name that nothing has: /tmp itself may be written by others, who cannot rename what is in it.
        if find_flaw(os.path.join(directory, f"ciuic-{os.urandom(8).hex()}")) is None:
            return directory
    raise OSError(
        errno.EPERM, "another user may replace temporary files; set TMPDIR to a directory of this user"
    )


def _flaw_of(path: str, status: os.stat_result, trusted: set[int], *, is_last: bool = False) -> Flaw | None:
    if status.st_uid not in trusted:
        return Flaw(path, status.st_uid, status.st_mode, "owned by another user")
    # The mode of a symbolic link has no meaning.
    if stat.S_ISLNK(status.st_mode) or not status.st_mode & _OTHERS_MAY_WRITE:
        return None
    if status.st_mode & stat.S_ISVTX and stat.S_ISDIR(status.st_mode) and not is_last:
        return None
    return Flaw(path, status.st_uid, status.st_mode, "writable by others")
