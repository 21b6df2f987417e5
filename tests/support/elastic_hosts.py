"""Hosts that run agents of torchrun: each has a network, processes, mounts and a disk of its own.

The first process of a host only adopts and reaps: an agent that is killed leaves its ranks and their writers behind, as on a machine, and a host that
is killed loses all its processes at one moment, and its disk, a tmpfs that is mounted in its mount namespace alone.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from support.host_networks import HostNetworks
from support.until import until

AGENT: Final = "torch.distributed.run"
_NAMESPACES: Final = ("--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child", "--mount-proc")
_OF_TORCH: Final = ("torchelastic_", "torchinductor_")
_ENDS_WITH_US: Final = ("setpriv", "--pdeathsig", "KILL")
_INIT: Final = (
    'mount -t tmpfs -o mode=0755 "$1" "$2" && mount -t tmpfs shm /dev/shm && hostname "$1" && mkdir "$2/tmp" && touch "$2/up"'
    " && while :; do sleep 1000 & wait; done"
)


class Event(NamedTuple):
    """Line that a rank has told."""

    word: str
    rank: int
    world: int
    value: str


def read_events(path: Path, after: int = 0) -> list[Event]:
    """Return what the ranks of elastic_training.py have told, after so many bytes of their file."""
    with open(path) as file:
        file.seek(after)
        lines = file.read().splitlines()
    return [Event(word, int(rank), int(world), value) for word, rank, world, value in map(str.split, lines)]


class ElasticHost:
    """Host of a number; ``disk`` is the path at which its processes see its disk."""

    def __init__(self, at: int, networks: HostNetworks, disk: Path, log: Path) -> None:
        self.at, self.disk, self._log = at, disk, log
        words = [
            *networks.command(at),
            *_ENDS_WITH_US,
            "unshare",
            *_NAMESPACES,
            "--",
            "sh",
            "-c",
            _INIT,
            "sh",
            f"host-{at}",
            str(disk),
        ]
        with open(log, "ab") as output:
            self._process = subprocess.Popen(
                words, cwd="/", stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        self._init = until("the start of a host", self._first_process, 30)
        self._networks = networks
        self._agent: subprocess.Popen[bytes] | None = None
        self._mounts = self._mounts_now()

    def _first_process(self) -> int:
        assert self._process.poll() is None, self._log.read_text()
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        return (
            int(children[0]) if children and Path(f"/proc/{children[0]}/root{self.disk}/up").exists() else 0
        )

    @property
    def root(self) -> Path:
        """Directory of this machine that is the root directory of the host."""
        return Path(f"/proc/{self._init}/root")

    def start(self, agent: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start an agent."""
        own = {
            "HOME": str(self.disk),
            "TMPDIR": str(self.disk / "tmp"),
            "XDG_CACHE_HOME": str(self.disk / "cache"),
            "XDG_STATE_HOME": str(self.disk / "state"),
        }
        inside = ["nsenter", "-t", str(self._init), "-m", "-p", "-i", "-u"]
        with open(self._log, "ab") as output:
            self._agent = subprocess.Popen(
                [*self._networks.command(self.at), *inside, "--", *agent],
                cwd="/", env={**environment, **own}, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip

    def status(self) -> int | None:
        """Return with what the agent has ended; None while it runs."""
        assert self._agent is not None
        return self._agent.poll()

    def wait(self, seconds: float) -> int:
        """Wait for the end of the agent; return its status."""
        assert self._agent is not None
        return self._agent.wait(seconds)

    def processes(self, word: str = "") -> dict[int, str]:
        """Return the live processes of the host with their command lines: all but those of its first process."""
        own, found = os.readlink(f"/proc/{self._init}/ns/pid"), {}
        for name in os.listdir("/proc"):
            with suppress(OSError, ValueError):
                pid = int(name)
                if pid == self._init or os.readlink(f"/proc/{pid}/ns/pid") != own:
                    continue
                command = (
                    Path(f"/proc/{pid}/cmdline")
                    .read_bytes()
                    .replace(b"\0", b" ")
                    .decode("utf-8", "replace")
                    .strip()
                )
                if command and word in command and command != "sleep 1000":
                    found[pid] = command
        return found

    def ranks(self) -> list[int]:
        """Return the processes that an agent has started."""
        return [pid for pid, command in self.processes("elastic_training").items() if AGENT not in command]

    def signal(self, pids: Sequence[int], which: signal.Signals) -> None:
        """Send a signal to processes of the host."""
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, which)

    def hurry(self) -> None:
        """End the idle priority of uploads, which busy processors would starve."""
        for pid in self.processes():
            with suppress(OSError):
                for thread in os.listdir(f"/proc/{pid}/task"):
                    os.setpriority(os.PRIO_PROCESS, int(thread), 0)

    def destroy(self) -> None:
        """Kill every process of the host at one moment; its disk is gone on return."""
        if self._process.poll() is None:
            self.signal([self._init], signal.SIGKILL)
        # unshare ends when the kernel has ended the whole namespace of processes.
        self._process.wait(60)
        if self._agent is not None:
            self._agent.wait(60)

    def left(self) -> list[str]:
        """Return what the host's programs have left behind: processes, mounts, files in shared memory and temporary files but for torch's own."""
        found = [f"process {command}" for command in self.processes().values()]
        found += [f"mount {point}" for point in self._mounts_now() - self._mounts]
        for path in (Path("/dev/shm"), self.disk / "tmp"):
            names = os.listdir(f"{self.root}{path}")
            found += [f"file {path / name}" for name in names if not name.startswith(_OF_TORCH)]
        return found

    def _mounts_now(self) -> set[str]:
        return {line.split()[4] for line in Path(f"/proc/{self._init}/mountinfo").read_text().splitlines()}

    def log(self) -> str:
        """Return the last lines of what the host's programs have said."""
        return self._log.read_text(errors="replace")[-6000:]
