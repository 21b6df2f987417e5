"""`ciuic prune`, `verify` and `forget` with --remote, over a directory."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.cli_repository import Host, MadeHost
from support.live import module_tmp

__all__ = ["module_tmp"]


@pytest.fixture(scope="module")
def made(module_tmp: Path) -> MadeHost:
    """Return a host that has made a remote and uploaded two snapshots; everything there is two days old."""

    def make(host: Host) -> None:
        nas = host.top.parent / "nas"
        host.run("remote", "init", f"file://{nas}")
        host.snapshot_of(os.urandom(600_000), os.urandom(600_000))
        host.run("remote", "upload", "--once")
        age(nas)

    return MadeHost(module_tmp, make)


@pytest.fixture
def host(made: MadeHost) -> Host:
    return made.again()


@pytest.fixture
def nas(host: Host) -> Path:
    return host.top.parent / "nas"


def age(nas: Path) -> None:
    then = time.time() - 2 * 86_400
    for path in nas.rglob("*"):
        if path.is_file():
            os.utime(path, (then, then))


def tree(top: Path) -> dict[str, bytes]:
    return {str(path.relative_to(top)): path.read_bytes() for path in top.rglob("*") if path.is_file()}


def packs(nas: Path) -> set[Path]:
    return {path for path in (nas / "packs").rglob("*") if path.is_file()}


def test_prune_frees_what_was_forgotten(host: Host, nas: Path) -> None:
    """forget and prune of the remote free a snapshot's packs; a dry run names them and changes nothing."""
    second, first = (row.id for row in host.list())
    assert host.json("prune", "--remote")["freed_bytes"] == 0
    assert host.json("forget", "--remote", "-y", first) == {"removed": [first]}
    before = {path: path.read_bytes() for path in nas.rglob("*") if path.is_file()}
    said = host.json("prune", "--remote", "--dry-run")
    assert {path: path.read_bytes() for path in nas.rglob("*") if path.is_file()} == before
    assert (said["dry_run"], said["remote"]) == (True, f"file://{nas}")
    assert "would be deleted" in host.run("prune", "--remote", "--dry-run").stdout.decode()
    done = host.json("prune", "--remote", "--name", "remote")
    assert done["freed_bytes"] == said["freed_bytes"] > 600_000
    (space,) = done["spaces"]
    assert space["packs"] == said["spaces"][0]["packs"]
    assert len(packs(nas)) == len([path for path in before if "packs" in path.parts]) - len(space["packs"])
    assert [one["id"] for one in host.json("list", "--all-hosts")["snapshots"]] == [second]
    assert host.json("verify", "--remote", "--checksum")["damaged"] is False
    # The host itself has both.
    assert len(host.list()) == 2


def test_forget_asks_and_resolves_first(host: Host) -> None:
    """Without -y and a terminal nothing is given up; nor where one of several ids is unknown."""
    second, first = (row.id for row in host.list())
    assert "nobody to ask" in host.fails("forget", "--remote", first, code=2)
    assert "cs-ffffff" in host.fails("forget", "--remote", "-y", first, "cs-ffffff", code=3)
    assert {one["id"] for one in host.json("list", "--all-hosts")["snapshots"]} == {first, second}


@pytest.mark.parametrize("how", [(), ("--checksum",), ("--sample", "50%")])
def test_verify_names_damage_of_the_remote(host: Host, nas: Path, how: tuple[str, ...]) -> None:
    """verify --remote ends with 0 for a sound remote and 4 for one without its packs, whatever it reads."""
    document = host.json("verify", "--remote", *how)
    assert (document["damaged"], len(document["snapshots"])) == (False, 2)
    assert bool(document["bytes_read"]) == bool(how)
    assert document["sample"] == (0.5 if "--sample" in how else None)
    newest = host.list()[0].id
    assert host.json("verify", "--remote", newest, *how)["snapshots"] == [newest]
    for path in packs(nas):
        if "data" in path.parts:
            path.unlink()
    document = host.json("verify", "--remote", *how, expect=4)
    assert {damage["kind"] for damage in document["damages"]} == {"data"}


