"""Settings of the daemon: the part of the configuration that it acts on, as one frozen value, and its replacement.

Guarantees: no other part of the daemon reads the configuration's own model, so that its shape may change
without them. A configuration that is not valid, or that cannot be taken up while the daemon runs, changes
nothing. Leaves validation to ciuic.config: settings are made of a configuration that has been checked.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ciuic.config import (
    AlertConfig,
    Config,
    HoldsConfig,
    MinFree,
    OverlayConfig,
    PreemptionConfig,
    Problem,
    SnapshotWhen,
    TrainerConfig,
    WatchConfig,
    WatchNumber,
    check_overlaps,
    check_repository,
    raise_for,
    repository_path,
)
from ciuic.daemon.base.repository_store import Store
from ciuic.errors import CiuicError
from ciuic.protocol.stored_remotely import RemotePlace
from ciuic.retention import RetentionPolicy
from ciuic.system import mountinfo, service_manager
from ciuic.system.urgency import MAX_DEFAULT_FINISH_WITHIN_SECONDS, MIN_SHARE, default_finish_within_seconds


class RootSettings(NamedTuple):
    """Settings of a directory to protect."""

    path: str
    driver: str = "auto"
    excludes: tuple[str, ...] = ()
    """Effective patterns (ciuic.excludes), global ones included."""
    last_good_within_seconds: int = 0
    """Age of the newest GOOD checkpoint from which an alert stands; 0: none does."""
    shows_snapshots: bool = False
    """The root's snapshots are shown at `.snapshots` in it."""


class Settings(NamedTuple):
    """Everything the daemon acts on."""

    socket: Path
    runtime_dir: Path
    repository: Path | None
    """Path of the repository; None: there is no root yet, and so no file system to put it on."""
    trust_repository: bool = False
    reserve: MinFree | None = None
    group: str | None = None
    roots: tuple[RootSettings, ...] = ()
    interval_seconds: int = 3600
    io_priority: str = "idle"
    min_share: float = MIN_SHARE
    finish_within_seconds: float = MAX_DEFAULT_FINISH_WITHIN_SECONDS
    """Deadline of a capture, counted from its cut."""
    retention: RetentionPolicy = RetentionPolicy()
    min_free: MinFree | None = None
    drill_every_seconds: int = 0
    """Time from one drill of a restore to the next; 0: none is done."""
    drill_scratch: Path = Path("/var/tmp")
    preemption: PreemptionConfig = PreemptionConfig()
    remotes: tuple[RemotePlace, ...] = ()
    """Remotes to which snapshots are replicated."""
    max_lags: tuple[tuple[str, int], ...] = ()
    """Name and limit, in seconds, of each remote that must not fall behind by more."""
    block_bytes: int = 256 * 1024
    undo_limit_bytes: int = 16 << 30
    overlay: OverlayConfig = OverlayConfig()
    watch: WatchConfig = WatchConfig()
    holds: HoldsConfig = HoldsConfig()
    alert: AlertConfig = AlertConfig()
    trainers: tuple[TrainerConfig, ...] = ()
    snapshot_when: tuple[SnapshotWhen, ...] = ()
    watch_numbers: tuple[WatchNumber, ...] = ()
    checkpoint_patterns: tuple[str, ...] = ()
    """Patterns of what is one checkpoint by the user's word."""
    exports_metrics: bool = False
    """An exporter is configured, for which the metrics are written to a file."""
    exports_spans: bool = False
    """An exporter is configured, for which the spans of snapshots are written to a file."""
    config_path: str = ""

    def root(self, path: str) -> RootSettings | None:
        """Return the settings of the root at `path`; None where there is none."""
        return next((root for root in self.roots if root.path == path), None)


