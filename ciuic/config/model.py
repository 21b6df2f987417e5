"""The effective configuration as values, and the schema of its files: each field of a section or table is a key.

A key has the name of its field without the unit (`_seconds`, `_bytes`); a text in the annotation is another name. The annotation
also has the parser of the key, unless the type tells all (`ciuic.config.keys`), and how its value is shown. A field without a
default is a key that must be set. A comment before a field says why its default is what it is.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from ciuic.config.values import (
    DailyWindow,
    IoPrioritySetting,
    account_value,
    bandwidth_value,
    block_size_value,
    change_value,
    clouds_value,
    endpoint_value,
    header_value,
    hosts_value,
    interval_value,
    io_priority_value,
    line_value,
    listen_value,
    metadata_endpoint_value,
    min_share_value,
    name_value,
    names_value,
    notify_value,
    path_pattern_value,
    path_text_value,
    patterns_value,
    ping_value,
    positive_value,
    price_value,
    program_value,
    remote_name_value,
    remote_url_value,
    show_hidden,
    show_share,
    show_size_or_share,
    size_or_share_value,
    socket_value,
    trainer_name_value,
    undo_limit_value,
    users_value,
    window_value,
    word_value,
)
from ciuic.errors import CiuicError, ConfigError
from ciuic.protocol.passthrough_names import DEFAULT_MAPPED_NAMES, DEFAULT_TRACKED_NAMES
from ciuic.retention import MinFree, RetentionPolicy
from ciuic.system.urgency import MIN_SHARE
from ciuic.types import Cloud
from ciuic.units import format_size

if TYPE_CHECKING:
    from ciuic.excludes import ExcludeMatcher

Driver = Literal["auto", "kernel", "pyfuse3"]
Interval = Annotated[int, interval_value]
SizeOrShare = Annotated[MinFree | None, size_or_share_value, show_size_or_share]
Patterns = Annotated[tuple[str, ...], patterns_value]
Names = Annotated[tuple[str, ...], names_value]
Name = Annotated[str | None, name_value]
ProgramWords = Annotated[tuple[str, ...], program_value]
Line = Annotated[str | None, line_value]
Word = Annotated[str | None, word_value]
Group = Annotated[str | None, account_value("group")]
User = Annotated[str | None, account_value("user")]
Listen = Annotated[str | None, listen_value]
Endpoint = Annotated[str | None, endpoint_value]
Price = Annotated[float | None, price_value]
NO_KEY = ""
"""Name of a field that no file sets."""
DEFAULT_REMOTE_NAME = "remote"
"""Name of the remote of a file that has one, unless it has a name."""
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "json", "text"]


class Origin(msgspec.Struct, frozen=True):
    """Source of a value."""

    kind: Literal["default", "file", "environment", "option"] = "default"
    name: str = ""
    """Path of the file, or name of the variable or option."""
    line: int = 0
    """Line number from 1; 0 where there is no line."""

    def __str__(self) -> str:
        if self.kind == "file":
            return f"{self.name}:{self.line}" if self.line else self.name
        return f"{self.kind} {self.name}".rstrip()


DEFAULT = Origin()


class Problem(msgspec.Struct, frozen=True):
    """Problem in a configuration or its places: errors stop the daemon, warnings are reported."""

    severity: Literal["error", "warning"]
    message: str
    hint: str = ""
    origin: Origin = DEFAULT
    error: type[CiuicError] = ConfigError
    """Error to raise, and so the exit code, when the problem stops something."""

    def __str__(self) -> str:
        where = f"{self.origin}: " if self.origin.kind == "file" else ""
        return where + self.message


class RootConfig(msgspec.Struct, frozen=True):
    """Protected directory."""

    path: Path
    """Absolute path without ``.``, ``..`` or a trailing slash."""
    driver: Driver = "auto"
    exclude: Patterns = ()
    """This root's own patterns as written; see `Config.excludes_of` for those in force."""
    # Off: a root may have data alone, or a training that is done.
    last_good_within_seconds: Interval = 0
    """Age of the newest GOOD checkpoint from which an alert stands; 0: none does."""
    snapshots_dir: bool = False
    """True if the root's snapshots are shown at `.snapshots` in it."""
    origin: Origin = DEFAULT


