"""Tests of a host's log: one commit for each call, whatever replies are lost and whoever else writes there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.remote_world import REPOSITORY, Bucket, Ids, MemoryState, sealer

from ciuic.errors import UsageError
from ciuic.remote.documents import (
    LogCommit,
    LogEntry,
    LogFence,
    LogHello,
    LogRetired,
    LogState,
    StoredRound,
    create_entry,
    create_round,
    read_entry,
)
from ciuic.remote.log_reader import RolledBack, Rounds
from ciuic.remote.object_names import log_entry_name, manifest_name
from ciuic.remote.objects.model import RemoteUnreachable
from ciuic.remote.writer_log import WriterLog, WriterState

IDS = Ids("test")
SEALER = sealer(IDS)
DIGEST = "cd" * 32
PACK = "d" + "12" * 16


class LossyBucket(Bucket):
    """Bucket whose next create may lose its request or its reply, or be sent twice by the client."""

    fate = ""

    def create(self, name: str, data: bytes) -> bool:
        fate, self.fate = self.fate, ""
        if fate == "request":
            raise RemoteUnreachable("not sent")
        created = super().create(name, data)
        if fate == "reply":
            raise RemoteUnreachable("no reply")
        return super().create(name, data) if fate == "twice" else created


@pytest.fixture
def bucket() -> LossyBucket:
    return LossyBucket()


def new_log(bucket: Bucket, state: MemoryState | WriterState | None = None) -> WriterLog:
    log = WriterLog(
        bucket,
        SEALER,
        state or MemoryState(),  # type: ignore[arg-type]
        Rounds(bucket, SEALER),
        host="h",
        repository=REPOSITORY,
        new_id=IDS.hex,
    )
    log.hello()
    return log


def manifest() -> str:
    return manifest_name(job="j", epoch=None, step=None, host="h", random=IDS.hex())


def commit(log: WriterLog, name: str = "", *, checked: int | None = None) -> bool:
    version = log.rounds.version if checked is None else checked
    return log.commit("cs-abcdef", name or manifest(), DIGEST, [PACK], checked=version)


def entries(bucket: Bucket, writer: str) -> list[LogEntry]:
    numbers = sorted(int(name[-10:]) for name in bucket.objects if name.startswith(f"w/{writer}/"))
    return [read_entry(bucket, SEALER, writer, number) for number in numbers]


def kinds(bucket: Bucket, writer: str) -> list[type]:
    return [type(entry) for entry in entries(bucket, writer)]


def others_entry(bucket: Bucket, log: WriterLog, entry: LogEntry) -> None:
    assert create_entry(bucket, SEALER, log.writer, log.next_number, entry)


def begin_round(bucket: Bucket, number: int, *packs: str) -> None:
    create_round(bucket, SEALER, number, "begun", StoredRound(nonce=IDS.hex(), condemned=packs))


def test_log_is_continued_by_the_next_process(bucket: LossyBucket) -> None:
    """A second process of a host says hello in the same log and commits after it."""
    state = MemoryState()
    first = new_log(bucket, state)
    assert commit(first)
    second = new_log(bucket, state)
    assert commit(second)
    assert second.writer == first.writer
    assert kinds(bucket, first.writer) == [LogHello, LogCommit, LogHello, LogCommit]


def test_commit_takes_one_put_and_no_list(bucket: LossyBucket) -> None:
    """A commit is one create and one small GET."""
    log = new_log(bucket)
    before = bucket.requests
    assert commit(log)
    assert bucket.requests - before == 2


@pytest.mark.parametrize("fate", ["reply", "request"])
def test_commit_is_made_once_when_a_reply_or_request_is_lost(bucket: LossyBucket, fate: str) -> None:
    """A commit that is called again after an error stands once."""
    log = new_log(bucket)
    name = manifest()
    bucket.fate = fate
    with pytest.raises(RemoteUnreachable):
        commit(log, name)
    assert commit(log, name)
    assert commit(log)
    assert kinds(bucket, log.writer) == [LogHello, LogCommit, LogCommit]


def test_commit_that_the_client_sent_twice_is_recognised(bucket: LossyBucket) -> None:
    """A client that repeats a request by itself reports that the name is taken: it is our own entry."""
    log = new_log(bucket)
    writer = log.writer
    bucket.fate = "twice"
    assert commit(log)
    assert log.writer == writer
    assert kinds(bucket, writer) == [LogHello, LogCommit]


def test_given_up_commit_that_arrived_is_passed_over(bucket: LossyBucket) -> None:
    """A commit whose reply was lost and that is not called again does not stop the next one."""
    log = new_log(bucket)
    bucket.fate = "reply"
    with pytest.raises(RemoteUnreachable):
        commit(log)
    assert commit(log)
    assert kinds(bucket, log.writer) == [LogHello, LogCommit, LogCommit]


def test_fence_makes_a_commit_look_again(bucket: LossyBucket) -> None:
    """A commit after a fence is refused until the caller has taken the round into account."""
    log = new_log(bucket)
    begin_round(bucket, 0, PACK)
    others_entry(bucket, log, LogFence(nonce=IDS.hex(), round=0))
    name = manifest()
    assert not commit(log, name)
    assert log.rounds.condemned == {PACK}
    assert commit(log, name)
    assert kinds(bucket, log.writer) == [LogHello, LogFence, LogCommit]


def test_fence_that_a_removal_passed_is_not_lost_on_the_next_commit(bucket: LossyBucket) -> None:
    """A snapshot that was looked up before a removal met a fence is looked up again."""
    log = new_log(bucket)
    checked = log.rounds.version
    begin_round(bucket, 0, PACK)
    others_entry(bucket, log, LogFence(nonce=IDS.hex(), round=0))
    log.remove([manifest()])
    assert not commit(log, checked=checked)


def test_fence_of_a_known_round_does_not_delay_a_commit(bucket: LossyBucket) -> None:
    """A fence of a round that hello has read says nothing new."""
    begin_round(bucket, 0, PACK)
    log = new_log(bucket)
    others_entry(bucket, log, LogFence(nonce=IDS.hex(), round=0))
    assert commit(log)


def test_summary_is_passed_over(bucket: LossyBucket) -> None:
    """A collector's summary at the end of the log does not disturb its writer."""
    log = new_log(bucket)
    writer = log.writer
    others_entry(bucket, log, LogState(nonce=IDS.hex(), live=(), removed=()))
    assert commit(log)
    assert kinds(bucket, writer) == [LogHello, LogState, LogCommit]


