"""The mounted part of a lazy restore: serve, fill, and take the mount away when everything is there.

Guarantees: when everything is there, the mount is served until nobody works in it, and only then taken away, and open files are served
until they are closed; it is gone however `serve` ends; after an end before everything is there, the directory below is as a killed process leaves it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import structlog

from ciuic.errors import Busy, CiuicError
from ciuic.fuse_layer.driver_choice import ask_kernel
from ciuic.fuse_layer.kernel.negotiation import negotiate
from ciuic.fuse_layer.system import mounts, syscalls
from ciuic.lazy.core import LazyCore
from ciuic.lazy.driver import LazyDriver
from ciuic.lazy.ending import finish
from ciuic.lazy.filler import Filler
from ciuic.lazy.layout import LazyLayout, LazyRecord
from ciuic.lazy.pending import PendingFiles
from ciuic.lazy.progress import LazyOutcome, LazyStatus, LostFile, StatusFile
from ciuic.lazy.settler import Settler
from ciuic.lazy.turnstile import Turnstile
from ciuic.printable import one_line
from ciuic.repository import Repository
from ciuic.repository.lookup import join
from ciuic.system.mountinfo import LAZY_FS_TYPE
from ciuic.system.open_files import describe, mount_users

log = structlog.get_logger(__name__)

_FS_TYPE: Final = LAZY_FS_TYPE.decode()
_STATUS_SECONDS: Final = 0.5
_PROBE_SECONDS: Final = 2.0
_LEAVE_SECONDS: Final = 0.5
_SWITCH_INTERVAL_SECONDS: Final = 0.002
"""Less than the usual 5 ms, so that requests do not wait for threads that fetch. With 0.5 ms, as in an overlay's worker, a fifth of
the time of a restore went into switching."""
_INTERRUPTS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class MountedRestore:
    """One mount, from its beginning to its end."""

    def __init__(
        self,
        repository: Repository,
        layout: LazyLayout,
        record: LazyRecord,
        pending: PendingFiles,
        content: int,
        backing: int,
        status: StatusFile,
    ) -> None:
        """Take the parts.

        Args:
            repository: repository to read from.
            layout: directories below the mount.
            record: record of the restore.
            pending: incomplete files.
            content: descriptor of the tree that is served.
            backing: O_PATH descriptor of the destination.
            status: what others are told.
        """
        self._layout = layout
        self._record = record
        self._pending = pending
        self._content = content
        self._backing = backing
        self._status = status
        self._turnstile = Turnstile()
        self._filler = Filler(repository, pending)
        self._settler = Settler(pending)
        self._mounted = False
        self._failure: OSError | None = None

    def serve(self, outcome: LazyOutcome, ready: Callable[[LazyStatus], None]) -> None:
        """Serve until everything is there and the last file is closed.

        Args:
            outcome: gets the paths that cannot be restored.
            ready: called when the mount answers.

        Raises:
            CiuicError: the mount was taken away before the end.
        """
        offer = ask_kernel(self._content)
        self._pending.put_in_order()
        fuse_fd = mounts.mount_fuse(self._backing, _FS_TYPE)
        self._mounted = True
        try:
            negotiated = negotiate(fuse_fd, passthrough=offer.passthrough, stack_depth=offer.stack_depth)
            core = LazyCore(
                self._content, self._pending, self._settler, kernel_keeps_times=negotiated.writeback
            )
            driver = LazyDriver(core, fuse_fd, negotiated, self._pending, self._turnstile)
            sys.setswitchinterval(_SWITCH_INTERVAL_SECONDS)
            driver.session.begin()
            threading.Thread(target=self._make_durable, args=(core,), name="sync", daemon=True).start()
            self._settler.start()
            self._filler.start()
            self._status.status.files_total = self._pending.files_total
            self._status.status.bytes_total = self._pending.bytes_total
            self._show()
            ready(self._status.status)
            self._until_filled(core, driver)
            self._end(core, outcome)
            self._status.tell("closing", lost=outcome.lost)
            self._unmount_when_left(driver)
            # Programs that have files open go on with this session.
            driver.session.wait()
            core.close()
        finally:
            self._detach()
            self._pending.close()
            self._filler.close()
            self._settler.close()
            os.close(fuse_fd)

    def _make_durable(self, core: LazyCore) -> None:
        """Sync the skeleton, and say so in the record; an fsync in the tree waits for it."""
        try:
            if self._record.boot:
                # All at once, and behind the mount: it may take as long as others have written much to the file system.
                syscalls.syncfs(self._layout.directory)
                self._record.boot = ""
                self._layout.write(self._record)
            core.durable.set()
        except OSError as error:
            self._failure = error
            log.exception("lazy_skeleton_not_durable")

    def _until_filled(self, core: LazyCore, driver: LazyDriver) -> None:
        while not (self._pending.wait_for_end(_STATUS_SECONDS) and core.durable.wait(_STATUS_SECONDS)):
            self._show()
            if self._failure is not None:
                raise self._failure
            if driver.session.is_over:
                self._mounted = False
                raise CiuicError(
                    f"the mount at {one_line(self._layout.path)} was taken away before everything was restored",
                    hint="the same command again goes on",
                )

    def _show(self) -> None:
        self._status.measure(self._pending.bytes_left)
        self._status.status.files_left = len(self._pending.by_ino)
        self._status.status.waits = self._filler.trouble
        self._status.tell("filling")

    def _end(self, core: LazyCore, outcome: LazyOutcome) -> None:
        """Put the tree in the destination's place while no request is under way; the mount shows it from then on."""
        # An interrupt in between would leave requests waiting for ever.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTS)
        try:
            with self._turnstile.closed():
                self._remove_damaged(outcome)
                finish(self._layout, self._record, self._content)
                core.become(self._layout.destination)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._show()

    def _unmount_when_left(self, driver: LazyDriver) -> None:
        """Take the mount away as soon as no program works in a directory of it; open files outlive it by themselves.

        The working directory of such a program would have no path, and not exist for what it starts.
        """
        status = self._status.status
        while users := self._users():
            if users != status.waits:
                status.waits = users
                self._status.tell("closing")
            if driver.session.wait(_LEAVE_SECONDS):
                break
        status.waits = ""
        self._detach()

    def _users(self) -> str:
        """Return who or what a detached mount would hurt, in words."""
        entry = mounts.mount_at(self._layout.path)
        if entry is None or entry.fs_type != _FS_TYPE:
            return ""
        inside = [f"{one_line(one.mount_point)} (a mount)" for one in mounts.mounts_inside(entry)]
        users = describe(mount_users(self._layout.path, files=False))
        return ", ".join([*inside, *([users] if users else [])])

    def _remove_damaged(self, outcome: LazyOutcome) -> None:
        """Remove every name of files that cannot be completed: a plain restore leaves them out as well."""
        damaged = {file.ino: file for file in self._pending.damaged if not file.gone}
        if not damaged:
            return
        stack = [(os.dup(self._content), self._layout.path)]
        while stack:
            fd, path = stack.pop()
            try:
                with os.scandir(fd) as entries:
                    for entry in entries:
                        name = os.fsencode(entry.name)
                        if entry.is_dir(follow_symlinks=False):
                            with suppress(OSError):
                                stack.append((os.open(name, _DIRECTORY, dir_fd=fd), join(path, name)))
                        elif entry.inode() in damaged:
                            os.unlink(name, dir_fd=fd)
                            file = damaged[entry.inode()]
                            reason = next(iter(file.damaged.values()))
                            outcome.lost.append(LostFile(one_line(join(path, name)), reason, damaged=True))
            finally:
                os.close(fd)
        self._record.lost = outcome.lost

    def _detach(self) -> None:
        if not self._mounted:
            return
        self._mounted = False
        try:
            mounts.detach(self._layout.path, _FS_TYPE)
        except OSError as error:
            # The operator was quicker.
            log.warning("lazy_mount_not_detached", reason=str(error))


def detach_dead(destination: bytes) -> None:
    """Detach a mount that a killed process has left.

    Raises:
        Busy: its process is alive.
    """
    while (entry := mounts.mount_at(destination)) is not None and entry.fs_type == _FS_TYPE:
        if mounts.probe(destination, _PROBE_SECONDS) == "alive":
            raise Busy(
                f"{one_line(destination)} is being restored by another process",
                hint="ciuic restore --status shows it",
            )
        mounts.detach(destination, _FS_TYPE)
