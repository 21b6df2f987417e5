"""torch.distributed.checkpoint with `FileSystemWriter` and `FileSystemReader` of ours in place of torch's."""

from __future__ import annotations

import inspect
import io
import json
import pickle  # noqa: TID251  async_save pickles writers
import shutil
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="no CPU build of PyTorch is offered here")
if not torch.distributed.is_available():
    pytest.skip("this PyTorch has no torch.distributed", allow_module_level=True)

from support.sharded_training import Ranks  # noqa: E402
from torch.distributed import checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint._extension import ZStandard  # noqa: E402

from ciuic.errors import NotFound  # noqa: E402
from ciuic.repository import Repository  # noqa: E402
from ciuic.training.dcp import FileSystemReader, FileSystemWriter, filesystem  # noqa: E402
from ciuic.training.writer.housekeeping import read_back  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def state(number: float) -> dict[str, Any]:
    """Return a state with a large and a small tensor, an object, and bytes in a file in memory."""
    return {
        "model": {"large": torch.full((300, 200), number), "small": torch.full((3,), number)},
        "step": int(number),
        "losses": [number, {"note": io.BytesIO(b"%d" % number)}],
    }


def save(directory: Path, number: float, **options: Any) -> FileSystemWriter:
    writer = FileSystemWriter(directory, **options)
    dcp.save(state(number), storage_writer=writer, no_dist=True)
    return writer


def load(directory: Path) -> dict[str, Any]:
    """Load a checkpoint and check that all of it is of one save; return it."""
    found = state(-1)
    dcp.load(found, storage_reader=FileSystemReader(directory), no_dist=True)
    number = found["step"]
    assert found["model"]["large"].eq(number).all()
    assert found["model"]["small"].eq(number).all()
    assert found["losses"][0] == number
    assert found["losses"][1]["note"].getvalue() == b"%d" % number
    return found


@pytest.mark.full
@pytest.mark.parametrize(
    ("ours", "theirs"), [(FileSystemWriter, dcp.FileSystemWriter), (FileSystemReader, dcp.FileSystemReader)]
)
def test_the_arguments_are_torchs(ours: type, theirs: type) -> None:
    """Every argument of torch's class has the same place, name, kind and default; ours alone are by keyword."""
    expected = list(inspect.signature(theirs).parameters.values())
    found = list(inspect.signature(ours).parameters.values())
    for mine, torchs in zip(found, expected, strict=False):
        assert (mine.name, mine.kind, mine.default) == (torchs.name, torchs.kind, torchs.default)
    assert all(one.kind is inspect.Parameter.KEYWORD_ONLY for one in found[len(expected) :])
    for name in inspect.signature(theirs).parameters:
        if not name.startswith("_"):
            assert hasattr(ours("somewhere"), name)


def test_the_metadata_is_torchs(tmp_path: Path) -> None:
    """Tensors, objects, the planner's data, ids and version are those that torch's classes return."""
    both = []
    for writer, reader in (
        (FileSystemWriter, FileSystemReader),
        (dcp.FileSystemWriter, dcp.FileSystemReader),
    ):
        directory = tmp_path / writer.__module__
        written = writer(directory)
        dcp.save(state(1), storage_writer=written, no_dist=True)
        read = reader(str(directory))
        found = read.read_metadata()
        meta = found.storage_meta
        assert (str(meta.checkpoint_id), meta.save_id, meta.load_id) == (
            str(directory),
            written.save_id,
            read.load_id,
        )
        assert read.checkpoint_id == written.checkpoint_id == directory
        both.append((found.state_dict_metadata, found.planner_data, found.version, meta.modules))
        first = written.save_id
        written.reset(tmp_path / "other")
        assert written.checkpoint_id == tmp_path / "other"
        assert written.save_id != first
    assert both[0] == both[1]


def test_a_checkpoint_is_overwritten_by_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last save is what is loaded, also where a crash came between its commit and its name; others are freed."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.json").write_text("{}")
    save(tmp_path / "run", 1)
    save(tmp_path / "run", 2)
    assert load(tmp_path / "run")["step"] == 2

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(filesystem, "write_checkpoint_pointer", crash)
    writer = FileSystemWriter(tmp_path / "run")
    with pytest.raises(dcp.CheckpointException, match="KeyboardInterrupt"):
        dcp.save(state(3), storage_writer=writer, no_dist=True)
    # The writer process removes the save before this one, which the pointer still names.
    writer.close()
    assert load(tmp_path / "run")["step"] == 3
    with Repository.open(tmp_path / "run/ciuic") as repository:
        (info,) = repository.snapshots.list()
        assert not read_back(repository, info.id)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [".metadata", "ciuic", "config.json"]


@pytest.mark.full
def test_a_checkpoint_is_not_overwritten_unasked(tmp_path: Path) -> None:
    """A second save with overwrite=False fails with torch's error, and the checkpoint stays as it was."""
    save(tmp_path / "run", 1)
    with pytest.raises(dcp.CheckpointException, match=r"Checkpoint already exists and self.overwrite=False"):
        save(tmp_path / "run", 2, overwrite=False)
    assert load(tmp_path / "run")["step"] == 1
    save(tmp_path / "new", 2, overwrite=False)
    assert load(tmp_path / "new")["step"] == 2


