"""Private ciuic for a test: installed commands, a real daemon, and files below one directory only."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support import impatient_daemon, leftovers
from support.overlay import DRIVER
from support.until import until
from support.warm_python import Program, WarmPython

from ciuic.system import mountinfo

_START_SECONDS = 60.0
_STOP_SECONDS = 60.0

CONFIG = """\
[repository]
path = "{repository}"

[schedule]
interval = "{interval}"

[daemon]
runtime_dir = "{top}/run"

[capture]
min_share = "100%"
"""


class Commands:
    """Commands, forked from a process that has imported them.

    Their imports would take most of the processor time and keep it from what is waited for.
    """

    _MODULES = (
        "ciuic.cli.app",
        "ciuic.cli.commands.status",
        "ciuic.cli.commands.list",
        "ciuic.cli.shared.pairs",
        "ciuic.cli.shared.remotes",
        "ciuic.config",
        "ciuic.protocol.control",
        "ciuic.protocol.pairing",
        "ciuic.remote.uploader",
        "ciuic.remote.upkeep.collect",
        "ciuic.repository",
    )
    _PROGRAM = "import sys; sys.argv[0] = {!r}; from ciuic.cli import main; main()"
    _warm: WarmPython | None = None

    @classmethod
    @contextmanager
    def warm(cls) -> Iterator[None]:
        """Import once what the commands import. Outside, each is an installed command."""
        with WarmPython(*cls._MODULES) as Commands._warm:
            yield
        Commands._warm = None

    @classmethod
    def run_bytes(cls, *arguments: str | bytes, **options: Any) -> subprocess.CompletedProcess[bytes]:
        """Run a command to its end; the options are those of `run`."""
        done = cls.run(*arguments, **options)
        return subprocess.CompletedProcess(
            done.args, done.returncode, done.stdout.encode(), done.stderr.encode()
        )

    @classmethod
    def run(
        cls, *arguments: str | bytes, env: Mapping[str, str], cwd: object = "/", timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        words = [*map(os.fsdecode, arguments)]
        if cls._warm is not None:
            program = cls._PROGRAM.format(str(installed()))
            return cls._warm.run(["-c", program, *words], timeout=timeout, env=env, cwd=cwd)
        return subprocess.run(
            [str(installed()), *words], env=env, cwd=str(cwd), check=False, stdin=subprocess.DEVNULL,
            capture_output=True, timeout=timeout, encoding="utf-8", errors="replace",
        )  # fmt: skip

    @classmethod
    def start(cls, *arguments: str, env: Mapping[str, str], before: str = "") -> Program:
        """Start a command within `warm`, after these statements."""
        assert cls._warm is not None
        program = cls._PROGRAM.format(str(installed()))
        return cls._warm.start(["-c", before + program, *arguments], env=env, cwd="/")


class Questions(Commands):
    """Commands that only ask: tests ask until something has happened."""

    @classmethod
    def ask(cls, live: Live, *arguments: str) -> str:
        """Return what a command prints that succeeds."""
        done = cls.run(*arguments, env=live.env)
        live.require(("ciuic", *arguments), done.returncode, 0, done.stdout + done.stderr)
        return done.stdout


class Listed(NamedTuple):
    """Line of `list --machine-readable`, parsed as scripts in the field do."""

    id: str
    time: datetime
    size_bytes: int


class CommandFailed(AssertionError):
    """Raised when a command exits with an unexpected status."""


def installed(program: str = "ciuic") -> Path:
    """Return the command that `pip install` put beside this interpreter."""
    path = Path(sys.executable).parent / program
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: run `make setup-test` and use .venv/bin/python")
    return path


class Live:
    """Configuration, repository, sockets and daemon below ``top``.

    A context manager that leaves nothing running. The daemon of an ``impatient`` one does not wait long before it tries again;
    ``prefix`` are words before the daemon's command, which take its place in the end, such as those of another network.
    """

    forks_commands = False
    """Commands are no processes of their own; those with PYTHONPATH are, for it counts at the start of an interpreter."""

    def __init__(
        self,
        top: Path,
        *,
        interval: str = "1h",
        repository: Path | None = None,
        more_config: str = "",
        impatient: bool = False,
        prefix: Sequence[str] = (),
    ) -> None:
        self.top = top
        program = [sys.executable, str(impatient_daemon.PROGRAM)] if impatient else [str(installed())]
        self._daemon = [*prefix, *program]
        self.repository = repository or top / "repository"
        self.config = top / "ciuic.toml"
        (top / "run").mkdir(mode=0o700, exist_ok=True)
        text = CONFIG.format(top=top, repository=self.repository, interval=interval)
        self.config.write_text(text + more_config)
        self.env = {
            **os.environ,
            "CIUIC_CONFIG": str(self.config),
            "CIUIC_VERDICT_KEY": str(top / "verdict-key"),
        }
        for name in ("CIUIC_REPO", "CIUIC_PROGRESS", "NOTIFY_SOCKET"):
            self.env.pop(name, None)
        self.daemon: subprocess.Popen[bytes] | None = None
        self.daemon_log = top / "daemon.log"

    def __enter__(self) -> Live:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- commands

    def run(
        self,
        *arguments: str | bytes,
        program: str = "ciuic",
        expect: int | None = 0,
        timeout_seconds: float = 120,
    ) -> subprocess.CompletedProcess[bytes]:
        """Run an installed command; ``expect`` is the exit code it must end with, None for any."""
        if arguments[:1] == ("protect",) and "CIUIC_TEST_DRIVER" in os.environ:
            arguments = ("protect", "--driver", DRIVER, *arguments[1:])
        if self.forks_commands and program == "ciuic" and "PYTHONPATH" not in self.env:
            done = Commands.run_bytes(*arguments, env=self.env, timeout=timeout_seconds)
        else:
            command: Sequence[str | bytes] = [str(installed(program)), *arguments]
            done = subprocess.run(
                command, env=self.env, cwd="/", check=False, stdin=subprocess.DEVNULL, capture_output=True,
                timeout=timeout_seconds,
            )  # fmt: skip
        text = (done.stdout + done.stderr).decode("utf-8", "replace")
        self.require((program, *arguments), done.returncode, expect, text)
        return done

    def require(self, command: Sequence[str | bytes], found: int, expect: int | None, text: str) -> None:
        """Raise CommandFailed with what a command printed, unless it ended as expected."""
        if expect is not None and found != expect:
            shown = " ".join(map(os.fsdecode, command))
            raise CommandFailed(f"`{shown}` ended with {found}, not {expect}:\n{text}\n{self.log_tail()}")

    def json(self, *arguments: str | bytes, expect: int | None = 0) -> Any:
        """Return the document that a command prints with --json."""
        return json.loads(self.run(*arguments, "--json", expect=expect).stdout)

    def list(self, program: str = "") -> list[Listed]:
        """Return committed snapshots, the newest first, parsed as a script does; by the installed program of this name, if one is given."""
        words = ("list", "--machine-readable")
        printed = (
            self.run(*words, program=program).stdout.decode() if program else Questions.ask(self, *words)
        )
        rows = []
        for line in printed.splitlines():
            snapshot, moment, size = line.split("|")
            rows.append(Listed(snapshot, datetime.strptime(moment, "%Y-%m-%d %H:%M:%S"), int(size)))  # noqa: DTZ007
        return rows

    def snapshot(self, *arguments: str) -> str:
        """Take a snapshot, wait until it is committed, and return its id."""
        return self.run("snapshot", "--wait", *arguments).stdout.decode().strip()

    def mode(self, snapshot: str) -> str:
        """Return how the only root of a snapshot was read: ``full`` or ``tracked``."""
        (root,) = self.json("show", snapshot)["roots"]
        return str(root["mode"])

    def snapshot_until_tracking(self) -> str:
        """Take snapshots until one has read only what changed, and return its id.

        More than one is needed while somebody has a copy of this machine's mounts, such as a test beside this one: the root can be
        written through it without passing the overlay.
        """
        end = time.monotonic() + 60
        while self.mode(snapshot := self.snapshot()) != "tracked":
            assert time.monotonic() < end, f"tracking does not count:\n{self.log_tail()}"
            time.sleep(0.5)
        return snapshot

    # -- the daemon

    def start(self, *roots: Path) -> None:
        """Start the daemon and return when it answers and every given root is mounted."""
        log = open(self.daemon_log, "ab")
        with log:
            self.daemon = subprocess.Popen(
                [*self._daemon, "daemon"], env=self.env, cwd="/", stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        self.wait_mounted(*roots)

    def status(self) -> dict[str, Any] | None:
        """Return `ciuic status --json`, or None while no daemon answers."""
        try:
            status: dict[str, Any] = json.loads(Questions.ask(self, "status", "--json"))
        except CommandFailed:
            return None
        return status

    def wait_mounted(self, *roots: Path) -> None:
        """Return when the daemon answers and has mounted each root."""

        def ready() -> bool:
            if self.daemon is None or self.daemon.poll() is not None:
                raise CommandFailed(f"the daemon ended by itself\n{self.log_tail()}")
            # Cheaper than a command, which can say no more before this is so.
            if not {os.fsencode(root) for root in roots} <= {mount.mount_point for mount in mountinfo.read()}:
                return False
            status = self.status()
            mounted = (
                {root["path"] for root in status["roots"] if root["state"] == "mounted"} if status else set()
            )
            return status is not None and {str(root) for root in roots} <= mounted

        try:
            until("the daemon's start", ready, _START_SECONDS)
        except TimeoutError as exc:
            raise CommandFailed(f"{exc}\n{self.log_tail()}") from exc

    def stop(self, sig: int = signal.SIGTERM) -> int:
        """End the daemon with a signal and return its exit status."""
        assert self.daemon is not None
        self.daemon.send_signal(sig)
        code = self.daemon.wait(_STOP_SECONDS)
        self.daemon = None
        return code

    def events(self, name: str) -> Sequence[dict[str, Any]]:
        """Return what the daemon has logged under this event, oldest first."""
        lines = (
            json.loads(line) for line in self.daemon_log.read_text().splitlines() if line.startswith("{")
        )
        return [line for line in lines if line.get("event") == name]

    def log_tail(self, lines: int = 40) -> str:
        """Return the end of the daemon's log, for a message."""
        if not self.daemon_log.exists():
            return ""
        text = self.daemon_log.read_text(errors="replace").splitlines()
        return "\n".join(["--- the daemon's log:", *(line[:400] for line in text[-lines:])])

    # -- the end

    def processes(self) -> dict[int, str]:
        """Return every process that names this installation's directory: daemon, workers, captures."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    command = (entry / "cmdline").read_bytes()
                except OSError:
                    # The process ended during the listing.
                    continue
                mine = str(self.top).encode() in command or self._has_our_config(entry)
                if mine and b"ciuic" in command:
                    found[int(entry.name)] = command.replace(b"\0", b" ").decode("utf-8", "replace")
        return found

    def _has_our_config(self, entry: Path) -> bool:
        try:
            return f"CIUIC_CONFIG={self.config}\0".encode() in (entry / "environ").read_bytes()
        except OSError:
            return False

    def close(self) -> None:
        """Stop the daemon; kill processes that do not end by themselves and detach mounts that stay."""
        if self.daemon is not None and self.daemon.poll() is None:
            self.daemon.terminate()
            try:
                self.daemon.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.daemon.kill()
                self.daemon.wait()
        self.daemon = None
        leftovers.unmount_below(self.top)
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


@pytest.fixture(scope="module")
def module_tmp(run_dir: Path) -> Iterator[Path]:
    """Provide a directory with a short name for a file's tests, which every user can enter."""
    run_dir.chmod(0o755)
    path = Path(tempfile.mkdtemp(dir=run_dir))
    path.chmod(0o755)
    yield path
    leftovers.unmount_below(path)
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def live(short_tmp: Path) -> Iterator[Live]:
    """Provide a configured ciuic with no roots yet and no daemon running."""
    try:
        installed()
    except FileNotFoundError as exc:
        pytest.fail(str(exc), pytrace=False)
    with Live(short_tmp) as one:
        yield one


@pytest.fixture
def root(short_tmp: Path) -> Path:
    """Provide an existing empty directory to protect."""
    path = short_tmp / "root"
    path.mkdir()
    return path


@pytest.fixture
def protected(live: Live, root: Path) -> Live:
    """Provide a running daemon with ``root`` protected, which has taken its first snapshot by itself."""
    live.run("protect", str(root))
    live.start(root)
    until("the first snapshot", live.list)
    return live


@pytest.fixture(scope="module")
def shared(run_dir: Path) -> Iterator[Live]:
    """Provide a running daemon for a file's tests, with ``top/root`` protected; a test that ends or kills a part of it needs its own."""
    top = Path(tempfile.mkdtemp(dir=run_dir))
    with Live(top) as one:
        (top / "root").mkdir()
        one.run("protect", str(top / "root"))
        one.start(top / "root")
        until("the first snapshot", one.list)
        yield one


def emptied_root(live: Live) -> Path:
    """Remove what an earlier test has left in the root of a shared daemon, and return it."""
    root = live.top / "root"
    for path in root.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    return root
