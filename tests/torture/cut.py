"""Torture of the cut: many writers in two roots, cuts at random instants, captures paused and killed.

A real daemon, real mounts, and writers in processes of their own (cut_writers). Each committed snapshot is
read through the library and compared with what the writers had done when it was requested and when it was cut
(cut_judge). At the end the last snapshot is restored by the command and compared with both roots, and
everything is verified.
"""

from __future__ import annotations

import os
import queue
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from support.live import CommandFailed, Live
from support.stored import read_tree
from support.trees import assert_same, manifest
from support.until import until
from torture import cut_judge as judge
from torture import cut_writers as writers
from torture.figure import Figure

from ciuic.errors import Busy, CiuicError
from ciuic.protocol.control import ControlClient
from ciuic.repository import Repository
from ciuic.types import FLAG_OPEN_FOR_WRITING, Snapshot, SnapshotId

KINDS = [
    "append",
    "append-synced",
    "append",
    "overwrite",
    "direct",
    "mapped",
    "sequence",
    "names",
    "names",
    "overwrite",
    "fresh",
]
"""Kinds of writers, one process each; writers in one root alternate between the first and the second."""
_UNFLUSHED = "unflushed"


class CutRequest(NamedTuple):
    """A snapshot that was cut, and the writers' progress around it."""

    id: str
    returned: list[int]
    begun: list[int]


class Site:
    """Daemon, roots, writers, and findings."""

    def __init__(self, live: Live, roots: tuple[Path, Path], seed: int) -> None:
        self.live, self.roots, self.seed = live, roots, seed
        self.counters = writers.Counters(live.top / "counters", len(KINDS))
        self.over = threading.Event()
        self.requested: queue.Queue[CutRequest | None] = queue.Queue()
        self.histories = {
            slot: judge.NameHistory(seed + slot) for slot, kind in enumerate(KINDS) if kind == "names"
        }
        self.snapshots = self.records = self.failed = self.unflushed = self.paused = self.killed = 0
        self._fresh_marks: set[bytes] = set()
        self.wrong: list[str] = []
        self.errors: list[str] = []
        """Errors that a job or an operator would see."""

    def client(self) -> ControlClient:
        return ControlClient(self.live.top / "run/control.sock")

    # -- cutting

    def cut_at_random(self) -> None:
        """Request snapshots until ``over``; runs in a thread."""
        rng = random.Random(self.seed + 1000)
        try:
            with self.client() as client:
                while not self.over.wait(rng.random() ** 2 * 0.8):
                    self._cut(client, by_command=rng.random() < 0.15)
        except Exception as error:
            self.errors.append(f"a snapshot could not be asked for: {error!r}")
        self.requested.put(None)

    def _cut(self, client: ControlClient, *, by_command: bool) -> None:
        returned = self.counters.all_returned()
        try:
            if by_command:
                done = self.live.run("snapshot", expect=None)
                if done.returncode == Busy.exit_code:
                    return
                if done.returncode != 0:
                    raise CommandFailed(done.stderr.decode())
                snapshot = done.stdout.decode().strip()
            else:
                snapshot = client.take_snapshot().id
        except Busy:
            # Eight snapshots wait for capture already, and the error says so.
            return
        self.requested.put(CutRequest(snapshot, returned, self.counters.all_begun()))

    def disturb_captures(self) -> None:
        """Pause and kill capture processes until ``over``; runs in a thread."""
        rng = random.Random(self.seed + 2000)
        while not self.over.wait(rng.random() * 1.5):
            captures = [
                pid
                for pid, command in self.live.processes().items()
                if "-m ciuic.daemon.capture.process " in command
            ]
            for pid in captures:
                try:
                    if rng.random() < 0.4:
                        os.kill(pid, signal.SIGKILL)
                        self.killed += 1
                    else:
                        os.kill(pid, signal.SIGSTOP)
                        self.paused += 1
                        time.sleep(rng.random())
                        os.kill(pid, signal.SIGCONT)
                except ProcessLookupError:
                    # The process ended by itself.
                    continue

    # -- judging

    def judge_all(self) -> None:
        """Judge each snapshot when it is committed, until the cutting is over."""
        with self.client() as client:
            while (requested := self.requested.get()) is not None:
                try:
                    state = client.wait_snapshot(requested.id)
                except CiuicError:
                    # Its captures were killed: its changes go into the next snapshot.
                    self.failed += 1
                    continue
                self._judge(requested, flushed=_UNFLUSHED not in state.tags)

    def _judge(self, requested: CutRequest, *, flushed: bool) -> None:
        with Repository.open(self.live.repository) as repository:
            snapshot = repository.snapshots.load(SnapshotId(requested.id))
            views = []
            for root in self.roots:
                record = next(record for record in snapshot.roots if record.path == os.fsencode(root))
                views.append(read_tree(repository, record.entry.content))
            self._fresh_marks = _marks(repository, snapshot, self.roots)
        self.snapshots += 1
        self.unflushed += not flushed
        for slot, kind in enumerate(KINDS):
            at = judge.Range(requested.returned[slot], requested.begun[slot])
            if not flushed and kind in ("append", "overwrite", "mapped"):
                at = judge.Range(0, at.high)
            verdict = self._verdict(kind, slot, at, views)
            self.records += verdict.records
            self.wrong += [f"{requested.id}, {kind}{slot}, {at}: {text}" for text in verdict.wrong]

    def _verdict(self, kind: str, slot: int, at: judge.Range, views: list[dict[bytes, Any]]) -> judge.Verdict:
        name, seed, view = f"{kind}{slot}".encode(), self.seed + slot, views[slot % 2]
        if kind.startswith("append"):
            return judge.judge_appends(view[name], seed, at, synced=kind == "append-synced")
        if kind == "fresh":
            return judge.judge_fresh(view[name], self._fresh_marks, seed, at)
        if kind in ("overwrite", "direct"):
            return judge.judge_slots(view.get(name), seed, at, in_order=kind == "direct")
        if kind == "mapped":
            return judge.judge_words(view.get(name), at, every=writers.SYNC_EVERY)
        if kind == "sequence":
            return judge.judge_sequence(views, name, at)
        return judge.judge_names([view[name] for view in views], self.histories[slot], at)

    # -- writers

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Run all writers; afterwards each must have ended well."""
        processes = []
        for slot, kind in enumerate(KINDS):
            writers.prepare(kind, slot, self.seed + slot, self.roots)
        for slot, kind in enumerate(KINDS):
            command = [sys.executable, "-m", "torture.cut_writers", kind, str(slot), str(self.seed + slot)]
            places = [self.live.top / "counters", *self.roots]
            processes.append(
                subprocess.Popen(
                    [*command, *map(str, places)],
                    env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
                    stderr=subprocess.PIPE,
                )
            )
        try:
            until("every writer's first operation", lambda: all(self.counters.all_returned()))
            yield
        finally:
            self.counters.stop()
            for slot, process in enumerate(processes):
                try:
                    _, stderr = process.communicate(timeout=120)
                except subprocess.TimeoutExpired:
                    process.kill()
                    _, stderr = process.communicate()
                if process.returncode != 0:
                    text = stderr.decode("utf-8", "replace")[-2000:]
                    self.errors.append(f"the job {KINDS[slot]}{slot} ended with {process.returncode}: {text}")


def run(seconds: float, seed: int) -> list[Figure]:
    """Return figures: snapshots and records checked, captures disturbed, the last snapshot compared."""
    top = Path(tempfile.mkdtemp(prefix="cut-"))
    roots = (top / "root-a", top / "root-b")
    with Live(top) as live:
        for root in roots:
            root.mkdir()
            live.run("protect", str(root))
        live.start(*roots)
        until("the first snapshot", live.list)
        site = Site(live, roots, seed)
        with site.writing():
            _disturbed(site, seconds)
        end = _compare_the_end(site, top / "out")
        if site.errors or site.wrong:
            sys.stderr.write(live.log_tail(400) + "\n")
    return _figures(site, end)


def _marks(repository: Repository, snapshot: Snapshot, roots: tuple[Path, Path]) -> set[bytes]:
    """Return names in the checkpoint writer's directory that are marked as open for writing."""
    slot = KINDS.index("fresh")
    record = next(record for record in snapshot.roots if record.path == os.fsencode(roots[slot % 2]))
    folder = repository.trees.entry(record.entry.content, b"fresh%d" % slot)
    entries = repository.trees.entries(folder.content) if folder is not None else ()
    return {entry.name for entry in entries if entry.flags & FLAG_OPEN_FOR_WRITING}


