"""Tests of damaged logs: everything that can be proved is read, nothing else, and a sum heals them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.remote_world import REPOSITORY, Bucket, Ids, MemoryState, sealer

from ciuic.remote.documents import LogCommit, LogEntry, LogFence, LogHello, LogRemove, create_entry
from ciuic.remote.errors import DamagedRemote
from ciuic.remote.log_reader import LogReader, Rounds
from ciuic.remote.object_names import log_entry_name, manifest_name
from ciuic.remote.writer_log import WriterLog, sum_up_log
from ciuic.repository.errors import UnsupportedFormat

IDS = Ids("damaged")
SEALER = sealer(IDS)
W, V = "11" * 16, "22" * 16


def name(number: int) -> str:
    return manifest_name(job="j", epoch=0, step=number, host="h", random=f"{number:032x}")


def commit(number: int) -> LogCommit:
    return LogCommit(
        nonce=IDS.hex(), repository=REPOSITORY, snapshot="cs-abcdef", manifest=name(number), digest="ab" * 32
    )


def bucket_of(*entries: LogEntry) -> Bucket:
    bucket = Bucket()
    hello = LogHello(nonce=IDS.hex(), host="h", repository=REPOSITORY)
    for number, entry in enumerate([hello, *entries]):
        assert create_entry(bucket, SEALER, W, number, entry)
    assert create_entry(bucket, SEALER, V, 0, hello)
    assert create_entry(bucket, SEALER, V, 1, commit(999))
    return bucket


def spoil(bucket: Bucket, number: int, way: str) -> None:
    entry = log_entry_name(W, number)
    if way == "missing":
        bucket.delete([entry])
    elif way == "later version":
        data = bytearray(bucket.get(entry))
        data[8] += 1
        bucket.put(entry, [bytes(data)])
    elif way == "moved":
        bucket.put(entry, [bucket.get(log_entry_name(V, 0))])
    else:
        bucket.put(entry, [bucket.get(entry)[:-1] + b"\0"])


def tolerant(bucket: Bucket) -> LogReader:
    reader = LogReader(bucket, SEALER, threads=1, skip_damaged=True)
    reader.refresh()
    return reader


@pytest.mark.parametrize("way", ["missing", "moved", "flipped", "later version"])
def test_readers_pass_over_a_damaged_entry(way: str) -> None:
    """The entries before and after a damaged one count, as do all other logs; the damage is named."""
    bucket = bucket_of(*map(commit, range(1, 6)))
    spoil(bucket, 3, way)
    reader = tolerant(bucket)
    assert set(reader.live()) == {name(number) for number in (1, 2, 4, 5, 999)}
    assert list(reader.damaged[W].problems) == [log_entry_name(W, 3)]
    assert bool(reader.damaged[W].later) == (way == "later version")
    with pytest.raises(UnsupportedFormat if way == "later version" else DamagedRemote):
        LogReader(bucket, SEALER).refresh()


def test_damage_is_noticed_again_and_its_end_too(tmp_path: Path) -> None:
    """A cache does not hide a damaged entry; when the entry is back, the log is whole."""
    bucket = bucket_of(*map(commit, range(1, 6)))
    sound = bucket.get(log_entry_name(W, 3))
    spoil(bucket, 3, "missing")
    for _ in range(2):
        reader = LogReader(bucket, SEALER, cache_path=str(tmp_path / "logs"), skip_damaged=True)
        reader.refresh()
        assert W in reader.damaged
        assert len(reader.live()) == 5
    bucket.put(log_entry_name(W, 3), [sound])
    reader.refresh()
    assert not reader.damaged
    assert len(reader.live()) == 6


ENTRIES = st.lists(
    st.one_of(
        st.builds(commit, st.integers(1, 8)),
        st.builds(lambda number: LogRemove(nonce=IDS.hex(), manifests=(name(number),)), st.integers(1, 8)),
        st.builds(lambda number: LogFence(nonce=IDS.hex(), round=number), st.integers(0, 3)),
    ),
    min_size=1,
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(entries=ENTRIES, data=st.data())
def test_what_is_read_is_what_the_sound_entries_say(entries: list[LogEntry], data: st.DataObject) -> None:
    """With any entries damaged or missing, exactly what the others say is read, and a sum of it heals the log."""
    bucket = bucket_of(*entries)
    # The last entry may be flipped; that it is missing can only be noticed by those who have read it.
    spoilt = data.draw(st.sets(st.integers(0, len(entries)), min_size=1, max_size=5))
    for number in spoilt:
        ways = ["moved", "flipped"] if number == len(entries) else ["missing", "moved", "flipped"]
        spoil(bucket, number, data.draw(st.sampled_from(ways)))
    sound = [entry for number, entry in enumerate(entries, start=1) if number not in spoilt]
    removed = {one for entry in sound if isinstance(entry, LogRemove) for one in entry.manifests}
    live = {entry.manifest for entry in sound if isinstance(entry, LogCommit)} - removed | {name(999)}
    reader = tolerant(bucket)
    assert set(reader.live()) == live
    assert sum_up_log(bucket, SEALER, W, reader.damaged[W].summary, reader.removed())
    for healed in (reader, LogReader(bucket, SEALER)):
        healed.refresh()
        assert not healed.damaged
        assert set(healed.live()) == live


def test_a_sum_does_not_hide_an_entry_that_came_meanwhile() -> None:
    """A damaged log that goes on is not summed up by what was read before."""
    bucket = bucket_of(commit(1), commit(2))
    spoil(bucket, 1, "flipped")
    reader = tolerant(bucket)
    assert create_entry(bucket, SEALER, W, 3, commit(3))
    assert not sum_up_log(bucket, SEALER, W, reader.damaged[W].summary, ())
    assert set(tolerant(bucket).live()) == {name(2), name(3), name(999)}


@pytest.mark.parametrize("number", [1, 2])
def test_a_writer_whose_log_is_damaged_takes_another(number: int) -> None:
    """An uploader whose last entry decays, while it runs or before it starts, commits in a new log."""
    bucket = Bucket()
    state = MemoryState()

    def start() -> WriterLog:
        log = WriterLog(bucket, SEALER, state, Rounds(bucket, SEALER), host="h", repository=REPOSITORY)  # type: ignore[arg-type]
        log.hello()
        return log

    log = start()
    first = log.writer
    assert log.commit("cs-abcdef", name(1), "ab" * 32, checked=log.rounds.version)
    entry = log_entry_name(first, 1)
    bucket.put(entry, [bucket.get(entry)[:-1] + b"\0"])
    if number == 2:
        log = start()
    while not log.commit("cs-abcdef", name(2), "ab" * 32, checked=log.rounds.version):
        pass
    assert log.writer != first
    assert name(2) in tolerant(bucket).live()