class RepositoryConfig(msgspec.Struct, frozen=True):
    """Section ``[repository]``."""

    path: Path | None = None
    """Path of the repository; None: at the top of the file system that holds the first root
    (`places.repository_path`)."""
    # Smaller blocks cost processor time for each, larger ones double the cost of a change in place
    # (docs/decisions/block-size.md).
    block_size_bytes: Annotated[int, block_size_value] = 256 * 1024
    """Block size of a repository that is yet to be made; an existing one keeps its own."""
    # Off: who owns a repository can read every file of every snapshot, and change what a restore brings back.
    trust_owner: bool = False
    """True if the repository may belong to another user; see `Config.trusts_repository`."""
    # Unset is not 0: without a reserve a first capture wrote until the job's disk was full.
    reserve: SizeOrShare = None
    """Free space on the file system that captures leave to others; None: see `disk_space.reserve_of`."""


class ScheduleConfig(msgspec.Struct, frozen=True):
    """Section ``[schedule]``."""

    interval_seconds: Interval = 3600


class CaptureConfig(msgspec.Struct, frozen=True):
    """Section ``[capture]``."""

    # Acts under bfq and mq-deadline; under `none`, which NVMe disks use, the throttle does the work alone
    # (docs/decisions/weights.md).
    io_priority: Annotated[IoPrioritySetting, io_priority_value] = IoPrioritySetting()
    # 1 %, and not 0: a process at the lowest priority alone would never run on a busy host
    # (docs/decisions/deadlines.md).
    min_share: Annotated[float, min_share_value, show_share] = MIN_SHARE
    """Smallest share of the time in which work beside the job runs while others wait for the disk
    (ciuic.system.urgency)."""
    # Unset follows `schedule.interval`, so that a snapshot is in progress for a twelfth of the time at most.
    finish_within_seconds: Interval | None = None
    """Time from a cut to the deadline of its capture; None: `urgency.default_finish_within_seconds`."""
    undo_limit_bytes: Annotated[int, undo_limit_value] = 16 << 30
    """Limit of a root's undo log; beyond it the snapshot in progress is given up, never the job."""


class DrillConfig(msgspec.Struct, frozen=True):
    """Section ``[drill]``."""

    # Off: a drill writes as much as the newest checkpoint is large, which the disk may have no room for.
    every_seconds: Interval | None = None
    """Time from one drill of a restore to the next; None: the daemon does none."""
    scratch: Path = Path("/var/tmp")
    """Directory below which files are restored, and removed again."""


class PreemptionConfig(msgspec.Struct, frozen=True):
    """Section ``[preemption]``: the end of this machine, of which its cloud gives notice."""

    # Off: nothing asks an address of the network that nobody named, and on other machines none answers.
    clouds: Annotated[tuple[Cloud, ...], clouds_value] = ()
    """Clouds whose metadata services are asked; empty: none is."""
    # The shortest notice of all three.
    grace_seconds: Interval = 30
    """Time until the end where a notice has none of its own."""
    endpoint: Annotated[str | None, metadata_endpoint_value] = None
    """Address to ask instead of the cloud's own, such as ``http://127.0.0.1:8080``; None: the cloud's own."""


class OverlayConfig(msgspec.Struct, frozen=True):
    """Section ``[overlay]``.

    Name patterns of files whose data must not pass the overlay worker by, so that a cut holds them.
    """

    # A list in the file replaces all of the default.
    tracked_names: Names = DEFAULT_TRACKED_NAMES
    """Logs that are made and kept open; each write is a request to the worker."""
    mapped_names: Names = DEFAULT_MAPPED_NAMES
    """Databases that are written through mappings; their data goes through the kernel's page cache."""


class ControlConfig(msgspec.Struct, frozen=True):
    """Section ``[control]``."""

    # Follows `daemon.runtime_dir` where that alone is set (`Draft.build`).
    socket: Annotated[Path, socket_value] = Path("/run/ciuic/control.sock")
    group: Group = None
    """Name of the group that may use the socket besides root."""


class TrainerConfig(msgspec.Struct, frozen=True):
    """``[[trainer]]``: a training to watch that does not register itself."""

    name: Annotated[str, trainer_name_value]
    pid_file: Path | None = None
    heartbeat_file: Path | None = None
    """File that is touched or written while the training lives."""
    heartbeat_seconds: Interval = 0
    """Age at which the heartbeat file counts as stopped; 0: no limit."""
    origin: Origin = DEFAULT


