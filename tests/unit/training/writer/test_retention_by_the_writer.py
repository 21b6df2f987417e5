"""Retention of a trainer's snapshots by the writer process."""

from __future__ import annotations

import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
from hypothesis import given, settings
from hypothesis.strategies import booleans, builds, integers, lists, sets, tuples
from support.stored import flip_stored
from support.stored import store as store_tree

from ciuic import SnapshotManager
from ciuic.daemon.base.repository_store import Store, UpkeepRules
from ciuic.maintenance.prune import prune
from ciuic.repository import Repository, SnapshotInfo, Walker
from ciuic.repository.chunk_reader import ChunkReader
from ciuic.retention import RetentionPolicy
from ciuic.training import EverySeconds, EverySteps, Latest
from ciuic.training.format.reading import read_facts
from ciuic.training.format.stored_files import SnapshotRef
from ciuic.training.rules import Moment, Rule
from ciuic.training.writer.housekeeping import FULL_READ_EVERY, WriterHousekeeping, read_back, split_by_rules
from ciuic.training.writer.marks import DAMAGED, VERIFIED
from ciuic.training.writer.messages import Note, RetentionRules
from ciuic.types import ChunkId, RootRecord, SnapshotDraft, SnapshotId


def test_a_snapshot_with_an_unreadable_step_stays(tmp_path: Path) -> None:
    """A snapshot whose step a rule needs and cannot read stays."""
    with SnapshotManager(tmp_path / "s") as manager:
        for step in (1, 2, 3):
            manager.save_snapshot(value=step, step=step, wait=True)
    with Repository.open(tmp_path / "s") as repository:
        infos = repository.snapshots.list()
        facts = {info.id: read_facts(repository, info.id) for info in infos}
    rules = RetentionRules(keep=(EverySteps(100),))
    assert split_by_rules(infos, rules, facts)[1] == [infos[1].id]
    del facts[infos[1].id]
    assert split_by_rules(infos, rules, facts)[1] == []


def test_damaged_snapshots_take_the_place_of_no_good_one(tmp_path: Path) -> None:
    """The good snapshot stays from which all runs resumed, each of which left one that was damaged later."""
    for step in range(5):
        with SnapshotManager(tmp_path / "s", max_snapshots=2) as manager:
            state = manager.load_latest_snapshot()
            assert state is None if step == 0 else state is not None and state["step"] == 0
            save = manager.save_snapshot(value=numpy.full(1 << 18, step), step=step, wait=True)
        assert save is not None
        if step:
            _damage_own_content(tmp_path / "s", save.id)
    with SnapshotManager(tmp_path / "s", max_snapshots=2) as manager:
        assert manager.load_latest_snapshot() is not None
        for step in (5, 6):
            manager.save_snapshot(value=numpy.full(1 << 18, step), step=step, wait=True)
    with Repository.open(tmp_path / "s") as repository:
        assert [DAMAGED in info.tags for info in repository.snapshots.list()] == [False, False]


def test_a_damaged_snapshot_is_kept_like_an_undamaged_one() -> None:
    """A damaged snapshot is kept and held like any other, and does not change what stays of the good ones."""

    def dropped(*damaged: int, held: int = 0) -> list[int]:
        infos = [
            SnapshotInfo(
                id=SnapshotId(f"cs-00000{number}"),
                time_ns=number,
                size_bytes=0,
                new_bytes=0,
                files=0,
                tags=(DAMAGED,) if number in damaged else (),
                held=number == held,
            )
            for number in (5, 4, 3, 2, 1)
        ]
        return [int(id_[-1]) for id_ in split_by_rules(infos, RetentionRules(keep=(Latest(2),)), {})[1]]

    assert dropped() == [1, 2, 3]
    assert dropped(5, 4) == [1]
    assert dropped(5, 4, 3) == [3]
    assert dropped(4, 2) == [1, 2]
    assert dropped(4, 2, held=2) == [1]
    assert dropped(5, 4, 3, 2, 1) == [1, 2, 3]


@given(
    damaged=sets(integers(1, 12)),
    held=sets(integers(1, 12)),
    rules=lists(
        builds(Latest, integers(1, 6)) | builds(EverySeconds, integers(1, 6)), min_size=1, max_size=3
    ),
)
def test_damage_never_removes_a_snapshot(
    damaged: set[int], held: set[int], rules: list[Latest | EverySeconds]
) -> None:
    """Damage removes nothing: what stays without damage stays, and what stays without the damaged ones."""

    def stay(numbers: set[int], tagged: set[int]) -> set[str]:
        infos = [
            SnapshotInfo(
                id=SnapshotId(f"cs-{number:06x}"),
                time_ns=number * 10**9,
                size_bytes=0,
                new_bytes=0,
                files=0,
                tags=(DAMAGED,) if number in tagged else (),
                held=number in held,
            )
            for number in sorted(numbers, reverse=True)
        ]
        return {info.id for info in split_by_rules(infos, RetentionRules(keep=tuple(rules)), {})[0]}

    everything = set(range(1, 13))
    assert stay(everything, damaged) == stay(everything, set()) | stay(everything - damaged, set())


