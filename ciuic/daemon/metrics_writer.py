"""Tasks of the metrics: count events, and write a file for the exporter (`ciuic.protocol.metrics_file`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

import structlog
import trio

from ciuic.daemon.parts import DaemonParts
from ciuic.protocol.metrics_file import METRICS_NAME, WRITE_SECONDS, write_metrics

log = structlog.get_logger(__name__)


async def run_metrics(parts: DaemonParts, text: Callable[[], Awaitable[bytes]]) -> None:
    """Count events, and keep the file of the metrics, until cancelled.

    Args:
        parts: parts of the daemon.
        text: returns the metrics in Prometheus text format.
    """
    async with trio.open_nursery() as nursery:
        nursery.start_soon(parts.metrics_registry.follow, parts.events)
        nursery.start_soon(_keep_file, parts, text)


async def _keep_file(parts: DaemonParts, text: Callable[[], Awaitable[bytes]]) -> None:
    """Replace the file every `WRITE_SECONDS` while an exporter is configured, and remove it while none is."""
    path = parts.runtime.path / METRICS_NAME
    is_failing = False
    try:
        while True:
            try:
                if parts.settings.exports_metrics:
                    # In this thread: a file of some kilobytes, on tmpfs.
                    write_metrics(path, await text())
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
