"""Four hosts with a network, a daemon with one root, and an uploader each, which are killed and started again."""

from __future__ import annotations

import os
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from support.host_networks import INTERFACE, HostNetworks
from support.live import Live, installed
from support.token_ring import Host

from ciuic.remote.sealing.key_slots import make_key_file

MEMBERS: Final = ("a", "b", "c", "d")


class DaemonHosts:
    """Hosts that share one remote; a context manager that leaves nothing running."""

    def __init__(
        self, place: Path, url: str, networks: HostNetworks, *, repository_bytes: int | None = None
    ) -> None:
        """Prepare; with ``repository_bytes`` the repository of each has a file system of its own, of that size."""
        self._place, self._url, self._networks = place, url, networks
        self._repository_bytes = repository_bytes
        self._closing = ExitStack()
        self._uploaders: list[subprocess.Popen[bytes] | None] = [None] * len(MEMBERS)
        self.hosts: list[Host] = []

    def __enter__(self) -> DaemonHosts:
        with ExitStack() as closing:
            self._place.mkdir(parents=True)
            key = self._place / "key"
            make_key_file(str(key))
            for at, name in enumerate(MEMBERS):
                place = self._place / name
                root = place / "root"
                root.mkdir(parents=True)
                remote = f'[remote]\nurl = "{self._url}"\nkey_file = "{key}"\n'
                prefix = self._networks.command(at)
                repository = None
                if self._repository_bytes is not None:
                    (store := place / "store").mkdir()
                    subprocess.run(
                        ["mount", "-t", "tmpfs", "-o", f"size={self._repository_bytes}", "tmpfs", store],
                        check=True,
                    )
                    # A daemon's end takes away what is mounted below its place; without one it stays.
                    closing.callback(_unmount, store)
                    repository = store / "repository"
                live = closing.enter_context(
                    Live(place, more_config=remote, prefix=prefix, repository=repository)
                )
                self.hosts.append(Host(name, MEMBERS, live, root, prefix))
            self.hosts[0].live.run("remote", "init")
            for at, host in enumerate(self.hosts):
                host.live.start()
                host.live.run("protect", os.fsencode(host.root))
                host.live.wait_mounted(host.root)
                closing.callback(self.kill_uploader, at)
            self.revive()
            self._closing = closing.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def kill_daemon(self, at: int) -> None:
        """Kill the daemon of a host with SIGKILL."""
        daemon = self.hosts[at].live.daemon
        if daemon is not None:
            daemon.kill()

    def kill_uploader(self, at: int) -> None:
        """Kill the uploader of a host with SIGKILL."""
        uploader = self._uploaders[at]
        if uploader is not None:
            uploader.kill()
            uploader.wait()
        self._uploaders[at] = None

    def revive(self) -> None:
        """Start what has ended, as a service manager does, and take up the links."""
        for at, host in enumerate(self.hosts):
            self._networks.run(at, "ip", "link", "set", INTERFACE, "up")
            if host.live.daemon is not None and host.live.daemon.poll() is not None:
                host.live.daemon.wait()
                host.live.start(host.root)
            uploader = self._uploaders[at]
            if uploader is None or uploader.poll() is not None:
                with open(host.live.top / "uploader.log", "ab") as log:
                    self._uploaders[at] = subprocess.Popen(
                        [*self._networks.command(at), str(installed()), "remote", "upload"],
                        env=host.live.env,
                        cwd="/",
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                    )


def _unmount(path: Path) -> None:
    if os.path.ismount(path):
        subprocess.run(["umount", "-l", path], check=True, timeout=30)