class WatchNumber(msgspec.Struct, frozen=True):
    """``[[watch_number]]``: a number in a file of a training, of which an alert tells when it is none or spikes."""

    file: Annotated[str, path_text_value]
    """Absolute path of JSON lines or of TensorBoard events; its last part may be a shell pattern."""
    key: Annotated[str, line_value] = "loss"
    """Key of the number in a line, or tag of the scalar."""
    origin: Origin = DEFAULT


class CheckpointPattern(msgspec.Struct, frozen=True):
    """``[[checkpoints]]``: what is one checkpoint by the user's word, whatever it looks like."""

    path: Annotated[str, path_pattern_value]
    """Pattern of absolute paths, as in gitignore."""
    origin: Origin = DEFAULT


class SnapshotWhen(msgspec.Struct, frozen=True):
    """``[[snapshot_when]]``: what a snapshot is taken for besides the schedule. One of the four, ``after`` with ``changes``."""

    renamed: Name = None
    """Shell pattern of the new name of a rename."""
    appears: Name = None
    """Shell pattern of a name that comes to be: made, linked or renamed to."""
    closed: Name = None
    """Shell pattern of the name of a file that a writer closes."""
    after_seconds: Interval = 0
    changes_bytes: Annotated[int, change_value] = 0
    # A program that renames every few seconds would take a snapshot each time.
    least_between_seconds: int = 60
    """Time from a snapshot of a root by this rule to its next one."""
    per_hour: Annotated[int, positive_value] = 12
    """Limit of the snapshots of a root by this rule in an hour."""
    origin: Origin = DEFAULT

    @property
    def kind(self) -> Literal["renamed", "appears", "closed"]:
        """Event of the name that the rule waits for."""
        return "renamed" if self.renamed is not None else "appears" if self.appears is not None else "closed"

    @property
    def name(self) -> str | None:
        """Pattern of the name; None for a rule of changed bytes."""
        return next((one for one in (self.renamed, self.appears, self.closed) if one is not None), None)

    def __str__(self) -> str:
        """Return the rule as the message of a snapshot."""
        if self.name is not None:
            return f"{self.kind} {self.name}"
        return f"{format_size(self.changes_bytes)} changed"


class WatchConfig(msgspec.Struct, frozen=True):
    """Section ``[watch]``."""

    users: Annotated[tuple[str, ...], users_value] = ()
    """Users whose processes are watched besides those of root, the control group and owners of roots; ``*``:
    everybody's."""
    # A trainer that dies again and again would take a snapshot each time.
    emergency_per_hour: int = 3
    silence: int = 20
    """Number of usual intervals between beats, after which a trainer without a limit of its own is told as silent; 0: none."""


class HoldsConfig(msgspec.Struct, frozen=True):
    """Section ``[holds]``.

    Limits for each user that asks for held snapshots of its roots without being an administrator.
    """

    # Held snapshots stay whatever the rules say, so an ordinary user could fill the disk with them.
    max_of_a_user: int = 16
    max_of_a_user_per_hour: int = 8


class AlertConfig(msgspec.Struct, frozen=True):
    """Section ``[alert]``."""

    command: ProgramWords = ()
    """Program and arguments; empty: nobody is told."""
    user: User = None
    # Alerts run one at a time: a command that hangs would keep back those after it.
    timeout_seconds: Interval = 30
    # As far ahead as a weekend is long.
    full_within_seconds: int = 3 * 86_400
    """Time until the repository's file system is full, below which an alert says so; 0: none does."""
    notify: Annotated[tuple[str, ...], notify_value, show_hidden] = ()
    """URLs of places that get a message at each alert, as apprise takes them; with passwords and tokens."""
    ping: Annotated[str | None, ping_value, show_hidden] = None
    """URL that is called for each snapshot, as healthchecks.io has it; a secret."""


class ExporterConfig(msgspec.Struct, frozen=True):
    """Section ``[exporter]``."""

    # Off: metrics name the protected directories, and everybody who reaches the port can read them.
    listen: Listen = None
    """Address and port, such as ``127.0.0.1:9847`` or ``[::1]:9847``, at which Prometheus finds the metrics; None: nowhere."""
    otlp: Endpoint = None
    """URL of a tracing system that takes OTLP over HTTP, such as ``http://127.0.0.1:4318``; None: none."""
    otlp_headers: Path | None = None
    """File with headers of the requests to it, one ``NAME: VALUE`` a line; None: there are none."""


