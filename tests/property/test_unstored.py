"""Tests that prune keeps what a remote has not stored, until the disk is about to fill, and then says so."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.stored import read_back, store

from ciuic.maintenance import prune as gc
from ciuic.maintenance.prune import prune, space_order
from ciuic.repository import Repository
from ciuic.retention import NEWEST, TRAINING, UNDOES, Decision, MinFree, RetentionPlan, RetentionPolicy
from ciuic.system.disk_space import unstored_floor_bytes
from ciuic.types import SnapshotId

BLOCK = 4096
OWN_BYTES = 100 * BLOCK
NOW_NS = 10**9 * 100
LAST = RetentionPolicy(keep_within_seconds=0, keep_last=1)
ALL = RetentionPolicy(keep_within_seconds=0, keep_last=100)


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    """Make six snapshots, each with as many bytes of its own."""
    with Repository.create(tmp_path / "repo", block_size=BLOCK) as made:
        for number in range(6):
            with made.writer(pack_bytes=32 * BLOCK) as writer:
                store(writer, {b"own": random.Random(number).randbytes(OWN_BYTES)}, number=number)
        yield made


def ids(*numbers: int) -> list[SnapshotId]:
    return [SnapshotId(f"cs-{number:06x}") for number in numbers]


def left(repository: Repository) -> list[SnapshotId]:
    return sorted(repository.snapshots.ids())


class Disk:
    """File system of ``blocks`` blocks of which the repository has a part, as prune sees it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, repository: Repository, blocks: int) -> None:
        self.repository = repository
        self.total_bytes = blocks * BLOCK
        self.capacity_bytes = 0
        monkeypatch.setattr(gc, "total_bytes", lambda path: self.total_bytes)
        monkeypatch.setattr(gc, "available_bytes", lambda path: self.available_bytes())

    def available_bytes(self) -> int:
        return self.capacity_bytes - self.repository.stored_bytes()

    def leave(self, blocks: int) -> None:
        """Let ``blocks`` blocks be free now."""
        self.capacity_bytes = self.repository.stored_bytes() + blocks * BLOCK


