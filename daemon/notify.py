"""Telling systemd how the daemon is: the datagram protocol of sd_notify(3), and its descriptor store.

Guarantees: without NOTIFY_SOCKET every call does nothing; a systemd that does not read never blocks or fails the daemon
(a lost datagram is logged). Written here rather than imported because it is forty lines against a stable protocol.
"""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Mapping, MutableMapping, Sequence

import structlog

LISTEN_FDS_START = 3
log = structlog.get_logger(__name__)


class Notifier:
    """Sends state to the service manager. One descriptor, non-blocking, close-on-exec."""

    def __init__(self, address: str = "", *, watchdog_seconds: float | None = None) -> None:
        self.watchdog_seconds = watchdog_seconds
        """How often systemd wants to hear from us; None when it does not watch."""
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket: socket.socket | None = None
        if address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str], pid: int) -> Notifier:
        """Takes the variables out of ``environment``, so that workers and captures do not speak in our name."""
        address = environment.pop("NOTIFY_SOCKET", "")
        microseconds = environment.pop("WATCHDOG_USEC", "")
        wanted_pid = environment.pop("WATCHDOG_PID", str(pid))
        watched = microseconds.isdigit() and int(microseconds) > 0 and wanted_pid == str(pid)
        return cls(address, watchdog_seconds=int(microseconds) / 1e6 if watched else None)

    @property
    def active(self) -> bool:
        return self._socket is not None

    def ready(self, status: str) -> None:
        """Start-up is over: the control socket answers."""
        self._send(f"READY=1\nSTATUS={_line(status)}")

    def status(self, text: str) -> None:
        """One line for `systemctl status`."""
        self._send(f"STATUS={_line(text)}")

    def watchdog(self) -> None:
        self._send("WATCHDOG=1")

    def stopping(self, text: str) -> None:
        self._send(f"STOPPING=1\nSTATUS={_line(text)}")

    def store(self, name: str, fd: int) -> None:
        """Gives systemd a duplicate of ``fd`` to keep while the service restarts, under a name without colons."""
        self._send(f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", [fd])

    def unstore(self, name: str) -> None:
        self._send(f"FDSTOREREMOVE=1\nFDNAME={name}")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, message: str, fds: Sequence[int] = ()) -> None:
        if self._socket is None:
            return
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self._socket.sendmsg([message.encode()], rights, 0, self._address)
        except OSError as error:
            log.warning("service_manager_not_told", message=message.split("\n")[0], error=str(error))


def take_stored_fds(environment: MutableMapping[str, str], pid: int) -> dict[str, int]:
    """The descriptors that systemd kept for us, by name (sd_listen_fds_with_names(3)); each is now close-on-exec and ours.

    The variables are removed, so that no child takes the numbers for its own. Of two with one name the later is kept.
    """
    count, names = _listen_variables(environment, pid)
    for variable in ("LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES"):
        environment.pop(variable, None)
    stored: dict[str, int] = {}
    for index in range(count):
        fd = LISTEN_FDS_START + index
        os.set_inheritable(fd, False)
        name = names[index] if index < len(names) else ""
        if name in stored:
            os.close(stored[name])
        stored[name] = fd
    return stored


def _listen_variables(environment: Mapping[str, str], pid: int) -> tuple[int, list[str]]:
    count = environment.get("LISTEN_FDS", "")
    if environment.get("LISTEN_PID") != str(pid) or not count.isdigit():
        return 0, []
    return int(count), environment.get("LISTEN_FDNAMES", "").split(":")


def _line(text: str) -> str:
    return text.replace("\n", " ")
