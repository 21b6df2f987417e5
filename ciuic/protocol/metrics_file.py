"""Metrics of the daemon as a file, for processes that may not use its control socket.

The daemon replaces ``metrics.prom`` in its runtime directory every ten seconds while an exporter is configured. The exporter has
a network and no privilege, so it gets a file and no socket: a process that can connect to the daemon can also queue descriptors on
the connection, and occupy the daemon.

Guarantees: a reader sees a whole document or none. The first line is a comment with the time of the boot clock, which tells the age
of the document also after the wall clock was set.

Format: Prometheus text exposition format, version 0.0.4.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final, NamedTuple

from ciuic.errors import Unreachable
from ciuic.system import service_manager
from ciuic.system.disk import Disk, read_regular

METRICS_NAME: Final = "metrics.prom"
"""Name of the file in the runtime directory."""
WRITE_SECONDS: Final = 10.0
"""Period with which the daemon replaces the file."""
MAX_AGE_SECONDS: Final = 60.0
"""Age from which on the daemon counts as gone: a busy host may delay it by several periods."""
_MAX_BYTES: Final = 16 << 20
_FIRST: Final = b"# ciuic boot clock "


class MetricsDocument(NamedTuple):
    """The metrics as the daemon wrote them."""

    text: bytes
    age_seconds: float


def write_metrics(path: Path, text: bytes) -> None:
    """Replace the file with ``text``, readable by every user of the host.

    The file is gone after a reboot; nothing is synced. Raises OSError.
    """
    data = _FIRST + b"%.3f\n" % _boot_seconds() + text
    Disk().replace_file(path, data, mode=0o644, durable=False)


def read_metrics(path: Path) -> MetricsDocument:
    """Return the metrics and their age.

    Raises:
        Unreachable: there is no such file, or it is not the daemon's.
    """
    try:
        content = read_regular(path, _MAX_BYTES)
    except OSError as error:
        raise Unreachable(
            f"there are no metrics at {path}: {error.strerror}",
            hint=f"the daemon writes them while `exporter.listen` is configured; {service_manager.start_hint()}",
        ) from error
    first, _, text = content.partition(b"\n")
    try:
        written = float(first.removeprefix(_FIRST)) if first.startswith(_FIRST) else None
    except ValueError:
        written = None
    if written is None:
        raise Unreachable(f"{path} was not written by the daemon", hint="remove it")
    return MetricsDocument(text, max(0.0, _boot_seconds() - written))


def _boot_seconds() -> float:
    # Counts the time in which the host sleeps, and is the same in every process of the host.
    return time.clock_gettime(time.CLOCK_BOOTTIME)
