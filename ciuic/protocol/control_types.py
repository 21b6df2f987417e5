"""Documents of the control socket (architecture.md, section 8), defined once for both ends.

Guarantees: what one end encodes the other decodes. A field unknown to the receiver is ignored, and a field that the sender did
not know has a default, so that a command and a daemon of different versions understand each other. Times are RFC 3339 strings
with offset, sizes are integers of bytes, durations are seconds. Paths are text: a root's path is written in a configuration
file, which is UTF-8. control.py and the daemon send and receive the documents.
"""

from __future__ import annotations

from datetime import datetime
from typing import Final, Literal

import msgspec

from ciuic.errors import CiuicError, error_of
from ciuic.printable import escaped
from ciuic.types import SetMember

MountState = Literal["starting", "mounted", "restarting", "failed", "stopping", "unmounted"]
SnapshotPhase = Literal["pending", "capturing", "committed", "failed"]
Severity = Literal["warning", "problem"]


# Without tags, and unknown fields are ignored: a command and a daemon of different versions must understand each other.
# An empty list or dict as a default is copied for each document by msgspec, unlike Python's own defaults. A
# document as a default needs a factory: msgspec refuses mutable ones.
class _Document(msgspec.Struct, kw_only=True):
    pass


class Progress(_Document):
    """Progress of a capture. ``*_total`` is 0 while unknown."""

    phase: str = ""
    files_done: int = 0
    files_total: int = 0
    bytes_done: int = 0
    bytes_total: int = 0
    new_bytes: int = 0
    path: str = ""
    share: float = 1.0
    """Share of the time that the capture may use; below 1 it is throttled, because other processes use the disk."""
    least_share: float = 0.0
    """Lower bound of ``share`` by now; it rises until `capture.finish_within`."""
    others_waiting: float = 0.0
    """Share of the time in which other processes waited for the disk lately."""
    others_writing: float = 0.0
    """Bytes per second that other processes wrote lately."""
    paused_seconds: float = 0.0
    """Time that the capture has spent measuring and pausing so far."""


class SnapshotState(_Document):
    """A snapshot of this daemon, requested or scheduled, from its cut until it is committed or has failed."""

    id: str
    state: SnapshotPhase
    time: str = ""
    """Instant of the cut."""
    error: str = ""
    hint: str = ""
    code: int = 0
    """Exit code of the failure (cli.md), 0 while there is none."""
    progress: Progress | None = None
    seconds_left: float | None = None
    """Estimate of the time until it is committed; None while unknown, as in the first capture of a root."""
    roots: list[str] = []
    tags: list[str] = []
    message: str = ""
    attempts: int = 0
    """Number of captures begun so far."""
    new_bytes: int = 0
    is_incomplete: bool = False
    """True if something could not be read and is missing. The field has this meaning in every document that has snapshots."""
    incomplete: list[str] = []
    """Paths that could not be read from the backing directories; the snapshot is committed without them and records that."""
    left_out: dict[str, str] = {}
    """Roots that are not in the snapshot, with the reason; the snapshot is `partial` then."""
    hold_microseconds: int = 0
    """Time for which changing operations were stopped for the cut."""


# Requests are strict: a daemon that ignored a field it does not know would do something else than was asked for.
class SnapshotRequest(_Document, forbid_unknown_fields=True):
    """Request for a snapshot. Empty ``roots``: all roots."""

    message: str = ""
    tags: list[str] = []
    hold: bool = False
    wait: bool = False
    roots: list[str] = []
    before_end_seconds: float = 0.0
    """Time until this machine ends, as of now; 0: no end is known."""
    cause: str = ""
    """Cause in words."""


MAX_HOLD_LIMIT_SECONDS: Final = 10.0
"""Longest hold that may be asked for: the jobs in the roots stand still meanwhile."""


class FlushRequest(_Document, forbid_unknown_fields=True):
    """Request to write back what the kernel has cached of these roots. Empty ``roots``: all roots."""

    roots: list[str] = []


class FlushReport(_Document):
    """Answer to a request to flush."""

    complete: bool
    """True if everything that was written before is in the overlays."""


class HoldRequest(_Document, forbid_unknown_fields=True):
    """Request to hold all roots of a snapshot, which is cut when that is decided.

    ``snapshot.wait`` does not count: the answer comes when all roots are held.
    """

    snapshot: SnapshotRequest
    set_member: SetMember
    limit_seconds: float
    """Time after which the hold ends by itself."""
    flushed: bool = True
    """The roots were flushed before, all of them."""


