"""Tasks of the metrics: count events, and write a file for the exporter (`ciuic.protocol.metrics_file`)."""

from __future__ import annotations

from contextlib import suppress
from typing import Protocol

import structlog
import trio

from ciuic.daemon.base.events import EventBus
from ciuic.daemon.base.metrics import Metrics
from ciuic.daemon.base.runtime import RuntimeDirectory
from ciuic.daemon.base.settings import Settings
from ciuic.protocol.metrics_file import METRICS_NAME, WRITE_SECONDS, write_metrics

log = structlog.get_logger(__name__)


class MetricsSource(Protocol):
    """The parts of the daemon that these tasks need."""

    @property
    def settings(self) -> Settings: ...
    @property
    def runtime(self) -> RuntimeDirectory: ...
    @property
    def metrics_registry(self) -> Metrics: ...
    @property
    def events(self) -> EventBus: ...
    async def metrics(self) -> bytes: ...


async def run_metrics(daemon: MetricsSource) -> None:
    """Count events, and keep the file of the metrics, until cancelled."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(daemon.metrics_registry.follow, daemon.events)
        nursery.start_soon(_keep_file, daemon)


async def _keep_file(daemon: MetricsSource) -> None:
    """Replace the file every `WRITE_SECONDS` while an exporter is configured, and remove it while none is."""
    path = daemon.runtime.path / METRICS_NAME
    is_failing = False
    try:
        while True:
            try:
                if daemon.settings.exports_metrics:
                    # In this thread: a file of some kilobytes, on tmpfs.
                    write_metrics(path, await daemon.metrics())
                else:
                    path.unlink(missing_ok=True)
                is_failing = False
            except Exception:  # nothing of the metrics may end the daemon
                # Once, not every ten seconds.
                if not is_failing:
                    log.exception("metrics_not_written", path=str(path))
                is_failing = True
            await trio.sleep(WRITE_SECONDS)
    finally:
        # The exporter answers `ciuic_up 0` at once.
        with suppress(OSError):
            path.unlink(missing_ok=True)