@pytest.mark.parametrize(
    "entry",
    [
        LogHello(nonce="ee" * 16, host="twin", repository=REPOSITORY),
        LogRetired(nonce="ee" * 16, live=(), removed=()),
    ],
)
def test_writer_leaves_a_log_that_is_not_its_own(bucket: LossyBucket, entry: LogEntry) -> None:
    """A log that a clone of the disk writes to, or that was ended, is left to itself; the commit is in a new one."""
    state = MemoryState()
    log = new_log(bucket, state)
    writer = log.writer
    others_entry(bucket, log, entry)
    assert commit(log)
    assert log.writer != writer
    assert kinds(bucket, writer)[-1] is type(entry)
    assert kinds(bucket, log.writer) == [LogHello, LogCommit]
    assert state.position == log._position()
    assert (log._position().writer, log._position().next) == (log.writer, 2)


@pytest.mark.parametrize(
    "entries",
    [
        [LogRetired(nonce="ee" * 16, live=(), removed=())],
        [LogHello(nonce=nonce * 16, host="twin", repository=REPOSITORY) for nonce in ("ee", "ff")],
    ],
)
def test_log_that_ended_or_has_two_writers_is_not_continued(
    bucket: LossyBucket, entries: list[LogEntry]
) -> None:
    """A process that finds its host's log ended, or continued by a clone of the disk, begins another."""
    state = MemoryState()
    log = new_log(bucket, state)
    for number, entry in enumerate(entries, log.next_number):
        create_entry(bucket, SEALER, log.writer, number, entry)
    assert new_log(bucket, state).writer != log.writer


