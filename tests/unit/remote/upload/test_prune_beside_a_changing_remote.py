"""Prune beside a remote that goes back, vanishes, is replaced or is away: nothing goes that is then nowhere."""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, get_args

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st
from support.remote_host import BLOCK
from support.stored import store
from support.until import until

from ciuic.cli.app import cli
from ciuic.cli.shared import remotes, slow
from ciuic.config import RemoteConfig
from ciuic.errors import CiuicError
from ciuic.maintenance.prune import prune
from ciuic.protocol.stored_remotely import MAX_UNSEEN_SECONDS, StoredRecord, read_record, remotes_done
from ciuic.remote import remote_index, remote_look
from ciuic.remote.access import Remote, init_remote, open_remote, repository_space
from ciuic.remote.log_reader import LogReader
from ciuic.remote.object_names import PackRef
from ciuic.remote.objects.directory_objects import DirectoryObjects
from ciuic.remote.objects.model import ObjectInfo, Objects, RemoteUnreachable
from ciuic.remote.remote_index import RemoteIndex, list_packs
from ciuic.remote.remote_look import look_at
from ciuic.remote.replication import Replication
from ciuic.remote.uploader import Labels, Persistence
from ciuic.repository import Repository, Walker
from ciuic.repository.pack_directory import Packs
from ciuic.retention import RetentionPolicy
from ciuic.types import SnapshotId

_KEEP_ONE = RetentionPolicy(keep_within_seconds=0, keep_last=1)
Step = Literal[
    "save",
    "upload",
    "accept",
    "copy",
    "go back",
    "empty",
    "vanish",
    "come back",
    "replace",
    "lose packs",
    "lose manifests",
    "prune",
    "prune blindly",
]


class _Beside:
    """A host, the directory of its remote, and a clock that runs ahead between two steps."""

    def __init__(self, place: Path) -> None:
        self.bucket, self.away, self.older = place / "bucket", place / "away", place / "older"
        self.repository = Repository.create(place / "repository", block_size=BLOCK)
        self.config = RemoteConfig(name="remote", url=f"file://{self.bucket}", encryption=False)
        self.state = place / "state"
        self.state.mkdir()
        self.rng = random.Random(1)
        self.saved = 0
        self.chunks: dict[str, set[bytes]] = {}
        """Chunks of each snapshot that was ever taken."""
        self.ahead_ns = 0
        self.replace()

    def do(self, step: str) -> None:
        getattr(self, step.replace(" ", "_"))()

    def save(self) -> None:
        self.saved += 1
        with self.repository.writer() as writer:
            store(writer, {b"f": self.rng.randbytes(BLOCK)}, number=self.saved)
        for id_ in self.repository.snapshots.names() - self.chunks.keys():
            snapshot = self.repository.snapshots.load(SnapshotId(id_))
            self.chunks[id_] = {reached.id for reached in Walker(self.repository).walk(snapshot)}

    def replication(self, stop: threading.Event | None = None) -> Replication:
        packs = Packs(
            str(Path(self.repository.path) / "packs"),
            bytes.fromhex(self.repository.id),
            self.repository.config.hash,
        )
        return Replication(
            self.repository,
            packs,
            self.config,
            self.state,
            host="host",
            persist=Persistence(stop or threading.Event()),
            labels=lambda repository, snapshot: Labels(),
            now_ns=self.now_ns,
        )

    def remote(self) -> Remote:
        return open_remote(DirectoryObjects(str(self.bucket)), [])

    def upload(self) -> None:
        with suppress(CiuicError):
            self.replication().catch_up(self.remote())

    def accept(self) -> None:
        """Go on with what is there now, as the hint says."""
        for directory in self.state.glob("remote/*/"):
            shutil.rmtree(directory)

    def _copy_now(self, source: Path, target: Path) -> None:
        shutil.rmtree(target, ignore_errors=True)
        if source.exists():
            shutil.copytree(source, target)
        self.ahead_ns += (MAX_UNSEEN_SECONDS + 1) * 10**9

    def replace(self) -> None:
        self.empty()
        init_remote(DirectoryObjects(str(self.bucket)), master=None, block_size=BLOCK)

    def empty(self) -> None:
        self.vanish()
        self.bucket.mkdir()

    def vanish(self) -> None:
        self._copy_now(self.bucket, self.away)
        shutil.rmtree(self.bucket, ignore_errors=True)

    def come_back(self) -> None:
        self._copy_now(self.away, self.bucket)

    def go_back(self) -> None:
        self._copy_now(self.older, self.bucket)

    def lose_packs(self) -> None:
        """Delete every second pack, as a person or a lifecycle rule does."""
        for path in sorted(self.packs())[::2]:
            path.unlink()
        self.ahead_ns += (MAX_UNSEEN_SECONDS + 1) * 10**9

    def lose_manifests(self) -> None:
        """Delete every second manifest, and cut the others."""
        for number, path in enumerate(sorted(self.bucket.rglob("manifests/*/*/*"))):
            if number % 2:
                path.write_bytes(path.read_bytes()[:-1])
            elif path.is_file():
                path.unlink()
        self.ahead_ns += (MAX_UNSEEN_SECONDS + 1) * 10**9

    def packs(self) -> list[Path]:
        return [path for path in self.bucket.rglob("packs/*/*/*") if path.is_file()]

    def look(self, record: StoredRecord) -> str | None:
        return look_at(self.config, self.repository, record, self.state)

    def write_config(self, place: Path) -> Path:
        config = place / "ciuic.toml"
        config.write_text(
            f'[repository]\npath = "{self.repository.path}"\n'
            f'[remote]\nname = "remote"\nurl = "{self.config.url}"\nencryption = false\n'
        )
        return config

    def now_ns(self) -> int:
        return time.time_ns() + self.ahead_ns

    def there(self) -> set[str]:
        """Return the snapshots that can be restored from the remote now."""
        if not self.bucket.exists():
            return set()
        try:
            remote = open_remote(DirectoryObjects(str(self.bucket)), [])
        except CiuicError:
            return set()
        try:
            space = repository_space(remote, self.repository, make=False)
        except CiuicError:
            return set()
        reader = LogReader(space.objects, space.sealer)
        reader.refresh()
        index = RemoteIndex.open(None)
        try:
            index.refresh(space.objects, space.sealer)
            committed = {
                one.snapshot for name, one in reader.live().items() if space.objects.info(name) is not None
            }
            return {id_ for id_ in committed if self.chunks[id_] <= index.has_many(self.chunks[id_])}
        finally:
            index.close()

    def prune(self, *, blindly: bool = False) -> None:
        repository = self.repository
        record = read_record("remote", self.state)
        looks = {}
        if record is not None and not blindly:
            answer = self.look(record)
            if answer is not None:
                looks["remote"] = answer
        before = set(map(str, repository.snapshots.names()))
        done = remotes_done(
            [self.config], repository.id, now_ns=self.now_ns(), looks=looks, state_dir=self.state
        ).done
        prune(repository, _KEEP_ONE, remotes=done)
        assert before - repository.snapshots.names() <= self.there()

    def prune_blindly(self) -> None:
        """Prune as the daemon does, which has no way to the remote."""
        self.prune(blindly=True)

    def copy(self) -> None:
        self._copy_now(self.bucket, self.older)


