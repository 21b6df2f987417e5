"""``ciuic check --remote``: does the remote agree with itself? With ``--repair``, mend what can be mended."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from ciuic.cli.shared.session import Session
from ciuic.cli.shared.verify_result import reporting
from ciuic.errors import CiuicError, Damaged

if TYPE_CHECKING:
    from ciuic.maintenance.check_report import CheckReport
    from ciuic.remote.reading.versions import SoundObjects
    from ciuic.remote.upkeep.versions import LockRenewal
    from ciuic.repository import Repository


def check_remotely(session: Session, *, repair: bool, read_data: bool) -> CheckReport:
    """Check the remote that the session reads, and repair it on request."""
    from ciuic.maintenance.check_report import CheckFinding, CheckReport
    from ciuic.remote.reading.opening import read_remote
    from ciuic.remote.upkeep.check import check_remote, repair_remote

    try:
        # Opened here: the question for a passphrase would stand in the middle of a progress line.
        opened = session.remote
    except Damaged as error:
        # remote.json, or an older state: then it is unknown which snapshots there are, and what else is right.
        finding = CheckFinding(
            "error", "log", error.message, error.hint or "nothing can be repaired without it"
        )
        return CheckReport([finding])
    # The report says what is left.
    session.exit_code = 0
    local = _local(session) if repair else None
    with reporting() as report:
        if not repair:
            return check_remote(opened, read_data=read_data, progress=report)
        return repair_remote(
            lambda: read_remote(opened.remote),
            local,
            host=socket.gethostname(),
            read_data=read_data,
            caches=_caches(session),
            progress=report,
        )


def check_behind_deletions(session: Session, *, repair: bool) -> CheckReport:
    """Find what was deleted, overwritten or forged in a bucket with versions; put it right on request."""
    from ciuic.cli.shared.progress import progress
    from ciuic.cli.shared.remotes import open_named_objects
    from ciuic.remote.upkeep.versions import check_versions

    objects = _sound_objects(session)
    assert session.remote_url is not None
    writer = open_named_objects(session.remote_url, lambda: session.config.remotes) if repair else None
    try:
        with progress("check") as reporter:
            return check_versions(objects, writer, lambda name: reporter.update(path=name.encode()))
    finally:
        if writer is not None:
            writer.close()


def renew_remote_locks(session: Session, seconds: int) -> LockRenewal:
    """Lock everything that the remote needs for this time from now on."""
    from ciuic.cli.shared.progress import progress
    from ciuic.remote.upkeep.versions import renew_locks

    session.behind_deletions = True
    objects = _sound_objects(session)
    until_ns = session.now_ns + seconds * 10**9
    with progress("lock") as reporter:
        return renew_locks(
            objects, objects.versions, until_ns, lambda name: reporter.update(path=name.encode())
        )


def _sound_objects(session: Session) -> SoundObjects:
    from ciuic.remote.reading.versions import SoundObjects

    objects = session.remote.remote.objects
    assert isinstance(objects, SoundObjects)
    return objects


def _caches(session: Session) -> list[str]:
    """Return where uploads of this host have kept what they read of logs."""
    from ciuic.protocol.stored_remotely import upload_state_dir

    return sorted(map(str, upload_state_dir().glob("*/*/logs")))


def _local(session: Session) -> Repository | None:
    """Return the repository of this host; None if there is none."""
    try:
        return session.local.repository
    except CiuicError:
        return None