@pytest.mark.parametrize("damage", ["junk", "cut", "missing"])
@pytest.mark.parametrize("part", ["final", "done"])
def test_a_damaged_part_of_an_ended_collection_is_mended(
    host: Host, nas: Path, part: str, damage: str
) -> None:
    """A `.final` or `.done` of a collection that has ended is reported and mended; collections and a host that was away go on."""
    second, first = (row.id for row in host.list())
    away = shutil.copytree(host.state, host.top / "away")
    host.run("forget", "--remote", "-y", first)
    assert host.json("prune", "--remote")["freed_bytes"] > 600_000
    path = nas / "gc" / f"0000000000.{part}"
    whole = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(b"junk" if damage == "junk" else whole[: len(whole) // 2])
    if (part, damage) != ("done", "missing"):
        assert "ciuic check --remote --repair" in host.run("check", "--remote", expect=4).stdout.decode()
    host.run("check", "--remote", "--repair")
    host.run("check", "--remote")
    # Before the upload, which may begin anew from the state of a host that has seen no collection.
    shutil.rmtree(host.state)
    away.rename(host.state)
    host.run("remote", "upload", "--once")
    assert host.json("prune", "--remote")["freed_bytes"] == 0
    assert host.json("verify", "--remote", "--checksum")["damaged"] is False
    assert second in {row["id"] for row in host.json("list")["snapshots"]}


def test_a_host_that_lost_its_state_is_told_what_ends_it(host: Host) -> None:
    """It looks like a cloned disk until its earlier log is ended; uploads, status and check say that nothing has to be done."""
    shutil.rmtree(host.state)
    host.snapshot_of(os.urandom(3000))
    done = host.run("remote", "upload", "--once")
    uploaded = (done.stdout + done.stderr).decode()
    assert "remote_has_other_writers" in uploaded
    checked = host.run("check", "--remote").stdout.decode()
    for told in (uploaded, checked):
        assert "lost its state" in told
        assert "30 days" in told
        assert "nothing has to be done" in told
    assert "nothing is to be done" in host.run("remote", "status").stdout.decode()


def upload_until(host: Host, stop: threading.Event) -> int:
    """Take and upload snapshots, at least one, until told to stop; return their number."""
    made = 0
    while not made or not stop.is_set():
        host.snapshot_of(os.urandom(100_000))
        host.run("remote", "upload", "--once")
        made += 1
    return made


@pytest.mark.parametrize("deleted", [False, True])
@pytest.mark.parametrize("done", ["missing", "junk"])
def test_a_collection_whose_decision_is_damaged_is_replaced(
    host: Host, nas: Path, done: str, deleted: bool
) -> None:
    """Uploads go on beside an interrupted collection whose `.final` is junk; a repair ends it, and nothing is lost."""
    first = host.list()[-1].id
    whole = shutil.copytree(nas, host.top / "whole")
    host.run("forget", "--remote", "-y", first)
    assert host.json("prune", "--remote")["freed_bytes"] > 600_000
    if not deleted:
        # As a collector that was killed after its decision left it.
        shutil.copytree(whole / "packs", nas / "packs", dirs_exist_ok=True)
    final, end = nas / "gc" / "0000000000.final", nas / "gc" / "0000000000.done"
    final.write_bytes(b"junk")
    if done == "missing":
        end.unlink()
    else:
        end.write_bytes(b"junk")
    # A host that did not see it end.
    shutil.rmtree(host.state)
    host.env["XDG_CACHE_HOME"] = str(host.top / "another-cache")
    assert "ciuic check --remote --repair" in host.fails("prune", "--remote", code=4)
    assert "0000000000.final" in host.run("check", "--remote", expect=4).stdout.decode()
    host.snapshot_of(os.urandom(600_000), os.urandom(600_000))
    host.run("remote", "upload", "--once")
    with ThreadPoolExecutor(1) as pool:
        stop = threading.Event()
        uploads = pool.submit(upload_until, host, stop)
        try:
            host.run("check", "--remote", "--repair")
        finally:
            stop.set()
        assert uploads.result() > 0
    host.run("check", "--remote")
    assert {path.name for path in (nas / "gc").iterdir()} >= {"0000000001.done", end.name, final.name}
    host.run("remote", "upload", "--once")
    assert host.json("prune", "--remote")["freed_bytes"] == 0
    assert host.json("verify", "--remote", "--checksum")["damaged"] is False
    uploaded = {row["id"] for row in host.json("list", "--all-hosts")["snapshots"]}
    assert {row.id for row in host.list()} - {first} <= uploaded


def test_unclear_choices_of_a_remote_are_refused(host: Host, nas: Path) -> None:
    """An unknown name, a name without --remote, and a sample beside a checksum are refused."""
    host.fails("prune", "--remote", "--name", "other", code=3)
    host.fails("prune", "--name", "remote", code=2)
    host.fails("verify", "--remote", "--checksum", "--sample", "5%", code=2)
    host.fails("verify", "--remote", "--sample", "5", code=2)
    host.fails("forget", "--held", "-y", "latest", code=2)
    host.env["CIUIC_REMOTE_KEY_FILE"] = str(host.key_file)
    assert host.json("--repo", f"file://{nas}", "prune", "--dry-run")["freed_bytes"] == 0


def test_check_repairs_from_the_repository(host: Host, nas: Path) -> None:
    """check --remote names a damaged pack with exit 4; --repair mends it from the host; then everything verifies."""
    assert host.json("check", "--remote", "--read-data")["findings"] == []
    largest = max(packs(nas), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[5000] ^= 1
    largest.write_bytes(data)
    report = host.json("check", "--remote", "--read-data", expect=4)
    assert report["damaged"]
    assert {finding["kind"] for finding in report["findings"]} == {"damaged chunk"}
    repaired = host.json("check", "--remote", "--repair", "--read-data")
    assert not repaired["damaged"]
    assert all(finding["repaired"] for finding in repaired["findings"])
    assert not largest.exists()
    assert "in order" in host.run("check", "--remote", "--read-data").stdout.decode()
    assert not host.json("verify", "--remote", "--checksum")["damaged"]


def test_a_damaged_log_is_passed_over_and_repaired(host: Host, nas: Path) -> None:
    """Readers show what can be proved and end with 4, what deletes refuses, and a repair brings the rest back."""
    everything = {row.id for row in host.list()}
    last = max(path for path in (nas / "w").rglob("*") if path.is_file())
    last.write_bytes(last.read_bytes()[:-1])
    host.env["XDG_CACHE_HOME"] = str(host.top / "another-cache")
    done = host.run("list", "--all-hosts", "--json", expect=4)
    (shown,) = {one["id"] for one in json.loads(done.stdout)["snapshots"]}
    assert f"{last.name} in the remote is damaged" in done.stderr.decode()
    (lost,) = everything - {shown}
    url, root = f"file://{nas}", str(host.top / "root")
    host.env["CIUIC_REMOTE_KEY_FILE"] = str(host.key_file)
    place = host.top / "restored"
    root = str(host.top / "root")
    host.run("--repo", url, "restore", "-s", shown, "-p", root, "-d", str(place), expect=4)
    assert list(place.rglob("file"))
    assert "check --remote --repair" in host.fails("prune", "--remote", code=4)
    assert "nothing was given up" in host.fails("forget", "--remote", "-y", shown, code=4)
    report = host.json("check", "--remote", expect=4)
    assert [finding["kind"] for finding in report["findings"]] == ["log", "log"]
    assert report["findings"][1]["snapshot"] == lost
    report = host.json("check", "--remote", "--repair")
    assert all(finding["repaired"] for finding in report["findings"])
    listed = host.json("list", "--all-hosts")["snapshots"]
    assert {one["id"] for one in listed} == everything
    assert host.json("verify", "--remote", "--checksum")["damaged"] is False
    host.json("prune", "--remote")


def test_forget_of_a_remote_is_asked_for_by_name_and_lasts(host: Host, nas: Path) -> None:
    """A URL alone gives nothing up; what was given up is uploaded again only on request."""
    second, first = (row.id for row in host.list())
    host.env["CIUIC_REMOTE_KEY_FILE"] = str(host.key_file)
    url = f"file://{nas}"
    assert "add --remote" in host.fails("--repo", url, "forget", "-y", first, code=2)
    host.run("--repo", url, "forget", "--remote", "-y", first)

    def listed() -> set[str]:
        return {one["id"] for one in host.json("list", "--all-hosts")["snapshots"]}

    host.run("remote", "upload", "--once")
    assert listed() == {second}
    (status,) = host.json("remote", "status")["remotes"]
    assert status["behind"]["snapshots"] == 0
    host.run("remote", "upload", "--once", "--again", first)
    assert listed() == {first, second}


def test_what_was_given_up_at_once_is_held_until_it_is_approved(host: Host, nas: Path) -> None:
    """Where another machine gave up everything, prune names the repository, deletes nothing, and ends with 8; --approve lets it go."""
    cache = host.env.get("XDG_CACHE_HOME", "")
    host.env["XDG_CACHE_HOME"] = str(host.top / "elsewhere")
    host.run("forget", "--remote", "-y", *(row.id for row in host.list()))
    host.env["XDG_CACHE_HOME"] = cache
    before, newest = packs(nas), host.list()[0].id
    host.run("prune", "--remote", "--dry-run")
    refused = host.run("prune", "--remote", "--json", expect=8)
    hidden = host.run("list", "--all-hosts", "--json")
    assert json.loads(hidden.stdout)["snapshots"] == []
    assert "2 snapshots that no collection has deleted are not shown" in " ".join(
        hidden.stderr.decode().split()
    )
    seen = host.json("list", "--all-hosts", "--all-claims")["snapshots"]
    assert [(one["id"], one["state"]) for one in seen] == [(row.id, "given_up") for row in host.list()]
    assert "given up" in host.run("list", "--all-hosts", "--all-claims").stdout.decode()
    url, root = f"file://{nas}", str(host.top / "root")
    host.run("--repo", url, "restore", "--all-claims", "-s", newest, "-p", root, "-d", str(host.top / "back"))
    assert host.run("restore", "-s", newest, "-p", root, "-d", str(host.top / "own")).returncode == 0
    assert tree(host.top / "back") == tree(host.top / "own") != {}
    assert "goes with the URL of a remote" in host.fails("list", "--all-claims", code=2)
    ((held,),) = [space["held"] for space in json.loads(refused.stdout)["spaces"]]
    assert held["snapshots"] == 2
    assert f"--approve {held['repository']}" in " ".join(refused.stderr.decode().split())
    assert packs(nas) == before
    host.run("prune", "--approve", held["repository"], expect=2)
    assert "no given-up snapshot" in host.fails("prune", "--remote", "--approve", "nobody", code=3)
    done = host.json("prune", "--remote", "--approve", held["repository"])
    assert (done["freed_bytes"] > 1_200_000, done["spaces"][0]["held"]) == (True, [])
