"""What a process keeps resident for each chunk of the repository that it has in use, in bytes: the bar is 60.

    make bench-store-memory                        a million chunks; two minutes
    make bench-store-memory ARGS="--chunks 100000"

The chunks compress well, so that the repository is small; their number is what counts. Each figure is the kernel's peak of a process
(VmHWM) that works on the whole repository, less the peak of the same on a repository of a thousand chunks.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ciuic.gc import prune
from ciuic.repository import Repository
from ciuic.repository.packing import Content
from ciuic.types import Entry, MapRef, RootRecord, SnapshotDraft, SnapshotId
from ciuic.verify import verify_snapshots

_BLOCK_BYTES: Final = 4096
_PACK_BYTES: Final = 1 << 20
"""So that as many chunks are in a pack as in one of 64 MiB with chunks of 3 KB: a pack is listed as a whole."""
_FEW: Final = 1_000
_TOGETHER: Final = 1024
_BAR_BYTES: Final = 60
_FILE_MODE: Final = 0o100600
_DIRECTORY_MODE: Final = 0o040700


def _contents(start: int, stop: int) -> list[Content]:
    return [
        Content(number.to_bytes(8, "little") * (_BLOCK_BYTES // 8)) for number in range(start + 1, stop + 1)
    ]


def make(path: Path, chunks: int) -> None:
    """A repository with one file of so many blocks, all different."""
    with (
        Repository.create(path, block_size=_BLOCK_BYTES) as repository,
        repository.writer(pack_bytes=_PACK_BYTES) as writer,
    ):
        found = MapRef(b"", 0)
        for start in range(0, chunks, _TOGETHER):
            ids = writer.put_chunks(_contents(start, min(chunks, start + _TOGETHER)))
            found = writer.update_block_map(found, start + len(ids), dict(enumerate(ids, start)))
        size_bytes = chunks * _BLOCK_BYTES
        file = Entry(
            name=b"f",
            mode=_FILE_MODE,
            size_bytes=size_bytes,
            content=found.content,
            map_height=found.map_height,
        )
        tree = writer.update_tree(b"", {b"f": file})
        root = Entry(name=b"", mode=_DIRECTORY_MODE, content=tree.id, total_files=1, total_bytes=size_bytes)
        roots = (RootRecord(path=b"/r", entry=root),)
        writer.commit(SnapshotDraft(id=SnapshotId("cs-000001"), time_ns=1, host="bench", roots=roots))


def _store_again(path: Path, chunks: int) -> None:
    """As a capture does that finds everything stored: every chunk is looked up."""
    with Repository.open(path) as repository, repository.writer() as writer:
        for start in range(0, chunks, _TOGETHER):
            writer.put_chunks(_contents(start, min(chunks, start + _TOGETHER)))


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


def _measured(name: str, path: Path, chunks: int) -> int:
    command = [sys.executable, "-m", "benchmarks.store.memory", "--only", name, "--at", str(path)]
    done = subprocess.run([*command, "--chunks", str(chunks)], stdout=subprocess.PIPE, check=True)
    return int(done.stdout)


def main() -> int:
    """0 when the bar is met."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.store.memory", description="Resident memory for a chunk."
    )
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--only", choices=sorted(WORK), help=argparse.SUPPRESS)
    parser.add_argument("--at", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only:
        WORK[given.only](given.at, given.chunks)
        print(_peak_bytes())
        return 0
    missed = False
    with tempfile.TemporaryDirectory(dir="/var/tmp") as place:
        many, few = Path(place, "many"), Path(place, "few")
        make(many, given.chunks)
        make(few, _FEW)
        for name in WORK:
            peak, least = _measured(name, many, given.chunks), _measured(name, few, _FEW)
            each = (peak - least) / (given.chunks - _FEW)
            missed |= each > _BAR_BYTES
            print(
                f"{name}: {peak / 1e6:.1f} MB, {least / 1e6:.1f} with {_FEW:,} chunks: {each:.1f} bytes a chunk"
            )
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