@settings(max_examples=60)
@given(steps=st.lists(st.sampled_from(get_args(Step)), max_size=14))
def test_what_prune_removes_is_on_the_remote_now(steps: list[Step]) -> None:
    """Whatever became of the remote since the last upload, each removed snapshot is there when it is removed."""
    with TemporaryDirectory() as place:
        beside = _Beside(Path(place))
        for step in ("save", "save", "copy", "upload", "save", "upload", *steps, "prune", "prune blindly"):
            beside.do(step)


def test_prune_removes_what_the_remote_has() -> None:
    """A remote that is as it was left lets all go that no rule keeps; without a look only soon after the upload."""
    with TemporaryDirectory() as place:
        beside = _Beside(Path(place))
        for step in ("save", "save", "save", "upload"):
            beside.do(step)
        beside.ahead_ns += (MAX_UNSEEN_SECONDS + 5) * 10**9
        beside.prune_blindly()
        assert len(beside.repository.snapshots.names()) == 3
        beside.prune()
        assert len(beside.repository.snapshots.names()) == 1
        for step in ("save", "upload"):
            beside.do(step)
        beside.prune_blindly()
        assert len(beside.repository.snapshots.names()) == 1


def test_an_upload_stores_lost_packs_again() -> None:
    """A look counts the packs that are lost, nothing counts as stored that lacks them, and an upload stores again what is here."""
    with TemporaryDirectory() as place:
        beside = _Beside(Path(place))
        for step in ("save", "save", "save", "upload", "lose packs"):
            beside.do(step)
        record = read_record("remote", beside.state)
        assert record is not None
        assert beside.look(record) == (
            "nothing counts as stored there: it lacks 3 packs that it had; "
            "an upload finds out what that means, and stores it again where it can"
        )
        committed = sorted(beside.bucket.rglob("manifests/**/*"))
        beside.upload()
        assert beside.there() == beside.repository.snapshots.names()
        assert beside.look(record) == ""
        after = read_record("remote", beside.state)
        assert after is not None
        assert after.stored == record.stored
        # Their commits stood, and no second ones were made.
        assert sorted(beside.bucket.rglob("manifests/**/*")) == committed


