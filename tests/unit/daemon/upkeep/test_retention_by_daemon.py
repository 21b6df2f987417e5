"""Tests of retention by the daemon: in its own process, in turn with captures, and only when needed."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from ciuic.config import MinFree
from ciuic.daemon.base.events import Alerts, EventBus
from ciuic.daemon.base.repository_store import Store, UpkeepNeed, UpkeepRules, summary
from ciuic.daemon.base.settings import Settings
from ciuic.daemon.upkeep import Upkeep
from ciuic.errors import Busy, CiuicError
from ciuic.protocol.control_types import PruneReport, UnstoredSnapshot
from ciuic.protocol.stored_remotely import RemotePlace, StoredRecord, write_record
from ciuic.repository import Repository
from ciuic.retention import RetentionPolicy
from ciuic.types import Entry, RootRecord, SnapshotDraft, SnapshotId

ONE = RetentionPolicy(keep_within_seconds=0, keep_last=1)
NOW_NS = 2_000_000_000 * 10**9


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Make four snapshots of an empty root, epochs 1 to 4."""
    path = tmp_path / "repository"
    with Repository.create(path) as made, made.writer() as writer:
        for number in range(1, 5):
            root = RootRecord(path=b"/a", entry=Entry(name=b"", mode=0o40755), session="s", epoch=number)
            writer.commit(
                SnapshotDraft(
                    id=SnapshotId(f"cs-00000{number}"),
                    time_ns=NOW_NS + number * 10**9,
                    host="h",
                    roots=(root,),
                )
            )
    return path


def upkeep_of(
    repository: Path,
    *,
    policy: RetentionPolicy = ONE,
    remotes: tuple[RemotePlace, ...] = (),
    alerts: Alerts | None = None,
    **more: Any,
) -> Upkeep:
    settings = Settings(
        socket=repository.parent / "c",
        runtime_dir=repository.parent,
        repository=repository,
        retention=policy,
        remotes=remotes,
    )
    store = Store(repository, block_bytes=262144)
    return Upkeep(
        lambda: settings,
        lambda: store,
        trio.Lock(),
        alerts or Alerts(EventBus(lambda: NOW_NS), lambda: NOW_NS),
        cwd=repository.parent,
        # What is recorded of a remote has to be young for the process as well, which has no other clock.
        now_ns=time.time_ns if remotes else lambda: NOW_NS,
        **more,
    )


def ids(repository: Path) -> list[str]:
    with Repository.open(repository) as opened:
        return [str(id_) for id_ in opened.snapshots.ids()]


def test_a_dry_run_decides_and_removes_nothing(repository: Path) -> None:
    """A dry run names every snapshot with its fate and removes none."""
    report = trio.run(lambda: upkeep_of(repository).prune(dry_run=True))
    assert {decision.id: decision.keep for decision in report.decisions} == {
        "cs-000004": True,
        "cs-000003": False,
        "cs-000002": False,
        "cs-000001": False,
    }
    assert len(ids(repository)) == 4


def test_snapshots_without_a_rule_are_removed(repository: Path) -> None:
    """The process removes what no rule keeps durably and reports the ids."""
    report = trio.run(lambda: upkeep_of(repository).prune(dry_run=False))
    assert sorted(report.removed) == ["cs-000001", "cs-000002", "cs-000003"]
    assert ids(repository) == ["cs-000004"]


def test_refusals_of_the_process_arrive_as_themselves(repository: Path) -> None:
    """Errors of the process keep their class and hint, and a process without a message is an error too."""
    script = 'import sys; print(\'{"error": "no", "hint": "do", "code": 75}\'); sys.exit(75)'
    upkeep = upkeep_of(repository, command=[sys.executable, "-c", script])
    with pytest.raises(Busy) as caught:
        trio.run(lambda: upkeep.prune(dry_run=False))
    assert (caught.value.message, caught.value.hint) == ("no", "do")
    upkeep = upkeep_of(repository, command=["/bin/false"])
    with pytest.raises(CiuicError, match="exit status 1"):
        trio.run(lambda: upkeep.prune(dry_run=False))


