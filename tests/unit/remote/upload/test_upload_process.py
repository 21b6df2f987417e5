"""Tests of the process that uploads: remotes do not depend on one another."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from support.remote_host import BLOCK
from support.restoring import take, write
from support.until import until

from ciuic.cli.app import cli
from ciuic.config import Config, RemoteConfig
from ciuic.errors import CiuicError
from ciuic.protocol.stored_remotely import read_record, remotes_done
from ciuic.remote.access import init_remote, open_remote
from ciuic.remote.host_status import HostStatus, StatusBehind, read_statuses
from ciuic.remote.objects.model import RemoteUnreachable
from ciuic.remote.objects.opening import open_objects
from ciuic.remote.replication import run
from ciuic.remote.upload_status import read_status
from ciuic.repository import Repository

_SECONDS = 60


class World:
    """A repository with one snapshot, and two remotes in directories, in clear."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.root = place / "root"
        self.root.mkdir()
        self.repository = Repository.create(place / "repository", block_size=BLOCK)
        self.config = Config(
            remotes=tuple(
                RemoteConfig(name=name, url=f"file://{place}/{name}", encryption=False)
                for name in ("one", "two")
            )
        )
        for remote in self.config.remotes:
            objects = open_objects(remote.url, make=True)
            init_remote(objects, master=None, block_size=BLOCK)
            objects.close()

    def snapshot(self, content: bytes) -> str:
        write(self.root / "file", content)
        return str(take(self.repository, self.root).id)

    def stored(self, name: str) -> frozenset[str]:
        record = read_record(name, self.place / "state")
        return frozenset() if record is None else record.stored

    def waits_for(self, name: str) -> str:
        status = read_status(name, self.place / "state")
        return "" if status is None else status.waits_for

    def run(self, *, once: bool, stop: threading.Event | None = None) -> None:
        place = self.place
        run(self.config, place / "repository", once=once, stop=stop, state_dir=place / "state")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.repository.close()


def test_a_remote_that_is_away_keeps_no_other_waiting(world: World) -> None:
    """While the directory of one remote is away, the other is served; the missing one says so, and goes on when it is back."""
    first = world.snapshot(b"1")
    (world.place / "one").rename(world.place / "away")
    stop = threading.Event()
    thread = threading.Thread(target=lambda: world.run(once=False, stop=stop))
    thread.start()
    try:
        until("the upload to the other remote", lambda: world.stored("two") == {first}, _SECONDS)
        until("the reason", lambda: "one" in world.waits_for("one"), _SECONDS)
        assert not world.waits_for("two")
        (world.place / "away").rename(world.place / "one")
        until("the upload to the first remote", lambda: world.stored("one") == {first}, _SECONDS)
        until("the end of the reason", lambda: not world.waits_for("one"), _SECONDS)
    finally:
        stop.set()
        thread.join(_SECONDS)
    assert not thread.is_alive()


def test_a_single_run_serves_the_others_first_and_fails_then(world: World) -> None:
    """With a remote that is away a run that ends uploads to the other one, and says at its end what failed."""
    first = world.snapshot(b"1")
    world.run(once=True)
    (world.place / "one").rename(world.place / "away")
    second = world.snapshot(b"2")
    with pytest.raises(RemoteUnreachable, match="one"):
        world.run(once=True)
    assert world.stored("two") == {first, second}
    assert world.stored("one") == {first}


def test_status_of_a_remote_that_is_away_keeps_what_was_known(world: World) -> None:
    """A process that cannot reach a remote does not say that nothing is missing in it."""
    world.snapshot(b"1")
    world.run(once=True)
    known = read_status("one", world.place / "state")
    assert known is not None
    assert known.remote_id
    (world.place / "one").rename(world.place / "away")
    stop = threading.Event()
    thread = threading.Thread(target=lambda: world.run(once=False, stop=stop))
    thread.start()
    try:
        until("the reason", lambda: world.waits_for("one"), _SECONDS)
    finally:
        stop.set()
        thread.join(_SECONDS)
    status = read_status("one", world.place / "state")
    assert status is not None
    assert (status.remote_id, status.snapshots) == (known.remote_id, known.snapshots)