@pytest.mark.full
def test_a_directory_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    """A directory without a checkpoint, or with one of torch's own, is an error that names the file and the way out."""
    with pytest.raises(FileNotFoundError, match=r"\.metadata"):
        FileSystemReader(tmp_path).read_metadata()
    assert FileSystemReader(tmp_path).find() is None
    with pytest.raises(dcp.CheckpointException, match=r"No such file or directory.*\.metadata"):
        load(tmp_path)
    dcp.save(state(1), checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(dcp.CheckpointException, match="is a pickle of torch's FileSystemWriter"):
        load(tmp_path)


@pytest.mark.full
def test_a_directory_may_be_moved(tmp_path: Path) -> None:
    """A checkpoint's directory can be moved and copied, with its own repository or beside a shared one."""
    save(tmp_path / "a/own", 1)
    save(tmp_path / "a/shared", 2, repository=tmp_path / "a/repository")
    shutil.move(tmp_path / "a", tmp_path / "b")
    shutil.copytree(tmp_path / "b/own", tmp_path / "copy")
    shutil.rmtree(tmp_path / "b/own")
    assert load(tmp_path / "copy")["step"] == 1
    assert load(tmp_path / "b/shared")["step"] == 2


@pytest.mark.full
def test_one_repository_for_many_checkpoints(tmp_path: Path) -> None:
    """Checkpoints in one repository store equal tensors once; one that was removed by the limit says so."""
    writer = FileSystemWriter(tmp_path / "unused", repository=tmp_path / "repository", max_snapshots=2)
    large = torch.rand(1 << 18)
    sizes = []
    for number in range(3):
        dcp.save(
            {"large": large, "step": number},
            checkpoint_id=tmp_path / f"step-{number}",
            storage_writer=writer,
            no_dist=True,
        )
        sizes.append(sum(file.stat().st_size for file in (tmp_path / "repository/packs").iterdir()))
    writer.close()
    assert sizes[2] < sizes[0] + large.numel()
    assert not (tmp_path / "unused").exists()
    for number in (1, 2):
        found = {"large": torch.zeros(1 << 18), "step": -1}
        dcp.load(
            found,
            checkpoint_id=tmp_path / f"step-{number}",
            storage_reader=FileSystemReader("/x"),
            no_dist=True,
        )
        assert found["step"] == number
        assert found["large"].equal(large)
    with pytest.raises(NotFound, match=r"step-0 is not in .*repository: it was removed"):
        FileSystemReader(tmp_path / "step-0").read_metadata()


@pytest.mark.full
def test_extensions_that_rewrite_content_are_refused(tmp_path: Path) -> None:
    """ZStandard compresses; an extension that would rewrite what is stored is refused and never left out."""
    save(tmp_path / "plain", 1)
    save(tmp_path / "small", 1, _extensions=[ZStandard()])
    assert load(tmp_path / "small")["step"] == 1
    sizes = {
        name: sum(file.stat().st_size for file in (tmp_path / name / "ciuic/packs").iterdir())
        for name in ("plain", "small")
    }
    assert sizes["small"] < sizes["plain"]

    class Encrypt:
        pass

    with pytest.raises(NotImplementedError, match="Encrypt would rewrite"):
        FileSystemWriter(tmp_path, _extensions=[Encrypt()])


@pytest.mark.full
def test_a_writer_can_be_sent_to_another_process(tmp_path: Path) -> None:
    """A writer out of a pickle, as async_save with processes makes it, saves where the original would."""
    writer = save(tmp_path / "run", 1)
    copy = pickle.loads(pickle.dumps(writer))
    assert copy.save_id == writer.save_id
    dcp.save(state(2), storage_writer=copy, no_dist=True)
    assert load(tmp_path / "run")["step"] == 2


@pytest.mark.full
@pytest.mark.parametrize(
    ("checkpoint_id", "valid"), [("s3://bucket/a", False), ("/proc/1/nothing/a", True), (Path("x"), True)]
)
def test_checkpoint_ids_are_judged_as_by_torch(checkpoint_id: Any, valid: bool) -> None:
    """A checkpoint_id is a local path for both classes where it is one for torch's, and no URL."""
    expected = dcp.FileSystemWriter.validate_checkpoint_id(checkpoint_id)
    assert FileSystemWriter.validate_checkpoint_id(checkpoint_id) == expected
    assert FileSystemReader.validate_checkpoint_id(checkpoint_id) == expected
    assert valid or not expected


def save_and_load_alone(rank: int, world: int, directory: str) -> None:
    """Save without collectives, each rank a state of its own, synchronously and asynchronously, and load it."""
    for number in (1, 2):
        writer = FileSystemWriter(directory)
        own = state(10 * number + rank)
        if number == 1:
            dcp.save(own, storage_writer=writer, use_collectives=False)
        else:
            dcp.async_save(own, storage_writer=writer, use_collectives=False).result()
        assert load_ranked(directory) == 10 * number + rank
        writer.close()


def load_ranked(directory: str) -> int:
    found = state(-1)
    dcp.load(found, storage_reader=FileSystemReader(directory))
    assert found["model"]["large"].eq(found["step"]).all()
    return int(found["step"])


@pytest.mark.full
def test_ranks_may_save_without_each_other(tmp_path: Path) -> None:
    """With use_collectives=False each rank saves and loads a checkpoint of its own in one directory."""
    Ranks(tmp_path / "ranks", 2, save_and_load_alone, str(tmp_path / "run")).check()
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"__0.metadata", "__1.metadata", "ciuic"}
    assert json.loads((tmp_path / "run/__1.metadata").read_text())["name"] == "dcp-rank-1"
