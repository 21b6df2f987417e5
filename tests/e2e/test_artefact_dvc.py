"""``ciuic export --as dvc``: a DVC directory with every byte, which DVC itself reads where it is installed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.dying_os import DATA_CALLS, NAME_CALLS, DyingOs, Killed, Steps
from support.restoring import take, write

from ciuic.artefacts import folder
from ciuic.artefacts.dvc import Stored, export_dvc
from ciuic.artefacts.snapshot_files import files_of
from ciuic.cli.app import cli
from ciuic.errors import DestinationExists, UsageError
from ciuic.repository import Repository
from ciuic.system import disk

DVC = shutil.which("dvc")


class Place:
    """A root, its repository and a destination."""

    def __init__(self, top: Path) -> None:
        self.root = top / "run"
        self.root.mkdir()
        self.destination = top / "destination"
        self.repository = Repository.create(top / "repository", block_size=4096)
        self.snapshot = ""

    def export(self, below: str = "", *, overwrite: bool = False) -> Stored:
        """Take a snapshot, and export it."""
        snapshot = take(self.repository, self.root)
        self.snapshot = str(snapshot.id)
        with self.repository.reopen() as repository:
            path = os.fsencode(self.root / below)
            found = files_of(repository, snapshot, path)
            return export_dvc(snapshot, repository.id, path, found, self.destination, overwrite=overwrite)

    def object(self, digest: str) -> Path:
        return self.destination / ".dvc/cache/files/md5" / digest[:2] / digest[2:]

    def listed(self) -> dict[str, bytes]:
        """Return the content of each file that ``run.dvc`` names, every object checked against its name."""
        text = (self.destination / "run.dvc").read_text()
        digest = text.split('md5: "')[1].split('"')[0]
        tree = self.object(digest).read_bytes()
        assert hashlib.md5(tree).hexdigest() + ".dir" == digest
        found = {}
        for one in json.loads(tree):
            path = self.object(one["md5"])
            found[one["relpath"]] = path.read_bytes()
            assert hashlib.md5(found[one["relpath"]]).hexdigest() == one["md5"]
            assert stat.S_IMODE(path.stat().st_mode) == 0o444
        return found

    def expected(self) -> dict[str, bytes]:
        return {
            str(path.relative_to(self.root)): path.read_bytes()
            for path in self.root.rglob("*")
            if path.is_file()
        }


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    write(made.root / "model.bin", os.urandom(20000))
    write(made.root / "below/größe \n'\"", b"odd")
    write(made.root / "empty", b"")
    write(made.root / "holes", bytes(9000))
    yield made
    made.repository.close()


def dvc(place: Place, *words: str) -> str:
    assert DVC is not None
    environment = {**os.environ, "DVC_NO_ANALYTICS": "1", "HOME": str(place.destination.parent)}
    done = subprocess.run(
        [DVC, *words],
        cwd=place.destination,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_cache_has_every_byte_and_names_the_snapshot(place: Place) -> None:
    """Objects have the content of the snapshot under its digest, and what DVC cannot hold or would obey is named."""
    for name in (b".git/config", b".dvcignore", b"not utf-8 \xff"):
        write(Path(os.fsdecode(os.fsencode(place.root) + b"/" + name)), b"x")
    expected = {
        name: data for name, data in place.expected().items() if name[0] != "." and name[:4] != "not "
    }
    (place.root / "link").symlink_to("model.bin")
    done = place.export()
    assert {one.name for one in done.left_out} == {b".git/config", b".dvcignore", b"not utf-8 \xff", b"link"}
    assert place.listed() == expected
    assert f'snapshot: "{place.snapshot}"' in (place.destination / "run.dvc").read_text()
    assert sorted(os.listdir(place.destination)) == [".dvc", "run.dvc"]
    assert not (place.destination / ".dvc/ciuic/new").exists()


def test_a_later_export_stores_what_has_changed_alone(place: Place) -> None:
    """A later export reads and stores what has changed; the file names the later state, and the earlier objects stay."""
    place.export()
    kept = place.object(hashlib.md5((place.root / "model.bin").read_bytes()).hexdigest()).stat()
    write(place.root / "new", b"12345")
    (place.root / "empty").unlink()
    (place.root / "model.bin").rename(place.root / "moved")
    done = place.export()
    assert (done.updated.written_bytes, done.updated.removed) == (5, 2)
    assert place.listed() == place.expected()
    again = place.object(hashlib.md5((place.root / "moved").read_bytes()).hexdigest()).stat()
    assert (again.st_ino, again.st_mtime_ns) == (kept.st_ino, kept.st_mtime_ns)


@pytest.mark.parametrize("steps", range(1, 60, 6))
def test_an_interrupted_export_is_repeated(place: Place, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """A process that dies at any step leaves a file whose objects are whole, and the next export completes."""
    place.export()
    before = place.listed()
    write(place.root / "model.bin", os.urandom(20000))
    write(place.root / "deep/er/new", b"new")
    with monkeypatch.context() as patched:
        dying = DyingOs(Steps(steps), NAME_CALLS | DATA_CALLS)
        for module in (folder, disk):
            patched.setattr(module, "os", dying)
        with pytest.raises(Killed):
            place.export()
    assert place.listed() in (before, place.expected())
    place.export()
    assert place.listed() == place.expected()


def test_what_is_not_its_own_is_refused(place: Place, tmp_path: Path) -> None:
    """A directory of other things, a file of the user's, a cache in another place and a link are refused."""
    place.destination.mkdir()
    (place.destination / "mine").write_text("mine")
    with pytest.raises(DestinationExists, match="nor a DVC directory"):
        place.export()
    (place.destination / ".dvc").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DestinationExists, match=r"something else at \.dvc"):
        place.export()
    (place.destination / ".dvc").unlink()
    write(place.destination / ".dvc/config", b"[core]\n    no_scm = true\n[cache]\n    dir = /elsewhere\n")
    with pytest.raises(UsageError, match="cache in another place"):
        place.export()
    (place.destination / ".dvc/config").write_bytes(b"[core]\n    no_scm = true\n")
    (place.destination / "run.dvc").write_text("outs: []\n")
    with pytest.raises(DestinationExists, match=r"run\.dvc already"):
        place.export()
    place.export(overwrite=True)
    assert place.listed() == place.expected()
    assert (place.destination / "mine").read_text() == "mine"


