"""Life of a lazy restore: skeleton, mount, filling, and the plain directory in the end.

Guarantees: `ready` is called when the mount answers; if the process ends before, the same call goes on later; the tree takes
the destination's place in one step for everybody who looks, after all of it is durable.
"""

from __future__ import annotations

import os
import posixpath
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from ciuic import STATE_DIR_NAME
from ciuic.errors import CiuicError, DestinationExists, NotPermitted, UsageError
from ciuic.fuse_layer.system import mounts
from ciuic.lazy.ending import finish
from ciuic.lazy.layout import LazyLayout, LazyPhase, LazyRecord, boot_id
from ciuic.lazy.mounted import MountedRestore, detach_dead
from ciuic.lazy.pending import PendingFiles
from ciuic.lazy.pending_file import PendingName
from ciuic.lazy.progress import DEFAULT_DIRECTORY, LazyOutcome, LazyStatus, LostFile, StatusFile
from ciuic.lazy.skeleton import SkeletonFiles
from ciuic.printable import one_line
from ciuic.repository import Repository
from ciuic.repository.lookup import find, join, normalise
from ciuic.restore import execute, plan_restore
from ciuic.restore.destination import open_way
from ciuic.restore.directory_handles import many_descriptors
from ciuic.restore.model import Result
from ciuic.system.mountinfo import LAZY_RESTORE
from ciuic.types import Snapshot


