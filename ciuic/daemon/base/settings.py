"""Settings of the daemon: the part of the configuration that it acts on, as one frozen value.

Guarantees: no part of the daemon below parts.py reads the configuration's own model, so that its shape may
change without them. Leaves validation to ciuic.config: a configuration that arrives here has been checked.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ciuic.config import (
    AlertConfig,
    Config,
    HoldsConfig,
    MinFree,
    OverlayConfig,
    TrainerConfig,
    WatchConfig,
    repository_path,
)
from ciuic.retention import RetentionPolicy
from ciuic.system.urgency import MAX_DEFAULT_FINISH_WITHIN_SECONDS, MIN_SHARE, default_finish_within_seconds


class RootSettings(NamedTuple):
    """Settings of a directory to protect."""

    path: str
    driver: str = "auto"
    excludes: tuple[str, ...] = ()
    """Effective patterns (ciuic.excludes), global ones included."""


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
    remotes: tuple[str, ...] = ()
    """Names of the remotes to which snapshots are replicated."""
    max_lags: tuple[tuple[str, int], ...] = ()
    """Name and limit, in seconds, of each remote that must not fall behind by more."""
    block_bytes: int = 256 * 1024
    undo_limit_bytes: int = 16 << 30
    overlay: OverlayConfig = OverlayConfig()
    watch: WatchConfig = WatchConfig()
    holds: HoldsConfig = HoldsConfig()
    alert: AlertConfig = AlertConfig()
    trainers: tuple[TrainerConfig, ...] = ()
    exports_metrics: bool = False
    """An exporter is configured, for which the metrics are written to a file."""
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
            RootSettings(str(root.path), root.driver, tuple(config.excludes_of(root)))
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
        remotes=tuple(remote.name for remote in config.remotes),
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
        exports_metrics=config.exporter.listen is not None,
        config_path=str(config.file or ""),
    )
