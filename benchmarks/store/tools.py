"""The tools that are compared, each with the commands that its users type and its own defaults.

A tool captures ``job.directory`` into what it keeps below ``job.beside``, and brings it back from there. None stands for what a
tool does not do. Commands run in the same process environment, with caches and configuration of their own below ``beside``.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from support.live import installed, wait_for

from benchmarks.store.usage import Used, run
from benchmarks.suite import Job

CIUIC, RESTIC, BORG, COPY, REFLINK = "ciuic", "restic", "borg", "cp -a", "cp -a --reflink"
_LIMIT_SECONDS = 3000.0
_FIRST_SECONDS = 60.0


class Tool(Protocol):
    """What every tool can be asked for; all return what the command took."""

    def prepare(self) -> None:
        """An empty store, before the first capture."""

    def wake(self) -> None:
        """Runs the program for nothing, so that its own files are read before a time is taken."""

    def capture(self) -> Used | None: ...

    def capture_again(self) -> Used | None:
        """When there is a capture already."""

    def restore(self, what: str, to: str, *, over: bool) -> Used | None:
        """``what`` below the directory ("" for all) into the directory ``to``, over what is there."""

    def restore_in_place(self) -> Used | None:
        """All, over the directory itself, which is there and served."""

    def verify(self) -> Used | None:
        """Reads and checks every byte that is stored."""

    def prune(self, keep: int) -> Used | None:
        """Removes all but the newest, and frees their space."""

    def store(self) -> str:
        """The directory that holds what was captured, without caches."""


class _Commands:
    """What the tools share: running a command of this job."""

    def __init__(self, job: Job, **environment: str) -> None:
        self._job = job
        temporary = f"{job.beside}/tmp"  # restic writes its packs there first: it must be the same disk
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

    def _below(self, name: str) -> str:
        return f"{self._job.beside}/{name}"

    def wake(self) -> None:
        return

    def prepare(self) -> None:
        return

    def restore_in_place(self) -> Used | None:
        return None


class Ciuic(_Commands):
    """The daemon with the directory under protection; the commands go through it, or read the repository themselves."""

    def __init__(self, job: Job) -> None:
        super().__init__(job, CIUIC_CONFIG=job.config)

    def _ciuic(self, *arguments: str) -> Used:
        return self._run(str(installed()), *arguments)

    def prepare(self) -> None:
        # The daemon takes a snapshot as soon as it protects something, here of the empty directory.
        wait_for("the daemon's own first snapshot", lambda: captured(self._job.log), _FIRST_SECONDS)

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
        return self._below("repository")


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
        return self._below("restic")


class Borg(_Commands):
    """borg with a local repository, not encrypted, compressed as by default."""

    def __init__(self, job: Job) -> None:
        super().__init__(
            job,
            BORG_REPO=f"{job.beside}/borg",
            BORG_BASE_DIR=f"{job.beside}/borg-own",
            BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK="yes",
        )
        self._counter = Path(self._below("borg-archives"))

    def prepare(self) -> None:
        Path(self._below("borg-own")).mkdir()
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
        return self._below("borg")


class Copy(_Commands):
    """A copy of the whole directory, which knows nothing of what was there before."""

    _how: Sequence[str] = ("--reflink=never",)

    def capture(self) -> Used | None:
        to = self.store()
        shutil.rmtree(to, ignore_errors=True)
        return self._run("cp", "-a", *self._how, self._job.directory, to)

    def capture_again(self) -> Used | None:
        return None

    def restore(self, what: str, to: str, *, over: bool) -> Used | None:
        os.makedirs(f"{to}/{os.path.dirname(what)}", exist_ok=True)
        return self._run("cp", "-aT", *self._how, f"{self.store()}/{what}", f"{to}/{what}")

    def verify(self) -> Used | None:
        return None

    def prune(self, keep: int) -> Used | None:
        return None

    def store(self) -> str:
        return self._below("copy")


class Reflink(Copy):
    """The same, sharing all extents; copied again whole when something has changed."""

    _how = ("--reflink=always",)

    def capture_again(self) -> Used | None:
        return self.capture()


def captured(log: str) -> bool:
    """Whether the daemon that writes this log has committed a snapshot."""
    return b'"snapshot_committed"' in Path(log).read_bytes()


_TOOLS: dict[str, type[Ciuic | Restic | Borg | Copy | Reflink]] = {
    CIUIC: Ciuic,
    RESTIC: Restic,
    BORG: Borg,
    COPY: Copy,
    REFLINK: Reflink,
}


def of(job: Job) -> Tool:
    """The tool that is this job's contender."""
    return _TOOLS[job.contender](job)