class LazyRestore:
    """One lazy restore.

    Args:
        repository: repository of the snapshot, open until the end.
        snapshot: snapshot to restore.
        path: absolute path of a directory, as it was at the snapshot.
        dest: directory in which it gets its base name; None: the original path.
        special: as of `plan_restore`.
        status_directory: where the status is written.
    """

    def __init__(
        self,
        repository: Repository,
        snapshot: Snapshot,
        path: bytes,
        dest: bytes | None = None,
        *,
        special: bool | None = None,
        status_directory: Path = DEFAULT_DIRECTORY,
    ) -> None:
        self._repository = repository
        self._snapshot = snapshot
        self._source = normalise(path)
        self._special = special
        self._name = posixpath.basename(self._source)
        parent = posixpath.dirname(self._source) if dest is None else os.path.abspath(dest)
        # Without links: what is mounted is looked for by its path in mountinfo.
        self.destination: Final = join(os.path.realpath(parent), self._name)
        self.status: Final = StatusFile(
            status_directory,
            LazyStatus(
                one_line(self.destination),
                str(snapshot.id),
                one_line(self._source),
                os.getpid(),
                began=time.time(),
            ),
        )

    def run(self, ready: Callable[[LazyStatus], None] = lambda status: None) -> LazyOutcome:
        """Restore; return when the destination is a plain directory and the mount is not in use any more.

        Args:
            ready: called when the tree stands and is mounted.

        Raises:
            NotPermitted: not root, or no /dev/fuse.
            DestinationExists: the destination is not empty, or of another restore.
            Busy: another process restores there.
            UsageError: it is no directory, or the destination cannot be mounted over.
            CiuicError: the mount was taken away before the end, or the skeleton could not be made.
        """
        self._check()
        detach_dead(self.destination)
        os.close(open_way(self.destination, make=True))
        os.chdir("/")
        # The core applies each caller's umask.
        before = os.umask(0)
        try:
            with ExitStack() as closing, many_descriptors():
                return self._run(closing, ready)
        finally:
            os.umask(before)

    def _check(self) -> None:
        if os.geteuid() != 0:
            raise NotPermitted("--lazy mounts, which only root may", hint="sudo, or restore without --lazy")
        if not os.access("/dev/fuse", os.R_OK | os.W_OK):
            raise NotPermitted(
                "--lazy needs /dev/fuse, which this machine or container does not have",
                hint="restore without --lazy, or give the container --device /dev/fuse --cap-add SYS_ADMIN",
            )
        if not self._name:
            raise UsageError("the root directory of the machine has no name to restore it under")
        if not find(self._repository, self._snapshot, self._source).entry.is_dir:
            raise UsageError(
                f"{one_line(self._source)} is no directory, and --lazy restores directories",
                hint="restore it without --lazy",
            )

    # -- the way to the mount

    def _run(self, closing: ExitStack, ready: Callable[[LazyStatus], None]) -> LazyOutcome:
        backing = self._kept(closing, mounts.open_backing(self.destination))
        self._refuse_overlay(backing)
        below = self._kept(
            closing, os.open(b"/proc/self/fd/%d" % backing, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        )
        layout = LazyLayout(below, self.destination)
        closing.callback(layout.close)
        try:
            return self._begun(closing, layout, backing, ready)
        except BaseException as error:
            code = error.exit_code if isinstance(error, CiuicError) else 1
            self.status.tell("interrupted", code=code)
            raise

    def _begun(
        self, closing: ExitStack, layout: LazyLayout, backing: int, ready: Callable[[LazyStatus], None]
    ) -> LazyOutcome:
        record = layout.record
        pending = PendingFiles(layout.pending, self._repository.block_size)
        if record is None or layout.needs_skeleton():
            if record is not None:
                self._require_same(record)
            record = self._new_record()
            self._make_skeleton(layout, record, pending)
        else:
            self._require_same(record)
            self._take_up(pending)
        outcome = LazyOutcome(
            self.destination,
            files=pending.files_total,
            bytes=pending.bytes_total,
            lost=list(record.lost),
            left_out=record.left_out,
            left_out_because=record.left_out_because,
        )
        content = self._kept(closing, layout.open_tree(self._name))
        if record.phase is LazyPhase.MOVING:
            finish(layout, record, content)
            ready(self.status.status)
        else:
            MountedRestore(self._repository, layout, record, pending, content, backing, self.status).serve(
                outcome, ready
            )
        outcome.complete = True
        self.status.tell("complete", code=outcome.exit_code, lost=outcome.lost)
        return outcome

    def _kept(self, closing: ExitStack, fd: int) -> int:
        closing.callback(os.close, fd)
        return fd

    def _refuse_overlay(self, backing: int) -> None:
        entry = mounts.mount_of(backing)
        if entry is not None and entry.fs_type == mounts.FS_TYPE:
            raise UsageError(
                f"{one_line(self.destination)} lies in a protected root, over which --lazy does not mount",
                hint="restore without --lazy, or into another directory with -d",
            )

    def _new_record(self) -> LazyRecord:
        foreign = self._repository.foreign_reason() if self._special is None else ""
        special = not foreign if self._special is None else self._special
        return LazyRecord(str(self._snapshot.id), self._source.hex(), special)

    def _require_same(self, record: LazyRecord) -> None:
        if (record.snapshot, record.source) != (str(self._snapshot.id), self._source.hex()):
            raise DestinationExists(
                f"{one_line(self.destination)} is an incomplete restore of "
                f"{one_line(bytes.fromhex(record.source))} from {one_line(os.fsencode(record.snapshot))}",
                hint="finish that one, or remove the directory",
            )

    def _make_skeleton(self, layout: LazyLayout, record: LazyRecord, pending: PendingFiles) -> None:
        layout.empty()
        # Not durable, nor is the next one: after a power cut the skeleton is made anew in any case.
        layout.write(record, durable=False)
        layout.mark()
        self.status.tell("preparing")
        tree = join(self.destination, STATE_DIR_NAME + b"/" + LAZY_RESTORE + b"/tree")
        plan = plan_restore(self._repository, self._snapshot, [self._source], tree, special=self._special)
        result = execute(plan, placeholders=SkeletonFiles(pending))
        if result.stopped:
            raise CiuicError(
                f"the tree could not be made: {result.stopped}", hint="run it again when there is room"
            )
        self._note_failures(record, result, tree)
        record.phase = LazyPhase.FILLING
        # Placeholders and their hidden links become durable behind the mount (mounted.py).
        record.boot = boot_id()
        layout.write(record, durable=False)

    def _note_failures(self, record: LazyRecord, result: Result, tree: bytes) -> None:
        shift = len(join(tree, self._name))
        for failure in result.failed:
            path = one_line(self.destination + failure.path[shift:])
            record.lost.append(LostFile(path, failure.reason, failure.damaged, failure.attribute))
        record.left_out, record.left_out_because = len(result.left_out), result.left_out_because

    def _take_up(self, pending: PendingFiles) -> None:
        """Read from the hidden links what an interrupted run has left to do."""
        for name in map(os.fsencode, os.listdir(pending.directory)):
            shape = PendingName.decode(name)
            st = os.stat(name, dir_fd=pending.directory, follow_symlinks=False)
            # Cut to nothing, or without another name: killed before the link was removed.
            if shape is None or st.st_size != shape.size_bytes or st.st_nlink < 2:
                os.unlink(name, dir_fd=pending.directory)
                continue
            pending.add(shape, st.st_ino, is_new=False)