class WebConfig(msgspec.Struct, frozen=True):
    """Section ``[web]``."""

    # Off: nothing listens at an address unless it is asked to, and a page only shows.
    listen: Listen = None
    """Address and port of the page beside its Unix socket; None: none."""
    hosts: Annotated[tuple[str, ...], hosts_value] = ()
    """Names of this host in the addresses of browsers, beside localhost."""
    actions: bool = False
    """The page may restore, take, hold and forget snapshots."""
    look_group: Group = None
    """Name of the group that may look at the page besides root; None: none."""
    restore_group: Group = None
    """Name of the group that may restore, too."""
    decide_group: Group = None
    """Name of the group that may decide what is kept, too."""
    proxy_user: User = None
    """User of a reverse proxy on this host that says who its callers are; None: none."""
    user_header: Annotated[str, header_value] = "x-remote-user"
    """Header in which it says so, in small letters."""


class RemoteSchedule(msgspec.Struct, frozen=True):
    """Section ``[remote.schedule]``."""

    interval_seconds: Interval = 0
    """Time in which one snapshot goes to the remote at most; 0: every snapshot does."""
    window: Annotated[DailyWindow | None, window_value] = None
    """When the remote may be written to; None: always."""


class RemotePrice(msgspec.Struct, frozen=True):
    """Section ``[remote.price]``, for reports of costs; None: not known."""

    put_per_1000: Price = None
    get_per_1000: Price = None
    gb_month: Price = None
    """Price of 10⁹ bytes stored for a month."""


TierKind = Literal["all", "files", "training"]


class TierRule(msgspec.Struct, frozen=True, kw_only=True):
    """``[[remote.tier]]``: which data become cold, and where they go."""

    after_seconds: int
    """Age of the youngest snapshot that needs a pack, from which the pack becomes cold."""
    storage_class: Annotated[str, word_value]
    """Class of the store, such as ``GLACIER_IR``."""
    kind: TierKind = "all"
    """Snapshots that count as old: of files, of trainings, or all. What others need stays warm."""
    # 1: the state from which a run would go on today is read at once, however long the run has slept.
    keep_newest: int = 1
    """Newest snapshots of each job of each host that count as young at any age."""


