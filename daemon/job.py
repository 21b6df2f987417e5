"""From a pending snapshot to the job of its capture process."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ciuic.control_types import rfc3339
from ciuic.daemon.capture_job import CaptureJob, RootJob
from ciuic.daemon.pending import PendingSnapshot
from ciuic.daemon.runtime import CutRecord, PendingRecord
from ciuic.daemon.settings import Settings
from ciuic.daemon.supervisor import RootSupervisor
from ciuic.errors import CiuicError
from ciuic.types import LeftOut
from ciuic.urgency import Urgency

LOCK_WAIT_SECONDS = 30.0


def make_job(
    pending: PendingSnapshot,
    settings: Settings,
    roots: Mapping[str, RootSupervisor],
    host: str,
    urgency: Urgency,
) -> tuple[CaptureJob, list[int]]:
    """The job, and the duplicates of descriptors that it names: the caller passes them on and closes them.

    CiuicError when the overlay session of a root has ended; the snapshot has to be cut anew then.
    """
    record = pending.record
    fds: list[int] = []
    jobs: list[RootJob] = []
    for cut in pending.remaining:
        try:
            jobs.append(_root_job(cut, roots, fds, pending.trust_tracking.get(cut.path, False)))
        except BaseException as error:
            for fd in fds:
                os.close(fd)
            if isinstance(error, CiuicError):
                pending.interrupt(cut.path, error.message)
            raise
    if not jobs:
        raise CiuicError(pending.lost or "no root is left that could be captured")
    job = CaptureJob(
        repository=str(settings.repository),
        id=record.id,
        time_ns=record.time_ns,
        host=host,
        roots=tuple(jobs),
        left_out=tuple(
            LeftOut(path=os.fsencode(path), reason=reason) for path, reason in record.left_out.items()
        ),
        tags=tuple(record.tags),
        message=_message(record),
        hold=record.hold,
        hold_reason=record.hold_reason or record.message if record.hold else "",
        hold_uid=record.user if record.hold else None,
        pair=record.pair,
        lock_wait_seconds=LOCK_WAIT_SECONDS,
        io_priority=settings.io_priority,
        urgency=urgency,
        runtime_dir=str(settings.runtime_dir),
        trust_repository=settings.trust_repository,
    )
    return job, fds


def _message(record: PendingRecord) -> str:
    """What the operator said, and that the snapshot is not of the instant that was promised."""
    if not record.retaken:
        return record.message
    return f"{record.message} [promised for {rfc3339(record.promised_ns)} and cut again: {record.retaken}]".lstrip()


def _root_job(
    cut: CutRecord, roots: Mapping[str, RootSupervisor], fds: list[int], trust_tracking: bool
) -> RootJob:
    supervisor = roots.get(cut.path)
    worker = supervisor.worker if supervisor else None
    if supervisor is None or worker is None or worker.session != cut.session:
        raise CiuicError(f"the overlay session of {cut.path} has ended")
    fds.append(os.dup(worker.backing_fd))
    backing_fd, undo_fd = fds[-1], -1
    if worker.undo_fd is not None:
        fds.append(os.dup(worker.undo_fd))
        undo_fd = fds[-1]
    return RootJob(
        path=os.fsencode(cut.path),
        backing_fd=backing_fd,
        undo_fd=undo_fd,
        session=cut.session,
        epoch=cut.epoch,
        worker_pid=worker.pid,
        excludes=supervisor.settings.excludes,
        trust_tracking=trust_tracking,
    )
