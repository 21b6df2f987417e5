"""The effective configuration as values. Made by ciuic.config.load, which has checked every one of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ciuic.errors import CiuicError, ConfigError
from ciuic.excludes import ExcludeMatcher, effective_patterns
from ciuic.open_names import DEFAULT_MAPPED_NAMES, DEFAULT_TRACKED_NAMES
from ciuic.retention import MinFree, RetentionPolicy
from ciuic.urgency import MIN_SHARE

Driver = Literal["auto", "kernel", "pyfuse3"]
DRIVERS: tuple[Driver, ...] = ("auto", "kernel", "pyfuse3")
IoClass = Literal["idle", "best-effort", "none"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "json", "text"]


@dataclass(frozen=True)
class Origin:
    """Where a value comes from."""

    kind: Literal["default", "file", "environment", "option"] = "default"
    name: str = ""
    """Path of the file, or name of the variable or option."""
    line: int = 0
    """1 for the first line; 0 where a line means nothing."""

    def __str__(self) -> str:
        if self.kind == "file":
            return f"{self.name}:{self.line}" if self.line else self.name
        return f"{self.kind} {self.name}".rstrip()


DEFAULT = Origin()


@dataclass(frozen=True)
class Problem:
    """Something wrong in a configuration, or with the places it names. Errors stop the daemon; warnings are said."""

    severity: Literal["error", "warning"]
    message: str
    hint: str = ""
    origin: Origin = DEFAULT
    error: type[CiuicError] = ConfigError
    """What to raise, and so the exit code, when this stops something."""

    def __str__(self) -> str:
        where = f"{self.origin}: " if self.origin.kind == "file" else ""
        return where + self.message


@dataclass(frozen=True)
class RootConfig:
    """One directory under protection."""

    path: Path
    """Absolute, without ``.``, ``..`` or a trailing slash."""
    driver: Driver = "auto"
    exclude: tuple[str, ...] = ()
    """This root's own patterns as written; see Config.excludes_of for what is in force."""
    origin: Origin = DEFAULT


@dataclass(frozen=True)
class RepositoryConfig:
    path: Path | None = None
    """None: at the top of the file system that holds the first root; see places.repository_path."""
    block_size_bytes: int = 256 * 1024
    """For a repository that is yet to be made; one that exists keeps its own."""
    trust_owner: bool = False
    """Whether it may belong to another user; see Config.trusts_repository."""
    reserve: MinFree | None = None
    """Space on its file system that captures do not use; None: see disk_space.reserve_of."""


@dataclass(frozen=True)
class ScheduleConfig:
    interval_seconds: int = 3600


@dataclass(frozen=True)
class IoPriority:
    """I/O class and level (0 highest … 7) of the capture process; ``none`` leaves it as inherited."""

    io_class: IoClass = "idle"
    level: int = 0

    def __str__(self) -> str:
        return f"{self.io_class}:{self.level}" if self.io_class == "best-effort" else self.io_class


@dataclass(frozen=True)
class CaptureConfig:
    io_priority: IoPriority = IoPriority()
    min_share: float = MIN_SHARE
    """Share of the time that work beside the job takes at least while others wait for the disk (ciuic.urgency)."""
    finish_within_seconds: int | None = None
    """Time from a cut to the deadline of its capture; None: urgency.default_finish_within_seconds."""
    undo_limit_bytes: int = 16 << 30
    """A root's undo log may grow to this; beyond it the snapshot in progress is given up, never the job."""


@dataclass(frozen=True)
class OverlayConfig:
    """Shell patterns of names of files whose data must not pass the overlay worker by, so that a cut holds them."""

    tracked_names: tuple[str, ...] = DEFAULT_TRACKED_NAMES
    """Logs that are made and kept open: each write is a request to the worker."""
    mapped_names: tuple[str, ...] = DEFAULT_MAPPED_NAMES
    """Databases that are written through mappings: their data take the way through the kernel's cache."""


@dataclass(frozen=True)
class ControlConfig:
    socket: Path = Path("/run/ciuic/control.sock")
    group: str | None = None
    """Name of the group that may use the socket besides root."""


@dataclass(frozen=True)
class TrainerConfig:
    """One training to watch that does not make itself known."""

    name: str
    pid_file: Path | None = None
    heartbeat_file: Path | None = None
    """Touched or written while the training lives."""
    heartbeat_seconds: int = 0
    """How old it may become; 0: as it likes."""
    origin: Origin = DEFAULT


@dataclass(frozen=True)
class WatchConfig:
    users: tuple[str, ...] = ()
    """Whose processes are watched besides those of root, the control group and owners of roots; ``*``: everybody's."""
    emergency_per_hour: int = 3


@dataclass(frozen=True)
class HoldsConfig:
    """Limits of each user that asks for held snapshots of its roots without being an administrator."""

    max_of_a_user: int = 16
    max_of_a_user_per_hour: int = 8


@dataclass(frozen=True)
class AlertConfig:
    command: tuple[str, ...] = ()
    """Program and arguments; none: nobody is told."""
    user: str | None = None
    timeout_seconds: int = 30


@dataclass(frozen=True)
class LogConfig:
    level: LogLevel = "info"
    format: LogFormat = "auto"


@dataclass(frozen=True)
class Config:
    """Everything that can be configured, complete: what a file leaves out stands at its default."""

    roots: tuple[RootConfig, ...] = ()
    exclude: tuple[str, ...] = ()
    """Patterns for all roots, as written."""
    repository: RepositoryConfig = RepositoryConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    retention: RetentionPolicy = field(default_factory=RetentionPolicy)
    min_free: MinFree | None = None
    capture: CaptureConfig = CaptureConfig()
    overlay: OverlayConfig = OverlayConfig()
    control: ControlConfig = ControlConfig()
    watch: WatchConfig = WatchConfig()
    holds: HoldsConfig = HoldsConfig()
    alert: AlertConfig = AlertConfig()
    trainers: tuple[TrainerConfig, ...] = ()
    runtime_dir: Path = Path("/run/ciuic")
    log: LogConfig = LogConfig()
    file: Path | None = None
    """The file that was read; None when there is none."""
    origins: Mapping[str, Origin] = field(default_factory=dict)
    """Origin of every key of ciuic.config.KEYS, by its dotted name, such as ``schedule.interval``."""

    def origin(self, key: str) -> Origin:
        """Where the value of the dotted ``key`` comes from."""
        return self.origins.get(key, DEFAULT)

    @property
    def trusts_repository(self) -> bool:
        """Whether the repository may belong to another user. What a file says is about the repository that the file names."""
        if self.origin("repository.trust_owner").kind == "option":
            return True
        return self.repository.trust_owner and self.origin("repository.path").kind in ("file", "default")

    def excludes_of(self, root: RootConfig) -> tuple[str, ...]:
        """The patterns in force for ``root``, as ExcludeMatcher and capture take them."""
        return effective_patterns(root.path, self.exclude, root.exclude)

    def exclude_matcher(self, root: RootConfig) -> ExcludeMatcher:
        """The compiled form of ``excludes_of``."""
        return ExcludeMatcher(root.path, self.excludes_of(root))
