"""What runs the daemon on this machine, for hints that can be followed: systemd, or a person or container.

Guarantees: files of /run, /etc and /proc are looked at, nothing is executed and nothing raises; imports so little that a
command that counts milliseconds may use it.
"""

from __future__ import annotations

import os
from typing import Final

UNIT: Final = "ciuic.service"
BOOTED: Final = "/run/systemd/system"
"""The directory whose presence means that systemd is the running init (sd_booted(3))."""
UNIT_DIRS: Final = (
    "/etc/systemd/system",
    "/run/systemd/system",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
)


def systemd_runs() -> bool:
    """Tell whether systemd is the init of this machine or container."""
    return os.path.isdir(BOOTED)


def unit_installed() -> bool:
    """Tell whether systemd runs and has the unit of the daemon."""
    return systemd_runs() and any(os.path.exists(f"{directory}/{UNIT}") for directory in UNIT_DIRS)


def start_hint() -> str:
    """How to start a daemon that does not run."""
    if unit_installed():
        return "start it: systemctl start ciuic, or run: ciuic daemon"
    if systemd_runs():
        return "start it: ciuic service install, or run: ciuic daemon (it stays in the foreground)"
    return "start it: ciuic daemon (it stays in the foreground; systemd does not run here)"


def restart_hint(pid: int | str = "self") -> str:
    """How to restart the daemon with this pid."""
    unit = unit_of_process(pid) if systemd_runs() else ""
    if "ciuic" in unit:  # else a daemon that a person started from within another service, such as cron
        return f"restart the daemon: systemctl restart {unit.removesuffix('.service')}"
    return "restart the daemon: ciuic stop, then start it as before (ciuic daemon)"


def log_hint() -> str:
    """Where the daemon's log is."""
    if unit_installed():
        return "its log: journalctl -u ciuic"
    return "its log is what ciuic daemon writes to stderr"


def unit_of_process(pid: int | str) -> str:
    """The systemd service that a process runs in; empty for none, and where it cannot be seen."""
    try:
        with open(f"/proc/{pid}/cgroup", encoding="utf-8", errors="replace") as file:
            text = file.read()
    except OSError:
        return ""
    return unit_of(text) or ""


def unit_of(cgroup: str) -> str | None:
    """The service in the text of a /proc/PID/cgroup; a user session's own manager counts as none."""
    for line in cgroup.splitlines():
        for part in reversed(line.rpartition(":")[2].split("/")):
            if part.startswith("user@"):
                break
            if part.endswith(".service"):
                return part
    return None
