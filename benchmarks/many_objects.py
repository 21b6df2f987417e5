"""Requests, time and memory of the commands that look at a remote of 100,000 objects.

    PYTHONPATH=tests python -m benchmarks.many_objects                     the figures that are reported; half an hour
    PYTHONPATH=tests python -m benchmarks.many_objects --objects 2000      smoke test; its figures mean nothing

The remote is a SeaweedFS, filled by `ciuic remote upload` with packs of one record each. Each command is a process of its own behind a
proxy that counts its requests, and answers each after the time that a request takes in the model of `benchmarks.fleet`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from support.object_servers import Fault, FaultProxy, Request, SeaweedFS
from support.small_repository import make_snapshot

from benchmarks.fleet.store import MEDIAN_SECONDS
from ciuic.cli import main as ciuic_main
from ciuic.remote import uploader
from ciuic.repository import Repository

# Packs, manifest and entry of the log of one snapshot; its tree has some nodes besides.
_OBJECTS_A_SNAPSHOT: Final = 100
_FILES: Final = _OBJECTS_A_SNAPSHOT - 3
# Between this process and the command: a process is said to have had the memory of the one that started it.
_MEASURING: Final = """
import os, sys
if (pid := os.fork()) == 0:
    os.dup2(2, 1)
    os.execv(sys.argv[1], sys.argv[1:])
