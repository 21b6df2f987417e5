"""Operations on attributes and extended attributes.

Guarantees: old attributes are saved before they change, in whatever way they change; times are set to the
nanosecond, and one that is not named stays as it is. The kernel has checked permissions
(default_permissions)."""

from __future__ import annotations

import os
import stat
from functools import partial
from typing import NamedTuple

from ciuic.fuse_layer import syscalls
from ciuic.fuse_layer.data import Data
from ciuic.fuse_layer.node import Node
from ciuic.fuse_layer.state import Attr, OverlayState
from ciuic.fuse_layer.times import KernelTimes

_GROUP_PRIVILEGE = stat.S_ISGID | stat.S_IXGRP
"""Set-group-id without group execution is no privilege; on some systems it marks mandatory locking."""


DEFAULT_ACL = b"system.posix_acl_default"


class SetAttr(NamedTuple):
    """What to change; None leaves a field. ``…_now`` asks for the file system's own clock."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size: int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None
    atime_now: bool = False
    mtime_now: bool = False
    keeps_privileges: bool = False
    """The caller has CAP_FSETID: a new size does not take set-id bits away."""
    chown_by: int | None = None
    """Who asked for chown(2) of neither user nor group: by root and the owner it takes set-id bits away."""

    @property
    def sets_times(self) -> bool:
        return self.atime_ns is not None or self.mtime_ns is not None or self.atime_now or self.mtime_now


class Attributes:
    """The operation group; one for each core."""

    def __init__(self, state: OverlayState, data: Data, times: KernelTimes) -> None:
        self._state = state
        self._nodes = state.nodes
        self._data = data
        self._times = times

    def getattr(self, node_id: int, handle: int | None = None) -> Attr:
        node = self._nodes.get(node_id)
        file = self._state.files.get(handle) if handle is not None else None
        return self._state.attr(node, file)

    def statx(self, node_id: int, handle: int | None, mask: int) -> tuple[Attr, syscalls.Statx]:
        """``getattr`` with what only statx(2) tells: birth time and attribute flags."""
        node = self._nodes.get(node_id)
        file = self._state.files.get(handle) if handle is not None else None
        attr = self._state.attr(node, file)
        path, _keep = self._pinned(node)
        return attr, syscalls.statx(path, mask, follow=True)

    def setattr(self, node_id: int, change: SetAttr, handle: int | None = None) -> Attr:
        """Apply in the order size, owner, mode, times: a change of owner clears set-id bits that the same
        call may set again."""
        node = self._nodes.get(node_id)
        with self._state.gate:
            if handle is not None and handle not in self._state.files:
                handle = None
            if handle is None and change.size is None and self._nodes.is_freed(node):
                # The kernel writes the times of a removed file back; an error would be told by the next syncfs(2).
                return self._state.attr(node)
            self._state.keep_inode(node)
            if change.size is not None:
                self._data.truncate(node, change.size, handle, keeps_privileges=change.keeps_privileges)
            if self._state.tracked(node):
                self._state.tracker.mark_attrs(node)
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
            if change.size is not None and node.kept_mtime_ns is not None:
                self._times.put_back(
                    node, path
                )  # a kernel that moves the time beside the size says so in the same request
            return self._state.attr(node)

    def _pinned(self, node: Node) -> tuple[bytes, object]:
        """A path that leads to the node's inode whatever happens to its names, to be followed, and what keeps it valid.

        chmod(2) follows symbolic links. Through a name, a symbolic link put in the file's place at the right moment would make
        us, who are root, change the mode of what it points to, anywhere on the host.
        """
        file = self._state.any_file(node)
        if file is not None:
            return b"/proc/self/fd/%d" % file.fd, file
        pin = self._nodes.pin(node)
        return b"/proc/self/fd/%d" % pin.fd, pin

    # -- extended attributes ------------------------------------------------------------------------

    def getxattr(self, node_id: int, name: bytes) -> bytes:
        path, _keep = self._pinned(self._nodes.get(node_id))
        return os.getxattr(path, name)

    def listxattr(self, node_id: int) -> list[bytes]:
        path, _keep = self._pinned(self._nodes.get(node_id))
        return [os.fsencode(name) for name in os.listxattr(path)]

    def setxattr(
        self, node_id: int, name: bytes, value: bytes, flags: int, *, drops_group_bit: bool = False
    ) -> None:
        """``flags``: 0, XATTR_CREATE or XATTR_REPLACE. ``drops_group_bit``: an ACL set by somebody outside the file's group takes
        the set-group-id bit away, as his chmod(2) would; the file system cannot see him behind us."""
        node = self._nodes.get(node_id)
        with self._state.gate:
            self._state.keep_inode(node)
            path, _keep = self._pinned(node)
            self._state.with_space(lambda: os.setxattr(path, name, value, flags))
            if name == DEFAULT_ACL:  # the kernel lets nobody create in the directory meanwhile
                self._nodes.without_default_acl.discard(node_id)
            if drops_group_bit:
                os.chmod(path, stat.S_IMODE(os.stat(path).st_mode) & ~stat.S_ISGID)
            if self._state.tracked(node):
                self._state.tracker.mark_attrs(node)

    def removexattr(self, node_id: int, name: bytes) -> None:
        node = self._nodes.get(node_id)
        with self._state.gate:
            self._state.keep_inode(node)
            path, _keep = self._pinned(node)
            os.removexattr(path, name)
            if self._state.tracked(node):
                self._state.tracker.mark_attrs(node)


def _take_privileges(path: bytes, uid: int) -> None:
    """chown(2) with -1 for both, as ``uid``. The kernel asks the same before a write by somebody else: there is nothing to refuse,
    and what the write takes away it takes when it comes."""
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
