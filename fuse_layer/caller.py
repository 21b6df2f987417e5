"""Creating things as the caller, so that they belong to him without a moment in which they do not.

Creating as root and changing the owner afterwards has a window in which a crash leaves a root-owned file, and
repeats by hand what the file system knows (setgid directories, bsdgroups mounts, quota of the owner). Instead
the serving thread takes the caller's file system ids for the one call. setfsuid(2) to another user than root
drops the file system capabilities from the effective set; they are raised again, because the kernel has
already checked the caller's permissions (default_permissions) with his supplementary groups, which this
thread does not have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from ciuic.fuse_layer import syscalls


class Caller(NamedTuple):
    """Who asks. ``umask`` is 0 where the kernel has applied it already."""

    uid: int
    gid: int
    umask: int = 0


ROOT = Caller(0, 0)


def is_outside(group: int, gid: int, pid: int) -> bool:
    """Whether a process that asks with ``gid`` is in ``group`` neither by that nor by its supplementary groups. One that is gone, or
    of another process namespace, is: a set-id bit too few is safe."""
    if group == gid:
        return False
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            groups = next((line for line in file if line.startswith(b"Groups:")), b"")
    except OSError:
        return True
    return group not in map(int, groups.split()[1:])


@contextmanager
def acting_as(caller: Caller) -> Iterator[None]:
    """The calling thread creates files as ``caller`` inside the block."""
    if caller.uid == 0 and caller.gid == 0:
        yield
        return
    permitted = syscalls.permitted_capabilities()
    syscalls.set_fs_ids(caller.uid, caller.gid)
    try:
        syscalls.raise_capabilities(permitted)
        yield
    finally:
        syscalls.set_fs_ids(0, 0)  # back to root: the kernel raises the file system capabilities by itself