class HoldState(_Document):
    """A hold that is in force."""

    token: str


class HoldDecision(_Document, forbid_unknown_fields=True):
    """Decision over a hold: cut, or release without a cut."""

    cut: bool


class RootRequest(_Document, forbid_unknown_fields=True):
    """Request about a root. ``path`` is absolute."""

    path: str


class ForgetRequest(_Document, forbid_unknown_fields=True):
    """Request to forget a trainer, given by name or pid."""

    trainer: str


class PruneRequest(_Document, forbid_unknown_fields=True):
    """Request to prune. ``dry_run``: decide and report only."""

    dry_run: bool = False


class BypassReport(_Document):
    """A process that writes to the backing directory without passing the overlay."""

    pid: int
    command: str = ""
    paths: list[str] = []


class BypassingMountReport(_Document):
    """A mount by which a root, or a part of it, is reached without passing the overlay."""

    place: str
    """Where, as the processes of its mount namespace name it."""
    shows: str
    """Path of the root, or below it, that is reached there, as the daemon names it."""
    pid: int = 0
    """A process of that mount namespace."""
    command: str = ""
    elsewhere: bool = False
    """True if that is not the daemon's mount namespace."""


class SnapshotSummary(_Document):
    """A committed snapshot in a status document."""

    id: str
    time: str
    new_bytes: int = 0
    size_bytes: int = 0
    partial: bool = False
    """True if roots are missing in it."""


class RootStatus(_Document):
    """Present state of a protected root."""

    path: str
    driver: str = ""
    """Driver in use, kernel or pyfuse3; the configured one until a worker has answered."""
    driver_why: str = ""
    passthrough: bool = False
    """True if the kernel passes data through to the files by itself."""
    filtered: bool = False
    """True if seccomp refuses system calls that the worker does not need."""
    state: MountState = "starting"
    session: str = ""
    epoch: int = 0
    pending: list[int] = []
    """Epochs cut and not yet captured."""
    dirty_bytes: int = 0
    """Upper bound of what the next snapshot will read."""
    dirty_inodes: int = 0
    undo_bytes: int = 0
    open_files: int = 0
    requests: int = 0
    waited_seconds: float = 0.0
    """Time during which at least one request of the job has waited in the overlay, as a rule for the disk."""
    worker_pid: int = 0
    restarts: int = 0
    mounted_since: str = ""
    tracking: bool = False
    """True: the next capture follows tracked changes; False: it compares the whole tree."""
    bypassing: list[BypassReport] = []
    bypassing_mounts: list[BypassingMountReport] = []
    error: str = ""
    snapshots_dir: str = "off"
    """The root's snapshots at `.snapshots` in it: off, starting, mounted, name taken (by a file of the owner's), unsupported (by
    the driver), failed."""
    last_snapshot: SnapshotSummary | None = None
    """Newest committed snapshot that has this root."""
    seconds_since_last: float | None = None
    """Work at risk in this root: time since that snapshot's cut, whatever the clock is set to. None: all work, because there is no snapshot."""
    seconds_since_good: float | None = None
    """Age of the newest checkpoint of this root that is GOOD by its stored verdict; None: none is known."""
    next_snapshot: str | None = None
    """Time of the next scheduled snapshot; the present time for a root whose first one is being taken."""


class RemoteStatus(_Document):
    """Snapshots of the repository that a remote lacks, from the record of the process that uploads."""

    name: str
    snapshots: int = 0
    """Snapshots that wait for the remote."""
    size_bytes: int = 0
    """Bytes by which these let the packs grow."""
    seconds: float = 0.0
    """Age of the oldest waiting snapshot that is newer than all stored ones."""
    stored: int = 0
    """Snapshots of the repository that the remote has."""
    newest: str = ""
    """Newest of these; empty for none."""
    problem: str = ""
    """Why nothing is known of the remote; empty if all is well."""
    last_drill: str = ""
    """End of the last drill of a rescue; empty if there was none."""
    drill_ok: bool = False
    """True if that drill proved that a rescue works."""


