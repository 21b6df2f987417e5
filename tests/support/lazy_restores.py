"""Lazy restores in processes of their own, from a remote in a directory."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.remote_host import RemoteHost, new_remote

from ciuic.fuse_layer.system import mounts
from ciuic.lazy.service import LazyLayout
from ciuic.remote.objects.directory_objects import DirectoryObjects
from ciuic.system.mountinfo import LAZY_FS_TYPE
from ciuic.system.poll import readable
from ciuic.types import Snapshot

_SECONDS = 60.0


def shell(command: str, *arguments: Path | str, timeout: float = 30) -> subprocess.CompletedProcess[bytes]:
    """Run a shell command on a mount: never in this process, and never for ever."""
    return subprocess.run(
        ["timeout", str(timeout), "sh", "-c", command, "sh", *map(str, arguments)],
        capture_output=True,
        check=False,
    )


class LazyChild:
    """A process that restores lazily."""

    def __init__(self, process: subprocess.Popen[str], mount: Path, stderr: Path) -> None:
        self.process = process
        self.mount = mount
        self._stderr = stderr

    def line(self) -> list[str]:
        """Return the first line that it prints, as words; none at its end. Where none comes, fail with the stacks of its threads."""
        assert self.process.stdout is not None
        # Asked once: what it printed since may be buffered here.
        if not readable(self.process.stdout.fileno(), _SECONDS):
            self.process.send_signal(signal.SIGABRT)
            self.process.wait(_SECONDS)
            pytest.fail("it says nothing:\n" + self._stderr.read_text()[-20_000:])
        return self.process.stdout.readline().split()

    def wait_for_mount(self) -> LazyChild:
        """Wait until the mount answers."""
        words = self.line()
        assert words[:1] == ["ready"], words
        return self

    def end(self) -> list[list[str]]:
        """Wait for its end, and return the lines that it printed."""
        out, _ = self.process.communicate(timeout=_SECONDS)
        return [line.split() for line in out.splitlines()]

    def kill(self) -> None:
        """Kill it, as the kernel kills a process that takes too much memory."""
        self.process.kill()
        self.process.wait(_SECONDS)


class LazyHost:
    """A tree, its snapshot in a remote without encryption, and lazy restores of it."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.objects = DirectoryObjects(str(place / "remote"), make=True)
        self.host = RemoteHost(place / "host", new_remote(self.objects, sealed=False))
        self.root = self.host.root
        self.control = place / "control"
        self.control.mkdir()
        self.dest = place / "dest"
        self.snapshot: Snapshot | None = None
        self._children: list[LazyChild] = []

    @property
    def mount(self) -> Path:
        """The restored directory."""
        return self.dest / "root"

    def upload(self) -> None:
        """Take a snapshot of the tree and upload it."""
        self.snapshot = self.host.snapshot()
        self.host.upload()

    def set(self, name: str, text: str = "") -> None:
        """Make a control file."""
        (self.control / name).write_text(text)

    def unset(self, name: str) -> None:
        """Remove a control file."""
        (self.control / name).unlink(missing_ok=True)

    def start(self) -> LazyChild:
        """Start a restore."""
        assert self.snapshot is not None
        with open(self.place / "stderr", "a") as stderr:
            process = subprocess.Popen(
                [
                    *(
                        sys.executable,
                        "-X",
                        "faulthandler",
                        "-m",
                        "support.lazy_child",
                        str(self.place / "remote"),
                    ),
                    *(str(self.place / "cache"), str(self.snapshot.id), str(self.root)),
                    *(str(self.dest), str(self.control)),
                ],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                cwd=Path(__file__).parents[1],
            )
        child = LazyChild(process, self.mount, self.place / "stderr")
        self._children.append(child)
        return child

    def is_mounted(self) -> bool:
        """Return whether the mount is there, dead or alive."""
        entry = mounts.mount_at(str(self.mount))
        return entry is not None and entry.fs_type == LAZY_FS_TYPE.decode()

    def close(self) -> None:
        """End what runs, and take mounts away."""
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.process.pid, signal.SIGKILL) if child.process.returncode is None else None
            child.process.wait(_SECONDS)
            if child.process.stdout is not None:
                child.process.stdout.close()
        while self.is_mounted():
            mounts.detach(str(self.mount), LAZY_FS_TYPE.decode())
        self.host.repository.close()


@contextlib.contextmanager
def lazy_host(place: Path) -> Iterator[LazyHost]:
    """Make a host, and clean up behind it."""
    host = LazyHost(place)
    try:
        yield host
    finally:
        host.close()


__all__ = ["LazyChild", "LazyHost", "LazyLayout", "lazy_host", "shell"]