def test_what_a_remote_lacks_stays_while_there_is_room(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Snapshots that no rule keeps stay until every remote has them, and go when it has."""
    Disk(monkeypatch, repository, 10_000).leave(2_000)
    lacking = {"nas": frozenset(ids(0, 1)), "s3": frozenset(ids(0, 2, 5))}
    for dry_run in (True, False):
        report = prune(repository, LAST, remotes=lacking, now_ns=NOW_NS, dry_run=dry_run)
        assert report.removed == ids(0)
        assert (report.removed_for_space, report.removed_unstored, report.notes) == ([], [], [])
    reasons = {decision.id: decision.reasons for decision in report.plan.kept}
    assert reasons[ids(1)[0]] == ("not on remote s3 yet",)
    assert reasons[ids(3)[0]] == ("not on remote nas yet", "not on remote s3 yet")
    everything = frozenset(ids(*range(6)))
    report = prune(repository, LAST, remotes={"nas": everything, "s3": everything}, now_ns=NOW_NS)
    assert left(repository) == ids(5)


def test_they_yield_below_a_tenth_without_min_free(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without min_free, below a tenth of the disk the oldest go that only a remote keeps, as many as needed.

    What a rule keeps stays, however little is free; the report names what was given up, and for which remote.
    """
    disk = Disk(monkeypatch, repository, 2_000)
    disk.leave(50)
    rules = RetentionPolicy(keep_within_seconds=0, keep_last=2)
    remotes = {"nas": frozenset(ids(1))}
    foreseen = prune(repository, rules, remotes=remotes, now_ns=NOW_NS, dry_run=True)
    report = prune(repository, rules, remotes=remotes, now_ns=NOW_NS)
    for one in (foreseen, report):
        # 1 is on the remote and kept by no rule; its space and that of 0 are enough for a tenth.
        assert one.removed == ids(1, 0)
        assert one.removed_for_space == ids(0)
        assert [(decision.id, decision.remotes) for decision in one.removed_unstored] == [
            (ids(0)[0], ("nas",))
        ]
    assert disk.available_bytes() >= 200 * BLOCK

    disk.leave(0)
    disk.total_bytes *= 10
    report = prune(repository, rules, remotes=remotes, now_ns=NOW_NS)
    assert report.removed == ids(2, 3)
    assert left(repository) == ids(4, 5)
    assert prune(repository, rules, remotes=remotes, now_ns=NOW_NS).removed == []
    assert read_back(repository, ids(4)[0]) == {b"own": random.Random(4).randbytes(OWN_BYTES)}


def test_min_free_takes_what_remotes_have_first(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below min_free, snapshots that every remote has go before older ones that a remote lacks."""
    disk = Disk(monkeypatch, repository, 2_000)
    disk.leave(10)
    remotes = {"nas": frozenset(ids(2, 3))}
    report = prune(repository, ALL, min_free=MinFree(size_bytes=150 * BLOCK), remotes=remotes, now_ns=NOW_NS)
    assert report.removed == report.removed_for_space == ids(2, 3)
    assert report.removed_unstored == []
    disk.leave(10)
    report = prune(repository, ALL, min_free=MinFree(size_bytes=150 * BLOCK), remotes=remotes, now_ns=NOW_NS)
    assert report.removed == ids(0, 1)
    assert [decision.id for decision in report.removed_unstored] == ids(0, 1)
    disk.leave(10)
    report = prune(
        repository, ALL, min_free=MinFree(size_bytes=10_000 * BLOCK), remotes=remotes, now_ns=NOW_NS
    )
    assert left(repository) == ids(5)
    assert "min_free" in report.notes[0]


def test_a_snapshot_that_waits_is_never_swept(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stays for a remote alone reads back whole after prune has freed the rest."""
    Disk(monkeypatch, repository, 10_000).leave(2_000)
    prune(repository, LAST, remotes={"nas": frozenset(ids(0, 2, 4))}, now_ns=NOW_NS)
    assert left(repository) == ids(1, 3, 5)
    for number in (1, 3, 5):
        assert read_back(repository, ids(number)[0]) == {b"own": random.Random(number).randbytes(OWN_BYTES)}


REASONS = st.sampled_from(["last 1 of 3", "held", NEWEST, f"{NEWEST} with /a", "tag good", TRAINING, UNDOES])


@st.composite
def plans(draw: st.DrawFn) -> RetentionPlan:
    """Generate plans with decisions for all kinds of reasons, newest first."""
    decisions = []
    for number in range(draw(st.integers(0, 12)), 0, -1):
        remotes = tuple(sorted(draw(st.frozensets(st.sampled_from(["nas", "s3"])))))
        reasons = (
            *draw(st.lists(REASONS, unique=True, max_size=2)),
            *(f"not on remote {r} yet" for r in remotes),
        )
        decisions.append(Decision(ids(number)[0], number, reasons, remotes))
    return RetentionPlan(tuple(decisions))


@given(plan=plans(), users=st.frozensets(st.integers(1, 12)), only_unstored=st.booleans())
def test_the_order_of_yielding(plan: RetentionPlan, users: frozenset[int], only_unstored: bool) -> None:
    """Each kept snapshot either never yields or has a place; what a remote lacks goes last, the oldest first."""
    held_for_users = frozenset(ids(*users))
    safe, others = space_order(plan, held_for_users, only_unstored=only_unstored)
    assert sorted([*safe, *others]) == sorted(decision.id for decision in plan.kept)
    by_id = {decision.id: decision for decision in plan.kept}
    for id_ in others:
        local = by_id[id_].local_reasons
        assert not any(
            reason in (TRAINING, UNDOES) or reason.startswith((NEWEST, "tag ")) for reason in local
        )
        assert "held" not in local or id_ in held_for_users
        assert not only_unstored or (by_id[id_].remotes and not local)
    # Read from the end, as they yield.
    yielding = [by_id[id_] for id_ in reversed(others)]
    groups = [(bool(one.remotes), one.local_reasons != ("held",)) for one in yielding]
    assert groups == sorted(groups)
    for group in set(groups):
        times = [one.time_ns for one, of in zip(yielding, groups, strict=True) if of == group]
        assert times == sorted(times)


@pytest.mark.parametrize(
    ("min_free", "reserve", "floor"),
    [
        (None, 0, 100),
        (None, 60, 120),
        (MinFree(size_bytes=7), 60, 7),
        (MinFree(share=0.5), 0, 500),
    ],
)
def test_the_floor_of_what_waits_for_a_remote(min_free: MinFree | None, reserve: int, floor: int) -> None:
    """The floor is min_free where it is set, else a tenth of the disk or twice the reserve."""
    assert unstored_floor_bytes(min_free, 1000, reserve) == floor
