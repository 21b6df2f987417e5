"""Process of ciuic-workers.service, which forks overlay workers for the daemon."""

from __future__ import annotations

import os
from typing import NoReturn

from ciuic.errors import UsageError
from ciuic.fuse_layer.prefork.messages import WORKER
from ciuic.system.child_process import environment, module_command

# Variables by which systemd passes sockets to a process (sd_listen_fds(3)) and asks it for notifications
# (sd_notify(3)).
_SYSTEMD_VARIABLES = (
    *("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"),
    *("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"),
)


def exec_standby() -> NoReturn:
    """Replace this process by one that forks workers for a daemon that asks on the socket passed by systemd."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        raise UsageError(
            "expected a listening socket from systemd (LISTEN_PID), got none",
            hint="systemctl start ciuic-workers.socket; `ciuic daemon` alone needs no such process",
        )
    # As every child of root (docs/decisions/children.md).
    os.chdir("/")
    command = module_command("ciuic.fuse_layer.standby", WORKER)
    # `environment` keeps harmless variables only, and drops these with the rest.
    told = {name: os.environ[name] for name in _SYSTEMD_VARIABLES if name in os.environ}
    os.execve(command[0], command, {**environment(), **told})