def settings_of(config: Config) -> Settings:
    """Return the settings of a configuration. Resolves the repository's path."""
    return Settings(
        socket=config.control.socket,
        runtime_dir=config.runtime_dir,
        repository=repository_path(config) if config.roots or config.repository.path else None,
        trust_repository=config.trusts_repository,
        reserve=config.repository.reserve,
        group=config.control.group,
        roots=tuple(
            RootSettings(
                str(root.path),
                root.driver,
                tuple(config.excludes_of(root)),
                root.last_good_within_seconds,
                root.snapshots_dir,
            )
            for root in config.roots
        ),
        interval_seconds=config.schedule.interval_seconds,
        io_priority=str(config.capture.io_priority),
        min_share=config.capture.min_share,
        # 0: none is configured, and the interval gives it.
        finish_within_seconds=config.capture.finish_within_seconds
        or default_finish_within_seconds(config.schedule.interval_seconds),
        retention=config.retention,
        min_free=config.min_free,
        drill_every_seconds=config.drill.every_seconds or 0,
        drill_scratch=config.drill.scratch,
        preemption=config.preemption,
        remotes=tuple(RemotePlace(remote.name, remote.url) for remote in config.remotes),
        max_lags=tuple(
            (remote.name, remote.max_lag_seconds)
            for remote in config.remotes
            if remote.max_lag_seconds is not None
        ),
        block_bytes=config.repository.block_size_bytes,
        undo_limit_bytes=config.capture.undo_limit_bytes,
        overlay=config.overlay,
        watch=config.watch,
        holds=config.holds,
        alert=config.alert,
        trainers=config.trainers,
        snapshot_when=config.snapshot_when,
        watch_numbers=config.watch_numbers,
        checkpoint_patterns=config.checkpoint_patterns,
        exports_metrics=config.exporter.listen is not None,
        exports_spans=config.exporter.otlp is not None,
        config_path=str(config.file or ""),
    )


class ActiveSettings:
    """Holder of the current `Settings` and `Store`, which a reload replaces.

    Belongs to the trio thread, except for `read`.
    """

    def __init__(self, config: Config, load: Callable[[], Config]) -> None:
        """Take up the configuration that the daemon starts with.

        Args:
            config: configuration to start with.
            load: reads the configuration again.

        Raises:
            ConfigError: `config` is not valid.
        """
        # Mounts are read in `read` alone: a bind mount that is made later must not keep a daemon from
        # starting.
        raise_for([*check_overlaps(config.roots), *_check_repository(config)])
        self._load = load
        self.settings = settings_of(config)
        self.store = _open_store(self.settings)

    def read(self) -> Settings:
        """Return the configuration as it is on disk now. Blocks; raises ConfigError when it is not valid."""
        config = self._load()
        # Overlaps through bind mounts are refused here, where a refusal leaves everything as it was, and not
        # at the start: a mount that somebody makes must not end the protection of a root.
        raise_for([*check_overlaps(config.roots, mountinfo.read()), *_check_repository(config)])
        return settings_of(config)

    def replace(self, settings: Settings) -> None:
        """Put new settings in force, except for the socket and the runtime directory, which need a restart.

        Raises:
            CiuicError: the repository would change.
        """
        current = self.settings
        if current.repository is not None and settings.repository != current.repository:
            raise CiuicError(
                f"the repository cannot change from {current.repository} to {settings.repository} while running",
                hint=service_manager.restart_hint(),
            )
        # Kept where nothing changed: a Store remembers that its repository was there, so that none is created
        # where one has gone.
        if (self.store.path, self.store.trusted) != (settings.repository, settings.trust_repository):
            self.store = _open_store(settings)
        self.store.remote = _first_remote(settings)
        # Workers and commands find the daemon by these two.
        self.settings = settings._replace(socket=current.socket, runtime_dir=current.runtime_dir)

    def remove_root(self, path: str) -> None:
        """Forget a root that is not served any more, until the configuration is read again."""
        roots = tuple(root for root in self.settings.roots if root.path != path)
        self.settings = self.settings._replace(roots=roots)


def _open_store(settings: Settings) -> Store:
    return Store(
        settings.repository,
        block_bytes=settings.block_bytes,
        trusted=settings.trust_repository,
        remote=_first_remote(settings),
    )


def _first_remote(settings: Settings) -> str:
    """Return the remote with which a repository can share chunks: of several, the first."""
    return settings.remotes[0].name if settings.remotes else ""


def _check_repository(config: Config) -> list[Problem]:
    """Return what is wrong with the repository's place; a daemon without roots needs no repository."""
    if not config.roots and config.repository.path is None:
        return []
    return check_repository(config, mountinfo.read())
