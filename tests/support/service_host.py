"""Host with a real systemd that runs ciuic as a service, and a job in its root that checks every result."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
from support import surviving_job
from support.live import installed
from support.real_systemd import RealSystemd
from support.until import until

from ciuic.errors import Unreachable
from ciuic.protocol.control import ControlClient

CODE = Path(__file__).parents[2]
CONFIG = "/etc/mine.toml"
_MOUNT_SECONDS = 60.0
_JOB_SECONDS = 60.0
_END_SECONDS = 10.0


@contextmanager
def service_host(top: Path) -> Iterator[ServiceHost]:
    """Yield a host with a systemd of its own and the installed service, whose directories lie on a tmpfs."""
    with RealSystemd(top, [CODE]) as systemd:
        mounted = systemd.run(["mount", "-t", "tmpfs", "tmpfs", "/srv"])
        assert mounted.returncode == 0, mounted.stderr
        made = ServiceHost(systemd, "/srv")
        made.install()
        yield made


class ServiceHost:
    """Host that runs commands as root. ``top`` contains ``root`` and ``repository``."""

    def __init__(self, systemd: RealSystemd, top: str, program: Path | None = None) -> None:
        self.systemd = systemd
        self.top = top
        self.program = program or installed()
        text = f'[repository]\npath = "{top}/repository"\n[[root]]\npath = "{top}/root"\n'
        self.write(CONFIG, text)
        self("mkdir", "-p", f"{top}/root")
        # The host has no journal: output of units would be lost.
        text = f"[Service]\nStandardOutput=append:{top}/log\nStandardError=inherit\n"
        self.write("/run/systemd/system/service.d/log.conf", text)

    def __call__(self, *command: str, expect: int | None = 0) -> str:
        done = self.systemd.run(list(command))
        if expect is not None and done.returncode != expect:
            raise AssertionError(
                f"{command} ended with {done.returncode}\n{done.stdout}{done.stderr}\n{self.journal()}"
            )
        return str(done.stdout)

    def journal(self) -> str:
        """Return the last lines of systemd and of all units."""
        units = self.systemd.files / f"{self.top}/log".lstrip("/")
        text = units.read_text(errors="replace") if units.exists() else ""
        return self.systemd.log.read_text(errors="replace")[-1000:] + text[-4000:]

    def write(self, path: str, text: str) -> None:
        """Write a file of the host, and make its directories."""
        self("sh", "-c", 'mkdir -p "$(dirname "$1")" && printf "%s" "$2" > "$1"', "write", path, text)

    def drop_in(self, unit: str, text: str) -> None:
        """Override a unit until the next boot; with an empty text, remove the override."""
        path = f"/run/systemd/system/{unit}.d/test.conf"
        if text:
            self.write(path, text)
        else:
            self("rm", path)
        self("systemctl", "daemon-reload")

    def ciuic(self, *arguments: str, expect: int | None = 0) -> str:
        # A PYTHONPATH of the caller's would put this checkout in the place of an older program.
        setting = ("-u", "PYTHONPATH", f"CIUIC_CONFIG={CONFIG}")
        return self("env", *setting, str(self.program), *arguments, expect=expect)

    def install(self) -> dict[str, Any]:
        """Install the service of ``program``; return the root when it is mounted."""
        self.ciuic("--config", CONFIG, "service", "install")
        return self.mounted()

    def status(self) -> dict[str, Any]:
        """Return the status document; empty while no daemon answers.

        Requested from this process: a command would take as long as what it measures.
        """
        try:
            with ControlClient(self.systemd.files / "run/ciuic/control.sock") as client:
                return dict(msgspec.to_builtins(client.status()))
        except Unreachable:
            return {}

    def root(self) -> dict[str, Any]:
        return dict((self.status().get("roots") or [{}])[0])

    def mounted(self) -> dict[str, Any]:
        found = until(
            "the mount", lambda: (root := self.root()).get("state") == "mounted" and root, _MOUNT_SECONDS
        )
        return dict(found)

    def shown(self, unit: str, name: str) -> str:
        """Return a property of a unit."""
        return self("systemctl", "show", "--value", f"--property={name}", unit).strip()

    def main_pid(self, unit: str = "ciuic.service") -> int:
        return int(self.shown(unit, "MainPID"))

    def another_daemon(self, before: int, seconds: float = _MOUNT_SECONDS) -> int:
        """Wait until systemd has restarted the daemon; return its pid when the root is mounted."""

        def started() -> int:
            pid = self.main_pid()
            return (
                pid
                if pid not in (0, before) and self.shown("ciuic.service", "ActiveState") == "active"
                else 0
            )

        pid = int(until("another daemon", started, seconds))
        self.mounted()
        return pid

    def process(self, unit: str) -> dict[str, str]:
        """Return /proc/PID/status of a unit's main process."""
        return self.process_status(self.main_pid(unit))

    def process_status(self, pid: int) -> dict[str, str]:
        lines = (line.partition(":") for line in self("cat", f"/proc/{pid}/status").splitlines())
        return {key: value.strip() for key, _, value in lines}

    @contextmanager
    def job(self, number: int = 0, *, mounts_change: bool = False) -> Iterator[ServiceJob]:
        """Run a job in the root; check at the end that it met no error, also with its oldest files."""
        stop = f"{self.top}/stop{number}"
        command = [str(installed("python")), surviving_job.__file__, f"{self.top}/root", str(number), stop]
        command += ["mounts-change"] if mounts_change else []
        process = subprocess.Popen(
            [*self.systemd.prefix(), *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        one = ServiceJob(self, process, number)
        try:
            one.goes_on()
            yield one
            one.goes_on()
            self("touch", stop)
            output, complaint = process.communicate(timeout=_JOB_SECONDS)
        finally:
            with suppress(ProcessLookupError):
                # The commands nsenter(1) and the job, while its files are still served.
                os.killpg(process.pid, signal.SIGKILL)
            # ValueError: all output has been read above.
            with suppress(subprocess.TimeoutExpired, ValueError):
                process.communicate(timeout=_END_SECONDS)
        assert process.returncode == 0, complaint
        one.result = json.loads(output)


class ServiceJob:
    """Process of surviving_job.py."""

    def __init__(self, host: ServiceHost, process: subprocess.Popen[str], number: int) -> None:
        self.result: dict[str, Any] = {}
        """Report of the process at its end: rounds, calls, and the long ones."""
        self._host = host
        self._process = process
        # Outside the root: changes through a detached overlay do not reach the kernel cache of the mount that
        # replaced it.
        self._rounds_file = Path(f"{host.top}/stop{number}.rounds")

    def goes_on(self) -> None:
        """Wait for two more of its rounds, which use files opened before and new ones."""
        before = self._rounds()
        until("the job's next rounds", lambda: self._rounds() >= before + 2, _JOB_SECONDS)

    def _rounds(self) -> int:
        if self._process.poll() is not None:
            assert self._process.stderr is not None
            raise AssertionError(f"the job ended: {self._process.stderr.read()}\n{self._host.journal()}")
        try:
            return int(self._rounds_file.read_text() or 0)
        except FileNotFoundError:
            return 0
