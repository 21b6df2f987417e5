"""Cost of opening a large remote with a warm cache: 10,000 snapshots, 5 TB in 320,000 packs, 20 million chunks.

    python -m benchmarks.remote_open                                     the figures that are reported
    python -m benchmarks.remote_open --snapshots 500 --packs 2000        smoke test; its figures mean nothing

The remote is a directory with real logs and manifests, and no packs: the index in the cache is filled with random rows, as
their tables would have filled it. *list*: ``ciuic --repo URL list``. *lookup*: a process that opens the remote, and looks up
a hundred chunks as a restore does.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from ciuic.remote.access import Remote, add_slot, init_remote, open_remote
from ciuic.remote.documents import (
    LogCommit,
    LogHello,
    RemoteManifest,
    encode_log_entry,
    encode_manifest,
    object_digest,
)
from ciuic.remote.object_names import log_entry_name, manifest_name, new_hex_id, new_pack_ref
from ciuic.remote.objects.opening import open_objects
from ciuic.remote.reading.opening import read_remote
from ciuic.remote.remote_index import PackTables, RemotePack
from ciuic.remote.sealing.key_slots import new_key_text, read_key_file
from ciuic.remote.sealing.sealer import MasterKey
from ciuic.repository.index_database import IndexDatabase
from ciuic.repository.model import PackRecord
from ciuic.repository.snapshot_format import encode_snapshot
from ciuic.types import ChunkId, Entry, RootRecord, Snapshot, SnapshotId

_BLOCK: Final = 262144
_CHUNKS_IN_PACK: Final = 64
_HOUR_NS: Final = 3600 * 10**9
_PACKS_AT_ONCE: Final = 4000
_RUNS: Final = 5


def make_remote(top: Path, snapshots: int) -> Remote:
    """Return a sealed remote with so many snapshots of one host."""
    remote = init_remote(
        open_objects(f"file://{top}/remote", make=True), master=MasterKey.generate(), block_size=_BLOCK
    )
    (top / "key").write_bytes(new_key_text())
    (top / "key").chmod(0o600)
    add_slot(remote, "host", read_key_file(str(top / "key")))
    # Without the store's fsync of each object: the files are made, not measured.
    place = top / "remote"
    writer, repository, previous = new_hex_id(), new_hex_id(), ""
    hello = LogHello(nonce=new_hex_id(), host="bench", repository=repository)
    _write(place / log_entry_name(writer, 0), encode_log_entry(remote.sealer, writer, 0, hello))
    for number in range(snapshots):
        id_ = SnapshotId(f"cs-{number:06x}")
        entry = Entry(name=b"", mode=0o40755, content=os.urandom(16), total_files=12, total_bytes=512 << 20)
        snapshot = Snapshot(
            id=id_,
            time_ns=1_700_000_000 * 10**9 + number * _HOUR_NS,
            host="bench",
            roots=(RootRecord(path=b"/data/run", entry=entry),),
            size_bytes=512 << 20,
            files=12,
        )
        name = manifest_name(job="run", epoch=number // 100, step=number, host="bench")
        manifest = RemoteManifest(
            snapshot=encode_snapshot(snapshot, repository),
            packs=tuple(new_pack_ref("data") for _ in range(32)),
            writer=writer,
            host="bench",
            job="run",
            epoch=number // 100,
            step=number,
            previous=previous,
        )
        data = encode_manifest(remote.sealer, name, manifest)
        previous = object_digest(data)
        _write(place / name, data)
        commit = LogCommit(
            nonce=new_hex_id(),
            repository=repository,
            snapshot=str(id_),
            manifest=name,
            digest=previous,
            packs=manifest.packs,
        )
        entry_name = log_entry_name(writer, number + 1)
        _write(place / entry_name, encode_log_entry(remote.sealer, writer, number + 1, commit))
    return remote


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def fill_index(path: str, packs: int) -> None:
    """Fill an index with the rows of so many packs of 64 chunks."""
    database = IndexDatabase.open(path, "write")
    tables = PackTables(database)
    rng = random.Random(1)
    for first in range(0, packs, _PACKS_AT_ONCE):
        batch = []
        for number in range(first, min(first + _PACKS_AT_ONCE, packs)):
            ids = rng.randbytes(16 * _CHUNKS_IN_PACK)
            records = [
                PackRecord(
                    ChunkId(ids[16 * at : 16 * at + 16]), 64 + at * (_BLOCK + 16), _BLOCK, _BLOCK, 0, 0, b""
                )
                for at in range(_CHUNKS_IN_PACK)
            ]
            batch.append((RemotePack(new_pack_ref("data"), 16 << 20, number, len(records)), records))
        tables.add(batch, unsorted=True)
    tables.sort()
    tables.set_rounds_finished(-1)
    database.close()


def _child(top: Path) -> None:
    """Open the remote and look up a hundred chunks."""
    remote = open_remote(open_objects(f"file://{top}/remote"), [read_key_file(str(top / "key"))])
    with read_remote(remote, cache_root=top / "cache" / "ciuic" / "remotes") as opened:
        rng = random.Random(1)
        found = opened.readers[0].lookup.find_many([rng.randbytes(16) for _ in range(100)])
        assert len(found) == 100, len(found)


def measure(top: Path, command: list[str]) -> tuple[float, float, float]:
    """Return medians of seconds and processor seconds of a command, and the largest memory in MiB."""
    variables = {
        **os.environ,
        "XDG_CACHE_HOME": str(top / "cache"),
        "CIUIC_REMOTE_KEY_FILE": str(top / "key"),
    }
    turns = []
    for _ in range(_RUNS):
        began = time.monotonic()
        process = subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0, command
        turns.append((time.monotonic() - began, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024))
    return (
        statistics.median(turn[0] for turn in turns),
        statistics.median(turn[1] for turn in turns),
        max(turn[2] for turn in turns),
    )


def main() -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(prog="benchmarks.remote_open", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--snapshots", type=int, default=10_000)
    parser.add_argument("--packs", type=int, default=320_000)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        _child(options.child)
        return 0
    with tempfile.TemporaryDirectory(prefix="ciuic-open-") as folder:
        top = Path(folder)
        remote = make_remote(top, options.snapshots)
        (top / "cache").mkdir(mode=0o700)
        ciuic = str(Path(sys.executable).with_name("ciuic"))
        list_ = [ciuic, "--repo", f"file://{top}/remote", "list"]
        # Fills the cache of manifests and logs.
        measure(top, list_)
        (cache,) = (top / "cache" / "ciuic" / "remotes").glob("*/*")
        index = cache / "index-0.sqlite"
        fill_index(str(index), options.packs)
        ids = options.packs * _CHUNKS_IN_PACK
        print(
            f"{options.snapshots} snapshots, {options.packs} packs, {ids} chunks; warm cache, medians of {_RUNS}; "
        )
        print(f"remote {remote.id}; index {index.stat().st_size / ids:.0f} bytes a chunk on the disk\n")
        print("| | s | processor s | memory MiB |\n| --- | --- | --- | --- |")
        lookup = [sys.executable, "-m", "benchmarks.remote_open", "--child", str(top)]
        for name, command in (("list", list_), ("lookup", lookup)):
            measure(top, command)
            seconds, processor, memory = measure(top, command)
            print(f"| {name} | {seconds:.2f} | {processor:.2f} | {memory:.0f} |")
        print(f"\nLoad {os.getloadavg()[0]:.1f}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
