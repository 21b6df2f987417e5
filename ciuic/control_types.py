"""The documents that pass over the control socket (architecture.md, section 8), one definition for both ends.

Guarantees: what one end encodes the other decodes; a field unknown to the receiver is ignored, and a field that the
sender did not know has a default, so that a command and a daemon of different versions understand one another.
Times are RFC 3339 strings with offset, sizes are integers of bytes, durations are seconds. Paths are text: a root's
path is written in a configuration file, which is UTF-8. Sending and receiving is left to control.py and the daemon.
"""

from __future__ import annotations

from datetime import datetime
from typing import Literal

import msgspec

MountState = Literal["starting", "mounted", "restarting", "failed", "stopping", "unmounted"]
SnapshotPhase = Literal["pending", "capturing", "committed", "failed"]
Severity = Literal["warning", "problem"]


class _Document(msgspec.Struct, kw_only=True):
    pass


class Progress(_Document):
    """How far a capture is. ``*_total`` is 0 while it is not known."""

    phase: str = ""
    files_done: int = 0
    files_total: int = 0
    bytes_done: int = 0
    bytes_total: int = 0
    new_bytes: int = 0
    path: str = ""
    share: float = 1.0
    """Share of the time that the capture works in: below 1 it is slowed down, because others use the disk."""
    least_share: float = 0.0
    """Share that it has in any case by now: it rises until `capture.finish_within`."""
    others_waiting: float = 0.0
    """The share of the time in which others waited for the disk lately."""
    others_writing: float = 0.0
    """Bytes per second that others wrote lately."""
    paused_seconds: float = 0.0
    """What the capture has spent listening and making way so far."""


class SnapshotState(_Document):
    """A snapshot that this daemon was asked for or took by itself, from its cut until it is committed or has failed."""

    id: str
    state: SnapshotPhase
    time: str = ""
    """The instant of the cut."""
    error: str = ""
    hint: str = ""
    code: int = 0
    """Exit code of the failure (cli.md), 0 while there is none."""
    progress: Progress | None = None
    seconds_left: float | None = None
    """Estimate of the time until it is committed; None where it is not known, as in the first capture of a root."""
    roots: list[str] = []
    tags: list[str] = []
    message: str = ""
    attempts: int = 0
    """Captures begun so far."""
    new_bytes: int = 0
    is_incomplete: bool = False
    """Something could not be read, and so is not in it. The field has this meaning in every document that has snapshots."""
    incomplete: list[str] = []
    """What could not be read from the backing directories; the snapshot is committed without it and says so."""
    left_out: dict[str, str] = {}
    """Roots that are not in the snapshot, with the reason: it is `partial`."""
    hold_microseconds: int = 0
    """How long changing operations were stopped for the cut."""
    retaken: str = ""
    """Why it shows a later instant than the one at which its id was promised; empty where it does not."""


class SnapshotRequest(_Document, forbid_unknown_fields=True):
    """``roots`` empty: all of them."""

    message: str = ""
    tags: list[str] = []
    hold: bool = False
    wait: bool = False
    roots: list[str] = []


class RootRequest(_Document, forbid_unknown_fields=True):
    """``path`` is absolute."""

    path: str


class ForgetRequest(_Document, forbid_unknown_fields=True):
    """``trainer``: its name or pid."""

    trainer: str


class PruneRequest(_Document, forbid_unknown_fields=True):
    """``dry_run``: decide and report only."""

    dry_run: bool = False


class BypassReport(_Document):
    """A process that writes to the backing directory without passing the overlay."""

    pid: int
    command: str = ""
    paths: list[str] = []


class SnapshotSummary(_Document):
    """A committed snapshot in a status document."""

    id: str
    time: str
    new_bytes: int = 0
    size_bytes: int = 0
    partial: bool = False
    """It lacks roots."""


class RootStatus(_Document):
    """One protected root as the daemon sees it now."""

    path: str
    driver: str = ""
    """kernel or pyfuse3; as long as no worker has answered, what is configured."""
    driver_why: str = ""
    passthrough: bool = False
    """The kernel carries data to the files by itself."""
    filtered: bool = False
    """System calls that the worker has no use for are refused by the kernel (seccomp)."""
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
    """The time in which at least one request of the job has waited in the overlay, for the disk as a rule."""
    worker_pid: int = 0
    restarts: int = 0
    mounted_since: str = ""
    tracking: bool = False
    """False: the next capture compares the whole tree instead of following tracked changes."""
    bypassing: list[BypassReport] = []
    error: str = ""
    last_snapshot: SnapshotSummary | None = None
    """The newest committed one that has this root."""
    seconds_since_last: float | None = None
    """Work at risk in this root: time since that snapshot's cut. None: all of it, for there is no snapshot."""
    next_snapshot: str | None = None
    """When the schedule takes the next one; now for a root whose first one is being taken."""


