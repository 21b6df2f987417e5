"""Mount of a view of snapshots: at a directory, for as long as the process serves it.

Root mounts by mount(2), others by fusermount3(1), which is set-user-ID. `read_only`, `nosuid` and `nodev` hold in both cases.

References:
    fusermount3(1); libfuse, lib/mount.c (``_FUSE_COMMFD``); unix(7) (``SCM_RIGHTS``)
"""

from __future__ import annotations

import array
import errno
import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from ciuic.errors import CiuicError, NotPermitted
from ciuic.fuse_layer.kernel.negotiation import negotiate
from ciuic.fuse_layer.system import mounts
from ciuic.printable import one_line
from ciuic.restore.destination import open_way
from ciuic.system.child_process import environment
from ciuic.view.filesystem import ViewFilesystem
from ciuic.view.tree import ViewTree

FS_TYPE: Final = "fuse.ciuic-view"
_SUBTYPE: Final = "ciuic-view"
_COMMAND_FD: Final = "_FUSE_COMMFD"


def is_view(path: bytes) -> bool:
    """Return whether a view is mounted at a path, also one whose process has ended."""
    found = mounts.mount_at(os.fsdecode(path))
    return found is not None and found.fs_type == FS_TYPE


class MountedView:
    """View that is mounted. `wait` serves it; `close` takes it away."""

    def __init__(
        self,
        tree: ViewTree,
        directory: bytes,
        problem: Callable[[str], None],
        *,
        for_others: bool,
        may_wait: bool = False,
    ) -> None:
        """Mount; on return the view answers.

        Args:
            tree: What to show.
            directory: Absolute path of an empty directory.
            problem: Told in words what cannot be read, from threads that serve requests.
            may_wait: Reading may take long, as from a remote: programs that wait may be interrupted.
            for_others: Other users may read what modes and ACLs of the snapshots permit them.

        Raises:
            NotPermitted: this user may not mount there, or not for others.
            CiuicError: it is no directory, or has something in it.
        """
        self.directory: Final = directory
        self._by_user = os.geteuid() != 0
        try:
            with os.scandir(directory) as entries:
                if next(entries, None) is not None:
                    raise CiuicError(
                        f"{one_line(directory)} is not empty",
                        hint="name a directory that is empty, or a new one",
                    )
        except OSError as error:
            hint = ""
            if error.errno == errno.ENOTCONN:
                hint = f"what was mounted there is dead; take it away: umount -l {one_line(directory)}"
            raise CiuicError(f"cannot mount at {one_line(directory)}: {error.strerror}", hint=hint) from None
        before = mounts.mounts_of(FS_TYPE)
        self._fuse_fd = (_mount_by_user if self._by_user else _mount_by_root)(directory, for_others)
        self._mount = mounts.new_mount(FS_TYPE, before, directory)
        try:
            negotiate(self._fuse_fd, passthrough=False)
            self._filesystem = ViewFilesystem(tree, self._fuse_fd, problem, may_wait=may_wait)
            self._filesystem.session.begin()
        except BaseException:
            self.close()
            raise

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until the view is unmounted; return False after the timeout."""
        return self._filesystem.session.wait(timeout_seconds)

    def close(self) -> None:
        """Detach the view; programs that have files open in it get errors. Harmless where it is unmounted already."""
        # EINVAL: nothing of ours is mounted there any more.
        with suppress(OSError, CiuicError):
            if self._by_user:
                _fusermount("-u", "-z", "-q", "--", os.fsdecode(self.directory))
            elif self._mount is not None:
                mounts.detach_mount(self._mount)
        with suppress(OSError):
            os.close(self._fuse_fd)
        self._fuse_fd = -1


def _mount_by_root(directory: bytes, for_others: bool) -> int:
    fd = open_way(directory)
    try:
        return mounts.mount_fuse(fd, FS_TYPE, read_only=True, for_others=for_others)
    except OSError as error:
        raise NotPermitted(f"cannot mount at {one_line(directory)}: {error.strerror}") from None
    finally:
        os.close(fd)


def _mount_by_user(directory: bytes, for_others: bool) -> int:
    options = f"ro,nosuid,nodev,default_permissions,fsname=ciuic,subtype={_SUBTYPE}"
    if for_others:
        options += ",allow_other"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        _fusermount(
            "-o",
            options,
            "--",
            os.fsdecode(directory),
            pass_fds=(theirs.fileno(),),
            more={_COMMAND_FD: str(theirs.fileno())},
        )
        theirs.close()
        received = array.array("i")
        _, ancillary, _, _ = ours.recvmsg(1, socket.CMSG_SPACE(received.itemsize))
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received.frombytes(data[: received.itemsize])
    if not received:
        raise NotPermitted(f"cannot mount at {one_line(directory)}: fusermount3 gave no connection")
    os.set_inheritable(received[0], False)
    return received[0]


def _fusermount(*arguments: str, pass_fds: tuple[int, ...] = (), more: dict[str, str] | None = None) -> None:
    program = shutil.which("fusermount3")
    if program is None:
        raise NotPermitted(
            "only root can mount here: fusermount3 is not installed",
            hint="install the package fuse3, or ask root",
        )
    done = subprocess.run(
        [program, *arguments],
        env={**environment(), **(more or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        pass_fds=pass_fds,
        cwd="/",
        check=False,
    )
    if done.returncode:
        reason = one_line(done.stderr.decode(errors="replace").strip().removeprefix("fusermount3: "))
        raise NotPermitted(f"cannot mount: {reason or 'fusermount3 refused'}")