def test_the_command_exports_one_file(place: Place) -> None:
    """The command exports a single file as well, and --json names the file that DVC reads."""
    take(place.repository, place.root)
    words = [
        "--repo",
        str(place.repository.path),
        "export",
        "latest",
        "-p",
        str(place.root / "model.bin"),
        "--as",
        "dvc",
    ]
    result = CliRunner().invoke(cli, [*words, str(place.destination), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["file"] == "model.bin.dvc"
    digest = hashlib.md5((place.root / "model.bin").read_bytes()).hexdigest()
    assert f'- md5: "{digest}"' in (place.destination / "model.bin.dvc").read_text()
    assert place.object(digest).read_bytes() == (place.root / "model.bin").read_bytes()


@pytest.mark.slow
@pytest.mark.skipif(
    DVC is None, reason="dvc is not installed: pip install dvc, in an environment of its own on PATH"
)
def test_dvc_reads_what_was_exported(place: Place) -> None:
    """DVC checks every file out, finds nothing changed, and brings the working tree to a later export."""
    for number in range(2):
        write(place.root / "model.bin", os.urandom(20000 + number))
        place.export()
        dvc(place, "checkout", "-q", "run.dvc")
        out = place.destination / "run"
        assert {
            str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()
        } == place.expected()
        assert "up to date" in dvc(place, "status", "run.dvc")
        before = (place.destination / "run.dvc").read_text().split('md5: "')[1].split('"')[0]
        # DVC's own digest of what it has checked out.
        dvc(place, "commit", "-q", "-f", "run.dvc")
        assert before in (place.destination / "run.dvc").read_text()
        assert place.snapshot in (place.destination / "run.dvc").read_text()
