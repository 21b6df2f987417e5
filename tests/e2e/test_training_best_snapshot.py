"""Loading the best snapshot and those of a step or epoch, and the table of all, with a real writer."""

from __future__ import annotations

import html.parser
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from support.tiny_training import Model

from ciuic import SnapshotManager
from ciuic.errors import Damaged, NotFound
from ciuic.history import checkpoints, timelines
from ciuic.repository import Repository
from ciuic.repository.block_maps import blocks_of
from ciuic.training import Best, SnapshotTable
from ciuic.training.format.stored_files import SnapshotRef
from ciuic.training.snapshots import TrainingSnapshots

LOSSES = {1: 3.0, 2: math.nan, 3: 1.0, 4: 2.0, 5: 1.0, 6: math.inf, 7: -math.inf}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, str]]:
    """Save a snapshot for each loss, two to an epoch; return the directory and the ids by step."""
    save_dir, ids = tmp_path_factory.mktemp("saved") / "snapshots", {}
    model = Model()
    with SnapshotManager(save_dir) as manager:
        for step, loss in LOSSES.items():
            metrics = {"loss": loss, "accuracy": 10.0 * step}
            save = manager.save_snapshot(model, epoch=step // 2, step=step, metrics=metrics, wait=True)
            assert save is not None
            assert save.id is not None
            ids[step] = save.id
    return save_dir, ids


@pytest.fixture
def ids(saved: tuple[Path, dict[int, str]], tmp_path: Path) -> dict[int, str]:
    """Return the ids of those snapshots, which a copy in ``snapshots`` has."""
    shutil.copytree(saved[0], tmp_path / "snapshots")
    return saved[1]


def test_loading_waits_for_the_saves_of_the_process(tmp_path: Path) -> None:
    """What is loaded is the last save, however quickly it follows others: by name, by epoch, by metric, to resume."""
    with SnapshotManager(tmp_path / "snapshots") as manager:
        model = Model()
        manager.register(model=model)
        epoch = 0
        for load in (
            lambda: manager.load_latest_snapshot(),
            lambda: manager.load_snapshot("latest"),
            lambda: manager.load_snapshot(epoch=manager.epoch),
            lambda: manager.load_best("score", "max"),
            lambda: manager.framework.load_state(),
        ):
            for _ in range(4):
                epoch += 1
                manager.epoch = epoch
                manager.save_snapshot(epoch=epoch, metrics={"score": float(epoch)})
            state = load()
            assert state is not None
            assert state["epoch"] == epoch


def test_the_best_is_that_of_the_rule_that_keeps_it(ids: dict[int, str], tmp_path: Path) -> None:
    """The best is the snapshot that `Best` keeps: finite, and of equally good ones the oldest."""
    with SnapshotManager(
        tmp_path / "snapshots", keep=[Best(2, "accuracy", "max"), Best(1, "accuracy", "max")]
    ) as manager:
        assert manager.load_best().id == ids[7]
        assert manager.load_snapshot("best").id == ids[7]
        assert manager.load_best("accuracy").id == ids[7], "the mode of the rule"
        assert manager.load_best("accuracy", "min").id == ids[1]
        assert manager.load_best("loss").id == ids[3]
        assert manager.load_best("loss", "max")["step"] == 1
    with SnapshotManager(tmp_path / "snapshots", keep=[Best(1, "loss")]) as manager:
        manager.save_snapshot(Model(), metrics={"loss": 5.0}, wait=True)
    assert [one.facts.metrics["loss"] for one in manager.list_snapshots()] == [5.0, 1.0], (
        "what the rule keeps"
    )
    assert manager.load_best().id == ids[3]


@pytest.mark.usefixtures("ids")
def test_what_is_best_is_never_guessed(tmp_path: Path) -> None:
    """Without one metric that is meant `load_best` names those that there are, and loads nothing."""
    plain = TrainingSnapshots(tmp_path / "snapshots")
    with pytest.raises(
        NotFound, match="which metric is best is not known; of metrics there are accuracy, loss"
    ):
        plain.load_best()
    with pytest.raises(
        NotFound, match=r"no snapshot has a finite f1; .* there are accuracy, loss, .*\(step 7, epoch 3\)"
    ):
        plain.load_best("f1", "max")
    with pytest.raises(ValueError, match="needs a metric"):
        plain.load_best(mode="max")
    with pytest.raises(ValueError, match='mode must be "min" or "max"'):
        plain.load_best("loss", "least")  # type: ignore[arg-type]
    with SnapshotManager(
        tmp_path / "snapshots", keep=[Best(1, "loss"), Best(1, "accuracy", "max")]
    ) as manager:
        with pytest.raises(NotFound, match=r"several rules for the best: .*'loss', 'min'.*'accuracy', 'max'"):
            manager.load_snapshot("best")
        assert manager.load_best("accuracy")["step"] == 7
        copied, where = manager.__reduce__()
        assert copied(*where).load_best("loss")["step"] == 3


def test_a_step_or_an_epoch_names_one_snapshot_or_none(ids: dict[int, str], tmp_path: Path) -> None:
    """A step and an epoch find their only snapshot; several or none are an error that lists what is there."""
    with SnapshotManager(tmp_path / "snapshots") as manager:
        assert manager.load_snapshot(step=4).id == ids[4]
        assert manager.load_snapshot(epoch=0).id == ids[1]
        assert manager.load_snapshot(epoch=2, step=5).id == ids[5]
        with pytest.raises(NotFound, match=f"2 snapshots have epoch 2: {ids[5]} .step 5, epoch 2., {ids[4]}"):
            manager.load_snapshot(epoch=2)
        with pytest.raises(NotFound, match=f"no snapshot has step 8; there are {ids[7]}"):
            manager.load_snapshot(step=8)
        with pytest.raises(NotFound, match="no snapshot has step 4 and epoch 1"):
            manager.load_snapshot(step=4, epoch=1)
        with pytest.raises(NotFound, match="could be cs-"):
            manager.load_snapshot(_common_prefix(manager, ids))
        with pytest.raises(ValueError, match="must get an id or name"):
            manager.load_snapshot(ids[1], step=1)


def test_without_a_name_the_newest_whole_state_is_loaded(tmp_path: Path) -> None:
    """`load_snapshot()` is `load_latest_snapshot()`, where there is a snapshot, and raises where there is none."""
    with SnapshotManager(tmp_path / "snapshots") as manager:
        with pytest.raises(NotFound, match="no snapshot of 'training' in "):
            manager.load_snapshot()
        assert manager.load_latest_snapshot() is None
        manager.save_snapshot(Model(), step=1)
        save = manager.save_snapshot(Model(), step=2)
        state, same = manager.load_snapshot(), manager.load_latest_snapshot()
        assert save is not None
        assert same is not None
        assert state.id == same.id == save.id


def _common_prefix(manager: SnapshotManager, ids: dict[int, str]) -> str:
    """Return a prefix of two ids; snapshots are added until two share a first digit."""
    seen: set[str] = set()
    names = list(ids.values())
    while True:
        for name in names:
            if name[:4] in seen:
                return name[:4]
            seen.add(name[:4])
        save = manager.save_snapshot(Model(), wait=True)
        assert save is not None
        names = [str(save.id)]


@pytest.mark.parametrize("what", ["weights", "facts"])
def test_a_best_that_is_damaged_is_not_replaced_in_silence(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Damaged weights of a snapshot that is named are an error; one whose metrics cannot be read is logged.

    Without a name the one before is loaded.
    """
    model = Model()
    with SnapshotManager(tmp_path / "snapshots") as manager:
        manager.save_snapshot(model, metrics={"loss": 1.0}, step=3, wait=True)
        model.weights["layer.weight"] += 1
        save = manager.save_snapshot(metrics={"loss": 0.1}, step=9, wait=True)
        assert save is not None
    with Repository.open(tmp_path / "snapshots") as repository:
        files = SnapshotRef("", str(save.id)).files(repository)
        entry = files.entry("model/layer.weight.safetensors" if what == "weights" else "snapshot.json")
        chunks = repository.block_maps.ids(
            entry.content, entry.map_height, blocks_of(entry.size_bytes, 1 << 18)
        )
        where = repository.chunks.locate([id_ for _, id_ in chunks][-1])
    with open(tmp_path / "snapshots" / "packs" / f"{where.pack:016x}.pack", "r+b") as pack:
        pack.seek(where.offset)
        pack.write(bytes(where.stored_bytes))
    plain = TrainingSnapshots(tmp_path / "snapshots")
    if what == "weights":
        for load in (lambda: plain.load_best("loss"), lambda: plain.load_snapshot("latest")):
            with pytest.raises(Damaged):
                load()
        assert plain.load_snapshot()["step"] == 3
        return
    assert plain.load_best("loss")["step"] == 3
    assert [one.message for one in caplog.records] == ["ciuic: 1 snapshot cannot be read, and is passed over"]


class _Texts(html.parser.HTMLParser):
    """Texts and tags of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_table_is_a_list_that_prints(ids: dict[int, str], tmp_path: Path) -> None:
    """The table has the snapshots newest first, aligned as text, and slices into tables."""
    plain = TrainingSnapshots(tmp_path / "snapshots")
    plain.hold(ids[1])
    table = plain.list_snapshots()
    assert [one.id for one in table] == list(ids.values())[::-1]
    assert (table[0].id, table[-1].id, len(table)) == (ids[7], ids[1], 7)
    assert isinstance(table[:2], SnapshotTable)
    lines = repr(table).splitlines()
    assert len(lines) == 8
    assert lines[0].split() == ["id", "time", "step", "epoch", "metrics", "size", "new", "tags"]
    assert "loss 3, accuracy 10" in lines[-1]
    assert lines[-1].endswith("held")
    column = lines[0].index("metrics")
    assert all(line[column - 1] == " " and line[column] != " " for line in lines)
    assert repr(table[:0]) == "no snapshots"


def test_the_table_of_a_notebook_is_escaped(tmp_path: Path) -> None:
    """Names from the repository are text in HTML and one line in text, whatever they contain."""
    hostile = "<script>alert('&\"')</script>"
    with SnapshotManager(tmp_path / "snapshots") as manager:
        manager.save_snapshot(Model(), metrics={hostile: 1.0, "\x1b[2J\n": 2.0}, tags=(hostile,), wait=True)
        table = manager.list_snapshots()
    page = _Texts()
    page.feed(table._repr_html_())
    assert page.tags == {"table", "thead", "tbody", "tr", "th", "td"}
    assert hostile in page.texts
    assert f"{hostile} 1, \\x1b[2J\\n 2" in page.texts
    assert len(repr(table).splitlines()) == 2
    assert "\x1b" not in repr(table)
    assert table[:0]._repr_html_() == "<p>no snapshots</p>"


@pytest.mark.usefixtures("ids")
def test_a_long_table_shows_the_newest(tmp_path: Path) -> None:
    """A table of many snapshots shows sixty and says how many there are besides."""
    (one, *_) = TrainingSnapshots(tmp_path / "snapshots").list_snapshots()
    table = SnapshotTable([one] * 100)
    assert len(repr(table).splitlines()) == 62
    assert repr(table).endswith("\n… and 40 earlier")
    assert table._repr_html_().count("<tr>") == 61


def test_names_that_are_no_ids_mean_snapshots_of_this_training(tmp_path: Path) -> None:
    """`latest` and times never name a snapshot of another training in the same repository; ids do."""
    ids = {}
    for name in ("mine", "other"):
        with SnapshotManager(tmp_path / "snapshots", name=name) as manager:
            save = manager.save_snapshot(Model(), step=1, wait=True)
            assert save is not None
            ids[name] = save.id
    mine = TrainingSnapshots(tmp_path / "snapshots", name="mine")
    assert mine.load_snapshot("latest").id == ids["mine"]
    assert mine.load_snapshot("2100-01-01").id == ids["mine"]
    assert mine.load_snapshot(str(ids["other"])).id == ids["other"]
    with pytest.raises(NotFound):
        mine.load_snapshot("latest~1")
    mine.hold("latest", "mine")
    with Repository.open(tmp_path / "snapshots") as repository:
        assert [info.id for info in repository.snapshots.list() if info.held] == [ids["mine"]]


class _Zeros:
    """Object whose state is large, and zeros alone, as that of a new optimizer."""

    def state_dict(self) -> dict[str, object]:
        return {"large": np.zeros(1 << 18), "small": np.zeros(4)}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Take nothing."""


def test_a_stored_state_is_good_whatever_its_tensors_are(tmp_path: Path) -> None:
    """A committed state is one checkpoint and GOOD, also with tensors of zeros, of which a snapshot has holes."""
    with SnapshotManager(tmp_path / "snapshots") as manager:
        manager.save_snapshot(Model(), _Zeros(), epoch=1, wait=True)
    with Repository.open(tmp_path / "snapshots") as repository:
        (timeline,) = timelines(repository.snapshots.load_all()[0])
        (found,) = checkpoints(repository, timeline)
    assert (found.checkpoint.path, found.checkpoint.verdict.state) == (b"/training", "GOOD")
    assert found.checkpoint.verdict.format == "training"
    assert found.mtime_ns > 0
