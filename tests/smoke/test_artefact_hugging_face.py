"""``ciuic export --as hf``: safetensors, transformers and huggingface_hub read the folder, and it is brought up to date."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.dying_os import DATA_CALLS, NAME_CALLS, DyingOs, Killed, Steps
from support.restoring import take

torch = pytest.importorskip("torch", reason="no CPU build of PyTorch is offered here")
safetensors_torch = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")

from ciuic.artefacts import folder, hugging_face  # noqa: E402
from ciuic.artefacts.hugging_face import Folder, export_hugging_face  # noqa: E402
from ciuic.artefacts.snapshot_files import files_of  # noqa: E402
from ciuic.cli.app import cli  # noqa: E402
from ciuic.errors import DestinationExists, UsageError  # noqa: E402
from ciuic.repository import Repository  # noqa: E402
from ciuic.system import disk  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class Place:
    """A root with a checkpoint, its repository and a destination."""

    def __init__(self, top: Path) -> None:
        self.root = top / "root"
        self.root.mkdir()
        self.destination = top / "destination"
        self.repository = Repository.create(top / "repository", block_size=4096)
        self.snapshot = ""

    def export(self, *, overwrite: bool = False, below: str = "") -> Folder:
        """Take a snapshot, and export it."""
        snapshot = take(self.repository, self.root)
        self.snapshot = str(snapshot.id)
        with self.repository.reopen() as repository:
            path = os.fsencode(self.root / below)
            found = files_of(repository, snapshot, path)
            return export_hugging_face(
                repository, snapshot, path, found, self.destination, overwrite=overwrite
            )

    def digests(self) -> dict[str, str]:
        return {
            str(path.relative_to(self.destination)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(self.destination.rglob("*"))
            if path.is_file()
        }


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.repository.close()


def state() -> dict[str, Any]:
    """Return tensors of many dtypes, a transposed one, a scalar, an empty one, and two that share a storage."""
    torch.manual_seed(5)
    shared = torch.randn(40, 30)
    return {
        "bf16": torch.randn(100, 70).to(torch.bfloat16),
        "f16": torch.randn(3, 5).half(),
        "f64": torch.randn(7, dtype=torch.float64),
        "i64": torch.arange(9),
        "u8": torch.arange(250, dtype=torch.uint8),
        "bool": torch.tensor([True, False]),
        "columns": torch.randn(33, 65).t(),
        "permuted": torch.randn(4, 5, 6).permute(2, 0, 1),
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 3),
        "shared": shared,
        "tied": shared,
    }


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(found[name], tensor), name


def test_weights_of_torch_are_read_by_safetensors(place: Place) -> None:
    """A state of torch becomes safetensors with every bit, without what an optimizer has, and its pickles stay behind."""
    torch.save({"model_state_dict": {f"module.{name}": one for name, one in state().items()}, "optimizer": {"m": torch.ones(3)}, "step": 3},
               place.root / "step.pt")  # fmt: skip
    torch.save({"exp_avg": torch.ones(3)}, place.root / "optimizer.pt")
    (place.root / "config.json").write_text('{"model_type": "x"}')
    # The destination may be a clone, whose hooks these would be.
    (place.root / ".git/hooks").mkdir(parents=True)
    (place.root / ".git/hooks/post-checkout").write_text("#!/bin/sh\n")
    (place.root / "link").symlink_to("/etc/passwd")
    done = place.export()
    same(safetensors_torch.load_file(place.destination / "model.safetensors"), state())
    assert {one.name for one in done.left_out} == {
        b"optimizer.pt",
        b"step.pt",
        b".git/hooks/post-checkout",
        b"link",
    }
    assert sorted(place.digests()) == [".ciuic-export.json", "README.md", "config.json", "model.safetensors"]


@pytest.mark.full
def test_large_weights_are_cut_into_shards_with_an_index(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights above the limit of a file become several, and the index names each tensor's."""
    monkeypatch.setattr(hugging_face, "MAX_SHARD_BYTES", 10_000)
    torch.save(state(), place.root / "pytorch_model.bin")
    place.export()
    index = json.loads((place.destination / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 2
    assert sorted(place.destination.glob("*.safetensors")) == [place.destination / name for name in shards]
    found: dict[str, Any] = {}
    for name in shards:
        found |= safetensors_torch.load_file(place.destination / name)
    same(found, state())
    assert index["weight_map"].keys() == state().keys()


@pytest.mark.full
def test_transformers_loads_what_was_exported(place: Place) -> None:
    """from_pretrained of transformers loads a checkpoint of shards as they are, one without their index, and one of torch."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=100, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(place.root, max_shard_size="30KB")
    (place.root / "README.md").write_text("---\nlicense: mit\nciuic_snapshot: cs-000000\n---\n# Mine\n")
    shards = sorted(path.name for path in place.root.glob("model-*.safetensors"))
    assert len(shards) > 1
    for removed in ((), ("model.safetensors.index.json",), (*shards, "config.json")):
        for name in removed:
            (place.root / name).unlink(missing_ok=True)
        if "config.json" in removed:
            torch.save(model.state_dict(), place.root / "pytorch_model.bin")
            config.save_pretrained(place.root)
        place.export()
        same(transformers.GPT2LMHeadModel.from_pretrained(place.destination).state_dict(), model.state_dict())
        card = hub.ModelCard.load(place.destination / "README.md")
        assert (card.data.to_dict()["ciuic_snapshot"], card.data.license) == (place.snapshot, "mit")
        assert card.text.strip() == "# Mine"
    assert not any((place.destination / name).exists() for name in shards)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["file", "directory", "shards", "shards without index"])
def test_weights_of_any_name_are_found_by_transformers(place: Place, kind: str) -> None:
    """Weights that training has named after their step have the name that from_pretrained looks for, and the card says which it was."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=100, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(place.root, max_shard_size="30KB" if kind.startswith("shards") else "1GB")
    for path in place.root.glob("model*"):
        path.rename(path.with_name(path.name.replace("model", "step-4000", 1)))
    index = place.root / "step-4000.safetensors.index.json"
    if kind == "shards":
        index.write_text(index.read_text().replace('"model-', '"step-4000-'))
    elif kind == "shards without index":
        index.unlink()
    place.export(below="step-4000.safetensors" if kind == "file" else "")
    if kind == "file":
        # As the model's own program knows it.
        config.save_pretrained(place.destination)
    same(transformers.GPT2LMHeadModel.from_pretrained(place.destination).state_dict(), model.state_dict())
    facts = hub.ModelCard.load(place.destination / "README.md").data.to_dict()
    was = {"shards": "step-4000.safetensors.index.json", "shards without index": None}
    assert facts.get("ciuic_weights") == was.get(kind, "step-4000.safetensors")
    assert place.export(below="step-4000.safetensors" if kind == "file" else "").updated.removed == 0


@pytest.mark.full
@pytest.mark.parametrize(
    "names",
    [
        ("adapter_model.safetensors", "config.json"),
        ("diffusion_pytorch_model.safetensors", "config.json"),
        ("model.fp16.safetensors", "config.json"),
        ("diffusion_pytorch_model-00001-of-00001.safetensors", "diffusion_pytorch_model.safetensors.index.json", "config.json"),
        ("step-1.safetensors", "step-2.safetensors", "config.json"),
        ("other.safetensors", "settings.yaml"),
        ("model.safetensors", "other.safetensors.index.json", "config.json"),
        ("text/step-1.safetensors", "config.json"),
    ],
)  # fmt: skip
def test_names_that_other_libraries_look_for_are_kept(place: Place, names: tuple[str, ...]) -> None:
    """Names of other libraries, and those among which none is the model's by itself, are those of the snapshot."""
    for name in names:
        (place.root / name).parent.mkdir(exist_ok=True)
        if name.endswith(".safetensors"):
            safetensors_torch.save_file({"w": torch.ones(2)}, place.root / name)
        else:
            (place.root / name).write_text("{}")
    place.export()
    assert sorted(place.digests()) == sorted([".ciuic-export.json", "README.md", *names])
    assert b"ciuic_weights" not in (place.destination / "README.md").read_bytes()


@pytest.mark.full
def test_a_later_export_writes_what_has_changed_alone(place: Place) -> None:
    """A later export writes what has changed, leaves what it does not know, and removes what is gone."""
    torch.save(state(), place.root / "pytorch_model.bin")
    (place.root / "config.json").write_text("{}")
    (place.root / "vocab.txt").write_text("a")
    first = place.export()
    assert first.updated.written_bytes == first.updated.size_bytes
    (place.destination / "mine").write_text("mine")
    weights = (place.destination / "model.safetensors").stat()
    (place.root / "config.json").write_text('{"a": 1}')
    (place.root / "vocab.txt").unlink()
    second = place.export()
    card = (place.destination / "README.md").stat().st_size
    assert (second.updated.written_bytes, second.updated.removed) == (8 + card, 1)
    after = (place.destination / "model.safetensors").stat()
    assert (after.st_ino, after.st_mtime_ns) == (weights.st_ino, weights.st_mtime_ns)
    assert sorted(place.digests()) == [
        ".ciuic-export.json",
        "README.md",
        "config.json",
        "mine",
        "model.safetensors",
    ]
    (place.root / "mine").write_text("of the snapshot")
    with pytest.raises(DestinationExists, match="mine"):
        place.export()
    place.export(overwrite=True)
    assert (place.destination / "mine").read_text() == "of the snapshot"


@pytest.mark.full
@pytest.mark.parametrize("steps", [1, 3, 5, 8, 12, 17, 23, 30, 38, 47, 57])
def test_an_interrupted_export_is_repeated(place: Place, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """A process that dies at any step leaves what the next export completes."""
    torch.save(state(), place.root / "pytorch_model.bin")
    (place.root / "gone.txt").write_text("x")
    place.export()
    torch.save({"other": torch.ones(5)}, place.root / "pytorch_model.bin")
    (place.root / "gone.txt").unlink()
    for name in ("config.json", "new/deep.txt"):
        (place.root / name).parent.mkdir(exist_ok=True)
        (place.root / name).write_text("{}")
    with monkeypatch.context() as patched:
        dying = DyingOs(Steps(steps), NAME_CALLS | DATA_CALLS)
        for module in (folder, disk):
            patched.setattr(module, "os", dying)
        with pytest.raises(Killed):
            place.export()
    place.export()
    found = place.digests()
    place.destination = place.destination.parent / "other"
    # The same names; only the card and the manifest say of which snapshot.
    place.export()
    for own in (".ciuic-export.json", "README.md"):
        found.pop(own)
    assert found == {name: digest for name, digest in place.digests().items() if name in found}
    assert len(place.digests()) == len(found) + 2


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod."])
@pytest.mark.parametrize("key", ["", "model", "state_dict", "model_state_dict", "net"])
@pytest.mark.parametrize(
    "beside", [{}, {"step": 3}, {"optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}}}]
)
def test_tensors_have_the_names_that_the_model_gives_them(
    place: Place, prefix: str, key: str, beside: dict[str, Any]
) -> None:
    """Whatever a checkpoint calls the model's state, and whatever stands beside it, names are those of the model."""
    # A model with a part that is called as states are.
    names = ("model.weight", "model.bias", "head.weight")
    own = {f"{prefix}{name}": torch.nn.Parameter(torch.ones(at + 1)) for at, name in enumerate(names)}
    torch.save({key: own, **beside} if key else own, place.root / "last.pt")
    place.export()
    assert sorted(safetensors_torch.load_file(place.destination / "model.safetensors")) == sorted(names)


def test_several_states_are_refused(place: Place) -> None:
    """A checkpoint of two models, neither of which has the usual name, is refused by the names of both."""
    torch.save({"gen": {"w": torch.ones(1)}, "disc": {"w": torch.ones(1)}}, place.root / "gan.pt")
    with pytest.raises(UsageError, match="several states: gen, disc"):
        place.export()


@pytest.mark.full
def test_what_has_no_weights_or_several_is_refused(place: Place) -> None:
    """Without weights, or with several files that may be them, the export says so and writes nothing."""
    (place.root / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="no weights"):
        place.export()
    for name in ("a.pt", "b.pt"):
        torch.save({"w": torch.ones(2)}, place.root / name)
    with pytest.raises(UsageError, match=r"several files of torch: a\.pt, b\.pt"):
        place.export()
    torch.save({"view": torch.ones(4, 4)[:, 1]}, place.root / "a.pt")
    with pytest.raises(UsageError, match="cannot hold view"):
        place.export(below="a.pt")
    assert not place.destination.exists()
    place.export(below="b.pt")
    assert torch.equal(
        safetensors_torch.load_file(place.destination / "model.safetensors")["w"], torch.ones(2)
    )


@pytest.mark.full
def test_a_large_tensor_in_another_order_is_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that would be put in order in memory has a limit, so that a sparse file cannot use all of it."""
    torch.save({"columns": torch.randn(33, 65).t(), "rows": torch.randn(33, 65)}, place.root / "model.pt")
    monkeypatch.setattr(hugging_face, "_MAX_LYING_BYTES", 1 << 10)
    with pytest.raises(UsageError, match="columns is larger"):
        place.export()


def test_the_command_reports_in_words_and_json(place: Place) -> None:
    """The command names the snapshot, and --json has the figures."""
    torch.save({"w": torch.ones(2)}, place.root / "model.pt")
    take(place.repository, place.root)
    words = [
        "--repo",
        str(place.repository.path),
        "export",
        "latest",
        "-p",
        str(place.root),
        "--as",
        "hf",
        str(place.destination),
    ]
    assert CliRunner().invoke(cli, words).exit_code == 0
    document = json.loads(CliRunner().invoke(cli, [*words, "--json"]).stdout)
    assert (document["format"], document["files"], document["written_bytes"], document["left_out"]) == (
        "hf",
        2,
        0,
        [],
    )
    assert CliRunner().invoke(cli, [*words, "--to", "torch"]).exit_code == 2
    assert CliRunner().invoke(cli, [*words, "--ranks", "2"]).exit_code == 2
