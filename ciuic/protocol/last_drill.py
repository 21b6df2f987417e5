"""Records of drills: written by `ciuic drill` and `ciuic remote drill`, read by the daemon, the status and the metrics.

The last drill of a remote is ``<state directory>/<name of the remote>/drill``, the last ones of a repository are `drills` beside its
own files; JSON. The writer replaces them atomically and durably. The reader takes them for hostile, as
`ciuic.protocol.stored_remotely` does; a record that cannot be read is none.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from ciuic.protocol.control_types import DrillStatus, rfc3339
from ciuic.protocol.stored_remotely import (
    StoredRecordDamaged,
    read_state_file,
    upload_state_dir,
    write_state_file,
)
from ciuic.structs import decode_json
from ciuic.types import MAX_TIME_NS

_NAME: Final = "drill"
_MAX_BYTES: Final = 1 << 16
_MAX_TEXT: Final = 1000
_HISTORY_NAME: Final = "drills"
_KEPT: Final = 30
"""Number of drills of a repository that are kept: the records of half a year with a drill each week."""

DrillVerdict = Literal["good", "damaged", "failed"]
"""good: the sample came back as it was. damaged: something did not. failed: the drill did not get that far."""


class LastDrill(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a drill that ended at ``time_ns``."""

    time_ns: Annotated[int, msgspec.Meta(ge=0, le=MAX_TIME_NS)]
    verdict: DrillVerdict
    seconds: Annotated[float, msgspec.Meta(ge=0)]
    """Time from the first request to the verdict."""
    reason: str = ""
    """Damage or failure in words; empty if all is good."""
    snapshot: str = ""
    """Snapshot that was restored from; empty if none was found."""
    files: int = 0
    bytes_read: int = 0
    estimated_seconds: float = 0.0
    """Time that a restore of the whole snapshot would take; 0 if it is not known."""

    @property
    def is_good(self) -> bool:
        """True if a rescue would have worked."""
        return self.verdict == "good"


def read_last_drill(name: str, state_dir: Path | None = None) -> LastDrill | None:
    """Return the last drill of the remote ``name``; None if there was none, or its record cannot be read."""
    place = upload_state_dir() if state_dir is None else state_dir
    try:
        return decode_drill(read_state_file(place, name, _NAME, _MAX_BYTES))
    except (OSError, StoredRecordDamaged):
        return None


def decode_drill(data: bytes) -> LastDrill:
    """Return the record in ``data``. StoredRecordDamaged for anything else."""
    try:
        return decode_json(data, LastDrill)
    except msgspec.DecodeError as error:
        raise StoredRecordDamaged(f"it is no record of a drill: {error}") from error


def write_last_drill(name: str, drill: LastDrill, state_dir: Path | None = None) -> None:
    """Replace the record of the remote ``name``, durably on return; the state directory must exist.

    Raises:
        OSError: the record cannot be written.
    """
    place = upload_state_dir() if state_dir is None else state_dir
    short = msgspec.structs.replace(drill, reason=drill.reason[:_MAX_TEXT])
    write_state_file(place, name, _NAME, msgspec.json.encode(short))


def read_drills(repository: Path) -> list[LastDrill]:
    """Return the last drills of a repository, newest first; none if there is no record that can be read.

    Damage in a snapshot that was removed since is left out.
    """
    place = Path(os.path.realpath(repository))
    try:
        found = decode_drills(read_state_file(place.parent, place.name, _HISTORY_NAME, _MAX_BYTES))
    except (OSError, StoredRecordDamaged):
        return []
    return [
        one
        for one in found
        if one.verdict != "damaged" or os.path.lexists(place / "snapshots" / one.snapshot)
    ]


def standing_drill(records: Sequence[LastDrill]) -> LastDrill | None:
    """Return the drill that says how things stand: the newest, unless damage was found and not taken back since.

    A drill of another snapshot, or of fewer files, proves nothing about damage that an earlier one has found.
    """
    for number, one in enumerate(records):
        if one.verdict == "damaged" and not any(
            later.is_good and later.snapshot == one.snapshot and later.files >= one.files
            for later in records[:number]
        ):
            return one
    return records[0] if records else None


def decode_drills(data: bytes) -> list[LastDrill]:
    """Return the records in ``data``, newest first. StoredRecordDamaged for anything else."""
    try:
        return decode_json(data, list[LastDrill])
    except msgspec.DecodeError as error:
        raise StoredRecordDamaged(f"it is no record of drills: {error}") from error


def drill_status(drill: LastDrill) -> DrillStatus:
    """Return the drill as the status has it."""
    return DrillStatus(
        time=rfc3339(drill.time_ns),
        verdict=drill.verdict,
        reason=drill.reason,
        seconds=drill.seconds,
        snapshot=drill.snapshot,
        files=drill.files,
        bytes_read=drill.bytes_read,
        estimated_seconds=drill.estimated_seconds,
    )


def add_drill(repository: Path, drill: LastDrill) -> None:
    """Add a drill to the records of a repository, durably on return.

    Raises:
        OSError: the records cannot be written.
    """
    place = Path(os.path.realpath(repository))
    short = msgspec.structs.replace(drill, reason=drill.reason[:_MAX_TEXT])
    kept = [short, *read_drills(repository)][:_KEPT]
    write_state_file(place.parent, place.name, _HISTORY_NAME, msgspec.json.encode(kept))