class RemoteConfig(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """``[remote]`` or ``[[remote]]``: an object store or directory to which snapshots are replicated."""

    # Several must each be named: their names tell them apart in commands, alerts and directories.
    name: Annotated[str, remote_name_value] = DEFAULT_REMOTE_NAME
    url: Annotated[str, remote_url_value]
    """``s3://``, ``gs://``, ``az://``, ``oss://``, ``ssh://`` or ``file://``; checked as text, without a slash at its end."""
    endpoint: Endpoint = None
    region: Word = None
    ssh_command: Line = None
    """Program and options that reach the host of an ``ssh://`` URL; None: ``ssh``."""
    ssh_program: Line = None
    """``ciuic`` on that host, as its shell takes it; None: found on its PATH."""
    bandwidth_bytes: Annotated[int | None, bandwidth_value] = None
    """Limit of what is sent in a second; None: no limit."""
    max_lag_seconds: Interval | None = None
    """Time by which the remote may fall behind before an alert; None: no alert."""
    # A PUT every five minutes is 8,640 in a month: a few cents at most.
    status_every_seconds: int = 300
    """Longest time between two statuses of this host on the remote; 0: none is stored."""
    encryption: bool = True
    key_file: Path | None = None
    key_command: ProgramWords = ()
    """Program and arguments whose output is the key; empty: none. Not both this and ``key_file``."""
    storage_class: Word = None
    # A remote answers the disasters that are found late: a month, which is also the time for which the cheaper storage classes are
    # paid at least. Its chunks are shared, so that it costs little.
    keep: RetentionPolicy = RetentionPolicy(keep_within_seconds=30 * 86_400, keep_last=10, keep_emergency=10)
    """Rules of the remote's own retention: at least those of ``[retention]``, unless they were set."""
    schedule: RemoteSchedule = RemoteSchedule()
    price: RemotePrice = RemotePrice()
    tiers: Annotated[tuple[TierRule, ...], "tier"] = ()
    """Rules by which packs become cold; none: all stay as they were stored."""
    origin: Origin = DEFAULT
    """Where the table begins."""
    origins: Mapping[str, Origin] = msgspec.field(default_factory=dict)
    """Origin of each key that was set, by its name in ``REMOTE_KEYS``, such as ``keep.keep_last``."""

    def __eq__(self, other: object) -> bool:
        # Two remotes are equal where they mean the same, wherever that is written.
        return isinstance(other, RemoteConfig) and self._meaning() == other._meaning()

    def __hash__(self) -> int:
        return hash(self._meaning())

    def _meaning(self) -> tuple[object, ...]:
        return tuple(getattr(self, name) for name in self.__struct_fields__ if not name.startswith("origin"))


class LogConfig(msgspec.Struct, frozen=True):
    """Section ``[log]``."""

    level: LogLevel = "info"
    format: LogFormat = "auto"


class Config(msgspec.Struct, frozen=True):
    """Effective configuration, complete: every value that a file leaves out is the default."""

    exclude: Patterns = ()
    """Patterns for all roots, as written."""
    repository: RepositoryConfig = RepositoryConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    retention: RetentionPolicy = msgspec.field(default_factory=RetentionPolicy)
    # Off: it is the one rule that removes what other rules keep.
    min_free: Annotated[SizeOrShare, "retention.min_free"] = None
    capture: CaptureConfig = CaptureConfig()
    drill: DrillConfig = DrillConfig()
    preemption: PreemptionConfig = PreemptionConfig()
    overlay: OverlayConfig = OverlayConfig()
    control: ControlConfig = ControlConfig()
    watch: WatchConfig = WatchConfig()
    holds: HoldsConfig = HoldsConfig()
    alert: AlertConfig = AlertConfig()
    exporter: ExporterConfig = ExporterConfig()
    web: WebConfig = WebConfig()
    runtime_dir: Annotated[Path, "daemon.runtime_dir"] = Path("/run/ciuic")
    log: LogConfig = LogConfig()
    roots: Annotated[tuple[RootConfig, ...], "root"] = ()
    trainers: Annotated[tuple[TrainerConfig, ...], "trainer"] = ()
    snapshot_when: Annotated[tuple[SnapshotWhen, ...], "snapshot_when"] = ()
    watch_numbers: Annotated[tuple[WatchNumber, ...], "watch_number"] = ()
    checkpoints: Annotated[tuple[CheckpointPattern, ...], "checkpoints"] = ()
    remotes: Annotated[tuple[RemoteConfig, ...], "remote"] = ()
    file: Annotated[Path | None, NO_KEY] = None
    """File that was read; None when there is none."""
    origins: Mapping[str, Origin] = msgspec.field(default_factory=dict)
    """Origin of every key of `ciuic.config.KEYS`, by its dotted name, such as ``schedule.interval``."""

    def origin(self, key: str) -> Origin:
        """Return the origin of the value of the dotted ``key``."""
        return self.origins.get(key, DEFAULT)

    @property
    def trusts_repository(self) -> bool:
        """True if the repository may belong to another user.

        Trust from a file covers only the repository that it names.
        """
        # --trust-repository was typed together with what the command names, so it covers --repo as well.
        if self.origin("repository.trust_owner").kind == "option":
            return True
        return self.repository.trust_owner and self.names_repository

    @property
    def names_repository(self) -> bool:
        """True if the repository is the one that the file names, whose snapshots its remotes receive."""
        return self.origin("repository.path").kind in ("file", "default")

    @property
    def checkpoint_patterns(self) -> tuple[str, ...]:
        """Patterns of what is one checkpoint each, of all roots."""
        return tuple(one.path for one in self.checkpoints)

    def excludes_of(self, root: RootConfig) -> tuple[str, ...]:
        """Return the patterns in force for ``root``, as `ExcludeMatcher` and capture take them."""
        # Imported here, as below: most commands read the configuration and no patterns.
        from ciuic.excludes import effective_patterns

        return effective_patterns(root.path, self.exclude, root.exclude)

    def exclude_matcher(self, root: RootConfig) -> "ExcludeMatcher":
        """Return the compiled form of `excludes_of`."""
        from ciuic.excludes import ExcludeMatcher

        return ExcludeMatcher(root.path, self.excludes_of(root))
