"""Creation of files under the caller's user and group, so that they belong to the caller from their first moment.

Creating as root and changing the owner afterwards has a window in which a crash leaves a file of root's, and
would repeat what the file system knows (setgid directories, bsdgroups mounts, quota of the owner). Instead
the serving thread takes the caller's file system ids for the one call. setfsuid(2) to another user than root
drops the file system capabilities from the effective set; they are raised again, because the kernel has
already checked the caller's permissions (default_permissions) with its supplementary groups, which this
thread does not have.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from ciuic.fuse_layer.system import syscalls

_CAP_SYS_ADMIN: Final = 21
"""Number of the capability in linux/capability.h."""


class Credentials(NamedTuple):
    """User, group and umask of a request. The umask is 0 where the kernel has applied it already."""

    uid: int
    gid: int
    umask: int = 0


ROOT = Credentials(0, 0)


def is_outside(group: int, gid: int, pid: int) -> bool:
    """Return whether a process of group ``gid`` is not in ``group``, its supplementary groups included."""
    if group == gid:
        return False
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            groups = next((line for line in file if line.startswith(b"Groups:")), b"")
    except OSError:
        # The process is gone, or of another process namespace. The caller takes a set-id bit away then: one
        # too few is safe.
        return True
    return group not in map(int, groups.split()[1:])


def shown_attributes(names: list[bytes], uid: int, pid: int) -> list[bytes]:
    """Return the names of extended attributes that a process may list.

    Without CAP_SYS_ADMIN ``trusted.*`` is invisible (xattr(7)), and FUSE in the kernel leaves that to the
    server. A process that is gone, or of another process namespace, has the capability if it is root.
    """
    shown = [name for name in names if not name.startswith(b"trusted.")]
    # Nearly always there is none, and the process need not be looked at.
    if len(shown) == len(names):
        return names
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            effective = next((line for line in file if line.startswith(b"CapEff:")), b"CapEff: 0")
    except OSError:
        return names if uid == 0 else shown
    return names if int(effective.split()[1], 16) >> _CAP_SYS_ADMIN & 1 else shown


@contextmanager
def acting_as(caller: Credentials) -> Iterator[None]:
    """Let the calling thread create files as ``caller`` inside the block."""
    if caller.uid == 0 and caller.gid == 0:
        yield
        return
    # The capabilities at this moment: in a container the worker may have fewer than all.
    permitted = syscalls.permitted_capabilities()
    syscalls.set_fs_ids(caller.uid, caller.gid)
    try:
        syscalls.raise_capabilities(permitted)
        yield
    finally:
        # Back to root, the kernel raises the file system capabilities by itself.
        syscalls.set_fs_ids(0, 0)