def _disturbed(site: Site, seconds: float) -> None:
    threads = [threading.Thread(target=site.cut_at_random), threading.Thread(target=site.disturb_captures)]
    timer = threading.Timer(seconds, site.over.set)
    for thread in (*threads, timer):
        thread.start()
    try:
        site.judge_all()
    finally:
        site.over.set()
        timer.cancel()
        for thread in threads:
            thread.join()


def _compare_the_end(site: Site, out: Path) -> list[str]:
    """Check, with all writers at rest, that a restored snapshot equals both roots and all verify."""
    wrong = []
    snapshot = site.live.snapshot()
    try:
        site.live.run("verify", "--all", "--checksum")
    except CommandFailed as error:
        wrong.append(str(error))
    for root in site.roots:
        site.live.run("restore", "-s", snapshot, "-p", str(root), "-d", str(out))
        try:
            assert_same(manifest(root), manifest(out / root.name))
        except AssertionError as error:
            wrong.append(f"restored {root.name}: {error}")
    return wrong


def _figures(site: Site, end: list[str]) -> list[Figure]:
    idle = () if site.snapshots else ("no snapshot was committed while the writers worked",)
    return [
        Figure("snapshots checked", site.snapshots, tuple(idle)),
        Figure("records checked in them", site.records, tuple(site.wrong)),
        Figure("operations of the writers", sum(site.counters.all_returned()), tuple(site.errors)),
        Figure("captures paused", site.paused),
        Figure("captures killed", site.killed),
        Figure("snapshots given up, their captures killed", site.failed),
        Figure("snapshots not flushed in time", site.unflushed),
        Figure("roots restored and compared at the end", len(site.roots), tuple(end)),
    ]