class DrillStatus(_Document):
    """The last drill of a restore from the repository, and when the daemon does the next."""

    time: str = ""
    """End of the last drill; empty if there was none."""
    verdict: str = ""
    """good, damaged or failed."""
    reason: str = ""
    """Damage or failure in words; empty if all is good."""
    seconds: float = 0.0
    snapshot: str = ""
    files: int = 0
    """Files that were restored and compared."""
    bytes_read: int = 0
    estimated_seconds: float = 0.0
    """Time that a restore of the whole snapshot would take."""
    interval_seconds: int = 0
    """Time from one drill to the next; 0: the daemon does none."""
    next: str = ""
    """Time of the next drill; empty if the daemon does none."""


class DamageStatus(_Document):
    """Damage of the repository that is known: what was found, and not refuted since."""

    places: int
    """Number of files and directories of snapshots, and of the repository's own files."""
    found: str
    """Time at which the first of them was found."""
    where: str
    """The one that was found last."""
    reason: str
    by: str = ""
    """Command that found it."""
    snapshots: list[str] = []
    """Snapshots that need one of them, as far as they are known."""


class RepositoryStatus(_Document):
    """The repository and its file system."""

    path: str = ""
    exists: bool = False
    missing: str = ""
    """Reason why a repository that existed is not there: its disk is absent, or it was moved. The daemon makes no new one."""
    missing_hint: str = ""
    """Remedy for a repository that is missing."""
    made_apart_from: str = ""
    """Remote whose identity the repository lacks, because this daemon found none and made it without a network."""
    size_bytes: int = 0
    """Space that the repository's files take on disk."""
    free_bytes: int = 0
    """Free space of the file system for an ordinary process, as df(1) shows it."""
    used_bytes: int = 0
    """Used space of the whole file system, the repository included."""
    total_bytes: int = 0
    growth_bytes_per_day: float = 0.0
    """Rate of the last week at which the use of the whole file system grows; 0 while it is not known."""
    own_growth_bytes_per_day: float = 0.0
    """Part of the repository in it."""
    full_in_seconds: float | None = None
    """Time until the file system is full at that rate; None while it is not known, or does not grow."""
    reserve_bytes: int = 0
    """Space that captures do not use, so that other programs have it."""
    reserve_reason: str = ""
    """Source of ``reserve_bytes``, for a person."""
    snapshots: int = 0


class BesideStatus(_Document):
    """Limits in force for captures and upkeep, which run beside the job."""

    io_priority: str = ""
    slice: str = ""
    """Systemd slice that they run in; empty if they run in none."""
    min_share: float = 1.0
    """Share of the time that they work at least while other processes are busy; 1: they are not throttled."""
    finish_within_seconds: float = 0.0
    """Time from a cut after which its capture is not throttled any more."""
    hears: list[str] = []
    """Signals that throttle them: `pressure` (processes wait for the disk), `writes` (processes write much), `requests` (the
    job's requests in the overlay)."""


class Alert(_Document):
    """A condition that the operator should know of. ``key`` is stable; an alert ends with its cause."""

    key: str
    severity: Severity
    since: str
    message: str
    hint: str = ""
    root: str = ""


def trainer_key(name: str, where: str) -> str:
    """Return the key of alerts about one training; it stays the same when the training is started again."""
    return f"trainer:{escaped(name)}:{escaped(where)}"


class TrainerStatus(_Document):
    """Present state of a watched training."""

    name: str
    where: str = ""
    pid: int = 0
    """Process id in the daemon's namespace; 0 if the daemon cannot see the process."""
    user: str = ""
    kind: str = ""
    """Origin of the registration: library (SnapshotManager), command (`ciuic watch -- COMMAND`), pid (`ciuic watch --pid`), file (a
    [[trainer]])."""
    state: Literal["running", "hung", "closed", "absent"] = "running"
    """State of the training.

    closed: it has reported that it is done, and its process still exists. absent: its file names no living process.
    """
    since: str = ""
    step: int = 0
    last_beat: str = ""
    """Time of the last heartbeat; empty: none yet."""
    heartbeat_seconds: float = 0.0
    """Time without a heartbeat after which it counts as hung; 0: never."""
    failed_saves: int = 0
    """Saves that failed in a row; 0: the last one is durable, or there was none."""
    failing_since: str = ""
    """Time of the first of them."""
    save_error: str = ""
    """Why the last of them failed."""


IncidentKind = Literal["died", "failed", "hung", "lost", "recovered"]