@pytest.mark.parametrize("fault", ["older", "replaced", "unreadable", "gone"])
def test_a_remote_that_is_not_what_it_was_has_nothing(world: World, fault: str) -> None:
    """Prune keeps everything, and the status says why, from the upload that meets such a remote until it is read again."""
    remote, state = world.place / "one", world.place / "state"
    first = world.snapshot(b"1")
    world.run(once=True)
    shutil.copytree(remote, world.place / "older")
    second = world.snapshot(b"2")
    world.run(once=True)
    assert world.stored("one") == {first, second}
    remote.rename(world.place / "whole")
    if fault == "older":
        (world.place / "older").rename(remote)
    else:
        remote.mkdir()
        if fault == "unreadable":
            (remote / "remote.json").write_text("{}")
        elif fault == "replaced":
            objects = open_objects(f"file://{remote}")
            init_remote(objects, master=None, block_size=BLOCK)
            objects.close()
    third = world.snapshot(b"3")
    with pytest.raises(CiuicError) as failure:
        world.run(once=True)
    done = remotes_done(world.config.remotes, world.repository.id, now_ns=time.time_ns(), state_dir=state)
    assert done.done == {"one": frozenset(), "two": {first, second, third}}
    assert failure.value.message in done.flaws[0]
    assert world.waits_for("one") == failure.value.message
    if fault in ("older", "replaced"):
        (status,) = _statuses(world, "one")
        assert (status.behind.snapshots, status.error) == (3, failure.value.message)
    shutil.rmtree(remote)
    (world.place / "whole").rename(remote)
    world.run(once=True)
    assert world.stored("one") == {first, second, third}
    assert world.waits_for("one") == ""


def _statuses(world: World, name: str) -> list[HostStatus]:
    objects = open_objects(f"file://{world.place}/{name}")
    try:
        found, _ = read_statuses(objects, open_remote(objects, []).sealer)
    finally:
        objects.close()
    assert all(not one.flaw for one in found)
    return [one.status for one in found if one.status is not None]


def test_an_upload_says_on_the_remote_how_its_host_is(world: World) -> None:
    """A single run leaves a status that promises no next one; one that goes on promises it, under the same name; 0 leaves none."""
    first, silent = world.config.remotes
    quiet = msgspec.structs.replace(silent, status_every_seconds=0)
    world.config = msgspec.structs.replace(world.config, remotes=(first, quiet))
    id_ = world.snapshot(b"1")
    world.run(once=True)
    (status,) = _statuses(world, "one")
    assert status.newest is not None
    assert (status.newest.snapshot, status.interval_seconds, status.error) == (id_, 0, "")
    assert (status.behind, status.newest_stored_ns) == (StatusBehind(), status.newest.time_ns)
    assert [(root.path, root.snapshot) for root in status.roots] == [(str(world.root), id_)]
    assert _statuses(world, "two") == []
    stop = threading.Event()
    thread = threading.Thread(target=lambda: world.run(once=False, stop=stop))
    thread.start()
    try:
        until(
            "a status of the process that goes on",
            lambda: [one.interval_seconds for one in _statuses(world, "one")] == [300],
            _SECONDS,
        )
    finally:
        stop.set()
        thread.join()


def test_a_host_whose_status_is_lost_is_seen_by_its_snapshots(world: World) -> None:
    """`fleet status` names a host by its manifests, also one whose repository has a space of its own."""
    world.snapshot(b"1")
    world.run(once=True)
    for path in (world.place / "one/status").iterdir():
        path.unlink()
    assert list((world.place / "one/repositories").iterdir())
    url = f"file://{world.place}/one"
    result = CliRunner().invoke(cli, ["fleet", "status", "--json", url])
    assert result.exit_code == 0, result.stderr
    (host,) = json.loads(result.stdout)["without_status"]
    assert host["snapshots"] == 1


def test_the_error_that_ended_an_upload_is_kept(world: World) -> None:
    """The status has it until the next upload begins to work."""
    world.snapshot(b"1")
    (world.place / "one").rename(world.place / "away")
    with pytest.raises(RemoteUnreachable) as failure:
        world.run(once=True)
    assert world.waits_for("one") == failure.value.message
    (world.place / "away").rename(world.place / "one")
    world.run(once=True)
    assert world.waits_for("one") == ""


@pytest.mark.parametrize("fault", ["damaged", "gone"])
def test_a_snapshot_whose_manifest_cannot_be_read_is_uploaded_again(world: World, fault: str) -> None:
    """A commit alone is no copy: until the snapshot is stored again prune keeps it."""
    id_ = world.snapshot(b"1")
    world.run(once=True)
    space = world.place / "one/repositories" / world.repository.id
    (manifest,) = (path for path in (space / "manifests").rglob("*") if path.is_file())
    if fault == "damaged":
        manifest.write_bytes(b"damaged")
    else:
        manifest.unlink()
    # What the host remembers of it is lost, as after its disk was replaced.
    (world.place / "state/one" / world.repository.id / "facts").unlink()
    world.run(once=True)
    assert world.stored("one") == {id_}
    again = [path for path in (space / "manifests").rglob("*") if path.is_file() and path != manifest]
    assert len(again) == 1
    requests = len(list((space / "w").rglob("*")))
    world.run(once=True)
    # It is read: nothing is uploaded a third time, and the log grows by the hello alone.
    assert len(list((space / "w").rglob("*"))) == requests + 1
