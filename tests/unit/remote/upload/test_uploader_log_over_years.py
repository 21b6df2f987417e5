"""Tests of an uploader's own log over years: short, and never short of a snapshot."""

from __future__ import annotations

from pathlib import Path

from support.remote_world import REPOSITORY, Bucket, Ids, MemoryState, sealer
from support.remote_years import live_for_years

from ciuic.remote.documents import GivenUp
from ciuic.remote.log_reader import LogReader, Rounds
from ciuic.remote.object_names import manifest_name, parse_log_entry
from ciuic.remote.writer_log import LogRotation, WriterLog


def test_a_log_without_collections_is_read_in_few_requests(tmp_path: Path) -> None:
    """After 6,000 commits with retention a reader asks for the last sum and what follows, and lists no page of known entries."""
    cache = str(tmp_path / "logs")
    years = live_for_years(6000, 50, max_entries=100, cache=cache)
    assert len(years.bucket.objects) > 11_000
    seals = sealer(Ids("reader"))
    for path, most in ((None, 12 + 120), (cache, 8 + 120), (cache, 3)):
        before = years.bucket.requests
        reader = LogReader(years.bucket, seals, threads=1, cache_path=path)
        reader.refresh()
        assert set(reader.live()) == years.kept
        assert years.bucket.requests - before <= most
        (summary,) = reader.logs.values()
        assert len(summary.committed) + len(summary.removed) < 600


def test_snapshots_that_are_all_kept_go_to_several_logs() -> None:
    """No log has more snapshots than one entry can name, and none of them is missing."""
    ids = Ids("kept")
    bucket, seals = Bucket(), sealer(ids)
    rounds = Rounds(bucket, seals)
    log = WriterLog(bucket, seals, MemoryState(), rounds, host="h", repository=REPOSITORY)  # type: ignore[arg-type]
    log.hello()
    own = LogRotation(
        bucket, seals, log, LogReader(bucket, seals, threads=1), max_entries=10, max_snapshots=25
    )
    names = [
        manifest_name(job="j", epoch=0, step=number, host="h", random=ids.hex()) for number in range(200)
    ]
    for number, name in enumerate(names):
        while not log.commit("cs-abcdef", name, "ab" * 32, checked=rounds.version):
            pass
        if number == 20:
            log.remove([names[0]], [GivenUp(REPOSITORY, "cs-abcdef")])
        own.tidy()
    reader = LogReader(bucket, seals, threads=1)
    reader.refresh()
    assert set(reader.live()) == set(names[1:])
    assert reader.given_up(REPOSITORY) == {"cs-abcdef"}
    assert len(reader.logs) >= 4
    assert max(len(summary.committed) for summary in reader.logs.values()) <= 25 + 11 + 1
    assert all(parse_log_entry(name) for name in bucket.objects)
