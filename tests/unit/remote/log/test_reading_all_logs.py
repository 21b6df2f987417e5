"""Tests of reading all logs: nothing missed, nothing read twice, gaps and older states refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.remote_world import REPOSITORY, Bucket, Ids, MeetingBucket, sealer

from ciuic.remote import documents
from ciuic.remote.documents import (
    LiveManifest,
    LogCommit,
    LogEntry,
    LogFence,
    LogHello,
    LogRemove,
    LogState,
    create_entry,
)
from ciuic.remote.errors import DamagedRemote
from ciuic.remote.log_reader import LogReader, RolledBack
from ciuic.remote.object_names import log_entry_name, manifest_name

IDS = Ids("reader")
SEALER = sealer(IDS)
W, V = "11" * 16, "22" * 16
PACK = "d" + "aa" * 16


def name(number: int) -> str:
    return manifest_name(job="j", epoch=0, step=number, host="h", random=f"{number:032x}")


def hello() -> LogHello:
    return LogHello(nonce=IDS.hex(), host="h", repository=REPOSITORY)


def commit(number: int) -> LogCommit:
    return LogCommit(
        nonce=IDS.hex(),
        repository=REPOSITORY,
        snapshot="cs-abcdef",
        manifest=name(number),
        digest="ab" * 32,
        packs=(PACK,),
    )


def remove(*numbers: int) -> LogRemove:
    return LogRemove(nonce=IDS.hex(), manifests=tuple(map(name, numbers)))


def state(*live: int, removed: tuple[int, ...] = ()) -> LogState:
    manifests = (LiveManifest(REPOSITORY, "cs-abcdef", name(number), "ab" * 32) for number in live)
    return LogState(nonce=IDS.hex(), live=tuple(manifests), removed=tuple(map(name, removed)))


def write(bucket: Bucket, writer: str, first: int, *entries: LogEntry) -> None:
    for number, entry in enumerate(entries, start=first):
        assert create_entry(bucket, SEALER, writer, number, entry)


def reader(bucket: Bucket, cache: Path | None = None) -> LogReader:
    return LogReader(bucket, SEALER, cache_path=str(cache) if cache else None)


def test_snapshot_exists_unless_any_log_removes_it() -> None:
    """A snapshot that one log commits is gone when another removes it."""
    bucket = Bucket()
    write(bucket, W, 0, hello(), commit(1), commit(2))
    write(bucket, V, 0, hello(), commit(3), remove(1))
    logs = reader(bucket)
    assert logs.refresh() == ((PACK, PACK, PACK), True)
    assert set(logs.live()) == {name(2), name(3)}


def test_only_what_is_new_is_read() -> None:
    """A second refresh costs a listing and a request for each new entry."""
    bucket = Bucket()
    write(bucket, W, 0, hello(), *(commit(number) for number in range(40)))
    logs = reader(bucket)
    logs.refresh()
    write(bucket, W, 41, commit(41), LogFence(nonce=IDS.hex(), round=7))
    before = bucket.requests
    assert logs.refresh() == ((PACK,), True)
    assert bucket.requests - before == 3
    assert len(logs.live()) == 41
    assert logs.logs[W].fence == 7


def test_logs_are_read_side_by_side() -> None:
    """Ten thousand logs with one new entry each take the time of a part of these requests."""
    bucket = MeetingBucket()
    writers = [f"{number:032x}" for number in range(8)]
    for number, writer in enumerate(writers):
        write(bucket, writer, 0, commit(number))
    bucket.meet("get w/", len(writers))
    logs = reader(bucket)
    logs.refresh()
    assert set(logs.live()) == {name(number) for number in range(len(writers))}


def test_log_is_read_back_to_its_summary_only() -> None:
    """What lies before a summary counts for nothing, even if somebody created it late."""
    bucket = Bucket()
    write(bucket, W, 3, commit(9))
    write(bucket, W, 7, state(1, removed=(5,)), commit(2))
    logs = reader(bucket)
    assert logs.refresh() == ((PACK,), False)
    assert set(logs.live()) == {name(1), name(2)}
    assert logs.removed() == {name(5)}


def test_host_that_was_away_meets_a_summary() -> None:
    """A reader whose entries were deleted goes on from the summary."""
    bucket = Bucket()
    write(bucket, W, 0, hello(), commit(1))
    logs = reader(bucket)
    logs.refresh()
    write(bucket, W, 2, commit(2), commit(3), state(2, 3), commit(4))
    bucket.delete(log_entry_name(W, number) for number in range(4))
    assert logs.refresh() == ((PACK,), False)
    assert set(logs.live()) == {name(2), name(3), name(4)}


def test_gap_is_damage() -> None:
    """A log that lacks an entry is refused, and nothing of it is taken in."""
    bucket = Bucket()
    write(bucket, W, 0, hello(), commit(1), commit(2))
    bucket.delete([log_entry_name(W, 1)])
    logs = reader(bucket)
    with pytest.raises(DamagedRemote, match="missing between others"):
        logs.refresh()
    assert not logs.logs


@pytest.mark.parametrize("left", [0, 1])
def test_shorter_log_is_refused(tmp_path: Path, left: int) -> None:
    """A log that ends before what an earlier process read, or is gone, means an older bucket."""
    bucket = Bucket()
    write(bucket, W, 0, hello(), commit(1))
    reader(bucket, tmp_path / "logs").refresh()
    bucket.delete(log_entry_name(W, number) for number in range(left, 2))
    with pytest.raises(RolledBack, match="older than it was"):
        reader(bucket, tmp_path / "logs").refresh()


def test_cache_saves_reading(tmp_path: Path) -> None:
    """The next process reads nothing that the one before has read; a damaged cache costs time alone."""
    bucket = Bucket()
    write(bucket, W, 0, hello(), commit(1))
    reader(bucket, tmp_path / "logs").refresh()
    again = reader(bucket, tmp_path / "logs")
    before = bucket.requests
    again.refresh()
    assert bucket.requests - before == 1
    assert set(again.live()) == {name(1)}
    (tmp_path / "logs").write_bytes(b"\x81")
    damaged = reader(bucket, tmp_path / "logs")
    damaged.refresh()
    assert damaged.live() == again.live()


def test_large_object_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever can write to the bucket cannot make a reader allocate more than the limit."""
    monkeypatch.setattr(documents, "MAX_DOCUMENT_BYTES", 1000)
    for read in (documents.read_object, documents.read_document):
        monkeypatch.setattr(read, "__defaults__", (1000,))
    bucket = Bucket()
    bucket.create(log_entry_name(W, 0), bytes(5000))
    with pytest.raises(DamagedRemote, match="more than 1000 bytes"):
        reader(bucket).refresh()
