"""`Git`: plumbing commands of git in a working tree, which run nothing that the working tree names.

Guarantees: no hook, filter, pager, editor, transport or monitor of the repository's configuration runs, and the configuration of the user and of the
host is not read. Names are passed by file descriptors, never on a command line. What git writes is synced.

References:
    git-fast-import(1), git-config(1), git(1) (environment variables), gitattributes(5)
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Final

from ciuic.errors import CiuicError, NotFound
from ciuic.printable import one_line
from ciuic.system.child_process import find_program, program_environment

# On the command line they win over every file.
_SETTINGS: Final = {
    "core.hooksPath": "/dev/null",
    "core.fsmonitor": "false",
    "core.attributesFile": "/dev/null",
    "core.fsync": "all",
    "core.fsyncMethod": "fsync",
    "core.untrackedCache": "false",
    "gc.auto": "0",
    "maintenance.auto": "false",
    "protocol.allow": "never",
}
# Git itself refuses the first three, also as Windows would read them (read-cache.c, verify_path).
_OBEYED: Final = re.compile(
    rb"(?i)(\.git|git~1|\.gitattributes|\.gitmodules|\.lfsconfig)[ .]*(:.*)?\Z", re.DOTALL
)
_VARIABLES: Final = {
    # Objects that are missing must not be fetched by a program that the configuration names.
    "GIT_ALLOW_PROTOCOL": "none",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_TERMINAL_PROMPT": "0",
    "LC_ALL": "C",
}


def is_obeyed(name: bytes) -> bool:
    """Return whether git or git-lfs would obey a file of this relative name in a working tree."""
    return any(_OBEYED.match(part) for part in re.split(rb"[/\\]", name))


def require_programs() -> None:
    """Refuse to go on without git and git-lfs. NotFound."""
    for name in ("git", "git-lfs"):
        if not os.access(find_program(name), os.X_OK):
            raise NotFound(
                f"{name} is not installed, and an export to git-lfs needs it", hint="apt install git git-lfs"
            )


class Git:
    """Commands of git in one working tree, whose directory has ``.git`` in it."""

    def __init__(self, directory: Path) -> None:
        self._directory: Final = directory

    def __call__(self, *words: str, given: bytes = b"") -> bytes:
        """Run a command; return what it prints.

        Raises:
            CiuicError: it failed.
        """
        done = self._run(words, given)
        if done.returncode:
            raise _failed(words[0], done.stderr)
        return done.stdout

    def ask(self, *words: str) -> bytes | None:
        """Run a command; return what it prints, None where it fails."""
        done = self._run(words, b"")
        return None if done.returncode else done.stdout

    def install_lfs(self) -> str:
        """Set up git-lfs in this repository, as ``git lfs install`` does; return what it complains of, empty for nothing."""
        if self._own("core.hooksPath"):
            return "core.hooksPath is set"
        command = [find_program("git-lfs"), "install", "--local"]
        done = subprocess.run(
            command,
            cwd=self._directory,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
        return one_line(os.fsdecode(done.stderr or done.stdout).strip()) if done.returncode else ""

    def has_lfs(self) -> bool:
        """Return whether git-lfs is set up in this repository: its filter, and the hook that pushes objects."""
        hook = self._directory / ".git/hooks/pre-push"
        return bool(self._own("filter.lfs.process")) and hook.is_file() and b"git lfs" in hook.read_bytes()

    def _own(self, key: str) -> bytes | None:
        return self.ask("config", "--file", ".git/config", "--get", key)

    def import_stream(self) -> FastImport:
        """Start ``git fast-import``; nothing is in the repository before it was told so."""
        command = self._command(("fast-import", "--quiet", "--done", "--force"))
        return FastImport(command, self._directory, self._environment())

    def _run(self, words: Iterable[str], given: bytes) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            self._command(words),
            cwd=self._directory,
            env=self._environment(),
            input=given,
            capture_output=True,
            check=False,
        )

    def _command(self, words: Iterable[str]) -> list[str]:
        settings = [word for key, value in _SETTINGS.items() for word in ("-c", f"{key}={value}")]
        return [find_program("git"), "--no-pager", "--literal-pathspecs", *settings, *words]

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in program_environment().items() if not name.startswith("GIT_")}
        # This very directory, and none above it.
        return {**kept, **_VARIABLES, "GIT_CEILING_DIRECTORIES": str(self._directory.parent)}


class FastImport:
    """A running ``git fast-import``; context manager, which ends it without effect unless `finish` was called."""

    def __init__(self, command: list[str], directory: Path, environment: dict[str, str]) -> None:
        self._errors: Final = tempfile.TemporaryFile()
        self._process: Final = subprocess.Popen(
            command,
            cwd=directory,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
        )
        assert self._process.stdin is not None
        self._stream: Final[IO[bytes]] = self._process.stdin

    def __enter__(self) -> FastImport:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Before its input ends: it would leave a report of a crash.
        if self._process.poll() is None:
            self._process.kill()
        with suppress(OSError):
            self._stream.close()
        self._process.wait()
        self._errors.close()

    def write(self, data: bytes) -> None:
        """Send a part of the stream. CiuicError if git has ended."""
        try:
            self._stream.write(data)
        except BrokenPipeError:
            raise self._failure() from None

    def file(self, name: bytes, mode: str, pieces: Iterable[bytes], size_bytes: int) -> None:
        """Put a file into the commit that was begun."""
        self.write(b"M %s inline %s\ndata %d\n" % (mode.encode("ascii"), _quoted(name), size_bytes))
        for piece in pieces:
            self.write(piece)
        self.write(b"\n")

    def delete(self, name: bytes) -> None:
        """Leave a file out of the commit that was begun."""
        self.write(b"D %s\n" % _quoted(name))

    def finish(self) -> None:
        """Store everything, durably but for names of directories. CiuicError if git refuses."""
        self.write(b"done\n")
        try:
            self._stream.close()
        except BrokenPipeError:
            raise self._failure() from None
        if self._process.wait():
            raise self._failure()

    def _failure(self) -> CiuicError:
        self._process.wait()
        self._errors.seek(0)
        return _failed("fast-import", self._errors.read())


def _quoted(name: bytes) -> bytes:
    """Return a name as fast-import reads any bytes: in quotes, C-style."""
    return b'"%s"' % name.replace(b"\\", b"\\\\").replace(b'"', b'\\"').replace(b"\n", b"\\n")


def _failed(command: str, said: bytes) -> CiuicError:
    lines = [one_line(os.fsdecode(line)) for line in said.splitlines() if line.strip()]
    return CiuicError(f"git {command} failed: {'; '.join(lines[:3]) or 'it says nothing'}")