def test_upkeep_waits_for_a_running_capture(repository: Path) -> None:
    """Captures and upkeep take turns, so neither finds the repository busy."""
    upkeep = upkeep_of(repository)

    async def main() -> None:
        await upkeep._lock.acquire()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: upkeep.prune(dry_run=False))
            await trio.testing.wait_all_tasks_blocked()
            assert len(ids(repository)) == 4
            upkeep._lock.release()

    trio.run(main)
    assert len(ids(repository)) == 1


def test_a_suggestion_is_followed_when_there_is_something_to_do(repository: Path) -> None:
    """Old snapshots are removed after a commit without a request."""
    upkeep = upkeep_of(repository)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(upkeep.run)
            upkeep.suggest()
            # The child process takes seconds to start on a busy machine.
            with trio.fail_after(60):
                while len(ids(repository)) > 1:  # noqa: ASYNC110 (another process does it)
                    await trio.sleep(0.02)
            nursery.cancel_scope.cancel()

    trio.run(main)


@pytest.mark.parametrize(
    ("policy", "min_free", "due"),
    [
        (ONE, None, True),
        (RetentionPolicy(keep_within_seconds=0, keep_last=4), None, False),
        (RetentionPolicy(keep_within_seconds=0, keep_last=4), MinFree(size_bytes=1 << 60), True),
        (RetentionPolicy(keep_within_seconds=0, keep_last=4), MinFree(size_bytes=1), False),
    ],
)
def test_upkeep_is_due_for_a_snapshot_without_reason_or_little_space(
    repository: Path, policy: RetentionPolicy, min_free: MinFree | None, due: bool
) -> None:
    """The process is started only when a snapshot has no reason to stay or space is short."""
    need = Store(repository, block_bytes=262144).upkeep_need(UpkeepRules(policy, min_free), now_ns=NOW_NS)
    assert need == UpkeepNeed(due, unstored=0)


