"""A person who may write anything to the bucket, against the installed commands: nothing is lost, and every fault can be mended."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.cli_repository import Host

REPAIR = "ciuic check --remote --repair"


class Bucket:
    """A remote in a directory with one snapshot each of two hosts; everything there is two days old."""

    def __init__(self, top: Path) -> None:
        self.top = top / "nas"
        self.victim, self.other = Host(top / "one"), Host(top / "two")
        for host in (self.victim, self.other):
            host.env["XDG_CACHE_HOME"] = str(host.top / "cache")
        url = f"file://{self.top}"
        self.victim.run("remote", "init", url)
        self.victim.snapshot_of(os.urandom(70_000))
        self.victim.run("remote", "upload", "--once")
        (self.log,) = (self.top / "w").iterdir()
        self.other.run("remote", "join", url, "--open-with", str(self.victim.key_file))
        self.other.snapshot_of(os.urandom(70_000))
        self.other.run("remote", "upload", "--once")
        self.age()
        self.stored = self.content()

    def age(self) -> None:
        then = time.time() - 2 * 86_400
        for path in self.top.rglob("*"):
            if path.is_file() and not path.is_symlink():
                os.utime(path, (then, then))

    def content(self) -> set[Path]:
        """Return the packs and manifests that are there."""
        return {
            path for part in ("packs", "manifests") for path in (self.top / part).rglob("*") if path.is_file()
        }

    @property
    def last(self) -> Path:
        """The last entry of the victim's log."""
        return max(self.log.iterdir())

    def assert_whole(self) -> None:
        """Assert that both hosts list and verify both snapshots, collect, and upload, and that nothing was lost."""
        for host in (self.victim, self.other):
            host.run("remote", "upload", "--once")
            assert host.json("prune", "--remote")["freed_bytes"] == 0
            assert len(host.json("list", "--all-hosts")["snapshots"]) == 2
            assert host.json("verify", "--remote", "--checksum")["damaged"] is False
        assert self.stored <= self.content()


@pytest.fixture(scope="module")
def built(run_dir: Path) -> Iterator[Bucket]:
    place = run_dir / "bucket"
    place.mkdir()
    made = Bucket(place)
    shutil.copytree(place, run_dir / "bucket.built", symlinks=True)
    yield made
    shutil.rmtree(place)
    shutil.rmtree(run_dir / "bucket.built")


@pytest.fixture
def bucket(built: Bucket) -> Bucket:
    """Return the bucket and its hosts as they were built."""
    place = built.top.parent
    shutil.rmtree(place)
    shutil.copytree(f"{place}.built", place, symlinks=True)
    return built


def page(path: Path) -> None:
    path.write_bytes(b"<!DOCTYPE html><html>sign in</html>")


def oversized(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(65 << 20)


def after_all_others(path: Path) -> None:
    (path.parent / "9999999999").write_bytes(b"x" * 400)


@pytest.mark.parametrize(
    "plant",
    [
        page,
        pytest.param(oversized, marks=pytest.mark.full),
        pytest.param(after_all_others, marks=pytest.mark.full),
    ],
)
def test_an_unreadable_entry_stops_only_deletion_until_it_is_mended(
    bucket: Bucket, plant: Callable[[Path], None]
) -> None:
    """Damage of a log is told by readers, refused by a collection, and mended, whatever it consists of."""
    plant(bucket.last)
    assert REPAIR in bucket.other.fails("list", "--all-hosts", code=4)
    assert REPAIR in bucket.other.fails("prune", "--remote", code=4)
    bucket.victim.run("remote", "upload", "--once")
    report = bucket.other.json("check", "--remote", "--repair")
    # Not information: the victim has begun another log, so that two upload its repository until the old one is retired.
    damages = [finding for finding in report["findings"] if finding["severity"] != "info"]
    assert damages
    assert all(finding["repaired"] for finding in damages), damages
    bucket.assert_whole()


@pytest.mark.parametrize(
    "kind", ["pipe", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("link", "directory"))]
)
def test_a_name_that_is_no_file_ends_an_upload_with_its_name(bucket: Bucket, kind: str) -> None:
    """What lies in place of an entry in a directory is damage by name; an upload does not wait for it."""
    last = bucket.last
    last.unlink()
    if kind == "pipe":
        os.mkfifo(last)
    elif kind == "link":
        last.symlink_to("/etc/passwd")
    else:
        last.mkdir()
    said = bucket.victim.fails("remote", "upload", "--once", code=4)
    assert last.name in said
    assert "no regular file" in said
    assert bucket.stored == bucket.content()


