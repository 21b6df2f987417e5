"""Compared tools, each with the commands that its users type and with its own defaults.

A tool captures ``job.directory`` into a store below ``job.beside``, and restores it from there. A method
returns None if the tool has no such operation. Commands run in the same process environment; their caches and
configuration are below ``beside``.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from support.live import installed
from support.until import until

from benchmarks.store.usage import Used, run
from benchmarks.suite import Job

CIUIC, RESTIC, BORG, COPY, REFLINK = "ciuic", "restic", "borg", "cp -a", "cp -a --reflink"
_LIMIT_SECONDS = 3000.0
_FIRST_SNAPSHOT_SECONDS = 60.0


class Tool(Protocol):
    """Operations of a tool; each returns the time and memory that its command used."""

    def prepare(self) -> None:
        """Create an empty store, before the first capture."""

    def wake(self) -> None:
        """Run the program once without measuring, so that its own files are in the page cache."""

    def capture(self) -> Used | None:
        """Capture the directory for the first time."""

    def capture_again(self) -> Used | None:
        """Capture the directory when the store already has a capture of it."""

    def restore(self, what: str, to: str, *, over: bool) -> Used | None:
        """Restore the path ``what`` ("" for all) into the directory ``to``, over its content if ``over``."""

    def restore_in_place(self) -> Used | None:
        """Restore all over the directory itself, while it is served."""

    def verify(self) -> Used | None:
        """Read and check every stored byte."""

    def prune(self, keep: int) -> Used | None:
        """Remove all but the ``keep`` newest captures, and free their space."""

    def store(self) -> str:
        """Return the directory of the store, without caches."""


class _Commands:
    """Base of the tools: runs the commands of one job."""

    def __init__(self, job: Job, **environment: str) -> None:
        self._job = job
        # restic writes its packs to TMPDIR first: it must be on the same disk.
        temporary = f"{job.beside}/tmp"
        os.makedirs(temporary, exist_ok=True)
        self._environment = {**os.environ, "TMPDIR": temporary, **environment}
        for name in ("CIUIC_REPO", "CIUIC_PROGRESS", "NOTIFY_SOCKET"):
            self._environment.pop(name, None)

    def _run(self, *command: str, cwd: str = "/") -> Used:
        return run(
            command,
            cwd=cwd,
            environment=self._environment,
            daemon_pid=self._job.server_pid,
            limit_seconds=_LIMIT_SECONDS,
        )

    def _path_beside(self, name: str) -> str:
        return f"{self._job.beside}/{name}"

    def wake(self) -> None:
        return

    def prepare(self) -> None:
        return

    def restore_in_place(self) -> Used | None:
        return None


class Ciuic(_Commands):
    """Daemon with a protected directory; commands go through the daemon or read the repository themselves."""

    def __init__(self, job: Job) -> None:
        super().__init__(job, CIUIC_CONFIG=job.config)

    def _ciuic(self, *arguments: str) -> Used:
        return self._run(str(installed()), *arguments)

    def prepare(self) -> None:
        # The daemon takes a first snapshot as soon as it protects a directory, here of the empty one.
        until("the daemon's own first snapshot", lambda: captured(self._job.log), _FIRST_SNAPSHOT_SECONDS)

    def wake(self) -> None:
        self._ciuic("list", "-n", "1")

    def capture(self) -> Used | None:
        return self._ciuic("snapshot", "--wait")

    capture_again = capture

    def restore(self, what: str, to: str, *, over: bool) -> Used | None:
        path = f"{self._job.directory}/{what}".rstrip("/")
        return self._ciuic(
            "restore", "-s", "latest", "-p", path, "-d", to, *(["--overwrite"] if over else [])
        )

    def restore_in_place(self) -> Used | None:
        return self._ciuic("restore", "-s", "latest", "-p", self._job.directory, "--overwrite")

    def verify(self) -> Used | None:
        return self._ciuic("verify", "--all", "--checksum")

    def prune(self, keep: int) -> Used | None:
        text = Path(self._job.config).read_text(encoding="utf-8")
        config = Path(self._job.config).with_name("prune.toml")
        config.write_text(f'{text}\n[retention]\nkeep_within = "0"\nkeep_last = {keep}\n', encoding="utf-8")
        return self._ciuic("--config", str(config), "prune")

    def store(self) -> str:
        return self._path_beside("repository")


class Restic(_Commands):
    """restic with a local repository."""

    def __init__(self, job: Job) -> None:
        super().__init__(
            job,
            RESTIC_REPOSITORY=f"{job.beside}/restic",
            RESTIC_PASSWORD="bench",
            RESTIC_CACHE_DIR=f"{job.beside}/restic-cache",
        )

    def prepare(self) -> None:
        self._run("restic", "init")

    def wake(self) -> None:
        self._run("restic", "version")

    def capture(self) -> Used | None:
        return self._run("restic", "backup", "--quiet", ".", cwd=self._job.directory)

    capture_again = capture

    def restore(self, what: str, to: str, *, over: bool) -> Used | None:
        only = ["--include", f"/{what}"] if what else []
        return self._run("restic", "restore", "latest", "--target", to, *only)

    def verify(self) -> Used | None:
        return self._run("restic", "check", "--read-data", "--quiet")

    def prune(self, keep: int) -> Used | None:
        return self._run("restic", "forget", "--keep-last", str(keep), "--prune", "--quiet")

    def store(self) -> str:
        return self._path_beside("restic")


class Borg(_Commands):
    """borg with a local repository, unencrypted, with its default compression."""

    def __init__(self, job: Job) -> None:
        super().__init__(
            job,
            BORG_REPO=f"{job.beside}/borg",
            BORG_BASE_DIR=f"{job.beside}/borg-own",
            BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK="yes",
        )
        self._counter = Path(self._path_beside("borg-archives"))

    def prepare(self) -> None:
        Path(self._path_beside("borg-own")).mkdir()
        self._run("borg", "init", "--encryption", "none")
        self._counter.write_text("0", encoding="ascii")

    def wake(self) -> None:
        self._run("borg", "--version")

    def capture(self) -> Used | None:
        number = int(self._counter.read_text(encoding="ascii")) + 1
        used = self._run("borg", "create", f"::a{number}", ".", cwd=self._job.directory)
        self._counter.write_text(str(number), encoding="ascii")
        return used

    capture_again = capture

    def restore(self, what: str, to: str, *, over: bool) -> Used | None:
        Path(to).mkdir(exist_ok=True)
        archive = f"::a{self._counter.read_text(encoding='ascii')}"
        return self._run("borg", "extract", archive, *([what] if what else []), cwd=to)

    def verify(self) -> Used | None:
        return self._run("borg", "check", "--verify-data")

    def prune(self, keep: int) -> Used | None:
        removed = self._run("borg", "prune", "--keep-last", str(keep))
        freed = self._run("borg", "compact")
        return Used(
            removed.seconds + freed.seconds,
            removed.cpu_seconds + freed.cpu_seconds,
            max(removed.peak_bytes, freed.peak_bytes),
            max(removed.command_bytes, freed.command_bytes),
            0,
        )

    def store(self) -> str:
        return self._path_beside("borg")


class Copy(_Commands):
    """Full copy of the directory by cp, without knowledge of an earlier copy."""

    _options: Sequence[str] = ("--reflink=never",)

    def capture(self) -> Used | None:
        to = self.store()
        shutil.rmtree(to, ignore_errors=True)
        return self._run("cp", "-a", *self._options, self._job.directory, to)

    def capture_again(self) -> Used | None:
        return None

    def restore(self, what: str, to: str, *, over: bool) -> Used | None:
        os.makedirs(f"{to}/{os.path.dirname(what)}", exist_ok=True)
        return self._run("cp", "-aT", *self._options, f"{self.store()}/{what}", f"{to}/{what}")

    def verify(self) -> Used | None:
        return None

    def prune(self, keep: int) -> Used | None:
        return None

    def store(self) -> str:
        return self._path_beside("copy")


class Reflink(Copy):
    """Full copy by cp that shares all extents; a second capture copies the whole directory again."""

    _options = ("--reflink=always",)

    def capture_again(self) -> Used | None:
        return self.capture()


def captured(log: str) -> bool:
    """Return whether the daemon that writes this log has committed a snapshot."""
    return b'"snapshot_committed"' in Path(log).read_bytes()


_TOOLS: dict[str, type[Ciuic | Restic | Borg | Copy | Reflink]] = {
    CIUIC: Ciuic,
    RESTIC: Restic,
    BORG: Borg,
    COPY: Copy,
    REFLINK: Reflink,
}


def tool_of(job: Job) -> Tool:
    """Return the tool of this job's contender."""
    return _TOOLS[job.contender](job)