@pytest.mark.parametrize("left", ["nothing before", "another entry before"])
def test_name_that_is_free_because_it_was_deleted_is_not_trusted(bucket: LossyBucket, left: str) -> None:
    """A writer that was paused while its log was truncated commits in a new log, with what was condemned meanwhile."""
    log = new_log(bucket)
    writer = log.writer
    assert commit(log)
    begin_round(bucket, 0, PACK)
    checked = log.rounds.version
    number = log.next_number
    create_entry(bucket, SEALER, writer, number + 1, LogState(nonce=IDS.hex(), live=(), removed=()))
    bucket.delete([log_entry_name(writer, number - 1)])
    if left == "another entry before":
        create_entry(bucket, SEALER, writer, number - 1, LogFence(nonce=IDS.hex(), round=0))
    assert not commit(log, checked=checked)
    assert log.rounds.condemned == {PACK}
    assert log.writer != writer
    assert commit(log)


def test_shorter_log_is_refused(bucket: LossyBucket) -> None:
    """A host that knows of an entry refuses a bucket that was brought back to before it."""
    state = MemoryState()
    log = new_log(bucket, state)
    assert commit(log)
    bucket.delete([log_entry_name(log.writer, 1)])
    with pytest.raises(RolledBack, match="older than it was"):
        new_log(bucket, state)


@pytest.mark.parametrize("other", [False, True])
def test_bucket_that_goes_back_while_a_host_writes_is_refused(bucket: LossyBucket, other: bool) -> None:
    """A commit behind entries that are gone, or are others, fails, and so does the next process: what it knows to be stored may be gone."""
    state = MemoryState()
    log = new_log(bucket, state)
    assert commit(log)
    assert commit(log)
    name = log_entry_name(log.writer, 2)
    bucket.delete([log_entry_name(log.writer, 1), name])
    if other:
        create_entry(
            bucket, SEALER, log.writer, 2, LogHello(nonce=IDS.hex(), host="h", repository=REPOSITORY)
        )
    with pytest.raises(RolledBack, match="older than it was"):
        commit(log)
    if not other:
        with pytest.raises(RolledBack, match="older than it was"):
            new_log(bucket, state)


def test_first_log_after_lost_hello_is_under_a_new_name(bucket: LossyBucket) -> None:
    """A hello whose reply was lost leaves nothing that a later hello builds on."""
    bucket.fate = "reply"
    state = MemoryState()
    with pytest.raises(RemoteUnreachable):
        new_log(bucket, state)
    assert state.position is None
    log = new_log(bucket, state)
    assert commit(log)


def test_commit_without_hello_is_a_mistake(bucket: LossyBucket) -> None:
    """Nothing is committed by a caller that has not read the rounds."""
    log = WriterLog(bucket, SEALER, MemoryState(), Rounds(bucket, SEALER), host="h", repository=REPOSITORY)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="hello"):
        commit(log)


def test_state_is_kept_in_a_file(bucket: LossyBucket, tmp_path: Path) -> None:
    """Name and end of the log survive the process; what is not readable counts as nothing."""
    path = tmp_path / "writer.json"
    log = new_log(bucket, WriterState(str(path)))
    known = WriterState(str(path)).load()
    assert known is not None
    assert (known, known.writer, known.next) == (log._position(), log.writer, 1)
    for junk in (b"", b"{}", b'{"writer":"../..","next":1}', b"[" * 5000):
        path.write_bytes(junk)
        assert WriterState(str(path)).load() is None


def test_two_threads_share_a_log(bucket: LossyBucket) -> None:
    """Commits of several threads stand one after the other."""
    import threading

    log = new_log(bucket)
    done: list[bool] = []
    work: Callable[[], None] = lambda: done.append(commit(log))  # noqa: E731
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == [True] * 8
    assert kinds(bucket, log.writer) == [LogHello, *[LogCommit] * 8]
