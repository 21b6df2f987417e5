"""``ciuic tensors``: where the numbers of a checkpoint went wrong, from the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.restoring import take, write

from ciuic.repository import Repository


class Place:
    """A root and its repository, and a cache of its own."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.root = top / "root"
        self.root.mkdir()
        self.repository = Repository.create(top / "repository", block_size=4096)

    def snapshot(self) -> str:
        """Take a snapshot; return its id."""
        return take(self.repository, self.root).id

    def run(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        """Run the command on the repository."""
        return subprocess.run(
            [sys.executable, "-m", "ciuic", "--repo", str(self.top / "repository"), *map(str, words)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={**os.environ, "XDG_CACHE_HOME": str(self.top / "cache")},
        )

    def document(self, *words: str | Path) -> Any:
        """Return the JSON that the command prints."""
        done = self.run("tensors", *words, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_a_spike_stands_out(place: Place) -> None:
    """The snapshot in which a layer jumped, and the one in which NaN began, are named by their lines; unchanged versions are one."""
    rng = np.random.default_rng(0)
    state = {name: rng.normal(0, 1, (32, 32)).astype(np.float32) for name in ("one", "two")}
    ids = []
    for step in range(6):
        if step == 3:
            state["two"] = state["two"] * 5
        elif step == 5:
            state["one"][0, 0] = np.nan
        elif step != 2:
            state["one"] = state["one"] + np.float32(1e-3)
        save_file(state, place.root / "model.safetensors")
        ids.append(place.snapshot())
    file = place.root / "model.safetensors"
    versions = place.document(file, "--history")["versions"]
    assert [one["first"] for one in versions] == [ids[5], ids[4], ids[3], ids[1], ids[0]]
    assert [one["nan"] for one in versions] == [1, 0, 0, 0, 0]
    assert versions[2]["most_changed"] == "two"
    assert versions[2]["drift"] > 1 > versions[1]["drift"] > 0
    assert versions[3]["snapshots"] == 2
    assert versions[4]["drift"] is None
    (only,) = place.document(file, "-s", ids[3], "-t", "two")["versions"]
    assert [one["name"] for one in only["tensors"]] == ["two"]
    assert only["drift"] == pytest.approx(4)
    # From what was kept: the same.
    assert place.document(file, "--history")["versions"] == versions
    table = place.run("tensors", file, "--history", "-n", "3").stdout.splitlines()
    assert [line.split()[2] for line in table[1:]] == [ids[5], ids[4], ids[3]]


@pytest.mark.full
def test_a_directory_of_files_is_one_checkpoint(place: Place) -> None:
    """Of several files and formats, with names that two of them have; files without tensors are passed over."""
    save_file({"w": np.ones(4, "f4"), "b": np.ones(2, "f4")}, place.root / "m-1.safetensors")
    np.savez(place.root / "m-2.npz", w=np.full(9, 2.0))
    write(place.root / "notes.bin", b"no tensors")
    place.snapshot()
    (found,) = place.document(place.root)["versions"]
    assert {one["name"]: one["norm"] for one in found["tensors"]} == {
        "w": 2,
        "b": pytest.approx(2**0.5),
        "m-2.npz:w": 6,
    }


@pytest.mark.full
def test_what_cannot_be_read_in_place_is_told(place: Place) -> None:
    """Compressed archives, other files, a torn version, a pattern that matches nothing, a path that is not there."""
    np.savez_compressed(place.root / "c.npz", w=np.ones(9))
    write(place.root / "text", b"text")
    save_file({"w": np.ones(4, "f4")}, place.root / "a.safetensors")
    place.snapshot()
    for name, code, reason in (
        ("c.npz", 2, "compressed"),
        ("text", 2, "neither safetensors nor an archive"),
        ("gone", 3, "no snapshot has"),
    ):
        done = place.run("tensors", place.root / name)
        assert (done.returncode, reason in done.stderr) == (code, True), done.stderr
    done = place.run("tensors", place.root / "a.safetensors", "-t", "other")
    assert (done.returncode, "no tensor of" in done.stderr) == (3, True), done.stderr
    data = (place.root / "a.safetensors").read_bytes()
    write(place.root / "a.safetensors", data[:-5])
    write(place.root / "b.safetensors", data)
    place.snapshot()
    done = place.run("tensors", place.root)
    assert (done.returncode, "a.safetensors is malformed" in done.stderr, len(done.stdout.splitlines())) == (
        8,
        True,
        2,
    )
    done = place.run("tensors", place.root / "a.safetensors", "--history")
    assert (done.returncode, len(done.stdout.splitlines())) == (8, 3), done.stderr


def _pickle_in_zip(path: Path, pickle: bytes, order: bytes = b"little") -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", pickle)
        archive.writestr(
            "a/byteorder", order, zipfile.ZIP_DEFLATED if len(order) > 99 else zipfile.ZIP_STORED
        )
        archive.writestr("a/data/0", bytes(1 << 16))


@pytest.mark.full
def test_small_files_that_would_take_all_memory_or_time_are_refused(place: Place) -> None:
    """Tuples that hold one another twice, long paths to many items, members that inflate, a storage that thousands of tensors share."""
    twice = b"\x80\x02K\x01\x85q\x00" + b"".join(
        b"h" + bytes([at]) + b"h" + bytes([at]) + b"\x86q" + bytes([at + 1]) for at in range(60)
    )
    _pickle_in_zip(place.root / "hash.pt", twice + b")R.")
    many = b"\x80\x02}X" + (3900).to_bytes(4, "little") + b"k" * 3900 + b"](" + b"]" * 3_000_000 + b"es."
    _pickle_in_zip(place.root / "paths.pt", many)
    _pickle_in_zip(place.root / "order.pt", b"\x80\x02}.", bytes(200 << 20))
    tensor = (
        b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
        b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpuM\x00\x40tQK\x00M\x00\x40\x85K\x01\x85\x89}tR"
    )
    _pickle_in_zip(place.root / "views.pt", b"\x80\x02](" + tensor + b"q\x00" + b"h\x00" * 50_000 + b"e.")
    place.snapshot()
    limited = f"ulimit -v 2000000; exec {sys.executable} -m ciuic --repo {place.top}/repository tensors "
    for name in ("hash.pt", "paths.pt", "order.pt", "views.pt"):
        done = subprocess.run(
            ["sh", "-c", limited + str(place.root / name)],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
            env={**os.environ, "XDG_CACHE_HOME": str(place.top / "cache")},
        )
        assert done.returncode in (3, 4), (name, done.stderr)
        assert "memory" not in done.stderr, (name, done.stderr)


@pytest.mark.full
def test_files_of_snapshots_are_compared(place: Place) -> None:
    """`diff --tensors -p FILE` tells what changed in a file that another program wrote."""
    ids = []
    for value in (1, 2):
        save_file({"w": np.full(4, value, "f4"), "b": np.ones(2000, "f4")}, place.root / "a.safetensors")
        ids.append(place.snapshot())
    done = place.run("diff", "--tensors", *ids, "-p", place.root / "a.safetensors", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [(one["name"], one["relative_change"]) for one in document["tensors"]] == [("w", 1.0)]
    assert document["identical"] == 1
