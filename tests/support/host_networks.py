"""Networks of hosts: a namespace for each, on one bridge, whose links can be cut.

All of it is in a network of this process's own and ends with it, however that ends: nothing has a name that would outlive it.
Only root can make them.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from typing import Final

INTERFACE: Final = "eth0"
"""Name of each host's device."""
_CLONE_NEWNET: Final = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


class HostNetworks:
    """Bridge in a new network of this process, and a network for each of so many hosts.

    Make it before this process has other threads or sockets: those stay in the network that they are in.
    """

    address: Final = "10.99.0.1"
    """Address of this process, which the hosts reach."""

    def __init__(self, count: int) -> None:
        _enter_new()
        _ip("link", "set", "lo", "up")
        _ip("link", "add", "bridge", "type", "bridge")
        _ip("addr", "add", f"{self.address}/24", "dev", "bridge")
        _ip("link", "set", "bridge", "up")
        self.paths: list[str] = []
        """What `enter` takes, for each host."""
        self.addresses = [f"10.99.0.{10 + at}" for at in range(count)]
        self._fds: list[int] = []
        for at, address in enumerate(self.addresses):
            self._fds.append(_new_network())
            # The kernel keeps a network for as long as a descriptor of it is open.
            path = f"/proc/{os.getpid()}/fd/{self._fds[at]}"
            self.paths.append(path)
            device = ["type", "veth", "peer", "name", INTERFACE, "netns", path]
            _ip("link", "add", f"host{at}", *device)
            _ip("link", "set", f"host{at}", "master", "bridge", "up")
            self.run(at, "ip", "link", "set", "lo", "up")
            self.run(at, "ip", "addr", "add", f"{address}/24", "dev", INTERFACE)
            self.run(at, "ip", "link", "set", INTERFACE, "up")

    def cut(self, at: int) -> None:
        """Take the link of a host down: what it sends is lost, and nobody is told."""
        _ip("link", "set", f"host{at}", "down")

    def mend(self, at: int) -> None:
        """Take the link of a host up again."""
        _ip("link", "set", f"host{at}", "up")

    def command(self, at: int) -> list[str]:
        """Return the words that run a command on a host, before the command."""
        return ["nsenter", f"--net={self.paths[at]}", "--"]

    def run(self, at: int, *command: str) -> None:
        """Run a command on a host; it must succeed."""
        subprocess.run([*self.command(at), *command], check=True, timeout=30)


def enter(path: str) -> None:
    """Enter a host's network with this thread and those that it will start."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc.setns(fd, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns", path)
    finally:
        os.close(fd)


def _enter_new() -> None:
    if _libc.unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")


def _new_network() -> int:
    """Return a descriptor of a new network."""
    made: list[int] = []

    def make() -> None:
        _enter_new()
        made.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC))

    # A network is a thread's own, so that this one's stays as it is.
    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    return made[0]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=30)
