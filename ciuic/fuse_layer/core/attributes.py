"""Operations on attributes and extended attributes.

Guarantees: the hooks of the state are called before attributes change, in whatever way they change; times are set to the
nanosecond, and one that is not given stays as it is. The kernel has checked permissions
(default_permissions).
"""

from __future__ import annotations

import errno
import os
import stat
from functools import partial
from typing import NamedTuple

from ciuic.fuse_layer.core.files import Files, KernelTimes
from ciuic.fuse_layer.state.node_table import Node
from ciuic.fuse_layer.state.passthrough_state import Attr, PassthroughState
from ciuic.fuse_layer.system import syscalls
from ciuic.system.mountinfo import HIDDEN_MOUNTS, MountTable, border_names

_GROUP_PRIVILEGE = stat.S_ISGID | stat.S_IXGRP
"""Bits of a set-group-id privilege: without group execution set-group-id is none, and marks mandatory locking
on some systems."""
DEFAULT_ACL = b"system.posix_acl_default"


class SetAttr(NamedTuple):
    """Attributes to change; None leaves a field. ``…_now`` asks for the file system's own clock."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size: int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None
    atime_now: bool = False
    mtime_now: bool = False
    keeps_privileges: bool = False
    """True if the caller has CAP_FSETID, so that a new size does not take set-id bits away."""
    chown_by: int | None = None
    """User who called chown(2) with -1 for both: by root and the owner that takes set-id bits away."""

    @property
    def sets_times(self) -> bool:
        """True if a time is to be set."""
        return self.atime_ns is not None or self.mtime_ns is not None or self.atime_now or self.mtime_now


class Attributes:
    """Operations of one root on attributes."""

    def __init__(self, state: PassthroughState, files: Files, times: KernelTimes) -> None:
        self._state = state
        self._nodes = state.nodes
        self._files = files
        self._times = times
        self._mounts = MountTable()

    def getattr(self, node_id: int, handle: int | None = None) -> Attr:
        """Return a node's attributes, through ``handle`` where that is open."""
        node = self._nodes.get(node_id)
        file = self._state.files.get(handle) if handle is not None else None
        return self._state.attr(node, file)

    def statx(self, node_id: int, handle: int | None, mask: int) -> tuple[Attr, syscalls.Statx]:
        """Return a node's attributes with those that only statx(2) tells: birth time and attribute flags."""
        node = self._nodes.get(node_id)
        file = self._state.files.get(handle) if handle is not None else None
        attr = self._state.attr(node, file)
        path, _keep = self._pinned(node)
        return attr, syscalls.statx(path, mask, follow=True)

    def setattr(self, node_id: int, change: SetAttr, handle: int | None = None) -> Attr:
        """Change attributes, and return the new ones."""
        # In the order size, owner, mode, times: a change of owner clears set-id bits that the same request
        # may set again.
        node = self._nodes.get(node_id)
        moves_times = handle is not None
        with self._state.gate:
            if handle is not None and handle not in self._state.files:
                # A predecessor's handle that could not be opened again (Files.has): the names
                # serve as well.
                handle = None
            if handle is None and change.size is None and self._nodes.is_freed(node):
                # The kernel writes the times of a removed file back. An error would be reported by the next
                # syncfs(2).
                return self._state.attr(node)
            self._state.keep_inode(node)
            if change.size is not None:
                self._files.truncate(
                    *(node, change.size, handle),
                    keeps_privileges=change.keeps_privileges,
                    moves_times=moves_times,
                )
            # Before the change: one that fails in the middle has changed something.
            self._state.mark_attributes(node)
            path, _keep = self._pinned(node)
            if change.uid is not None or change.gid is not None:
                os.chown(
                    path,
                    -1 if change.uid is None else change.uid,
                    -1 if change.gid is None else change.gid,
                )
            if change.chown_by is not None:
                _take_privileges(path, change.chown_by)
            if change.mode is not None:
                os.chmod(path, change.mode & 0o7777)
            if change.sets_times:
                set_times = partial(_set_times, path, change)
                if change.mtime_ns is not None or change.mtime_now:
                    self._times.told(node, change.mtime_ns, set_times)
                else:
                    set_times()
            # A kernel that moves the time beside the size says so in the same request: a size alone moves no
            # time.
            if change.size is not None and node.kept_mtime_ns is not None:
                self._times.put_back(node, path)
            return self._state.attr(node)

    def _pinned(self, node: Node) -> tuple[bytes, object]:
        """Return a path, to be followed, that leads to the node's inode whatever happens to its names; and what keeps it valid."""
        # chmod(2) follows symbolic links. Through a name, a symbolic link put in the file's place at the
        # right moment would make this process, which is root's, change the mode of any file of the host.
        file = self._state.any_file(node)
        if file is not None:
            return b"/proc/self/fd/%d" % file.fd, file
        pin = self._nodes.pin(node)
        return b"/proc/self/fd/%d" % pin.fd, pin

    # -- extended attributes ------------------------------------------------------------------------

    def getxattr(self, node_id: int, name: bytes) -> bytes:
        """Return an extended attribute."""
        node = self._nodes.get(node_id)
        if name == HIDDEN_MOUNTS:
            return self._borders_in(node)
        path, _keep = self._pinned(node)
        return os.getxattr(path, name)

    def _borders_in(self, node: Node) -> bytes:
        """Return the names in a directory at which another file system or subvolume begins, each ended by a NUL."""
        if node.kind != stat.S_IFDIR:
            raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))
        pin = self._nodes.pin(node)
        fd = os.open(b".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=pin.fd)
        try:
            return b"".join(name + b"\0" for name in border_names(fd, self._mounts.read()))
        finally:
            os.close(fd)

    def listxattr(self, node_id: int) -> list[bytes]:
        """Return the names of extended attributes."""
        path, _keep = self._pinned(self._nodes.get(node_id))
        return [os.fsencode(name) for name in os.listxattr(path)]

    def setxattr(
        self, node_id: int, name: bytes, value: bytes, flags: int, *, drops_group_bit: bool = False
    ) -> None:
        """Set an extended attribute.

        Args:
            node_id: node to change.
            name: name of the attribute.
            value: its value.
            flags: 0, XATTR_CREATE or XATTR_REPLACE.
            drops_group_bit: the caller is outside the file's group and sets its ACL, which takes the
                set-group-id bit away as chmod(2) would. The file system sees root as the caller.
        """
        node = self._nodes.get(node_id)
        with self._state.gate:
            self._state.keep_inode(node)
            path, _keep = self._pinned(node)
            self._state.mark_attributes(node)
            # A large value takes blocks of its own: on a full disk the undo log's space is given up for it.
            self._state.with_space(lambda: os.setxattr(path, name, value, flags))
            # No file can be created in the directory meanwhile: the kernel holds its lock.
            if name == DEFAULT_ACL:
                self._nodes.without_default_acl.discard(node_id)
            # By hand, because the backing file system sees root set the ACL and keeps the bit (xfstests
            # generic/375).
            if drops_group_bit:
                os.chmod(path, stat.S_IMODE(os.stat(path).st_mode) & ~stat.S_ISGID)

    def removexattr(self, node_id: int, name: bytes) -> None:
        """Remove an extended attribute."""
        node = self._nodes.get(node_id)
        with self._state.gate:
            self._state.keep_inode(node)
            path, _keep = self._pinned(node)
            self._state.mark_attributes(node)
            os.removexattr(path, name)


def _take_privileges(path: bytes, uid: int) -> None:
    """Carry out chown(2) with -1 for both as ``uid``: take set-id bits away where the caller is root or the owner."""
    # The kernel sends the same request before a write by another user. Nothing is refused: the write itself
    # takes the bits away.
    st = os.stat(path)
    loses = st.st_mode & stat.S_ISUID or st.st_mode & _GROUP_PRIVILEGE == _GROUP_PRIVILEGE
    if loses and uid in (0, st.st_uid) and not stat.S_ISDIR(st.st_mode):
        os.chown(path, -1, -1)


def _set_times(path: bytes, change: SetAttr) -> None:
    syscalls.utimensat(
        path,
        change.atime_ns,
        change.mtime_ns,
        atime_now=change.atime_now,
        mtime_now=change.mtime_now,
        follow=True,
    )