def _damage_own_content(save_dir: Path, id_: str) -> None:
    """Flip a bit in each chunk that only this snapshot has."""
    with Repository.open(save_dir) as repository:
        seen: set[ChunkId] = set()
        walker = Walker(repository, seen=seen)
        for other in repository.snapshots.ids():
            if other != id_:
                deque(walker.walk(repository.snapshots.load(other), on_damage=lambda *_: None), maxlen=0)
        own = [
            one.id for one in walker.walk(repository.snapshots.load(SnapshotId(id_))) if one.kind == "data"
        ]
        assert own
        for chunk in own:
            flip_stored(repository, chunk)


def test_no_retention_but_its_own_removes_states(tmp_path: Path) -> None:
    """`ciuic prune` and a daemon with the same repository leave training states alone."""
    with SnapshotManager(tmp_path / "s") as manager:
        saves = [manager.save_snapshot(value=step, step=step, wait=True) for step in (1, 2, 3)]
    policy = RetentionPolicy(keep_within_seconds=0, keep_last=0)
    store = Store(tmp_path / "s", block_bytes=1 << 18)
    with Repository.open(tmp_path / "s") as repository:
        entry = repository.snapshots.load(repository.snapshots.ids()[0]).roots[0].entry
        with repository.writer() as writer:
            files = RootRecord(path=b"/data", entry=entry, session="00" * 16, epoch=1)
            for number in (1, 2):
                id_ = SnapshotId(f"cs-00000{number}")
                writer.commit(
                    SnapshotDraft(id=id_, time_ns=number, host="h", roots=(files,), tags=("training",))
                )
        assert store.upkeep_need(UpkeepRules(policy), now_ns=10**18).is_due
        report = prune(repository, policy, now_ns=10**18)
        assert report.removed == ["cs-000001"]
        assert set(repository.snapshots.ids()) == {
            "cs-000002",
            *(save.id for save in saves if save is not None),
        }
        assert not store.upkeep_need(UpkeepRules(policy), now_ns=10**18).is_due


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b'"name":"value"', b'"name":"valve"', "value.valve is in no file"),
        (b'"shape":[3]', b'"shape":[5]', "cannot have"),
        (b'"version":', b'"fersion":', "version"),
    ],
)
def test_verified_means_that_the_state_can_be_loaded(
    tmp_path: Path, old: bytes, new: bytes, reason: str
) -> None:
    """A state whose bytes are right and whose names lead nowhere is told and tagged, and good ones stay for it."""
    trainer = _Trainer(tmp_path / "s")
    good = []
    for _ in range(2):
        save = trainer.manager.save_snapshot(value=numpy.full(3, 1j), wait=True)
        assert save is not None
        good.append(save.id)
    trainer.manager.close()
    with Repository.open(tmp_path / "s") as repository:
        files = SnapshotRef(str(tmp_path / "s"), str(good[-1])).files(repository)
        tree: dict[bytes, object] = {}
        for name in files.names():
            content = bytes(files.read(name))
            if name == "state.json":
                assert old in content
                content = content.replace(old, new)
            top, _, below = name.encode().rpartition(b"/")
            inner = tree.setdefault(top, {}) if top else tree
            assert isinstance(inner, dict)
            inner[below] = content
        with repository.writer() as writer:
            bad = store_tree(writer, tree, number=1, time_ns=time.time_ns(), root=b"/training").id
    told = trainer.tend()
    assert [note.text for note in told if reason not in note.text] == []
    assert len(told) == 1
    assert {info.id: (VERIFIED in info.tags, DAMAGED in info.tags) for info in trainer.infos()} == {
        bad: (False, True),
        good[1]: (True, False),
    }
    assert trainer.tend() == []


