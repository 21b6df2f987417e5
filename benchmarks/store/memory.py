"""Resident memory per chunk of the repository that a process has in use, in bytes; the bar is 60.

    make bench-store-memory                        a million chunks; two minutes
    make bench-store-memory ARGS="--chunks 100000"

The chunks compress well, which keeps the repository small: only their number matters. Each figure is the peak
resident memory (VmHWM) of a process that works on the whole repository, minus the peak of the same work on a
repository of a thousand chunks.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ciuic.maintenance.prune import prune
from ciuic.maintenance.verify import verify_snapshots
from ciuic.repository import Repository
from ciuic.repository.compression import Content
from ciuic.types import Entry, MapRef, RootRecord, SnapshotDraft, SnapshotId

_BLOCK_BYTES: Final = 4096
_PACK_BYTES: Final = 1 << 20
"""Pack size that gives as many chunks as 64 MiB with chunks of 3 KB: a pack is listed as a whole."""
_BASELINE_CHUNKS: Final = 1_000
_BATCH_CHUNKS: Final = 1024
_BAR_BYTES: Final = 60
_FILE_MODE: Final = 0o100600
_DIRECTORY_MODE: Final = 0o040700


def _contents(start: int, stop: int) -> list[Content]:
    return [
        Content(number.to_bytes(8, "little") * (_BLOCK_BYTES // 8)) for number in range(start + 1, stop + 1)
    ]


def make(path: Path, chunks: int) -> None:
    """Create a repository with one file of ``chunks`` different blocks."""
    with (
        Repository.create(path, block_size=_BLOCK_BYTES) as repository,
        repository.writer(pack_bytes=_PACK_BYTES) as writer,
    ):
        block_map = MapRef(b"", 0)
        for start in range(0, chunks, _BATCH_CHUNKS):
            ids = writer.put_chunks(_contents(start, min(chunks, start + _BATCH_CHUNKS)))
            block_map = writer.update_block_map(block_map, start + len(ids), dict(enumerate(ids, start)))
        size_bytes = chunks * _BLOCK_BYTES
        file = Entry(
            name=b"f",
            mode=_FILE_MODE,
            size_bytes=size_bytes,
            content=block_map.content,
            map_height=block_map.map_height,
        )
        tree = writer.update_tree(b"", {b"f": file})
        root = Entry(name=b"", mode=_DIRECTORY_MODE, content=tree.id, total_files=1, total_bytes=size_bytes)
        roots = (RootRecord(path=b"/r", entry=root),)
        writer.commit(SnapshotDraft(id=SnapshotId("cs-000001"), time_ns=1, host="bench", roots=roots))


def _store_again(path: Path, chunks: int) -> None:
    """Look up every chunk, as a capture does that finds all of them stored."""
    with Repository.open(path) as repository, repository.writer() as writer:
        for start in range(0, chunks, _BATCH_CHUNKS):
            writer.put_chunks(_contents(start, min(chunks, start + _BATCH_CHUNKS)))


def _verify(path: Path, chunks: int) -> None:
    with Repository.open(path) as repository:
        assert not verify_snapshots(repository, checksum=True).damages


def _prune(path: Path, chunks: int) -> None:
    with Repository.open(path) as repository:
        prune(repository)


WORK: dict[str, Callable[[Path, int], None]] = {
    "capture that finds all of it stored": _store_again,
    "verify --checksum": _verify,
    "prune": _prune,
}


def _peak_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmHWM:")[1].split()[0]) << 10


def _peak_bytes_of_child(name: str, path: Path, chunks: int) -> int:
    command = [sys.executable, "-m", "benchmarks.store.memory", "--only", name, "--at", str(path)]
    completed = subprocess.run([*command, "--chunks", str(chunks)], stdout=subprocess.PIPE, check=True)
    return int(completed.stdout)


def main() -> int:
    """Return 0 if every process meets the bar, else 1."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.store.memory", description="Resident memory for a chunk."
    )
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--only", choices=sorted(WORK), help=argparse.SUPPRESS)
    parser.add_argument("--at", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        WORK[arguments.only](arguments.at, arguments.chunks)
        print(_peak_bytes())
        return 0
    missed = False
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        many, few = Path(directory, "many"), Path(directory, "few")
        make(many, arguments.chunks)
        make(few, _BASELINE_CHUNKS)
        for name in WORK:
            peak, baseline = (
                _peak_bytes_of_child(name, many, arguments.chunks),
                _peak_bytes_of_child(name, few, _BASELINE_CHUNKS),
            )
            bytes_per_chunk = (peak - baseline) / (arguments.chunks - _BASELINE_CHUNKS)
            missed |= bytes_per_chunk > _BAR_BYTES
            print(
                f"{name}: {peak / 1e6:.1f} MB, {baseline / 1e6:.1f} with {_BASELINE_CHUNKS:,} chunks: {bytes_per_chunk:.1f} bytes a chunk"
            )
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
