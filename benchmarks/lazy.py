"""Lazy restore next to a plain one, from a remote whose every request takes a round trip of 20 ms.

    python -m benchmarks.lazy                                   the figures that are reported
    python -m benchmarks.lazy --mib 32 --small 50 --rounds 1    smoke test; its figures mean nothing

Each turn is a process of its own with an empty cache, and the two take turns. *tree*: from the start of the process until the mount
answers. *first*: until another process has read a file of 1 MiB that the restore would fetch late by itself. *whole*: until the
directory is plain and durable. The delay is one of the store's interface, without a limit of bandwidth; the store is a directory,
and is not encrypted.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Final

_FILES: Final = 16
_BLOCK: Final = 262144


class DelayedObjects:
    """Store whose requests take a while."""

    def __init__(self, inner: Any, seconds: float) -> None:
        self._inner = inner
        self._seconds = seconds

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name in ("url", "close"):
            return found

        def delayed(*arguments: Any, **options: Any) -> Any:
            time.sleep(self._seconds)
            return found(*arguments, **options)

        return delayed


def make(top: Path, mib: int, small: int) -> None:
    """Make a tree, its snapshot and the remote."""
    from support.restoring import take

    from ciuic.config import RemoteConfig
    from ciuic.remote.access import init_remote
    from ciuic.remote.objects.directory_objects import DirectoryObjects
    from ciuic.remote.replication import Replication
    from ciuic.remote.uploader import Labels, Persistence
    from ciuic.repository import Repository
    from ciuic.repository.pack_directory import Packs

    rng = random.Random(1)
    root = top / "root"
    (root / "small").mkdir(parents=True)
    for number in range(small):
        (root / "small" / f"{number:05d}").write_bytes(rng.randbytes(4096))
    for number in range(_FILES):
        with open(root / f"checkpoint-{number:02d}", "wb") as file:
            for _ in range(mib // _FILES):
                file.write(rng.randbytes(1 << 20))
    (root / "first").write_bytes(rng.randbytes(1 << 20))
    # The oldest: fetched last.
    os.utime(root / "first", (1, 1))
    (top / "state").mkdir()
    remote = init_remote(DirectoryObjects(str(top / "remote"), make=True), master=None, block_size=_BLOCK)
    with Repository.create(top / "repository", block_size=_BLOCK, identity=remote.identity) as repository:
        take(repository, root)
        packs = Packs(f"{repository.path}/packs", bytes.fromhex(repository.id), repository.config.hash)
        config = RemoteConfig(name="remote", url="memory://unused")
        Replication(
            *(repository, packs, config, top / "state"),
            host="host",
            persist=Persistence(threading.Event()),
            labels=lambda repository, snapshot: Labels(),
        ).catch_up(remote)


def restore(top: Path, way: str, dest: Path, cache: Path, delay_seconds: float) -> None:
    """Restore in this process, as the command does."""
    if way == "lazy":
        from ciuic.lazy import preload

        preload()
    from ciuic.remote.access import open_remote
    from ciuic.remote.objects.directory_objects import DirectoryObjects
    from ciuic.remote.reading.opening import read_remote

    objects: Any = DelayedObjects(DirectoryObjects(str(top / "remote")), delay_seconds)
    source = os.fsencode(top / "root")
    with read_remote(open_remote(objects, []), cache_root=cache) as opened:
        snapshot = opened.snapshots.load(opened.snapshots.resolve("latest"))
        repository = opened.repository_of([snapshot.id])
        if way == "plain":
            from ciuic.restore import execute, plan_restore

            execute(plan_restore(repository, snapshot, [source], os.fsencode(dest), special=True))
            return
        from ciuic.lazy.service import LazyRestore

        lazy = LazyRestore(
            repository, snapshot, source, os.fsencode(dest), special=True, status_directory=cache / "status"
        )
        lazy.run(lambda status: print("ready", flush=True))


def turn(top: Path, way: str, delay_ms: float, number: int) -> dict[str, float]:
    """Run one restore, and measure it."""
    dest, cache = top / f"dest-{number}", top / f"cache-{number}"
    cache.mkdir()
    began = time.monotonic()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "benchmarks.lazy", "--child", way, "--top", str(top)),
            *("--dest", str(dest), "--cache", str(cache), "--delay-ms", str(delay_ms)),
        ],
        stdout=subprocess.PIPE,
    )
    found: dict[str, float] = {}
    assert process.stdout is not None
    if way == "lazy" and process.stdout.readline():
        found["tree"] = time.monotonic() - began
        subprocess.run(
            ["timeout", "60", "cat", dest / "root" / "first"], stdout=subprocess.DEVNULL, check=True
        )
        found["first"] = time.monotonic() - began
    process.stdout.read()
    if process.wait():
        raise RuntimeError(f"the {way} restore ended with {process.returncode}")
    found["whole"] = time.monotonic() - began
    subprocess.run(["diff", "-r", top / "root", dest / "root"], check=True)
    shutil.rmtree(dest)
    shutil.rmtree(cache)
    return found


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--small", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--delay-ms", type=float, default=20.0)
    parser.add_argument("--place", type=Path, default=None, help="directory for everything")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    for name in ("--top", "--dest", "--cache"):
        parser.add_argument(name, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        restore(options.top, options.child, options.dest, options.cache, options.delay_ms / 1000)
        return
    with tempfile.TemporaryDirectory(dir=options.place) as folder:
        top = Path(folder)
        make(top, options.mib, options.small)
        turns: dict[str, list[dict[str, float]]] = {"plain": [], "lazy": []}
        for number in range(2 * options.rounds):
            way = ("plain", "lazy")[number % 2]
            turns[way].append(turn(top, way, options.delay_ms, number))
    lazy, plain = turns["lazy"], [found["whole"] for found in turns["plain"]]
    print(
        f"{options.mib} MiB in {_FILES} files, {options.small} files of 4 KiB, {options.delay_ms:g} ms a request"
    )
    for name in ("tree", "first", "whole"):
        values = [found[name] for found in lazy]
        print(f"lazy, {name:<6} {statistics.median(values):6.2f} s  ({min(values):.2f} to {max(values):.2f})")
    print(f"plain, whole {statistics.median(plain):6.2f} s  ({min(plain):.2f} to {max(plain):.2f})")
    ratio = statistics.median([found["whole"] for found in lazy]) / statistics.median(plain)
    print(f"whole, lazy / plain {ratio:.2f}")


if __name__ == "__main__":
    main()