def test_a_pack_that_was_cut_is_stored_again() -> None:
    """A pack of another size than it had is one that is lost."""
    with TemporaryDirectory() as place:
        beside = _Beside(Path(place))
        for step in ("save", "save", "upload"):
            beside.do(step)
        (first, *_) = beside.packs()
        first.write_bytes(first.read_bytes()[:-1])
        record = read_record("remote", beside.state)
        assert record is not None
        assert "it lacks 1 pack that it had" in str(beside.look(record))
        beside.upload()
        assert beside.there() == beside.repository.snapshots.names()


def test_a_snapshot_that_was_given_up_is_not_relied_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot that a collection deleted since the last upload counts as stored no more; its packs are not reported as lost."""
    with TemporaryDirectory() as place:
        beside = _Beside(Path(place))
        for step in ("save", "save", "upload"):
            beside.do(step)
        record = read_record("remote", beside.state)
        assert record is not None
        (kept, removed) = sorted(beside.repository.snapshots.names())
        monkeypatch.setenv("CIUIC_UPLOAD_STATE", str(beside.state))
        monkeypatch.setenv("XDG_CACHE_HOME", f"{place}/cache")
        monkeypatch.setenv("CIUIC_REPO", "")
        config = beside.write_config(Path(place))
        before = set(beside.packs())
        day_ago = time.time() - 2 * 86_400
        for path in beside.bucket.rglob("*"):
            os.utime(path, (day_ago, day_ago))
        for words in (("forget", "--remote", "-y", removed), ("prune", "--remote")):
            result = CliRunner().invoke(cli, ["--config", str(config), *words])
            assert result.exit_code == 0, result.output
        assert not before <= set(beside.packs())
        assert beside.look(record) == (
            "nothing counts as stored there: a collection removed 1 manifest of snapshots that were given up there; "
            "the next upload takes note of them"
        )
        assert beside.there() == {kept}
        beside.upload()
        record = read_record("remote", beside.state)
        assert record is not None
        assert (record.stored, beside.look(record)) == ({kept}, "")


def test_a_service_reads_all_again_where_something_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload that goes on finds packs and manifests gone at a listing, and stores again what they held."""
    for name, seconds in (("LOOK_EVERY_SECONDS", 0.0), ("_AGAIN_SECONDS", 0.0), ("_POLL_SECONDS", 0.02)):
        monkeypatch.setattr(f"ciuic.remote.replication.{name}", seconds)
    with TemporaryDirectory() as place:
        beside = _Beside(Path(place))
        beside.do("save")
        beside.do("save")
        stop = threading.Event()
        service = beside.replication(stop)
        running = threading.Thread(target=service.run, args=(beside.remote(),))
        running.start()
        try:
            names = beside.repository.snapshots.names()
            for lose in (None, "lose packs", "lose manifests"):
                if lose is not None:
                    beside.do(lose)
                    assert beside.there() != names
                until(f"the upload after {lose}", lambda: beside.there() == names)
        finally:
            stop.set()
            running.join(60)
        assert not running.is_alive()


def test_prune_says_that_it_waits_for_a_remote(monkeypatch: pytest.MonkeyPatch) -> None:
    """A remote that does not answer is named while prune waits, with nothing shown on a terminal, and nothing goes."""
    with TemporaryDirectory() as place:
        beside = _Beside(Path(place))
        for step in ("save", "save", "upload"):
            beside.do(step)
        monkeypatch.setenv("CIUIC_UPLOAD_STATE", str(beside.state))
        monkeypatch.setenv("CIUIC_REPO", "")
        config = beside.write_config(Path(place))
        config.write_text(config.read_text() + "[retention]\nkeep_within = 0\nkeep_last = 1\n")
        said = threading.Event()
        lines: list[str] = []

        def complain(text: str) -> None:
            lines.append(text)
            said.set()

        def refuse_late(config: RemoteConfig) -> Objects:
            assert said.wait(60)
            raise RemoteUnreachable("cannot open it: no answer from the store")

        monkeypatch.setattr(slow, "ANSWER_SECONDS", 0.0)
        monkeypatch.setattr(remotes, "complain", complain)
        monkeypatch.setattr(remote_look, "configured_objects", refuse_late)
        before = beside.repository.snapshots.names()
        result = CliRunner().invoke(cli, ["--config", str(config), "prune"])
        assert result.exit_code == 0, result.output
        assert lines == ["still asking the remote remote what it has"]
        assert "nothing counts as stored there: cannot open it: no answer from the store" in result.stderr
        assert beside.repository.snapshots.names() == before


