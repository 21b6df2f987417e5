"""Years of one host: commits and removals of a writer whose log is never collected, in memory.

    PYTHONPATH=tests:. python -m support.remote_years 1000000

prints what the log takes then, and what opening it costs.
"""

from __future__ import annotations

import sys
import tempfile
import time
import tracemalloc
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from support.remote_world import REPOSITORY, Bucket, Ids, MemoryState, sealer

from ciuic.remote.log_reader import LogReader, Rounds
from ciuic.remote.object_names import manifest_name
from ciuic.remote.objects.model import ObjectInfo
from ciuic.remote.writer_log import LogRotation, WriterLog

_KEPT_ENTRIES = 8192
_PAGE = 1000


class Years(NamedTuple):
    """A bucket after many commits."""

    bucket: Bucket
    kept: set[str]
    """Manifests of the snapshots that exist."""
    reader: LogReader
    """The writer's own, as an uploader keeps it."""


class LongBucket(Bucket):
    """Bucket of logs with millions of names, which keeps the content of the newest alone."""

    def __init__(self) -> None:
        super().__init__()
        self._names: list[str] = []
        self._recent: deque[str] = deque()

    def create(self, name: str, data: bytes) -> bool:
        if not super().create(name, data):
            return False
        insort(self._names, name)
        self._recent.append(name)
        if len(self._recent) > _KEPT_ENTRIES:
            self.objects[self._recent.popleft()] = (b"", 0)
        return True

    def page(self, prefix: str, after: str, count: int) -> list[ObjectInfo]:
        """Return one page of a listing, of as many names as stores give."""
        self.requests += 1
        begin = max(bisect_left(self._names, prefix), bisect_right(self._names, after))
        found = self._names[begin : begin + min(count, _PAGE)]
        return [ObjectInfo(name, len(self.objects[name][0]), 0) for name in found if name.startswith(prefix)]

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        while page := self.page(prefix, after, _PAGE):
            yield from page
            after = page[-1].name


def live_for_years(commits: int, keep: int, *, max_entries: int = 1024, cache: str | None = None) -> Years:
    """Commit so many snapshots and keep the newest, by one entry for each removal, as retention does.

    Args:
        commits: Number of snapshots.
        keep: Number of snapshots that retention keeps.
        max_entries: Entries after which the writer sums up its log.
        cache: Cache of a reader that looks now and then; None for none.
    """
    ids = Ids("years")
    bucket, seals = LongBucket(), sealer(ids)
    rounds = Rounds(bucket, seals)
    log = WriterLog(
        bucket,
        seals,
        MemoryState(),  # type: ignore[arg-type]
        rounds,
        host="host",
        repository=REPOSITORY,
        new_id=ids.hex,
    )
    log.hello()
    reader = LogReader(bucket, seals, threads=1, skip_damaged=True)
    own = LogRotation(bucket, seals, log, reader, max_entries=max_entries, new_id=ids.hex)
    kept: deque[str] = deque()
    for number in range(commits):
        name = manifest_name(job="files", epoch=0, step=0, host="host", random=ids.hex())
        assert log.commit("cs-abcdef", name, "ab" * 32, checked=rounds.version)
        kept.append(name)
        if len(kept) > keep:
            log.remove([kept.popleft()])
        own.tidy()
        if cache is not None and number % (commits // 4 or 1) == 0:
            LogReader(bucket, seals, cache_path=cache).refresh()
    return Years(bucket, set(kept), reader)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(commits: int, keep: int = 10_000) -> None:
    """Print what it costs to open the log after so many commits."""
    with tempfile.TemporaryDirectory() as directory:
        began = time.monotonic()
        years = live_for_years(commits, keep, cache=f"{directory}/logs")
        _say(f"{commits} commits in {time.monotonic() - began:.0f} s, {len(years.bucket.objects)} objects")
        for what, cache in (("cold", None), ("first", f"{directory}/logs"), ("warm", f"{directory}/logs")):
            before, began, used = years.bucket.requests, time.monotonic(), time.process_time()
            reader = LogReader(years.bucket, sealer(Ids("reader")), cache_path=cache)
            reader.refresh()
            assert set(reader.live()) == years.kept
            _say(
                f"{what}: {time.monotonic() - began:.2f} s, {time.process_time() - used:.2f} s of processor time, "
                f"{years.bucket.requests - before} requests"
            )
        tracemalloc.start()
        reader = LogReader(years.bucket, sealer(Ids("reader")), cache_path=f"{directory}/logs")
        reader.refresh()
        _say(f"memory of an opening: {tracemalloc.get_traced_memory()[1] >> 20} MiB at most")


if __name__ == "__main__":
    main(int(sys.argv[1]), *map(int, sys.argv[2:]))
