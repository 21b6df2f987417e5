"""``ciuic check --remote``: does the remote agree with itself? With ``--repair``, mend what can be mended."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from ciuic.cli.shared.session import Session
from ciuic.cli.shared.verify_result import reporting
from ciuic.errors import CiuicError, Damaged

if TYPE_CHECKING:
    from ciuic.maintenance.check_report import CheckReport
    from ciuic.repository import Repository


def check_remotely(session: Session, *, repair: bool, read_data: bool) -> CheckReport:
    """Check the remote that the session reads, and repair it on request."""
    from ciuic.maintenance.check_report import CheckFinding, CheckReport
    from ciuic.remote.reading.opening import read_remote
    from ciuic.remote.upkeep.check import check_remote
    from ciuic.remote.upkeep.repair import repair_remote

    try:
        # Opened here: the question for a passphrase would stand in the middle of a progress line.
        opened = session.remote
    except Damaged as error:
        # A log or remote.json: nobody knows then which snapshots there are, and what else is right.
        finding = CheckFinding(
            "error", "log", error.message, error.hint or "nothing can be repaired without it"
        )
        return CheckReport([finding])
    local = _local(session) if repair else None
    with reporting() as report:
        if not repair:
            return check_remote(opened, read_data=read_data, progress=report)
        return repair_remote(
            lambda: read_remote(opened.remote),
            local,
            host=socket.gethostname(),
            read_data=read_data,
            progress=report,
        )


def _local(session: Session) -> Repository | None:
    """Return the repository of this host; None if there is none."""
    try:
        return session.local.repository
    except CiuicError:
        return None
