"""The service: supervises overlay workers, decides when to cut, has snapshots captured, applies retention, answers.

``run`` and ``run_workers`` are its whole interface. It is imported when called: the capture process lives in this package too and must not
pay for, or depend on, anything of the service.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from ciuic.config import Config

__all__ = ["run", "run_workers"]


def run(config: Config, *, reload: Callable[[], Config] | None = None) -> int:
    """Runs the daemon in the foreground until SIGTERM, SIGINT or a stop request; returns its exit status.

    ``reload`` reads the configuration again (SIGHUP, POST /v1/reload, new roots); by default the same file.
    Raises CiuicError when the daemon cannot start: another one runs, the configuration cannot be meant, no permission.
    """
    from ciuic.daemon.main import run_daemon

    return run_daemon(config, reload=reload)


def run_workers() -> NoReturn:
    """Becomes the process that forks overlay workers, on the socket that systemd passes (ciuic-workers.service)."""
    from ciuic.daemon.worker_process import exec_standby

    exec_standby()
