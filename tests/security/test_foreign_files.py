"""Files of other programs, made by somebody who wants them to cost: links, pipes, bombs, and containers that hold each other."""

from __future__ import annotations

import io
import json
import os
import pickle  # noqa: TID251  the attacker's
import signal
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from support.late_modules import torch
from support.second_user import MADE_UP

from ciuic.errors import CiuicError, UsageError
from ciuic.training import import_state, state_import
from ciuic.training.convert import foreign_files
from ciuic.training.convert.dcp_import import decode_torch_metadata, read_dcp
from ciuic.training.convert.foreign_files import (
    ForeignDirectory,
    check_extent,
    load_plain,
    read_hugging_face,
)

pytestmark = pytest.mark.filterwarnings("ignore")


def _folder(top: Path) -> Path:
    """Make a folder of save_pretrained with one tensor."""
    folder = top / "folder"
    folder.mkdir()
    header = json.dumps({"weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    (folder / "config.json").write_bytes(b"{}")
    return folder


@pytest.mark.parametrize("name", ["vocab.txt", "config.json", "trainer_state.json", "optimizer.pt"])
def test_a_link_out_of_a_folder_is_refused_by_name(tmp_path: Path, name: str) -> None:
    """A file of a Hugging Face folder that is a link does not get into the state."""
    folder = _folder(tmp_path)
    secret = tmp_path / "secret"
    secret.write_bytes(b"{}")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(secret)
    with ForeignDirectory(folder) as directory, pytest.raises(ValueError, match=f"{name} .*symbolic link"):
        read_hugging_face(directory)


def test_weights_that_are_a_link_are_refused(tmp_path: Path) -> None:
    """Nor do weights that an index names."""
    folder = _folder(tmp_path)
    (folder / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    (folder / "a.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
    for file, message in (("a.safetensors", "symbolic link"), ("../elsewhere.safetensors", "outside")):
        index = {"weight_map": {"weight": file}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with ForeignDirectory(folder) as directory, pytest.raises(ValueError, match=message):
            read_hugging_face(directory)


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (lambda path: path.symlink_to("/dev/zero"), "symbolic link"),
        (lambda path: os.mknod(path, 0o020666, os.makedev(1, 5)), "device"),
        (os.mkfifo, "pipe"),
        (lambda path: path.mkdir(), "directory"),
        (lambda path: path.write_bytes(b"") or os.truncate(path, 1 << 40), "at most"),
    ],
)
def test_metadata_that_is_no_plain_file_is_refused(tmp_path: Path, plant: Any, message: str) -> None:
    """A .metadata that is a device, a pipe, a link or has no end is refused by name, and not waited for."""
    plant(tmp_path / ".metadata")
    with ForeignDirectory(tmp_path) as directory, pytest.raises(ValueError, match=rf"\.metadata.*{message}"):
        read_dcp(directory)


def test_an_archive_of_far_more_than_its_size_is_refused(tmp_path: Path) -> None:
    """A deflated archive is refused by the size that it claims, before anything of it is inflated."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}, protocol=2))
        archive.writestr("archive/data/0", bytes(64 << 20))
    assert len(file.getvalue()) < 1 << 20
    with pytest.raises(ValueError, match=r"bomb\.pt is an archive of"):
        load_plain(file, "bomb.pt")


@pytest.mark.parametrize("version", ["2.5.1", "2.5.1+cu121", "1.13.0"])
def test_a_torch_that_executes_files_reads_none(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Before 2.6 torch executes what a file says whatever it was asked for, and so it is not asked."""
    monkeypatch.setattr("torch.__version__", version)
    file = io.BytesIO()
    torch.save({}, file)
    with pytest.raises(UsageError, match="not read by torch"):
        load_plain(file, "x.pt")


def _doubled(kind: type) -> Any:
    value: Any = kind(("x",))
    for _ in range(200):
        value = kind((value, value))
    return value


@pytest.mark.parametrize("kind", [list, tuple])
def test_containers_that_hold_each_other_are_refused(kind: type) -> None:
    """A kilobyte that stands for 2^200 values is refused after a bounded number of them, as is a view of no memory."""
    with pytest.raises(ValueError, match="deeper"):
        check_extent(_doubled(kind), 1000)
    twice: Any = kind(("x",) * 100)
    for _ in range(5):
        twice = kind((twice,) * 100)
    with pytest.raises(ValueError, match="far larger"):
        check_extent({"a": twice}, 1000)
    with pytest.raises(ValueError, match="far larger"):
        check_extent({"a": torch.zeros(1).expand(1 << 40)}, 1000)
    check_extent({"a": [torch.zeros(2), ("b", 1)], "c": {1: None}}, 100)


@pytest.mark.parametrize("place", ["key", "set", "name", "number"])
def test_metadata_with_tuples_of_tuples_is_refused(place: str) -> None:
    """Nested tuples are neither hashed nor put into words, each of which would take 2^200 steps."""
    # Opcodes alone: pickle itself would hash the key.
    nested = b"".join((b")", b"2\x86" * 200))
    data = {
        "key": b"\x80\x02}" + nested + b"Ns.",
        "set": b"\x80\x04\x8f(" + nested + b"\x90.",
        "name": b"\x80\x04" + nested + nested + b"\x93.",
        "number": b"\x80\x02" + nested + b".",
    }[place]
    with pytest.raises(ValueError, match=r"metadata|pickle"):
        decode_torch_metadata(data.replace(b"2\x86", b"q\x00h\x00\x86"))


class _Unknown:
    """Value that only pickle could load."""


def test_no_advice_to_load_everything_reaches_the_user(tmp_path: Path) -> None:
    """What torch refuses is said without torch's advice to load it all the same."""
    from torch.distributed import checkpoint

    files = {"object": io.BytesIO(), "script": io.BytesIO(), "old": io.BytesIO()}
    torch.save({"a": _Unknown()}, files["object"])
    torch.save({"a": _Unknown()}, files["old"], _use_new_zipfile_serialization=False)
    with zipfile.ZipFile(files["script"], "w") as archive:
        archive.writestr("archive/constants.pkl", b"")
        archive.writestr("archive/data.pkl", b"")
        archive.writestr("archive/version", b"3")
    for name, file in files.items():
        with pytest.raises(UsageError) as found:
            load_plain(file, name)
        assert "False" not in found.value.message
    checkpoint.save({"a": _Unknown()}, checkpoint_id=tmp_path, no_dist=True)
    with ForeignDirectory(tmp_path) as directory, pytest.raises((UsageError, ValueError)) as refused:
        read_dcp(directory)
    assert "False" not in str(refused.value)


def test_a_reader_that_takes_forever_or_everything_is_ended(tmp_path: Path) -> None:
    """A tuple that is hashed for years ends its process by SIGXCPU, and memory without end is an error in it."""
    limit = "from ciuic.system.privileges import limit_resources; limit_resources(256 << 20, 1);"
    forever = "key = ()\nfor _ in range(200): key = key, key\nhash(key)"
    done = subprocess.run([sys.executable, "-c", f"{limit}\n{forever}"], capture_output=True, check=False)
    assert done.returncode == -signal.SIGXCPU, done.stderr
    done = subprocess.run([sys.executable, "-c", f"{limit} bytes(1 << 30)"], capture_output=True, check=False)
    assert b"MemoryError" in done.stderr


def test_the_end_of_a_reader_is_told_by_the_name_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that its limits have ended is an error of usage that names what it read."""
    (tmp_path / "forever.pt").write_bytes(b"x")
    for name, message in (("XCPU", "processor time"), ("SEGV", "status -11")):
        monkeypatch.setattr(
            state_import, "module_command", lambda _, name=name: ["sh", "-c", f"kill -{name} $$"]
        )
        with pytest.raises(UsageError, match=rf"forever\.pt .*{message}"):
            import_state(tmp_path / "forever.pt", tmp_path / "snapshots")


def test_a_package_that_the_reader_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that is missing only for the process that reads, such as one that torch needs, is no malformed file."""
    path = tmp_path / "x.pt"
    path.write_bytes(b"x")
    monkeypatch.delitem(sys.modules, "ciuic.training.convert.foreign_files")
    monkeypatch.delattr("ciuic.training.convert.foreign_files")
    monkeypatch.setitem(sys.modules, "torch", None)
    order = state_import.ImportOrder(str(path), str(tmp_path / "snapshots"), "training", ())
    answer = state_import.answer_order(order)
    assert (answer.exit_code, "package torch" in answer.message) == (UsageError.exit_code, True), answer


@pytest.mark.parametrize("name", ["../weights", "\ud800"])
def test_an_index_with_an_impossible_name_is_refused_by_directory_and_name(tmp_path: Path, name: str) -> None:
    """A name that leads elsewhere, or that no file can have, is told with the directory that has it."""
    with ForeignDirectory(tmp_path) as folder, pytest.raises(ValueError, match="names a file") as refusal:
        folder.open(name)
    assert str(tmp_path) in str(refusal.value)
    assert repr(name) in str(refusal.value)


@pytest.mark.parametrize("kind", ["folder", "file", "link in a link"])
def test_another_users_link_does_not_choose_what_root_imports(tmp_path: Path, kind: str) -> None:
    """A link is followed to its owner's own files, and not to those that only root may read."""
    folder = _folder(tmp_path)
    target = folder if kind == "folder" else folder / "model.safetensors"
    link = tmp_path / "link.safetensors"
    link.symlink_to(target)
    if kind == "link in a link":
        link = tmp_path / "outer.safetensors"
        link.symlink_to("link.safetensors")
    os.chown(tmp_path / "link.safetensors", MADE_UP.uid, MADE_UP.gid, follow_symlinks=False)
    with pytest.raises(CiuicError, match=f"link of user {MADE_UP.uid}"):
        state_import._read(link, 1 << 20)
    os.chown(target, MADE_UP.uid, MADE_UP.gid)
    assert "weight" in state_import._read(link, 1 << 20).objects["model"]


@pytest.mark.parametrize("way", ["written to", "exchanged", "removed"])
@pytest.mark.parametrize("source", ["folder", "file"])
def test_what_changes_while_it_is_read_is_no_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, way: str
) -> None:
    """A state of two moments is refused, from one file that is written to and from a folder whose files are exchanged."""
    folder = _folder(tmp_path)
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    read = foreign_files.read_safetensors

    def changed(*arguments: Any) -> Any:
        found = read(*arguments)
        if way == "removed":
            weights.unlink()
        elif way == "written to":
            weights.write_bytes(content + b"more")
        else:
            (tmp_path / "new").write_bytes(content)
            (tmp_path / "new").rename(weights)
        return found

    monkeypatch.setattr(foreign_files, "read_safetensors", changed)
    if source == "file" and way != "written to":
        # The file that was opened is read as a whole, wherever its name leads by then.
        assert "weight" in state_import._read(weights, 1 << 20).objects["model"]
        return
    with pytest.raises(ValueError, match=r"model\.safetensors was changed while it was read"):
        state_import._read(folder if source == "folder" else weights, 1 << 20)
