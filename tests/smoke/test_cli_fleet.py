"""`ciuic fleet`, run as installed on a machine that has nothing but the URL and a key of a remote in a directory."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support import remote_recipe as recipe
from support.cli_repository import Host
from support.remote_host import Elsewhere

from ciuic import __version__
from ciuic.remote.access import open_remote, read_key_file
from ciuic.remote.host_status import HostStatus, StatusBehind, StatusKey
from ciuic.remote.object_names import status_name
from ciuic.remote.objects.opening import open_objects


class Fleet:
    """Two hosts with a snapshot each on one remote, and a machine elsewhere."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.url = f"file://{place}/nas"
        self.one, self.two = Host(place / "one"), Host(place / "two")
        self.one.run("remote", "init", self.url)
        self.two.run("remote", "join", self.url, "--open-with", str(self.one.key_file))
        self.ids = [
            host.snapshot_of(random.Random(n).randbytes(9000)) for n, host in enumerate((self.one, self.two))
        ]
        for host in (self.one, self.two):
            host.run("remote", "upload", "--once")
        (place / "elsewhere").mkdir()
        self.elsewhere = Elsewhere(
            place / "elsewhere", self.url, {"CIUIC_REMOTE_KEY_FILE": str(self.one.key_file)}
        )

    def json(self, *arguments: str, code: int = 0) -> Any:
        done = self.elsewhere.start("fleet", *arguments, "--json")
        assert done.returncode == code, done.stderr.decode()
        return json.loads(done.stdout)

    def tell(self, secret: bytes, status: HostStatus, name: str = "") -> None:
        """Store a status as another program that has the key of the remote."""
        key_of_host = StatusKey(secret)
        objects = open_objects(self.url)
        try:
            secrets = [read_key_file(str(self.one.key_file))]
            sealer = open_remote(objects, secrets).sealer
            place = name or status_name(key_of_host.reporter)
            objects.put(place, [key_of_host.encode(sealer, place, status)])
        finally:
            objects.close()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    return Fleet(tmp_path_factory.mktemp("fleet"))


@pytest.fixture
def fleet(made: Fleet) -> Fleet:
    if not (made.place / "kept").exists():
        shutil.copytree(made.place / "nas", made.place / "kept")
    shutil.rmtree(made.place / "nas")
    shutil.copytree(made.place / "kept", made.place / "nas")
    return made


def test_the_hosts_are_seen_from_elsewhere(fleet: Fleet) -> None:
    """Each host says what it has; two of one name are two; the exit code is 0 while all are well."""
    hosts = fleet.json("status")["hosts"]
    assert sorted(one["newest"]["snapshot"] for one in hosts) == sorted(fleet.ids)
    assert len({one["host"] for one in hosts}) == 1
    for one in hosts:
        assert (one["problems"], one["error"], one["behind"]["snapshots"]) == ([], "", 0)
        assert one["newest_stored"] == one["newest"]["time"]
    lines = fleet.elsewhere.run("fleet", "status").splitlines()
    assert [line.split()[0].partition("~")[2] for line in lines[1:3]] == [
        one["reporter"][:8] for one in hosts
    ]
    assert all(line.endswith(" ok") for line in lines[1:3])
    fleet.tell(b"\2" * 32, msgspec.structs.replace(recipe.STATUS, host="old", ciuic="0.0.9"))
    told = fleet.elsewhere.start("fleet", "status").stderr.decode()
    assert f"version {__version__} on 2 hosts; 0.0.9 on old" in told


@pytest.mark.full
def test_a_host_that_needs_a_person_comes_first_and_can_hurt_nobody(fleet: Fleet) -> None:
    """Silent, late, in error, with a failed drill; hostile text stays on its line; a forged status of another host is told as that."""
    hosts = fleet.json("status")["hosts"]
    evil = msgspec.structs.replace(
        recipe.STATUS,
        behind=StatusBehind(snapshots=1, size_bytes=2**62, only_here_ns=1),
        host="\x1b[31mevil\nroot",
        time_ns=10**18,
        error="\x1b]0;owned\x07\u202e" + "x" * 400,
    )
    fleet.tell(bytes(32), evil)
    fleet.tell(b"\1" * 32, evil, name=status_name(hosts[0]["reporter"]))
    found = fleet.json("status", code=1)["hosts"]
    forged, other = sorted((one for one in found if one["problems"]), key=lambda one: one["host"] is not None)
    assert (forged["reporter"], [one["kind"] for one in forged["problems"]]) == (
        hosts[0]["reporter"],
        ["forged"],
    )
    assert [one["kind"] for one in other["problems"]] == ["silent", "error", "behind"]
    assert not found[-1]["problems"]
    done = fleet.elsewhere.start("fleet", "status")
    assert done.returncode == 1
    text = done.stdout.decode()
    assert not {"\x1b", "\x07", "\u202e"} & set(text)
    assert len(text.splitlines()) == 4
    assert "another host wrote it" in text
    file = fleet.place / "fleet.prom"
    fleet.elsewhere.run("fleet", "status", "--textfile", str(file))
    written = file.read_text()
    assert "\x1b" not in written
    labels = f'host="",kind="forged",remote="remote",reporter="{forged["reporter"]}"'
    assert f"ciuic_fleet_problem{{{labels}}} 1.0" in written
    assert len(re.findall(r"^ciuic_fleet_told_timestamp_seconds{", written, re.MULTILINE)) == 3


