"""Build the job of a capture process from a pending snapshot."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ciuic.daemon.base.runtime import CutRecord, PendingRecord
from ciuic.daemon.base.settings import Settings
from ciuic.daemon.capture.job import CaptureJob, RootJob
from ciuic.daemon.roots.supervisor import RootSupervisor
from ciuic.daemon.snapshots.pending import PendingSnapshot
from ciuic.errors import CiuicError
from ciuic.protocol.control_types import rfc3339
from ciuic.system.urgency import Urgency
from ciuic.types import LeftOut

# Wait of the capture process for another writer, before the attempt ends as Busy and another one follows.
LOCK_WAIT_SECONDS = 30.0


def make_job(
    pending: PendingSnapshot,
    settings: Settings,
    roots: Mapping[str, RootSupervisor],
    host: str,
    urgency: Urgency,
) -> tuple[CaptureJob, list[int]]:
    """Return the job and duplicates of the descriptors that it names.

    The caller passes them on and closes them.

    Args:
        pending: snapshot with at least one remaining root.
        settings: settings in force.
        roots: supervisors of the roots, by path.
        host: name of this host, for the snapshot's record.
        urgency: deadline and share that the capture works under.

    Raises:
        CiuicError: the overlay session of a root has ended, and the snapshot has to be cut anew; or no root
            remains.
    """
    record = pending.record
    fds: list[int] = []
    jobs: list[RootJob] = []
    for cut in pending.remaining:
        try:
            # A snapshot that a predecessor cut has no entry: whether its tracking had a gap is not known.
            jobs.append(_root_job(cut, roots, fds, pending.trust_tracking.get(cut.path, False)))
        except BaseException as error:
            # The caller closes what is returned; of a job that is not returned the duplicates are closed
            # here.
            for fd in fds:
                os.close(fd)
            if isinstance(error, CiuicError):
                pending.interrupt(cut.path, error.message)
            raise
    if not jobs:
        raise CiuicError(pending.drop_reason or "no root is left that could be captured")
    job = CaptureJob(
        repository=str(settings.repository),
        id=record.id,
        time_ns=record.time_ns,
        host=host,
        roots=tuple(jobs),
        left_out=_left_out(record),
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


def _left_out(record: PendingRecord) -> tuple[LeftOut, ...]:
    return tuple(LeftOut(path=os.fsencode(path), reason=reason) for path, reason in record.left_out.items())


def _message(record: PendingRecord) -> str:
    """Return the operator's message.

    It also has the promised instant and the reason, for a snapshot that was cut anew.
    """
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
    # Duplicates: a worker that ends closes its own at any time, and the numbers may be reused before the
    # fork.
    fds.append(os.dup(worker.backing_fd))
    backing_fd, undo_fd = fds[-1], -1
    # One that was deleted under a worker is made anew: the capture finds that by its name.
    if worker.undo_fd is not None and os.fstat(worker.undo_fd).st_nlink:
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
