"""The service, which supervises overlay workers, takes snapshots and applies retention.

`run` and `run_workers` are the whole interface. Both import the service when they are called: the capture
process is in this package too, and must not pay for, or depend on, any part of the service.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from ciuic.config import Config

__all__ = ["run", "run_workers"]


def run(config: Config, *, reload: Callable[[], Config] | None = None) -> int:
    """Run the daemon in the foreground until SIGTERM, SIGINT or a stop request, and return its exit status.

    Args:
        config: configuration to start with.
        reload: reads the configuration again (SIGHUP, POST /v1/reload, new roots); by default from the same
            file.

    Raises:
        CiuicError: the daemon cannot start: another one runs, the configuration is not valid, or permission
            is missing.
    """
    from ciuic.daemon.service import run_daemon

    return run_daemon(config, reload=reload)


def run_workers() -> NoReturn:
    """Become the process that forks overlay workers, on the socket that systemd passes."""
    from ciuic.fuse_layer.prefork.service import exec_standby

    exec_standby()
