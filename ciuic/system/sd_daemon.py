"""The protocol of systemd with a service: notifications (sd_notify(3)), and descriptors that it passes (sd_listen_fds(3)).

Guarantees: without NOTIFY_SOCKET every notification does nothing; a systemd that does not read never blocks
or fails the process (a lost datagram is logged). sd_notify is not a dependency because it is forty lines for a
stable protocol.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, MutableMapping, Sequence

import structlog

from ciuic.system.unix_sockets import rights

# SD_LISTEN_FDS_START of sd_listen_fds(3).
_LISTEN_FDS_START = 3
log = structlog.get_logger(__name__)


class Notifier:
    """Connection to the service manager, for a process that it has started. One descriptor, non-blocking, close-on-exec."""

    def __init__(self, address: str = "", *, watchdog_seconds: float | None = None) -> None:
        self.watchdog_seconds = watchdog_seconds
        """Longest pause between two `watchdog` calls; None when systemd does not watch."""
        # An address that begins with @ is an abstract socket (sd_notify(3)).
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket: socket.socket | None = None
        if address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            # A systemd that does not read must not block this process: a datagram is lost then.
            self._socket.setblocking(False)

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str], pid: int) -> Notifier:
        """Return the notifier for these variables, and remove them from the environment.

        Workers and captures must not notify in its name.
        """
        address = environment.pop("NOTIFY_SOCKET", "")
        microseconds = environment.pop("WATCHDOG_USEC", "")
        # The watchdog may be meant for another process, from which this one has the variables
        # (sd_watchdog_enabled(3)).
        wanted_pid = environment.pop("WATCHDOG_PID", str(pid))
        watched = microseconds.isdigit() and int(microseconds) > 0 and wanted_pid == str(pid)
        return cls(address, watchdog_seconds=int(microseconds) / 1e6 if watched else None)

    @property
    def active(self) -> bool:
        """True if there is a service manager to notify."""
        return self._socket is not None

    def ready(self, status: str) -> None:
        """Report that the start is complete and the control socket answers."""
        self._send(f"READY=1\nSTATUS={_line(status)}")

    def status(self, text: str) -> None:
        """Set the line of `systemctl status`."""
        self._send(f"STATUS={_line(text)}")

    def watchdog(self) -> None:
        """Tell systemd's watchdog that the daemon is alive."""
        self._send("WATCHDOG=1")

    def stopping(self, text: str) -> None:
        """Report that the daemon is stopping."""
        self._send(f"STOPPING=1\nSTATUS={_line(text)}")

    def store(self, name: str, fd: int) -> None:
        """Have systemd keep a duplicate of `fd` while the service restarts, under a name without colons."""
        # FDPOLL=0: systemd would otherwise drop a descriptor as soon as it reports an error or hang-up.
        self._send(f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", [fd])

    def unstore(self, name: str) -> None:
        """Have systemd drop a descriptor that it keeps."""
        self._send(f"FDSTOREREMOVE=1\nFDNAME={name}")

    def close(self) -> None:
        """Close the socket."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, message: str, fds: Sequence[int] = ()) -> None:
        if self._socket is None:
            return
        try:
            self._socket.sendmsg([message.encode()], rights(fds), 0, self._address)
        except OSError as error:
            log.warning("service_manager_not_told", message=message.split("\n")[0], error=str(error))


def take_stored_fds(environment: MutableMapping[str, str], pid: int) -> dict[str, int]:
    """Return the descriptors that systemd kept, by name, now close-on-exec and owned by the caller.

    See sd_listen_fds_with_names(3).

    The variables are removed, so that no child takes the numbers for its own. Of two descriptors with one
    name the later is kept.
    """
    count, names = _listen_variables(environment, pid)
    for variable in ("LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES"):
        environment.pop(variable, None)
    stored: dict[str, int] = {}
    for index in range(count):
        fd = _LISTEN_FDS_START + index
        # systemd passes them without close-on-exec, and workers and captures must not inherit them.
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
    # A line of a datagram is one assignment.
    return text.replace("\n", " ")
