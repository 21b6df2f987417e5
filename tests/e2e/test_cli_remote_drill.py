"""`ciuic remote drill`, over a directory: a rescue is proved from the remote alone, and its outcome is noted."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.cli_repository import Host, MadeHost
from support.live import installed, module_tmp
from support.until import until

from ciuic.repository import Repository
from ciuic.repository.snapshot_format import encode_snapshot

__all__ = ["module_tmp"]


@pytest.fixture(scope="module")
def made(module_tmp: Path) -> MadeHost:
    """Return a host with a remote, which has its snapshot of 40 files and two checkpoints."""

    def make(host: Host) -> None:
        scratch = host.top.parent / "scratch"
        scratch.mkdir()
        host.env["TMPDIR"] = str(scratch)
        host.run("remote", "init", f"file://{host.top.parent}/nas")
        rng = random.Random(5)
        tree: dict[bytes, Any] = {b"log-%02d" % number: rng.randbytes(9000) for number in range(40)}
        tree[b"checkpoints"] = {
            b"model-100.safetensors": rng.randbytes(30_000),
            b"model-200.safetensors": rng.randbytes(30_000),
        }
        host.snapshot_of(tree)
        host.run("remote", "upload", "--once")

    return MadeHost(module_tmp, make)


@pytest.fixture
def host(made: MadeHost) -> Host:
    return made.again()


@pytest.fixture
def place(host: Host) -> Path:
    """Return the directory of the host and its remote."""
    return host.top.parent


def drilled(host: Host, *options: str, expect: int = 0) -> dict[str, Any]:
    (document,) = host.json("remote", "drill", *options, expect=expect)["drills"]
    found: dict[str, Any] = document
    return found


def left_in(host: Host) -> list[str]:
    return os.listdir(host.env["TMPDIR"])


def last(host: Host) -> Any:
    return host.json("remote", "status")["remotes"][0]["last_drill"]


def test_a_good_remote_is_proved_without_the_repository(host: Host) -> None:
    """The drill says what it restored and how long all would take; it works without the repository, and removes its files."""
    newest = str(Repository.open(host.repository).snapshots.list()[0].id)
    assert last(host) is None
    assert "last drill never" in host.run("remote", "status").stdout.decode()
    first = drilled(host)
    assert (first["verdict"], first["snapshot"], first["damages"]) == ("good", newest, [])
    assert (first["files"], first["files_total"]) == (42, 42)
    assert first["bytes_read"] == first["bytes_total"] == 40 * 9000 + 60_000
    assert first["same_as_local"] is True
    assert first["estimated_seconds"] >= first["restore_seconds"] > 0
    noted = last(host)
    assert (noted["verdict"], noted["snapshot"], noted["files"]) == ("good", newest, 42)
    assert ": good, 42 files" in host.run("remote", "status").stdout.decode()
    # The same files of a small sample again, with the seed; the newest checkpoint is always among them.
    shutil.rmtree(host.repository)
    small = drilled(host, "--sample", "20KiB")
    assert small["same_as_local"] is None
    assert small["files"] < 10
    assert os.path.basename(small["checkpoint"]) == "model-200.safetensors"
    again = drilled(host, "--sample", "20KiB", "--seed", str(small["seed"]))
    assert [again[key] for key in ("files", "bytes_read")] == [small[key] for key in ("files", "bytes_read")]
    assert "verdict    good" in host.run("remote", "drill", "--snapshot", newest).stdout.decode()
    host.fails("remote", "drill", "--snapshot", "cs-0123456789", code=3)
    assert left_in(host) == []


def test_damage_in_the_remote_is_found(host: Host, place: Path) -> None:
    """A data pack that decayed: exit code 4, the paths, and the same in the status. The repository here does not make up for it."""
    (pack,) = (place / "nas/packs/data").glob("*/*")
    data = bytearray(pack.read_bytes())
    data[len(data) // 3 :: 4096] = bytes(len(data[len(data) // 3 :: 4096]))
    pack.write_bytes(data)
    document = drilled(host, expect=4)
    assert document["verdict"] == "damaged"
    assert document["damages"]
    assert all(str(host.top / "root") in damage["path"] for damage in document["damages"])
    assert last(host)["verdict"] == "damaged"
    said = host.run("remote", "status").stdout.decode()
    assert "DAMAGED" in said
    assert document["damages"][0]["path"] in said
    assert "verdict    DAMAGED" in host.run("remote", "drill", expect=4).stdout.decode()
    assert left_in(host) == []


def test_a_lost_tree_is_damage(host: Host, place: Path) -> None:
    """Without the packs of trees the directories are named."""
    for pack in (place / "nas/packs/meta").glob("*/*"):
        pack.unlink()
    assert drilled(host, expect=4)["damages"]
    assert left_in(host) == []


def test_a_store_that_is_away_is_a_failed_drill(host: Host, place: Path) -> None:
    """Exit code 1, a failed drill in the status, nothing left; the next good one replaces it."""
    (place / "nas").rename(place / "away")
    host.fails("remote", "drill", code=1)
    assert last(host)["verdict"] == "failed"
    assert "FAILED" in host.run("remote", "status").stdout.decode()
    (place / "away").rename(place / "nas")
    assert drilled(host)["verdict"] == "good"
    assert last(host)["verdict"] == "good"
    assert left_in(host) == []


def test_a_remote_without_a_snapshot_of_this_host_is_no_rescue(short_tmp: Path) -> None:
    """Nothing to restore is a failure, and not exit code 3, which says that there is no remote."""
    host = Host(short_tmp / "one")
    host.fails("remote", "drill", code=3)
    host.run("remote", "init", f"file://{short_tmp}/nas")
    assert "nothing could be rescued" in host.fails("remote", "drill", code=1)
    assert last(host)["verdict"] == "failed"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_ended_drill_leaves_nothing_behind(host: Host, number: signal.Signals) -> None:
    """After SIGTERM nothing is left; what SIGKILL leaves, the next drill removes."""
    tree = {b"large-%d.bin" % one: random.Random(one).randbytes(8 << 20) for one in range(8)}
    host.snapshot_of(tree)
    host.run("remote", "upload", "--once")
    process = subprocess.Popen([str(installed()), "remote", "drill"], env=host.env, cwd="/")
    until("its directory", lambda: left_in(host))
    process.send_signal(number)
    process.wait(60)
    if number == signal.SIGTERM:
        assert left_in(host) == []
    assert drilled(host)["verdict"] == "good"
    assert left_in(host) == []


def test_other_trees_in_the_repository_are_told(host: Host) -> None:
    """A snapshot of this id with other trees here is damage: one of the two is not what was taken."""
    newest = host.list()[0].id
    other = host.snapshot_of({b"other": b"content"})
    with Repository.open(host.repository) as repository:
        snapshot = repository.snapshots.load(repository.snapshots.resolve(other))
        assert snapshot.roots[0].path == os.fsencode(host.top / "root")
        id_ = repository.snapshots.resolve(newest)
        data = encode_snapshot(msgspec.structs.replace(snapshot, id=id_), repository.id)
        path = Path(repository.snapshots.path(id_))
    path.chmod(0o600)
    path.write_bytes(data)
    document = drilled(host, "--snapshot", newest, expect=4)
    assert document["same_as_local"] is False


def test_a_scratch_directory_that_is_missing_is_named_with_its_option(host: Host, place: Path) -> None:
    """All drills name the option, or the variable, and the directory; no drill is noted."""
    missing = place / "missing"
    for command in (("remote", "drill"), ("drill",), ("drill", "--run", "true")):
        told = host.fails(*command, "--scratch", str(missing), code=2)
        assert "--scratch" in told
        assert f"'{missing}' does not exist" in told
    host.env["TMPDIR"] = str(missing)
    for command in (("remote", "drill"), ("drill",), ("drill", "--run", "true")):
        assert f"TMPDIR must name a directory, got {missing}" in host.fails(*command, code=2)
    assert last(host) is None