class RepositoryStatus(_Document):
    """The store and the file system it lies on."""

    path: str = ""
    exists: bool = False
    missing: str = ""
    """Reason why a repository that existed is not there: its disk is absent, or it was moved. The daemon makes no new one."""
    missing_hint: str = ""
    """Remedy for a repository that is missing."""
    size_bytes: int = 0
    """Bytes that the store's files take on disk."""
    free_bytes: int = 0
    """What the file system has free for an ordinary process, as df(1) shows it."""
    used_bytes: int = 0
    """Used space of the whole file system, the store included."""
    total_bytes: int = 0
    reserve_bytes: int = 0
    """Space that captures do not use, so that other programs have it."""
    reserve_reason: str = ""
    """Source of ``reserve_bytes``, for a person."""
    snapshots: int = 0


class BesideStatus(_Document):
    """What is in force for captures and upkeep, which run beside the job."""

    io_priority: str = ""
    slice: str = ""
    """The systemd slice that they run in; empty where they run in none."""
    min_share: float = 1.0
    """Share of the time that they work in at least while others are busy; 1: they make way for nobody."""
    finish_within_seconds: float = 0.0
    """Time from a cut until its capture is slowed down by nothing any more."""
    hears: list[str] = []
    """What they make way for: `pressure` (whoever waits for the disk), `writes` (whoever writes much), `requests` (the job's,
    in the overlay)."""


class Alert(_Document):
    """Something an operator should know. ``key`` is stable; an alert goes when its cause has gone."""

    key: str
    severity: Severity
    since: str
    message: str
    hint: str = ""
    root: str = ""


class TrainerStatus(_Document):
    """A training that is watched, as of now."""

    name: str
    where: str = ""
    pid: int = 0
    """0: none that could be seen from here."""
    user: str = ""
    kind: str = ""
    """library (SnapshotManager), command (`ciuic watch -- COMMAND`), pid (`ciuic watch --pid`), file (a [[trainer]])."""
    state: Literal["running", "hung", "closed", "absent"] = "running"
    """closed: it has said that it is done, and its process is still there. absent: its file names no living process."""
    since: str = ""
    step: int = 0
    last_beat: str = ""
    """Empty: none yet."""
    heartbeat_seconds: float = 0.0
    """Without a beat for so long it counts as hung; 0: never."""


IncidentKind = Literal["died", "failed", "hung", "lost", "recovered"]


class Incident(_Document):
    """Something that happened to a trainer."""

    kind: IncidentKind
    """died: killed, or gone without a word; failed: by its own account or exit status; hung: no beat for too long; lost: gone while
    no daemon watched; recovered: it beats again."""
    time: str
    trainer: TrainerStatus
    reason: str = ""
    snapshot: str = ""
    """The emergency snapshot, from its cut on."""
    no_snapshot: str = ""
    """Why there is none."""


class StatusDocument(_Document):
    """What ``ciuic status --json`` prints."""

    version: str
    pid: int
    since: str
    now: str
    roots: list[RootStatus] = []
    repository: RepositoryStatus = msgspec.field(default_factory=RepositoryStatus)
    last_snapshot: SnapshotSummary | None = None
    next_snapshot: str | None = None
    seconds_since_last: float | None = None
    """Work at risk: that of the root which is longest without a snapshot. None: a root, or without roots the repository, has none."""
    interval_seconds: int = 0
    captures: list[SnapshotState] = []
    """Not yet committed, oldest first; and the last failure, if nothing was committed since."""
    beside: BesideStatus = msgspec.field(default_factory=BesideStatus)
    alerts: list[Alert] = []
    trainers: list[TrainerStatus] = []
    """Those that are watched."""
    incidents: list[Incident] = []
    """The latest, newest first."""
    stopping: bool = False
    config_path: str = ""


class PrunedSnapshot(_Document):
    """One decision of the retention policy."""

    id: str
    time: str
    keep: bool
    reasons: list[str] = []


class PruneReport(_Document):
    """``freed_bytes`` is 0 in a dry run."""

    dry_run: bool
    decisions: list[PrunedSnapshot] = []
    removed: list[str] = []
    freed_bytes: int = 0


class Event(_Document):
    """One line of GET /v1/events. ``kind`` is a stable snake_case phrase."""

    kind: str
    time: str
    root: str = ""
    snapshot: SnapshotState | None = None
    alert: Alert | None = None
    incident: Incident | None = None
    detail: str = ""


class RootChange(_Document):
    """A root that a reload began or ceased to serve."""

    path: str
    change: Literal["added", "removed"]
    state: MountState
    error: str = ""
    """Why an added root is not mounted."""


class ReloadReport(_Document):
    """The answer to POST /v1/reload. Daemons before this document existed answer with an empty one."""

    config_path: str = ""
    changes: list[RootChange] = []
    at_restart: list[str] = []
    """Keys that have changed in the file and are in force from the daemon's next start on."""


class Resource(_Document):
    """One method of one path of the control API."""

    method: str
    path: str


class Index(_Document):
    """The answer to GET /: what this daemon is, and what it can be asked."""

    version: str
    name: str = "ciuic"
    resources: list[Resource] = []


class ErrorDocument(_Document):
    """A refusal. ``code`` is the exit code of cli.md."""

    error: str
    hint: str = ""
    code: int = 1


def rfc3339(time_ns: int) -> str:
    """The instant in local time with its offset, to the second, as every ``--json`` of ciuic writes it."""
    return datetime.fromtimestamp(time_ns // 1_000_000_000).astimezone().isoformat()
