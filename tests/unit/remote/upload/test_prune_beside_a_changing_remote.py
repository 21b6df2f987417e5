"""Prune beside a remote that goes back, vanishes, is replaced or is away: nothing goes that is then nowhere."""

from __future__ import annotations

import json
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

from ciuic.cli.app import cli
from ciuic.config import RemoteConfig
from ciuic.errors import CiuicError
from ciuic.maintenance.prune import prune
from ciuic.protocol.stored_remotely import MAX_UNSEEN_SECONDS, read_record, remotes_done
from ciuic.remote.access import init_remote, open_remote, repository_space
from ciuic.remote.log_reader import LogReader
from ciuic.remote.objects.directory_objects import DirectoryObjects
from ciuic.remote.remote_look import look_at
from ciuic.remote.replication import Replication
from ciuic.remote.uploader import Labels
from ciuic.repository import Repository
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
        self.ahead_ns = 0
        self.replace()

    def do(self, step: str) -> None:
        getattr(self, step.replace(" ", "_"))()

    def save(self) -> None:
        self.saved += 1
        with self.repository.writer() as writer:
            store(writer, {b"f": self.rng.randbytes(BLOCK)}, number=self.saved)

    def upload(self) -> None:
        packs = Packs(
            str(Path(self.repository.path) / "packs"),
            bytes.fromhex(self.repository.id),
            self.repository.config.hash,
        )
        replication = Replication(
            self.repository,
            packs,
            self.config,
            self.state,
            host="host",
            stop=threading.Event(),
            labels=lambda repository, snapshot: Labels(),
            now_ns=self.now_ns,
        )
        with suppress(CiuicError):
            replication.catch_up(open_remote(DirectoryObjects(str(self.bucket)), []))

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
        """Return the snapshots that the remote commits now."""
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
        return {live.snapshot for live in reader.live().values()}

    def prune(self, *, blindly: bool = False) -> None:
        repository = self.repository
        record = read_record("remote", self.state)
        looks = {}
        if record is not None and not blindly:
            answer = look_at(self.config, repository, record, self.state)
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