class Incident(_Document):
    """An event in the life of a watched trainer."""

    kind: IncidentKind
    """Kind of the incident.

    died: killed, or ended without a report. failed: according to its own report or exit status. hung: no heartbeat for too long.
    lost: ended while no daemon watched. recovered: its heartbeat has resumed.
    """
    time: str
    trainer: TrainerStatus
    reason: str = ""
    snapshot: str = ""
    """Id of the emergency snapshot, from its cut on."""
    no_snapshot: str = ""
    """Reason why there is no emergency snapshot."""


class StatusDocument(_Document):
    """Document that ``ciuic status --json`` prints."""

    version: str
    pid: int
    since: str
    now: str
    roots: list[RootStatus] = []
    repository: RepositoryStatus = msgspec.field(default_factory=RepositoryStatus)
    remotes: list[RemoteStatus] = []
    drill: DrillStatus | None = None
    """None: there was no drill, and none is configured."""
    damage: DamageStatus | None = None
    """None: none is known."""
    last_snapshot: SnapshotSummary | None = None
    next_snapshot: str | None = None
    seconds_since_last: float | None = None
    """Work at risk: time since the last snapshot of the root that has been without one for longest.

    None: a root has no snapshot, or there are no roots and the repository has none.
    """
    interval_seconds: int = 0
    undo_limit_bytes: int = 0
    """Size of a root's undo log at which its oldest snapshot that is not captured yet is given up."""
    captures: list[SnapshotState] = []
    """Snapshots not yet committed, oldest first; and the last failure, if nothing was committed since."""
    beside: BesideStatus = msgspec.field(default_factory=BesideStatus)
    alerts: list[Alert] = []
    trainers: list[TrainerStatus] = []
    """Watched trainers."""
    incidents: list[Incident] = []
    """Latest incidents, newest first."""
    stopping: bool = False
    config_path: str = ""


class PrunedSnapshot(_Document):
    """A decision of the retention policy."""

    id: str
    time: str
    keep: bool
    reasons: list[str] = []


class UnstoredSnapshot(_Document):
    """Snapshot that was removed for lack of space although some remotes had not stored it."""

    id: str
    remotes: list[str] = []


class PruneReport(_Document):
    """Result of a prune. ``freed_bytes`` is 0 in a dry run."""

    dry_run: bool
    decisions: list[PrunedSnapshot] = []
    removed: list[str] = []
    removed_unstored: list[UnstoredSnapshot] = []
    freed_bytes: int = 0
    notes: list[str] = []


class Event(_Document):
    """A line of GET /v1/events. ``kind`` is a stable snake_case phrase."""

    kind: str
    time: str
    root: str = ""
    snapshot: SnapshotState | None = None
    alert: Alert | None = None
    incident: Incident | None = None
    detail: str = ""


class RootChange(_Document):
    """A root that a reload added or removed."""

    path: str
    change: Literal["added", "removed"]
    state: MountState
    error: str = ""
    """Reason why an added root is not mounted."""


class ReloadReport(_Document):
    """Answer to POST /v1/reload. Daemons of versions without this document answer with an empty one."""

    config_path: str = ""
    changes: list[RootChange] = []
    at_restart: list[str] = []
    """Keys that have changed in the file and take effect at the daemon's next start."""


class Resource(_Document):
    """A method of a path of the control API."""

    method: str
    path: str


class Index(_Document):
    """Answer to GET /: the daemon's version and the resources of its API."""

    version: str
    name: str = "ciuic"
    resources: list[Resource] = []


class ErrorDocument(_Document):
    """Error answer. ``code`` is the exit code of cli.md."""

    error: str
    hint: str = ""
    code: int = 1

    @classmethod
    def of(cls, error: CiuicError) -> ErrorDocument:
        """Return the document of an error."""
        return cls(error=error.message, hint=error.hint, code=error.exit_code)

    def raised(self) -> CiuicError:
        """Return the error as the class that has its exit code."""
        return error_of(self.code, self.error, hint=self.hint)


def rfc3339(time_ns: int) -> str:
    """Format an instant in local time with its offset, to the second, as the documents of the daemon have it (those of snapshots: `ciuic.cli.shared.times`)."""
    # Divided as integers, because isoformat() adds a fraction to a time that is not a whole second.
    return datetime.fromtimestamp(time_ns // 1_000_000_000).astimezone().isoformat()
