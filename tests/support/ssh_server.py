"""A real sshd on a loopback port, with one key of a host, for remotes of ``ssh://``."""

from __future__ import annotations

import getpass
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.ci import needs
from support.object_servers import free_ports

from ciuic.remote.objects.ssh_objects import SshObjects
from ciuic.remote.objects.urls import StoreSettings, parse_url

_START_TIMEOUT_SECONDS = 30
_CHECKOUT = Path(__file__).parents[2]


def sshd_program() -> str:
    """Return the path of sshd, or nothing."""
    return shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin") or ""


class SshServer:
    """sshd that admits the user of these tests, with a key of its own and no PAM."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Make keys, start sshd and wait until its port is open."""
        self.place.mkdir(parents=True, exist_ok=True)
        for name in ("host_key", "user_key"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.place / name],
                check=True,
                timeout=60,
            )
        (self.port,) = free_ports(1)
        self.admit()
        host_key = (self.place / "host_key.pub").read_text()
        (self.place / "known_hosts").write_text(f"[127.0.0.1]:{self.port} {host_key}")
        # Where sshd parts from its privileges; Debian makes it when its own service starts.
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        (self.place / "sshd_config").write_text(
            "\n".join(
                (
                    f"ListenAddress 127.0.0.1:{self.port}",
                    f"HostKey {self.place}/host_key",
                    f"AuthorizedKeysFile {self.place}/authorized_keys",
                    f"PidFile {self.place}/sshd.pid",
                    "StrictModes no",
                    "UsePAM no",
                    "PasswordAuthentication no",
                    "PermitRootLogin prohibit-password",
                    "MaxStartups 200",
                    "MaxSessions 200",
                    f'SetEnv PATH="{Path(sys.executable).parent}:/usr/bin:/bin" PYTHONPATH="{_CHECKOUT}"',
                )
            )
            + "\n"
        )
        with open(self.place / "sshd.log", "ab") as log:
            # setpriv: it ends with this process, even when that is killed.
            self._process = subprocess.Popen(
                [
                    "setpriv",
                    "--pdeathsig",
                    "KILL",
                    "--",
                    sshd_program(),
                    "-D",
                    "-e",
                    "-f",
                    self.place / "sshd_config",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_TIMEOUT_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                time.sleep(0.05)
        raise AssertionError(f"sshd does not start:\n{self.log()}")

    def admit(self, options: str = "") -> None:
        """Admit the key of these tests, with options of authorized_keys(5) such as a forced command."""
        key = (self.place / "user_key.pub").read_text()
        (self.place / "authorized_keys").write_text(f"{options} {key}".lstrip())

    def log(self) -> str:
        """Return the end of sshd's log."""
        return (self.place / "sshd.log").read_text(errors="replace")[-3000:]

    @property
    def command(self) -> str:
        """Command line of ssh that reaches this server and no file of the user's."""
        options = (
            "IdentitiesOnly=yes",
            f"UserKnownHostsFile={self.place}/known_hosts",
            "StrictHostKeyChecking=yes",
        )
        return shlex.join(
            ("ssh", "-F", "none", "-i", f"{self.place}/user_key", *(f"-o{one}" for one in options))
        )

    @property
    def program(self) -> str:
        """``ciuic`` as the shell of the server takes it."""
        return f"{shlex.quote(sys.executable)} -m ciuic"

    def environment(self) -> dict[str, str]:
        """Return the environment in which ciuic reaches this server."""
        return {"CIUIC_SSH_COMMAND": self.command, "CIUIC_SSH_PROGRAM": self.program}

    def url_of(self, directory: Path) -> str:
        """Return the URL of a directory."""
        return f"ssh://{getpass.getuser()}@127.0.0.1:{self.port}{directory}"

    def new_url(self) -> str:
        """Return the URL of a new directory, which is not there yet."""
        return self.url_of(self.place / uuid.uuid4().hex)

    def connect(self, url: str, *, make: bool = True) -> SshObjects:
        """Return a client of this server."""
        settings = StoreSettings(ssh_command=self.command, ssh_program=self.program)
        return SshObjects(parse_url(url), settings, make=make, environment=dict(os.environ))

    def stop(self) -> None:
        """End the server; sessions that are open end with their clients."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(30)
            self._process = None


@pytest.fixture(scope="session")
def ssh_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    """Provide the session's sshd."""
    needs("" if sshd_program() else "there is no sshd (Debian: openssh-server)")
    needs("" if shutil.which("ssh") else "there is no ssh (Debian: openssh-client)")
    server = SshServer(tmp_path_factory.mktemp("sshd"))
    try:
        server.start()
        yield server
    finally:
        server.stop()