_, status, usage = os.wait4(pid, 0)
print(usage.ru_maxrss)
sys.exit(os.waitstatus_to_exitcode(status))
"""
_KINDS: Final = ("LIST", "GET", "HEAD", "PUT", "POST", "DELETE")


class Turn(NamedTuple):
    """One command."""

    requests: Counter[str]
    received_bytes: int
    seconds: float
    memory_bytes: int


class CountingProxy(FaultProxy):
    """Proxy that counts requests by their kind, and is as slow as a store in the same region."""

    def __init__(self, endpoint: str) -> None:
        self.counts: Counter[str] = Counter()
        self.received_bytes = 0
        self._counting = threading.Lock()
        super().__init__(endpoint)
        self.fault = self._count

    def _count(self, request: Request) -> Fault:
        kind = "LIST" if "list-type=" in request.path else request.method
        self.counts[kind] += 1

        def received(body: bytes) -> bytes:
            with self._counting:
                self.received_bytes += len(body)
            return body

        return Fault(spoils=received, delay=lambda: time.sleep(MEDIAN_SECONDS.get(kind, 0.04)))


class ManyObjects:
    """Host whose remote has many objects."""

    def __init__(self, top: Path, server: SeaweedFS) -> None:
        self._top = top
        self._server = server
        self.url = server.new_url()
        self._made = 0
        self._configure(server.endpoint)
        self._run(server.endpoint, "remote", "init", "--yes", "--endpoint", server.endpoint, self.url)

    def fill(self, objects: int) -> None:
        """Make snapshots, and upload them so that the remote has this many objects."""
        self.add_snapshots(max(1, objects // _OBJECTS_A_SNAPSHOT), _FILES)
        self._configure(self._server.endpoint)
        argv = [sys.executable, "-m", "benchmarks.many_objects", "--fill"]
        subprocess.run(argv, env=self._environment(self._server.endpoint), check=True)

    def add_snapshots(self, count: int, files: int) -> None:
        """Make local snapshots of new content, a chunk for each file."""
        with Repository.open(self._top / "repository") as repository, repository.writer() as writer:
            for _ in range(count):
                self._made += 1
                made = {b"%03d" % at: b"%08d %03d" % (self._made, at) * 8 for at in range(files)}
                now_ns = time.time_ns()
                make_snapshot(writer, str(repository.snapshots.new_id()), made, time_ns=now_ns)

    def measure(self, *argv: str) -> Turn:
        """Run a command against the remote behind the proxy."""
        with closing(CountingProxy(self._server.endpoint)) as proxy:
            self._configure(proxy.endpoint)
            began = time.monotonic()
            memory_bytes = self._run(proxy.endpoint, *argv)
            return Turn(proxy.counts, proxy.received_bytes, time.monotonic() - began, memory_bytes)

    def _run(self, endpoint: str, *argv: str) -> int:
        """Run a command to its end, and return its largest resident set in bytes."""
        with open(self._top / "log", "wb") as log:
            measured = subprocess.run(
                [sys.executable, "-S", "-c", _MEASURING, sys.executable, "-m", "ciuic", *argv],
                env=self._environment(endpoint),
                stdout=subprocess.PIPE,
                stderr=log,
                check=False,
            )
        if measured.returncode:
            raise RuntimeError(f"{argv}: {(self._top / 'log').read_text(errors='replace')[-2000:]}")
        return int(measured.stdout) * 1024

    def _configure(self, endpoint: str) -> None:
        text = f'[repository]\npath = "{self._top}/repository"\n[control]\nsocket = "{self._top}/control"\n'
        for key in self._top.glob("*.key"):
            text += f'[remote]\nurl = "{self.url}"\nendpoint = "{endpoint}"\nkey_file = "{key}"\n'
        (self._top / "ciuic.toml").write_text(text)

    def _environment(self, endpoint: str) -> dict[str, str]:
        return {
            **os.environ,
            **self._server.environment(endpoint),
            "CIUIC_CONFIG": f"{self._top}/ciuic.toml",
            "CIUIC_REMOTE_KEY_FILE": "".join(map(str, self._top.glob("*.key"))),
            "CIUIC_UPLOAD_STATE": f"{self._top}/state",
            "CIUIC_LOG": "error",
            "XDG_CACHE_HOME": f"{self._top}/cache",
            "XDG_STATE_HOME": f"{self._top}/state-home",
            "XDG_RUNTIME_DIR": str(self._top),
        }


@contextmanager
def many_objects(objects: int) -> Iterator[ManyObjects]:
    """Provide a remote with so many objects."""
    with tempfile.TemporaryDirectory(prefix="ciuic-many-") as top:
        (Path(top) / "server").mkdir()
        (Path(top) / "host").mkdir(mode=0o700)
        server = SeaweedFS(Path(top) / "server")
        try:
            server.start()
            host = ManyObjects(Path(top) / "host", server)
            host.fill(objects)
            yield host
        finally:
            server.stop()


def rows(host: ManyObjects) -> Iterator[tuple[str, Turn]]:
    """Yield each command with what it took."""
    reading = ("--repo", host.url, "list")
    once = ("remote", "upload", "--once")
    yield "`remote status`", host.measure("remote", "status")
    contact = ("remote", "status", "--contact")
    yield "`remote status --contact`, without a cache", host.measure(*contact)
    yield "`remote status --contact`", host.measure(*contact)
    yield "`--repo URL list`, first time", host.measure(*reading)
    yield "`--repo URL list`, again", host.measure(*reading)
    yield "`list --all-hosts`", host.measure("list", "--all-hosts")
    yield "`remote upload --once`, nothing new", host.measure(*once)
    host.add_snapshots(1, 1)
    yield "`remote upload --once`, one small snapshot", host.measure(*once)
    yield "`prune`", host.measure("prune")
    yield "`fleet status`", host.measure("--repo", host.url, "fleet", "status")
    yield "`prune --remote`, first time", host.measure("prune", "--remote")
    yield "`prune --remote`, again", host.measure("prune", "--remote")


def main() -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(prog="benchmarks.many_objects", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--objects", type=int, default=100_000)
    parser.add_argument("--fill", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.fill:
        # A pack for each record.
        uploader._MAX_RECORDS = 1  # type: ignore[misc]
        uploader._SENDING_THREADS = 16  # type: ignore[misc]
        uploader._MAX_WAITING_PACKS = 17  # type: ignore[misc]
        sys.argv = ["ciuic", "remote", "upload", "--once"]
        ciuic_main()
    print(f"| {options.objects:,} objects | {' | '.join(_KINDS)} | MiB received | s | MiB of memory |")
    print("| --- |" + " --- |" * (len(_KINDS) + 3))
    with many_objects(options.objects) as host:
        for name, turn in rows(host):
            counts = " | ".join(f"{turn.requests[kind]:,}" for kind in _KINDS)
            print(
                f"| {name} | {counts} | {turn.received_bytes / 2**20:.1f} | {turn.seconds:.1f} | {turn.memory_bytes / 2**20:.0f} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
