"""``ciuic export --as``: what changes between file, link and directory is exported again, and foreign files stop that."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support.dying_os import DATA_CALLS, NAME_CALLS, DyingOs, Killed, Steps
from support.restoring import take

from ciuic.artefacts import folder
from ciuic.artefacts.dvc import export_dvc
from ciuic.artefacts.git_lfs import export_git_lfs
from ciuic.artefacts.hugging_face import export_hugging_face
from ciuic.artefacts.snapshot_files import files_of
from ciuic.errors import DestinationExists
from ciuic.repository import Repository
from ciuic.system import disk

_KINDS: dict[str, dict[str, str]] = {
    "file": {"it": "file"},
    "link": {"it": "-> model.safetensors"},
    "directory": {"it/in": "in"},
    "nested": {"it/in/deep/a": "a", "it/in/deep/b": "b", "it/other/c": "c"},
    "nested file": {"it/in/deep": "deep", "it/other": "-> in"},
    "nothing": {},
}
"""What is at `it`; a link has an arrow before its target."""


class Place:
    """A root with one file of weights, its repository and a destination."""

    def __init__(self, top: Path) -> None:
        self.root = top / "root"
        self.root.mkdir()
        (self.root / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
        self.destination = top / "destination"
        self.repository = Repository.create(top / "repository", block_size=4096)

    def become(self, kind: str) -> None:
        """Replace what is at `it`."""
        at = self.root / "it"
        if at.is_dir() and not at.is_symlink():
            shutil.rmtree(at)
        else:
            at.unlink(missing_ok=True)
        for name, text in _KINDS[kind].items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if text.startswith("-> "):
                path.symlink_to(text.removeprefix("-> "))
            else:
                path.write_text(text)

    def export(self, form: str, *, overwrite: bool = False) -> None:
        """Take a snapshot, and export it."""
        snapshot = take(self.repository, self.root)
        with self.repository.reopen() as repository:
            path = os.fsencode(self.root)
            found = files_of(repository, snapshot, path)
            if form == "git-lfs":
                export_git_lfs(snapshot, repository.id, path, found, self.destination, overwrite=overwrite)
            elif form == "hf":
                export_hugging_face(repository, snapshot, path, found, self.destination, overwrite=overwrite)
            else:
                export_dvc(snapshot, repository.id, path, found, self.destination, overwrite=overwrite)

    def found(self, form: str) -> dict[str, str]:
        """Return what the artefact has at `it`, directories that are empty included."""
        if form == "dvc":
            (stored,) = (self.destination / ".dvc/ciuic").glob("*.json")
            names = json.loads(stored.read_text())["files"]
            return dict.fromkeys((name for name in names if name.startswith("it")), "")
        at = self.destination / "it"
        found = {}
        for path in (at, *(at.rglob("*") if not at.is_symlink() else ())):
            name = str(path.relative_to(self.destination))
            if path.is_symlink():
                found[name] = f"-> {os.readlink(path)}"
            elif path.is_file():
                found[name] = path.read_text()
            elif path.is_dir() and not any(path.iterdir()):
                found[name] = "an empty directory"
        return found


def expected(form: str, kind: str) -> dict[str, str]:
    """Return what an artefact has of a kind: git-lfs alone keeps links."""
    kept = {
        name: text for name, text in _KINDS[kind].items() if form == "git-lfs" or not text.startswith("-> ")
    }
    return dict.fromkeys(kept, "") if form == "dvc" else kept


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.repository.close()


@pytest.mark.parametrize("form", ["git-lfs", "hf", "dvc"])
@pytest.mark.parametrize("before", _KINDS)
def test_what_becomes_another_kind_is_exported_again(place: Place, form: str, before: str) -> None:
    """Whatever an export has written becomes file, link or directory by the next one, and back."""
    for after in (kind for kind in _KINDS if kind != before):
        for kind in (before, after):
            place.become(kind)
            place.export(form)
            assert place.found(form) == expected(form, kind), (before, after)


def _file(at: Path) -> None:
    at.write_text("mine")


def _empty_directory(at: Path) -> None:
    at.mkdir()


def _link(at: Path) -> None:
    at.symlink_to("mine")


def _replaced(at: Path) -> None:
    at.with_name("b").unlink()
    at.with_name("b").mkdir()


@pytest.mark.parametrize("form", ["git-lfs", "hf"])
@pytest.mark.parametrize("foreign", [_file, _empty_directory, _link, _replaced])
@pytest.mark.parametrize("overwrite", [False, True])
def test_foreign_things_in_a_directory_that_became_a_file_stop_the_export(
    place: Place, form: str, foreign: Callable[[Path], None], *, overwrite: bool
) -> None:
    """A directory with anything in it that no export has written is not removed: the export changes nothing, and names it."""
    place.become("nested")
    place.export(form)
    foreign(place.destination / "it/in/deep/mine")
    before = place.found(form)
    place.become("file")
    with pytest.raises(DestinationExists, match=r"it/in/deep/(mine|b) already"):
        place.export(form, overwrite=overwrite)
    assert place.found(form) == before


@pytest.mark.parametrize("form", ["git-lfs", "hf"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_on_the_way_to_a_file_is_kept(place: Place, form: str, *, overwrite: bool) -> None:
    """A file that no export has written does not become a directory."""
    place.export(form)
    (place.destination / "it").write_text("mine")
    place.become("nested")
    with pytest.raises(DestinationExists, match="something else at it,"):
        place.export(form, overwrite=overwrite)
    assert place.found(form) == {"it": "mine"}


@pytest.mark.parametrize("steps", range(1, 40, 4))
@pytest.mark.parametrize("form", ["git-lfs", "hf"])
def test_an_interrupted_change_of_kind_is_repeated(
    place: Place, monkeypatch: pytest.MonkeyPatch, form: str, steps: int
) -> None:
    """A process that dies while a directory becomes a file leaves what the next export completes."""
    place.become("nested")
    place.export(form)
    place.become("nested file")
    with monkeypatch.context() as patched:
        dying = DyingOs(Steps(steps), NAME_CALLS | DATA_CALLS)
        for module in (folder, disk):
            patched.setattr(module, "os", dying)
        with suppress(Killed):
            place.export(form)
    place.export(form)
    assert place.found(form) == expected(form, "nested file")
