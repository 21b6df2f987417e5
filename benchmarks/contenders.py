"""Contenders: the plain directory, ciuic on each of its drivers, and other file systems if they are built.

A contender serves a directory that is over, or beside, a *backing* directory of its own, and takes it away
again. One that cannot serve on this machine is found out by ``refusal_reason`` before anything is measured.
To add a driver, add its name to ``suite.DRIVERS``; to add a peer, a line to ``contenders``.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from support import leftovers
from support.live import Live
from support.overlay import Overlay

from benchmarks.suite import CIUIC, CORE, DRIVERS

PEER_VARIABLE = "CIUIC_BENCH_PASSTHROUGH_HP"
NATIVE = "native"
PEER, PEER_PLAIN = "libfuse C++", "libfuse C++, no passthrough"
_BLOCK_BYTES = 256 << 10
_MOUNT_SECONDS = 30.0
_STOP_SECONDS = 60.0


class Served(Protocol):
    """A directory that is being served."""

    directory: Path
    control: str
    server_pid: int
    log: str
    config: str

    def close(self, *, hung: bool = False) -> None:
        """Unmount; kill processes that do not end by themselves, and at once those that are known to hang."""


class Place(NamedTuple):
    """Directories of a contender: its backing directory, and one for sockets and logs.

    The latter has a short name: paths of unix sockets end at 107 bytes.
    """

    backing: Path
    own: Path
    scale: float

    @property
    def beside(self) -> Path:
        """Directory for data that a contender keeps on the same file system."""
        return self.backing.with_name(f"{self.backing.name}-beside")


class Contender(NamedTuple):
    """Contender: its name in the table, and functions that serve it without and with a daemon."""

    name: str
    serve: Callable[[Place], Served]
    serve_with_daemon: Callable[[Place], Served] | None = None


class Plain:
    """The plain directory."""

    control, server_pid, log, config = "", 0, "", ""

    def __init__(self, place: Place) -> None:
        self.directory = place.backing

    def close(self, *, hung: bool = False) -> None:
        return


class Worker:
    """An overlay worker in place over the backing directory."""

    log, config = "", ""

    def __init__(self, place: Place, driver: str) -> None:
        self.directory = place.backing
        self.control = str(place.own / "control")
        self._overlay = Overlay(
            place.backing, Path(self.control), block_size=_BLOCK_BYTES, extra=("--driver", driver)
        )
        self.server_pid = self._overlay.process.pid

    def close(self, *, hung: bool = False) -> None:
        if not hung and self._overlay.process.poll() is None:
            try:
                self._overlay.stop(0)
                return
            except Exception:  # any failure: the process is killed below
                pass
        self._overlay.kill()


class Daemon:
    """Daemon and workers over the backing directory, with a snapshot every interval (a minute at scale 1)."""

    control = ""

    def __init__(self, place: Place, driver: str, interval: str = "") -> None:
        self.directory = place.backing
        self._live = Live(
            place.own,
            interval=interval or f"{max(1, round(60 * place.scale))}s",
            repository=place.beside / "repository",
            more_config=f'\n[[root]]\npath = "{place.backing}"\ndriver = "{driver}"\n',
        )
        self.log, self.config = str(self._live.daemon_log), str(self._live.config)
        try:
            self._live.start(place.backing)
        except BaseException:
            self._live.close()
            raise
        assert self._live.daemon is not None
        self.server_pid = self._live.daemon.pid

    def close(self, *, hung: bool = False) -> None:
        self._live.close()


class Program:
    """Other file system: ``program`` runs in the foreground with the backing directory and a mount point."""

    control, log, config = "", "", ""

    def __init__(self, place: Place, *program: str) -> None:
        self.directory = place.own / "mount"
        self.directory.mkdir(exist_ok=True)
        self._log_path = place.own / "log"
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [*program, str(place.backing), str(self.directory)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.server_pid = self._process.pid
        deadline = time.monotonic() + _MOUNT_SECONDS
        while not leftovers.mounts_below((self.directory,)):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.close()
                raise RuntimeError(f"{program[0]} did not mount: {self._log_path.read_text()[-500:]}")
            time.sleep(0.02)

    def close(self, *, hung: bool = False) -> None:
        leftovers.unmount_below(self.directory)
        if hung:
            self._process.kill()
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _ciuic(name: str, driver: str) -> Contender:
    return Contender(name, lambda place: Worker(place, driver), lambda place: Daemon(place, driver))


def contenders(environment: Mapping[str, str]) -> list[Contender]:
    """Return all contenders that might be measured, the plain directory first."""
    found = [Contender(NATIVE, Plain, Plain), Contender(CORE, Plain)]
    found += [_ciuic(name, driver) for name, driver in zip(CIUIC, DRIVERS, strict=True)]
    peer = environment.get(PEER_VARIABLE, "")
    if peer:
        found.append(Contender(PEER, lambda place: Program(place, peer, "--foreground")))
        found.append(
            Contender(PEER_PLAIN, lambda place: Program(place, peer, "--foreground", "--nopassthrough"))
        )
    return found


def refusal_reason(contender: Contender, top: Path) -> str:
    """Return why the contender cannot serve here, by trying; empty if it can."""
    own = Path(tempfile.mkdtemp(dir=top))
    place = Place(own / "backing", own, 1)
    place.backing.mkdir()
    served = None
    try:
        served = contender.serve(place)
        (served.directory / "probe").write_bytes(b"probe")
        if (served.directory / "probe").read_bytes() != b"probe":
            return "it does not read back what was written"
    except Exception as error:  # any failure: the contender is left out, with the end of its error message
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return lines[-1] if lines else type(error).__name__
    finally:
        if served is not None:
            with contextlib.suppress(Exception):
                served.close()
        leftovers.unmount_below(own)
    return (
        "" if os.path.exists(place.backing / "probe") else "what was written is not in the backing directory"
    )