class _Trainer:
    """Saves of one training, and the housekeeping of its writer."""

    def __init__(self, save_dir: Path) -> None:
        self.save_dir = save_dir
        self.manager = SnapshotManager(save_dir, compression="none")
        self.is_busy = False
        self.steps = 0
        self.told: list[Note] = []
        self.housekeeping = WriterHousekeeping(
            str(save_dir),
            b"/training",
            RetentionRules(keep=(Latest(2),)),
            should_stop=lambda: False,
            is_busy=lambda: self.is_busy,
            tell=self.told.append,
        )

    def tend(self) -> list[Note]:
        """Apply the rules; return what is told."""
        self.told.clear()
        self.housekeeping.after()
        return list(self.told)

    def save(self) -> None:
        self.steps += 1
        # 9 blocks that no other snapshot has.
        value = numpy.random.default_rng(self.steps).integers(0, 255, 9 << 18, "u1")
        save = self.manager.save_snapshot(value=value, step=self.steps, wait=True)
        assert save is not None
        assert save.id is not None

    def infos(self) -> list[SnapshotInfo]:
        with Repository.open(self.save_dir) as repository:
            return repository.snapshots.list()

    def verified(self) -> list[str]:
        return [info.id for info in self.infos() if VERIFIED in info.tags]


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[_Trainer]:
    trainer = _Trainer(tmp_path / "s")
    with trainer.manager:
        yield trainer


def test_on_a_busy_machine_the_newest_that_was_read_wholly_stays(trainer: _Trainer) -> None:
    """On a busy machine the newest snapshot that was read back wholly stays beside those that rules keep.

    Once the machine has idle time again, or at the sixteenth removal, the newest is read wholly, and replaces
    it.
    """
    for _ in range(3):
        trainer.save()
    trainer.housekeeping.after()
    (first,) = trainer.verified()
    assert trainer.infos()[0].id == first
    trainer.is_busy = True
    for _ in range(FULL_READ_EVERY):
        trainer.save()
        trainer.housekeeping.after()
        assert trainer.verified() == [first]
        assert len(trainer.infos()) <= 3
    trainer.save()
    trainer.housekeeping.after()
    newest, before = trainer.infos()
    assert trainer.verified() == [newest.id]
    trainer.save()
    trainer.save()
    trainer.housekeeping.after()
    assert trainer.verified() == [newest.id]
    trainer.is_busy = False
    trainer.housekeeping.after()
    assert before.id not in [info.id for info in trainer.infos()]
    assert trainer.verified() == [trainer.infos()[0].id]


def test_a_sample_reads_other_chunks_each_time(trainer: _Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample reads every fourth chunk, from a random one on, and finds damage there."""
    trainer.save()
    with Repository.open(trainer.save_dir) as repository:
        id_ = repository.snapshots.ids()[0]
        snapshot = repository.snapshots.load(id_)
        data = {one.id for one in Walker(repository).walk(snapshot) if one.kind == "data"}
        reads: list[ChunkId] = []
        get = ChunkReader.get
        monkeypatch.setattr(
            ChunkReader,
            "get",
            lambda self, chunk: (chunk in data and reads.append(chunk)) or get(self, chunk),
        )
        read: set[ChunkId] = set()
        while read != data:
            reads.clear()
            assert read_back(repository, id_, one_in=4) == ""
            assert len(reads) <= -(-len(data) // 4) + 1
            read |= set(reads)
    _damage_own_content(trainer.save_dir, id_)
    with Repository.open(trainer.save_dir) as repository:
        assert read_back(repository, id_, one_in=4)


@given(saves=lists(tuples(booleans(), booleans()), min_size=1, max_size=12))
@settings(max_examples=6)
def test_a_snapshot_that_was_read_wholly_and_is_good_always_stays(saves: list[tuple[bool, bool]]) -> None:
    """Whatever is damaged, and whenever the machine is busy, a good snapshot that was read wholly stays."""
    with tempfile.TemporaryDirectory() as place:
        trainer = _Trainer(Path(place) / "s")
        with trainer.manager:
            for _ in range(2):
                trainer.save()
            damaged: set[str] = set()
            for is_damaged, trainer.is_busy in saves:
                trainer.save()
                if is_damaged:
                    damaged.add(trainer.infos()[0].id)
                    _damage_own_content(trainer.save_dir, trainer.infos()[0].id)
                trainer.housekeeping.after()
                assert set(trainer.verified()) - damaged
                assert damaged.isdisjoint(trainer.verified())


class _Broken(Rule):
    def due(self, moment: Moment) -> str:
        raise RuntimeError("a mistake in the program's own rule")


def test_a_rule_that_raises_does_not_end_the_training(tmp_path: Path) -> None:
    """An exception in a rule of the program is logged and does not end the training."""
    with SnapshotManager(tmp_path / "s", save_when=[_Broken()]) as manager:
        manager.framework.set_objects({"value": {"weights": 1}})
        manager.boundary()
        assert manager.save_snapshot(wait=True) is not None