@pytest.fixture
def nas(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that writes what the remote ``nas`` has stored of the repository."""
    state = repository.parent / "upload"
    state.mkdir()
    monkeypatch.setenv("CIUIC_UPLOAD_STATE", str(state))
    with Repository.open(repository) as opened:
        identity = opened.id

    def write(*stored: str) -> None:
        record = StoredRecord(
            repository=identity, stored=frozenset(stored), tail_ns=1, seen_ns=time.time_ns()
        )
        write_record("nas", record)

    return write


def test_what_a_remote_lacks_is_kept_by_the_process_too(repository: Path, nas: Callable[..., None]) -> None:
    """The process keeps what a remote has not stored, and upkeep is due again when the remote has it."""
    nas("cs-000001", "cs-000004")
    upkeep = upkeep_of(repository, remotes=(RemotePlace("nas", "file:///mnt/nas"),))
    report = trio.run(lambda: upkeep.prune(dry_run=False))
    assert report.removed == ["cs-000001"]
    assert report.removed_unstored == []
    assert {decision.id: decision.reasons for decision in report.decisions}["cs-000002"] == [
        "not on remote nas yet"
    ]
    assert upkeep._need() == UpkeepNeed(is_due=False, unstored=2)
    nas("cs-000002", "cs-000003", "cs-000004")
    assert upkeep._need() == UpkeepNeed(is_due=True, unstored=0)
    trio.run(lambda: upkeep.prune(dry_run=False))
    assert ids(repository) == ["cs-000004"]


def test_an_alert_names_what_was_removed_before_a_remote_had_it(
    repository: Path, nas: Callable[..., None]
) -> None:
    """Where the disk fills, snapshots go that a remote lacks, and an alert names them until it has caught up."""
    nas("cs-000004")
    alerts = Alerts(EventBus(lambda: NOW_NS), lambda: NOW_NS)
    upkeep = upkeep_of(
        repository,
        remotes=(RemotePlace("nas", "file:///mnt/nas"),),
        alerts=alerts,
        reserve_bytes=lambda: 1 << 60,
    )
    assert upkeep._need() == UpkeepNeed(is_due=True, unstored=3)
    trio.run(lambda: upkeep.prune(dry_run=True))
    assert "unstored" not in alerts
    trio.run(upkeep.once)
    assert ids(repository) == ["cs-000004"]
    (alert,) = alerts.standing()
    assert alert.message == (
        "3 snapshots removed for lack of space before remote nas had stored them: "
        "cs-000001, cs-000002, cs-000003"
    )
    assert alert.severity == "problem"


def test_the_alert_ends_when_the_remotes_have_caught_up(repository: Path, nas: Callable[..., None]) -> None:
    """The alert stands while a snapshot waits for a remote, and ends at the first round in which none does."""
    alerts = Alerts(EventBus(lambda: NOW_NS), lambda: NOW_NS)
    keep_all = RetentionPolicy(keep_within_seconds=0, keep_last=4)
    upkeep = upkeep_of(
        repository, policy=keep_all, remotes=(RemotePlace("nas", "file:///mnt/nas"),), alerts=alerts
    )
    report = PruneReport(dry_run=False, removed_unstored=[UnstoredSnapshot(id="cs-000000", remotes=["nas"])])
    upkeep._tell_unstored(report)
    for stored, stands in ((["cs-000001"], True), (ids(repository), False)):
        nas(*stored)
        trio.run(upkeep.once)
        assert ("unstored" in alerts) is stands


def test_the_store_answers_queries_of_the_daemon(repository: Path) -> None:
    """The store returns newest snapshot, snapshot of an epoch, free ids, size and room."""
    store = Store(repository, block_bytes=4096)
    latest = store.latest()
    assert latest is not None
    assert summary(latest).id == "cs-000004"
    found = store.snapshot_of_epoch("/a", "s", 2)
    assert found is not None
    assert found.id == "cs-000002"
    for other in (("/b", "s", 2), ("/a", "t", 2), ("/a", "s", 9)):
        assert store.snapshot_of_epoch(*other) is None
    assert store.find("cs-000003") is not None
    assert store.find("cs-000009") is None
    assert store.find("nonsense") is None
    assert store.block_bytes() == 262144
    status = store.status()
    assert (status.exists, status.snapshots) == (True, 4)
    assert 0 < status.free_bytes <= status.total_bytes


def outcome_of(ask: Callable[[Store], Any], store: Store) -> Any:
    try:
        return ask(store)
    except CiuicError as error:
        return error


@pytest.mark.parametrize(
    "ask",
    [
        lambda store: store.latest(),
        lambda store: store.new_id(frozenset()),
        lambda store: store.snapshot_of_epoch("/a", "s", 1),
    ],
)
def test_a_store_that_cannot_be_read_is_an_error_in_words(
    tmp_path: Path, ask: Callable[[Store], Any]
) -> None:
    """A file in place of the repository gives CiuicErrors, and the status still has an answer."""
    (tmp_path / "repository").write_text("not a directory")
    store = Store(tmp_path / "repository", block_bytes=4096)
    assert isinstance(outcome_of(ask, store), (CiuicError, type(None)))
    assert store.status().snapshots == 0


def test_a_repository_that_many_ask_for_is_made_once(tmp_path: Path) -> None:
    """Daemon start and first snapshot may both make the repository, and both find one in the end."""
    store = Store(tmp_path / "new", block_bytes=65536)
    barrier = threading.Barrier(8)

    def ask(_: int) -> None:
        barrier.wait()
        store.ensure()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(ask, range(8)))
    assert store.status().exists


def test_a_missing_repository_is_made_once(tmp_path: Path) -> None:
    """`ensure` makes the repository with the configured block size, and leaves an existing one alone."""
    store = Store(tmp_path / "new", block_bytes=65536)
    assert store.latest() is None
    store.ensure()
    store.ensure()
    assert store.block_bytes() == 65536
    with pytest.raises(CiuicError, match="no repository is configured"):
        Store(None, block_bytes=65536).ensure()
