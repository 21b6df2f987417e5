"""Readers beside a busy writer, and beside one that is killed, get the right bytes or a clear error."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

from support.small_repository import BLOCK, content, make_snapshot, read_files

from ciuic.errors import CiuicError
from ciuic.repository import Repository
from ciuic.types import SnapshotId

_CHILD = """
import random, sys
sys.path.insert(0, sys.argv[2]); sys.path.insert(0, sys.argv[3])
from support.small_repository import content, make_snapshot
from ciuic.repository import Repository, Walker
from ciuic.types import SnapshotId
rounds, dice = int(sys.argv[4]), random.Random(int(sys.argv[5]))
with Repository.open(sys.argv[1]) as repository:
    for number in range(rounds):
        with repository.writer(pack_bytes=30_000, wait_seconds=30) as writer:
            files = {b"%d" % seed: content(seed, 4) for seed in dice.sample(range(20), 5)}
            snapshot = make_snapshot(writer, f"cs-{dice.getrandbits(40):010x}", files, time_ns=number + 2)
            print(snapshot.id, *sorted(int(name) for name in files), flush=True)
            ids = repository.snapshots.ids()
            if len(ids) > 4:
                writer.remove_snapshots(dice.sample([i for i in ids if i != "cs-000001"], 2))
                live = set()
                for id_ in repository.snapshots.ids():
                    live |= {r.id for r in Walker(repository).walk(repository.snapshots.load(id_))}
                for pack in repository.packs():
                    if dice.random() < 0.7:
                        writer.rewrite_pack(pack.number, live)
"""
_OPENS = """
import sys
from ciuic.repository import Repository
for number in range(1 << 40):
    with Repository.open(sys.argv[1]) as repository:
        listed = len(repository.snapshots.ids())
    if not number:
        print(listed, flush=True)
"""
_COMMITS = """
import sys
sys.path.insert(0, sys.argv[2])
from support.small_repository import content, make_snapshot
from ciuic.repository import Repository
with Repository.open(sys.argv[1]) as reader, Repository.open(sys.argv[1]) as repository:
    for number in range(int(sys.argv[3])):
        reader.snapshots.ids()
        with repository.writer(wait_seconds=30) as writer:
            make_snapshot(writer, f"cs-1{number:05x}", {b"a": content(number, 4)}, time_ns=number + 2)
"""
FILES = {b"a": content(100, 6), b"b": content(101, 30)}


def _start(top: Path, rounds: int, seed: int) -> subprocess.Popen[str]:
    here = Path(__file__).parents[1]
    command = [sys.executable, "-c", _CHILD, str(top), str(here), str(here.parent), str(rounds), str(seed)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _make(top: Path) -> None:
    with Repository.create(top, block_size=BLOCK) as repository, repository.writer() as writer:
        make_snapshot(writer, "cs-000001", FILES)


def test_a_process_that_reads_may_commit_while_others_open(tmp_path: Path) -> None:
    """No commit is lost, and no process dies, where a process that reads commits beside others that open and list."""
    top = tmp_path / "r"
    _make(top)
    tests = str(Path(__file__).parents[1])
    opening = [
        subprocess.Popen([sys.executable, "-c", _OPENS, str(top)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        listed = [int((one.stdout or sys.stdin).readline()) for one in opening]
        assert listed == [1, 1]
        process = subprocess.run([sys.executable, "-c", _COMMITS, str(top), tests, "150"], timeout=300)
        assert process.returncode == 0
        assert [one.poll() for one in opening] == [None, None]
    finally:
        for one in opening:
            one.kill()
            one.communicate()
    with Repository.open(top) as reader:
        assert len(reader.snapshots.ids()) == 151


def test_readers_during_concurrent_writes(tmp_path: Path) -> None:
    """A reader gets a kept snapshot's exact bytes while snapshots come and go and packs are rewritten."""
    top = tmp_path / "r"
    _make(top)
    reads = others = 0
    with _start(top, 25, 1) as child, Repository.open(top) as reader:
        while child.poll() is None or not reads:
            assert read_files(reader, "cs-000001") == FILES
            reads += 1
            for id_ in reader.snapshots.ids()[:2]:
                try:
                    files = read_files(reader, id_)
                except CiuicError:
                    assert id_ not in reader.snapshots.ids(), "a listed snapshot must be readable"
                    continue
                expected = FILES if id_ == "cs-000001" else {name: content(int(name), 4) for name in files}
                assert files == expected
                others += 1
        assert child.stdout is not None
        child.stdout.read()
        assert child.returncode == 0
    assert reads
    assert others
    with Repository.open(top) as reader:
        assert read_files(reader, "cs-000001") == FILES
        assert list(reader.scrub()) == []
        assert reader.check_index() == []


def test_a_writer_killed_at_any_moment(tmp_path: Path) -> None:
    """Every listed snapshot is whole after each of a dozen SIGKILLs, and the next writer repairs nothing."""
    top = tmp_path / "r"
    _make(top)
    dice = random.Random(3)
    for attempt in range(12):
        with _start(top, 1000, attempt) as child:
            assert child.stdout is not None
            for _ in range(dice.randrange(1, 4)):
                assert child.stdout.readline(), "the writer must be at work when it is killed"
            for _ in range(dice.randrange(20_000)):
                # A few microseconds more each time, so that the kill falls at another place.
                os.getppid()
            assert child.poll() is None
            child.send_signal(signal.SIGKILL)
            child.stdout.read()
        with Repository.open(top) as reader:
            assert reader.snapshots.unreadable() == []
            for id_ in reader.snapshots.ids():
                files = read_files(reader, id_)
                assert files == (
                    FILES if id_ == "cs-000001" else {name: content(int(name), 4) for name in files}
                )
            assert SnapshotId("cs-000001") in reader.snapshots.ids()
            with reader.writer() as writer:
                writer.flush()
            assert reader.check_index() == []
