"""Snapshots that a training keeps because a remote has not stored them yet."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis.strategies import booleans, dictionaries, integers, lists, sets, tuples

from ciuic import SnapshotManager
from ciuic.protocol.stored_remotely import RemotePlace, StoredRecord, write_record
from ciuic.repository import Repository, SnapshotInfo
from ciuic.training import Latest
from ciuic.training.remote.uploads import FORGOTTEN_AFTER_NS, MIN_FREE_SHARE, RemotePins, state_dir
from ciuic.training.writer.housekeeping import REMOVED_UNSTORED_NOTE, WriterHousekeeping
from ciuic.training.writer.messages import Note, RetentionRules
from ciuic.types import SnapshotId

REPOSITORY = "0" * 32
NOW_NS = 10 * FORGOTTEN_AFTER_NS


def _id(number: int) -> SnapshotId:
    return SnapshotId(f"cs-{number:06x}")


def _info(number: int, time_ns: int) -> SnapshotInfo:
    return SnapshotInfo(id=_id(number), time_ns=time_ns, size_bytes=0, new_bytes=0, files=0)


def _pins(place: Path, remotes: tuple[str, ...], free_share: float = 1.0) -> RemotePins:
    places = [RemotePlace(name, "memory://bucket") for name in remotes]
    return RemotePins(str(place), places, lambda _: free_share, lambda: NOW_NS)


@given(
    ages=lists(integers(0, 2 * FORGOTTEN_AFTER_NS), min_size=1, max_size=8),
    stored=dictionaries(integers(0, 1), tuples(sets(integers(0, 7)), sets(integers(0, 7))), max_size=2),
    is_full=booleans(),
)
def test_only_what_every_remote_has_or_refuses_goes(
    tmp_path_factory: pytest.TempPathFactory,
    ages: list[int],
    stored: dict[int, tuple[set[int], set[int]]],
    is_full: bool,
) -> None:
    """A snapshot goes if each remote has it or passes it over, if it is old and the remote never stored any, or if
    the disk is nearly full; then those that are lost are named."""
    place = tmp_path_factory.mktemp("pins")
    state_dir(place).mkdir()
    for remote, (has, refuses) in stored.items():
        record = StoredRecord(
            repository=REPOSITORY,
            stored=frozenset(f"cs-{number:06x}" for number in has),
            passed_over=frozenset(f"cs-{number:06x}" for number in refuses),
            tail_ns=1,
            seen_ns=NOW_NS,
        )
        write_record(f"remote-{remote}", record, state_dir(place))
    infos = [_info(number, NOW_NS - age) for number, age in enumerate(ages)]
    drop = [info.id for info in infos]
    needed = {
        _id(number)
        for number, age in enumerate(ages)
        if any(
            number not in stored[remote][0] | stored[remote][1]
            if remote in stored
            else age <= FORGOTTEN_AFTER_NS
            for remote in range(2)
        )
    }
    share = MIN_FREE_SHARE / 2 if is_full else 1.0
    going, lost = _pins(place, ("remote-0", "remote-1"), share).removable(infos, drop, REPOSITORY)
    assert going == (drop if is_full else [id_ for id_ in drop if id_ not in needed])
    assert lost == (needed if is_full else set())


def test_a_record_that_cannot_be_read_lets_nothing_go(tmp_path: Path) -> None:
    """With a damaged record, or one of another repository, a remote needs every snapshot."""
    infos = [_info(0, NOW_NS)]
    (state_dir(tmp_path) / "remote").mkdir(parents=True)
    (state_dir(tmp_path) / "remote" / "stored").write_bytes(b"{")
    assert _pins(tmp_path, ("remote",)).removable(infos, [_id(0)], REPOSITORY) == ([], set())
    other = StoredRecord(repository="1" * 32, stored=frozenset({"cs-000000"}), tail_ns=1)
    write_record("remote", other, state_dir(tmp_path))
    assert _pins(tmp_path, ("remote",)).removable(infos, [_id(0)], REPOSITORY) == ([], set())


def test_the_rules_of_a_training_wait_for_its_remote(tmp_path: Path) -> None:
    """Housekeeping keeps what the remote lacks, removes it once it is stored, and names what a full disk takes."""
    where = tmp_path / "s"
    with SnapshotManager(where) as manager:
        ids = []
        for step in range(4):
            save = manager.save_snapshot(value=step, step=step, wait=True)
            assert save is not None
            ids.append(str(save.id))
    state_dir(where).mkdir()
    share = 1.0
    notes: list[Note] = []
    housekeeping = WriterHousekeeping(
        str(where),
        b"/training",
        RetentionRules(keep=(Latest(1),)),
        should_stop=lambda: False,
        tell=notes.append,
        remotes=(RemotePlace("remote", "memory://bucket"),),
        free_share=lambda _: share,
    )

    def left() -> list[str]:
        housekeeping.after()
        with Repository.open(where) as repository:
            return [str(info.id) for info in reversed(repository.snapshots.list())]

    assert left() == ids
    with Repository.open(where) as repository:
        record = StoredRecord(
            repository=repository.id, stored=frozenset(ids[:2]), tail_ns=1, seen_ns=time.time_ns()
        )
    write_record("remote", record, state_dir(where))
    assert left() == ids[2:]
    assert notes == []
    share = 0.0
    assert left() == ids[3:]
    assert [(note.event, ids[2] in note.text) for note in notes] == [(REMOVED_UNSTORED_NOTE, True)]
