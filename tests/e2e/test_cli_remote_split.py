"""The installed command on remotes whose packs lie in another place than the log: two directories, and a plain bucket beside a locked one."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
from support import trees
from support.cli_repository import Host
from support.object_servers import SeaweedFS, environment_for_s3
from support.remote_host import Elsewhere, RemoteHost, new_remote
from support.restoring import write
from support.versioned_objects import attack

from ciuic.remote.access import add_slot
from ciuic.remote.objects.split_objects import SplitObjects
from ciuic.remote.sealing.key_slots import make_key_file


@pytest.fixture
def host(short_tmp: Path) -> Host:
    return Host(short_tmp / "one")


@pytest.fixture
def other(short_tmp: Path) -> Host:
    return Host(short_tmp / "two")


@pytest.fixture
def log(short_tmp: Path) -> Path:
    return short_tmp / "log"


@pytest.fixture
def packs(short_tmp: Path) -> Path:
    return short_tmp / "packs"


def tops(place: Path) -> set[str]:
    return {path.name for path in place.iterdir()}


def test_two_directories_from_init_to_drill(
    host: Host, other: Host, log: Path, packs: Path, short_tmp: Path
) -> None:
    """init, upload, status, join, reading on a third machine, drill, forget, prune, check and repair."""
    url, packs_url = f"file://{log}", f"file://{packs}"
    document = host.json("remote", "init", url, "--packs-url", packs_url)
    assert document["packs_url"] == packs_url
    assert f'packs_url = "{packs_url}"' in host.config.read_text()
    contents = [os.urandom(300_000) for _ in range(2)]
    host.snapshot_of(*contents)
    ids = [one["id"] for one in reversed(host.json("list")["snapshots"])]
    host.run("remote", "upload", "--once")
    assert {"keys", "remote.json", "w"} <= tops(log)
    assert not tops(log) & {"packs", "manifests"}
    assert {"keys", "manifests", "packs", "remote.json"} <= tops(packs)
    assert not tops(packs) & {"w", "gc"}
    (status,) = host.json("remote", "status", "--contact")["remotes"]
    assert status["contact"]["spaces"][0]["snapshots"] == 2
    assert packs_url in host.run("remote", "status").stdout.decode()
    # Without the place of the packs, or with another one, nothing is joined or read.
    key = ("--open-with", str(host.key_file))
    assert "lie in another place" in other.fails("remote", "join", url, *key, code=1)
    assert "has no part of the remote" in other.fails(
        "remote", "join", url, *key, "--packs-url", f"file://{short_tmp}", code=1
    )
    other.run("remote", "join", url, *key, "--packs-url", packs_url)
    assert other.identity() == host.identity()
    (short_tmp / "reader").mkdir()
    reader = Elsewhere(short_tmp / "reader", url, {"CIUIC_REMOTE_KEY_FILE": str(host.key_file)})
    assert "--packs-url" in reader.run("list", code=1)
    reader.run("--packs-url", packs_url, "list")
    reader.secrets["CIUIC_REMOTE_PACKS_URL"] = packs_url
    assert reader.listed() == set(ids)
    reader.run("verify", "--all", "--checksum", "--json")
    reader.run("restore", "-s", ids[0], "-p", str(host.top / "root"), "-d", str(short_tmp / "back"))
    assert (short_tmp / "back" / "root" / "file").read_bytes() == contents[0]
    host.run("remote", "drill")
    assert "the configuration has packs_url" in host.fails(
        "--repo", url, "--packs-url", f"{packs_url}2", "list", code=2
    )
    host.run("--repo", url, "list")
    host.run("forget", "--remote", "-y", ids[0])
    host.run("prune", "--remote")
    assert reader.listed() == {ids[1]}
    for pack in (packs / "packs" / "data").rglob("*"):
        if pack.is_file():
            pack.unlink()
    host.fails("check", "--remote", code=4)
    host.run("check", "--remote", "--repair")
    host.run("check", "--remote", "--read-data")
    # A configured remote is not opened at the wrong place either.
    host.config.write_text(host.config.read_text().replace(packs_url, f"file://{short_tmp}/two"))
    assert "has no part of the remote" in host.fails("remote", "upload", "--once", code=1)


def test_damage_is_named_where_it_lies(host: Host, log: Path, packs: Path, short_tmp: Path) -> None:
    """Packs and manifests are named in the place of the packs, where an operator looks for them."""
    url, packs_url = f"file://{log}", f"file://{packs}"
    host.json("remote", "init", url, "--packs-url", packs_url)
    host.snapshot_of(os.urandom(300_000))
    host.run("remote", "upload", "--once")
    for pack in files_below(packs / "packs" / "data"):
        flip(pack)
    told = said(host, "--repo", url, "verify", "--all", "--checksum", "--json")
    assert f"{packs_url}/packs/data/" in told
    told += said(host, "check", "--remote", "--read-data", "--json")
    for manifest in files_below(packs / "manifests"):
        flip(manifest)
    secrets = {"CIUIC_REMOTE_KEY_FILE": str(host.key_file), "CIUIC_REMOTE_PACKS_URL": packs_url}
    # With no cache, which has the manifests as they were.
    reader = Elsewhere(new_directory(short_tmp / "reader"), url, secrets)
    told += reader.run("verify", "--all", "--json", code=4) + reader.start("list").stderr.decode()
    assert f"{packs_url}/manifests/" in told
    assert f"{url}/packs/" not in told
    assert f"{url}/manifests/" not in told


def said(host: Host, *arguments: str) -> str:
    """Run a command that finds damage, and return all that it said."""
    process = host.run(*arguments, expect=4)
    return (process.stdout + process.stderr).decode()


def files_below(place: Path) -> list[Path]:
    return [path for path in place.rglob("*") if path.is_file()]


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)


def test_a_remote_with_its_packs_beside_its_log_stays_so(host: Host, log: Path, packs: Path) -> None:
    """packs_url that is added to a remote without one is refused before anything is sent."""
    host.json("remote", "init", f"file://{log}")
    host.snapshot_of(b"first")
    packs.mkdir()
    host.config.write_text(
        host.config.read_text().replace(
            f'url = "file://{log}"', f'url = "file://{log}"\npacks_url = "file://{packs}"'
        )
    )
    assert "leave it out" in host.fails("remote", "upload", "--once", code=1)
    assert not tops(packs)


def new_directory(path: Path) -> Path:
    path.mkdir()
    return path


class LockedPacks:
    """Remote with its log in a plain bucket and its packs in one with versions and locks; two snapshots were uploaded."""

    def __init__(self, place: Path, server: SeaweedFS) -> None:
        url, packs_url = server.new_url(), server.versioned_url(locked=True)
        self.log, self.packs = server.connect(url), server.connect(packs_url)
        remote = new_remote(SplitObjects(self.log, self.packs), packs_url=packs_url)
        key_file = place / "key"
        add_slot(remote, "file", make_key_file(str(key_file)))
        self.host = RemoteHost(place / "host", remote, name="node1")
        rng = random.Random(2)
        self.manifests = {}
        for turn in range(2):
            write(self.host.root / f"{turn}.bin", rng.randbytes(200_000))
            self.manifests[self.host.snapshot().id] = trees.manifest(self.host.root)
            self.host.upload()
        secrets = {
            "CIUIC_REMOTE_KEY_FILE": str(key_file),
            "CIUIC_REMOTE_PACKS_URL": packs_url,
            **environment_for_s3(server.endpoint),
        }
        self.reader = lambda name: Elsewhere(new_directory(place / name), url, secrets)

    def assert_restores(self, reader: Elsewhere) -> None:
        """Restore both snapshots, and compare them bit for bit and by their attributes."""
        assert reader.listed() == set(self.manifests)
        for id_, manifest in self.manifests.items():
            assert not reader.differences(id_, self.host.root, manifest)


def test_a_rescue_from_a_locked_bucket(tmp_path: Path, seaweedfs: SeaweedFS) -> None:
    """The log is deleted, and everything in the locked bucket overwritten and deleted: it all comes back."""
    bucket = LockedPacks(tmp_path, seaweedfs)
    told = json.loads(bucket.reader("operator").run("check", "--renew-locks", "30d", "--json"))
    assert told["locked"] == len(list(bucket.packs.list("")))
    attack(bucket.packs, random.Random(3))
    bucket.log.delete([info.name for info in list(bucket.log.list(""))])
    # The operator's cache knows a later log, and refuses.
    rescuer = bucket.reader("rescuer")
    assert rescuer.start("list").returncode
    rescuer.run("check", "--behind-deletions", "--repair")
    rescuer.run("check", "--repair", "--read-data")
    bucket.assert_restores(rescuer)
    rescuer.run("verify", "--all", "--checksum", "--json")


def test_reading_behind_deletions_in_the_bucket_of_the_packs(tmp_path: Path, seaweedfs: SeaweedFS) -> None:
    """With the log as it was, what was deleted from the bucket of the packs is read behind deletions."""
    bucket = LockedPacks(tmp_path, seaweedfs)
    attack(bucket.packs, random.Random(4))
    reader = bucket.reader("reader")
    listed = json.loads(reader.run("list", "--json", "--behind-deletions"))
    assert {snapshot["id"] for snapshot in listed["snapshots"]} == set(bucket.manifests)
    reader.run("verify", "--all", "--checksum", "--behind-deletions")
