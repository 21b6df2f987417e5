"""Find out what runs the daemon on this machine, systemd or a shell or container, so that hints can be followed.

Guarantees: only files of /run, /etc and /proc are read, nothing is executed and nothing raises. The module imports so little that
commands with a budget of milliseconds may use it.
"""

from __future__ import annotations

import os
from typing import Final

UNIT: Final = "ciuic.service"
BOOTED: Final = "/run/systemd/system"
"""Directory that exists if systemd is the running init (sd_booted(3))."""
UNIT_DIRS: Final = (
    "/etc/systemd/system",
    "/run/systemd/system",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
)


def _systemd_runs() -> bool:
    """Return whether systemd is the init of this machine or container."""
    return os.path.isdir(BOOTED)


def _unit_installed() -> bool:
    """Return whether systemd runs and has the unit of the daemon."""
    return _systemd_runs() and any(os.path.exists(f"{directory}/{UNIT}") for directory in UNIT_DIRS)


def start_hint() -> str:
    """Return a hint on how to start the daemon."""
    if _unit_installed():
        return "start it: systemctl start ciuic, or run: ciuic daemon"
    if _systemd_runs():
        return "start it: ciuic service install, or run: ciuic daemon (it stays in the foreground)"
    return "start it: ciuic daemon (it stays in the foreground; systemd does not run here)"


def restart_hint(pid: int | str = "self") -> str:
    """Return a hint on how to restart the daemon with this pid."""
    unit = unit_of_process(pid) if _systemd_runs() else ""
    # Without the check: the unit of a daemon that was started by hand within another service, such as cron.
    if "ciuic" in unit:
        return f"restart the daemon: systemctl restart {unit.removesuffix('.service')}"
    return "restart the daemon: ciuic stop, then start it as before (ciuic daemon)"


def log_hint() -> str:
    """Return a hint on where the daemon's log is."""
    if _unit_installed():
        return "its log: journalctl -u ciuic"
    return "its log is what ciuic daemon writes to stderr"


def unit_of_process(pid: int | str) -> str:
    """Return the systemd service that a process runs in; empty for none, and where it cannot be read."""
    try:
        # Untranslated: a carriage return is allowed in the name of a control group.
        with open(f"/proc/{pid}/cgroup", encoding="utf-8", errors="replace", newline="\n") as file:
            text = file.read()
    except OSError:
        return ""
    return unit_of(text) or ""


def unit_of(cgroup: str) -> str | None:
    """Return the service in the text of a /proc/PID/cgroup; the manager of a user session does not count as one."""
    # Not splitlines(), and no colon after the second: the kernel refuses the newline alone in a group's name.
    for line in cgroup.split("\n"):
        for part in reversed(line.split(":", 2)[-1].split("/")):
            if part.startswith("user@"):
                break
            if part.endswith(".service"):
                return part
    return None
