"""Wait until the remotes have a snapshot, by the records of the process that uploads.

Guarantees: a remote counts as done only when its record names the snapshot as stored, which is written after the
remote's commit. Interrupting the wait interrupts nothing else.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from ciuic.cli.shared.messages import complain, warn
from ciuic.cli.shared.names import shown_text
from ciuic.errors import CiuicError, NotFound

if TYPE_CHECKING:
    from ciuic.cli.shared.session import Session

_POLL_SECONDS: Final = 0.2
# Time after which it is said that nothing uploads, or what the upload waits for.
_PATIENCE_SECONDS: Final = 5.0


class RemoteWait:
    """Wait for the configured remotes; made before the snapshot is taken, so that what is missing is said first."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._names = [remote.name for remote in session.config.remotes]
        if not self._names:
            raise NotFound("no remote is configured to wait for", hint="ciuic remote init URL makes one")

    def until_stored(self, snapshot_id: str) -> None:
        """Return when every remote has committed the snapshot.

        Raises:
            CiuicError: a remote does not want it.
        """
        try:
            began, told = time.monotonic(), False
            repository = self._session.repository.id
            for name in self._names:
                while not _is_stored(name, repository, snapshot_id):
                    if not told and time.monotonic() - began > _PATIENCE_SECONDS:
                        told = True
                        _tell(name)
                    time.sleep(_POLL_SECONDS)
        except KeyboardInterrupt:
            complain(f"{snapshot_id} is committed on this host, and its upload goes on")
            raise


def _is_stored(name: str, repository: str, snapshot_id: str) -> bool:
    from ciuic.protocol.stored_remotely import StoredRecordDamaged, read_record

    try:
        record = read_record(name)
    except StoredRecordDamaged as error:
        raise CiuicError(
            f"{snapshot_id} is committed on this host; what the remote {name} has stored cannot be read: {error}"
        ) from None
    # Ids are short: another repository, which was uploaded before this one, may have the same.
    if record is None or record.repository != repository:
        return False
    if snapshot_id in record.stored:
        return True
    if snapshot_id in record.passed_over:
        raise CiuicError(
            f"{snapshot_id} is committed on this host, and does not go to the remote {name}",
            hint="its schedule or retention leaves the snapshot out: ciuic config show",
        )
    return False


def _tell(name: str) -> None:
    """Say why a remote may take long."""
    from ciuic.protocol.stored_remotely import upload_state_dir
    from ciuic.remote.upload.upload_status import read_status

    status = read_status(name, upload_state_dir())
    if status is None or not status.runs:
        warn(
            f"nothing seems to upload to the remote {name}",
            hint="ciuic remote upload, or ciuic service install",
        )
    elif status.waits_for:
        warn(f"the upload to the remote {name} waits: {shown_text(status.waits_for)}")