@pytest.mark.full
def test_silence_counts_from_what_was_promised(fleet: Fleet) -> None:
    """A single upload promises no next status; --silent-after judges it all the same."""
    assert fleet.json("status", "--silent-after", "1h")
    hosts = fleet.json("status", "--silent-after", "0", code=1)["hosts"]
    assert [[one["kind"] for one in host["problems"]] for host in hosts] == [["silent"]] * 2
    shutil.rmtree(fleet.place / "nas/status")
    document = fleet.json("status")
    assert document["hosts"] == []
    assert [one["snapshots"] for one in document["without_status"]] == [2]
    assert document["missing"] == []


@pytest.mark.full
def test_an_expected_host_without_a_status_needs_a_person(fleet: Fleet) -> None:
    """What is deleted is missed where it is expected; a remote that is away has an exit code of its own."""
    (name,) = {one["host"] for one in fleet.json("status", "--expect", os.uname().nodename)["hosts"]}
    assert fleet.json("status", "--expect", "node9", "--expect", name, code=1)["missing"] == ["node9"]
    shutil.rmtree(fleet.place / "nas/status")
    assert fleet.json("status", "--expect", name, code=1)["missing"] == [name]
    done = fleet.elsewhere.start("fleet", "status", "--expect", name)
    (line,) = [line for line in done.stdout.decode().splitlines() if line.startswith(name)]
    assert line.endswith("no status, though one is expected")
    file = fleet.place / "fleet.prom"
    fleet.elsewhere.run("fleet", "status", "--expect", name, "--textfile", str(file))
    assert f'host="{name}",kind="missing"' in file.read_text()
    (fleet.place / "nas").rename(fleet.place / "away")
    try:
        assert fleet.elsewhere.start("fleet", "status").returncode == 5
    finally:
        (fleet.place / "away").rename(fleet.place / "nas")


def test_snapshots_of_all_hosts_are_listed_verified_and_drilled(fleet: Fleet) -> None:
    """The newest of each host and root: all good from elsewhere, and exit code 4 with the host that has lost a pack."""
    listed = fleet.json("list")["snapshots"]
    assert sorted(one["id"].rpartition("/")[2] for one in listed) == sorted(fleet.ids)
    root = str(fleet.two.top / "root")
    assert [one["roots"][0]["path"] for one in fleet.json("list", "--root", root)["snapshots"]] == [root]
    verified = fleet.json("verify", "--checksum")["verified"]
    assert [one["verdict"] for one in verified] == ["good", "good"]
    assert {one["root"] for one in verified} == {str(host.top / "root") for host in (fleet.one, fleet.two)}
    drills = fleet.json("drill")["drills"]
    assert [(one["verdict"], one["snapshot"].rpartition("/")[2]) for one in drills] == [
        ("good", one["snapshot"].rpartition("/")[2])
        for one in sorted(verified, key=lambda one: str(one["host"]))
    ]
    # Both hosts have one name here, and each can be named.
    names = [one["host"] for one in drills]
    assert len({name.partition("~")[0] for name in names}) == 1
    assert [one["host"] for one in fleet.json("drill", "--host", names[1])["drills"]] == names[1:]
    assert [one["host"] for one in fleet.json("verify", "--host", names[0])["verified"]] == names[:1]
    assert "every byte right" in fleet.elsewhere.run("fleet", "verify", "--checksum")
    assert fleet.elsewhere.start("fleet", "verify", "--host", "nobody").returncode == 3
    for pack in (fleet.place / "nas/packs/data").glob("*/*"):
        pack.write_bytes(pack.read_bytes()[:64] + bytes(pack.stat().st_size - 64))
    assert "damaged" in {one["verdict"] for one in fleet.json("verify", "--checksum", code=4)["verified"]}
    assert "damaged" in {one["verdict"] for one in fleet.json("drill", code=4)["drills"]}