def test_a_deleted_log_is_damage_and_is_committed_again(bucket: Bucket) -> None:
    """Without the log of one writer nothing is deleted, its snapshot is missed, and a repair brings it back."""
    shutil.rmtree(bucket.log)
    assert "its writer, is gone" in bucket.other.fails("list", "--all-hosts", code=4)
    assert "nothing was deleted" in bucket.other.fails("prune", "--remote", code=4)
    assert bucket.content() == bucket.stored
    assert bucket.other.json("check", "--remote", expect=4)["damaged"]
    bucket.other.run("check", "--remote", "--repair")
    assert len(bucket.other.json("list", "--all-hosts")["snapshots"]) == 2


def test_a_log_that_was_cut_locks_its_host_out_only_until_it_is_told_to_go_on(bucket: Bucket) -> None:
    """A host that remembers more of a log than is there names what to remove; then everything is there again."""
    bucket.other.run("list", "--all-hosts")
    bucket.last.unlink()
    assert b"older than it was" in bucket.other.run("remote", "upload", "--once").stdout
    for host, command in (
        (bucket.victim, ("remote", "upload", "--once")),
        (bucket.other, ("list", "--all-hosts")),
    ):
        said = host.fails(*command, code=4)
        assert "the remote is older than it was" in said
        (memory,) = re.findall("remove ([^,]*),", said)
        assert Path(memory).is_relative_to(host.top)
        shutil.rmtree(memory)
    bucket.other.run("check", "--remote", "--repair")
    bucket.assert_whole()


def test_logs_that_are_all_gone_delete_nothing(bucket: Bucket) -> None:
    """A bucket without any log, as an empty listing shows it, is a refusal."""
    shutil.rmtree(bucket.top / "w")
    assert "nothing was deleted" in bucket.other.fails("prune", "--remote", code=4)
    assert bucket.content() == bucket.stored


def test_planted_keys_lock_nobody_out(bucket: Bucket) -> None:
    """Junk, pages and oversized objects below keys/ are passed over, named, and removable."""
    keys = bucket.top / "keys"
    for number in range(40):
        (keys / f"a{number}").write_bytes(b"{}")
    page(keys / "0page")
    oversized(keys / "0huge")
    (keys / "a\x1b[31m\nname").write_bytes(b"x")
    bucket.victim.run("remote", "upload", "--once")
    said = bucket.other.run("check", "--remote", expect=4)
    assert b"ciuic remote keys remove 0huge" in said.stdout
    assert b"\x1b" not in said.stdout + said.stderr
    bucket.other.run("remote", "keys", "remove", "-y", "0huge")
    assert not (keys / "0huge").exists()
    bucket.assert_whole()


@pytest.mark.parametrize(
    "name",
    [
        "0000000000",
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in ("0000000005.done", "0000000000.final", "9999999999")
        ),
    ],
)
def test_a_planted_round_is_mended(bucket: Bucket, name: str) -> None:
    """An unreadable object of a collection's round keeps nobody from reading, and a repair lets uploads go on."""
    rounds = bucket.top / "gc"
    rounds.mkdir(exist_ok=True)
    (rounds / name).write_bytes(b"junk")
    assert len(bucket.other.json("list", "--all-hosts")["snapshots"]) == 2
    assert bucket.other.json("verify", "--remote", "--checksum")["damaged"] is False
    assert "gc/" in bucket.victim.fails("prune", "--remote", code=4)
    assert REPAIR in bucket.victim.run("check", "--remote", expect=4).stdout.decode()
    bucket.other.run("check", "--remote", "--repair")
    bucket.assert_whole()
