"""Time until `ciuic list` and `ciuic checkpoints` show stored verdicts: `python -m benchmarks.verdicts`.

A repository of 1,000 snapshots with 100,000 files each, twenty checkpoints among them of which each snapshot replaces one. Wall and
processor time of whole commands, the median of several, with the verdicts stored and, for `checkpoints`, judged anew.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from support.checkpoint_files import FORMATS
from support.cli_repository import FIRST_NS, SECOND_NS, directory, store_file, store_tree

from ciuic.history import judge_snapshot
from ciuic.repository import Repository
from ciuic.types import RootRecord, SnapshotDraft, SnapshotId
from ciuic.verdicts.records import KEY_VARIABLE, VerdictRecords, own_key
from ciuic.verdicts.verdict import FileVerdicts

_FILES_OF_A_DIRECTORY = 1000
_CHECKPOINTS = 20


def _fill(path: Path, snapshots: int, files: int) -> None:
    weights = FORMATS["safetensors"].make(random.Random(1))
    with Repository.create(path) as repository, repository.writer() as writer:
        one = store_file(writer, repository.block_size, b"", b"content")
        folder = {b"f%05d" % number: one for number in range(_FILES_OF_A_DIRECTORY)}
        tree = store_tree(
            writer,
            repository.block_size,
            {b"d%04d" % n: folder for n in range(files // _FILES_OF_A_DIRECTORY)},
        )
        kept: dict[bytes, object] = {}
        for number in range(snapshots):
            time_ns = FIRST_NS + number * 3600 * SECOND_NS
            name = b"checkpoint-%d.safetensors" % number
            # Another content each time, and a torn one now and then.
            content = weights + number.to_bytes(4, "big") if number % 7 else weights[:-5]
            kept[name] = (content, {"mtime_ns": time_ns, "ctime_ns": time_ns, "ino": 1000 + number})
            kept.pop(b"checkpoint-%d.safetensors" % (number - _CHECKPOINTS), None)
            below = store_tree(writer, repository.block_size, kept)  # type: ignore[arg-type]
            tree = writer.update_tree(tree.id, {b"checkpoints": directory(b"checkpoints", below)})
            root = RootRecord(path=b"/data", entry=directory(b"", tree), mode="tracked", not_held=0)
            writer.commit(
                SnapshotDraft(
                    id=SnapshotId.parse(f"cs-{number:06x}"), time_ns=time_ns, host="h", roots=(root,)
                )
            )


def _judge(path: Path) -> float:
    """Store the verdicts on every snapshot, and return the seconds that it took."""
    began = time.perf_counter()
    with Repository.open(path) as repository:
        records, known = VerdictRecords(repository, own_key()), FileVerdicts()
        snapshots, _ = repository.snapshots.load_all()
        for snapshot in snapshots:
            records.write(judge_snapshot(repository, snapshots, snapshot, known))
    return time.perf_counter() - began


def _time(path: Path, rounds: int, *words: str, **environment: str) -> tuple[float, float]:
    """Return the medians of wall and processor seconds of a command."""
    wall, processor = [], []
    for _ in range(rounds):
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(
            [Path(sys.executable).with_name("ciuic"), "--repo", path, *words],
            env={**os.environ, "CIUIC_CONFIG": "/dev/null", **environment},
            cwd="/",
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        wall.append(time.perf_counter() - began)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        processor.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return statistics.median(wall), statistics.median(processor)


def main() -> None:
    """Make the repository, time the commands, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verdicts", description=main.__doc__)
    parser.add_argument("--snapshots", type=int, default=1000)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ciuic-bench-", dir="/var/tmp") as top:
        path = Path(top) / "repository"
        os.environ[KEY_VARIABLE] = f"{top}/key"
        _fill(path, options.snapshots, options.files)
        seconds = _judge(path)
        stored = sum(one.stat().st_size for one in (path / "verdicts").iterdir())
        print(f"{options.snapshots} snapshots of {options.files} files")
        print(f"judged and stored: {seconds / options.snapshots * 1e3:.1f} ms a snapshot, {stored >> 10} KiB")
        for label, words, environment in (
            ("list", ("list",), {}),
            ("list, no verdicts", ("list",), {KEY_VARIABLE: "/none"}),
            ("checkpoints", ("checkpoints",), {}),
            ("checkpoints, judged anew", ("checkpoints",), {KEY_VARIABLE: "/none"}),
        ):
            wall, processor = _time(path, options.rounds, *words, **environment)
            print(f"{label:26} {wall:.3f} s wall, {processor:.3f} s of processor")


if __name__ == "__main__":
    main()