@pytest.mark.parametrize("command", ["prune --remote", "remote status --contact"])
def test_commands_say_that_they_ask_a_large_remote(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """A command that lists a remote, or reads its tables, says so once that takes long."""
    with TemporaryDirectory() as place:
        beside = _Beside(Path(place))
        for step in ("save", "upload"):
            beside.do(step)
        monkeypatch.setenv("CIUIC_UPLOAD_STATE", str(beside.state))
        monkeypatch.setenv("XDG_CACHE_HOME", f"{place}/cache")
        monkeypatch.setenv("CIUIC_REPO", "")
        config = beside.write_config(Path(place))
        said = threading.Event()
        lines: list[str] = []

        def complain(text: str) -> None:
            lines.append(text)
            said.set()

        def list_late(objects: Objects) -> dict[PackRef, ObjectInfo]:
            assert said.wait(60)
            return list_packs(objects)

        monkeypatch.setattr(slow, "ANSWER_SECONDS", 0.0)
        monkeypatch.setattr(remotes, "complain", complain)
        monkeypatch.setattr(remote_look, "looks", lambda *_, **__: {})
        monkeypatch.setattr(remote_index, "list_packs", list_late)
        result = CliRunner().invoke(cli, ["--config", str(config), *command.split()])
        assert result.exit_code == 0, result.output
        assert {line.partition(" the remote ")[0] for line in lines} == {"still asking"}


def test_doctor_and_status_say_what_a_remote_has_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a rollback that no upload has met both name the snapshots that the remote lacks, and those that are not here either."""
    with TemporaryDirectory() as place:
        beside = _Beside(Path(place))
        for step in ("save", "upload", "copy", "save", "save", "upload"):
            beside.do(step)
        lost, kept = "cs-000002", "cs-000003"
        with beside.repository.writer() as writer:
            writer.remove_snapshots([SnapshotId(lost)])
        beside.go_back()
        config = beside.write_config(Path(place))
        monkeypatch.setenv("CIUIC_UPLOAD_STATE", str(beside.state))
        monkeypatch.setenv("CIUIC_REPO", "")

        def say(*words: str) -> Any:
            return json.loads(CliRunner().invoke(cli, ["--config", str(config), *words, "--json"]).stdout)

        (status,) = say("remote", "status", "--contact")["remotes"]
        (found,) = [
            one
            for one in say("doctor", "--recovery")["findings"]
            if one["check"] == "recovery: remote remote"
        ]
        assert (
            f"it lacks 2 snapshots that it had: {kept}, {lost}; not on this host either: {lost}"
            in status["problem"]
        )
        assert (found["level"], found["message"]) == ("problem", status["problem"])
        assert status["behind"]["snapshots"] == 2


@pytest.mark.parametrize("kind", ["manifests", "packs"])
def test_prune_keeps_what_a_check_could_not_read(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A lost manifest or pack counts its snapshots out for prune and status from the check on that meets it, until one finds them whole."""
    with TemporaryDirectory() as place:
        beside = _Beside(Path(place))
        for step in ("save", "save", "upload"):
            beside.do(step)
        monkeypatch.setenv("CIUIC_UPLOAD_STATE", str(beside.state))
        monkeypatch.setenv("CIUIC_REPO", "")
        monkeypatch.setenv("XDG_CACHE_HOME", f"{place}/cache")
        config = beside.write_config(Path(place))

        def run(*words: str) -> Result:
            return CliRunner().invoke(cli, ["--config", str(config), *words])

        (lost, *_) = sorted(path for path in beside.bucket.rglob(f"{kind}/**/*") if path.is_file())
        content = lost.read_bytes()
        lost.unlink()
        assert run("check", "--remote").exit_code == 4
        assert "cannot be read whole of cs-00000" in run("remote", "status").stdout
        here = beside.repository.snapshots.names()
        record = read_record("remote", beside.state)
        assert record is not None
        done = remotes_done([beside.config], beside.repository.id, now_ns=beside.now_ns())
        kept = here - set(done.done["remote"] or ())
        assert kept
        assert len(done.flaws) == 1
        lost.write_bytes(content)
        checked = run("check", "--remote")
        assert checked.exit_code == 0, checked.output
        done = remotes_done([beside.config], beside.repository.id, now_ns=beside.now_ns())
        assert (done.done, done.flaws) == ({"remote": record.stored}, [])
