"""The installed command finds, compares, exports and completes training states on a remote."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import click
import numpy as np
import pytest
from click.shell_completion import CompletionItem
from support.cli_repository import Host
from support.live import Commands
from support.remote_training import WAIT_SECONDS
from support.until import until

from ciuic import SnapshotManager
from ciuic.cli.shared import completion
from ciuic.cli.shared.remotes import open_named_remote
from ciuic.cli.shared.session import Session
from ciuic.remote.access import add_slot, open_remote
from ciuic.remote.errors import WrongKey
from ciuic.remote.objects.opening import open_objects
from ciuic.remote.sealing.key_slots import SlotSecret, make_key_file, read_key_file, show_recovery_key
from ciuic.training.remote.uploads import is_uploading, state_dir

SAVED = (("first", 10), ("first", 20), ("second", 20), ("first", 20))
"""Trainings and steps in the order in which they are saved; a step that was trained again is there twice."""


class Remote:
    """Remote with the states of two trainings, and commands of a machine that has the URL and the key alone."""

    def __init__(self, place: Path) -> None:
        (place / "nas").mkdir()
        self.url = f"file://{place / 'nas'}"
        self.key_file = str(place / "key")
        make_key_file(self.key_file)
        self.home = place / "elsewhere"
        self.home.mkdir(mode=0o700)
        option = {"url": self.url, "key_file": self.key_file}
        self.ids = []
        for number, (job, step) in enumerate(SAVED):
            with SnapshotManager(place / "snapshots", name=job, remote=option) as manager:
                state = {"w": np.full(2000, float(number))}
                save = manager.save_snapshot(model=state, epoch=step // 10, step=step, wait=True)
                assert save is not None
                self.ids.append(save.id)
                # One upload stores what is saved before its end.
                assert number < len(SAVED) - 1 or manager.wait_remote(WAIT_SECONDS)
        snapshots = str(place / "snapshots")
        # It ends by itself when no training saves any more, and must not outlive the tests.
        until(
            "the end of all uploads",
            lambda: not any(is_uploading(snapshots, one) for one in os.listdir(state_dir(snapshots))),
        )

    def run(self, *arguments: str, code: int = 0, **variables: str) -> str:
        """Run a command that ends with this code; return what it printed, or said of its failure."""
        env = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "CIUIC_REPO": self.url,
            "CIUIC_REMOTE_KEY_FILE": self.key_file,
            **variables,
        }
        done = Commands.run(*arguments, env=env)
        assert done.returncode == code, done.stderr
        return done.stderr if code else done.stdout


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
    place = tmp_path_factory.mktemp("states")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("STATE", "CACHE"):
            patch.setenv(f"XDG_{name}_HOME", str(place / name))
        yield Remote(place)


def test_states_are_found_by_job_step_and_host(remote: Remote) -> None:
    """`list` chooses by labels; JOB@STEP is the newest of a step, and what is not there is said by name."""

    def listed(*options: str) -> list[str]:
        return [one.split("|")[0] for one in remote.run("list", "--machine-readable", *options).splitlines()]

    oldest_first = remote.ids
    assert listed("--job", "first") == [oldest_first[3], oldest_first[1], oldest_first[0]]
    assert listed("--step", "20", "--job", "second") == [oldest_first[2]]
    assert listed("--epoch", "1") == [oldest_first[0]]
    assert listed("--host", os.uname().nodename, "-n", "1") == [oldest_first[3]]
    (one,) = json.loads(remote.run("list", "--json", "--job", "second"))["snapshots"]
    assert (one["job"], one["epoch"], one["step"]) == ("second", 2, 20)
    assert "second" in remote.run("list")
    for name, at in (("first@20", 3), ("first@10", 0), ("second@latest", 2), ("first@latest~2", 0)):
        assert json.loads(remote.run("show", name, "--json"))["id"] == oldest_first[at], name
    assert "its last steps are: 10, 20" in remote.run("show", "first@15", code=3)
    assert "jobs there are: first, second" in remote.run("show", "third@15", code=3)
    assert "choose among the snapshots of a remote" in remote.run(
        "--repo", str(remote.home), "list", "--job", "first", code=2
    )


def test_states_are_compared_and_exported(remote: Remote, tmp_path: Path) -> None:
    """`diff --tensors` and `export` read states of a remote as those of a repository."""
    assert remote.run(
        "diff", "--tensors", "--machine-readable", "first@10", "first@20", "--skip-identical"
    ).endswith("|model_state_dict.w\n")
    target = tmp_path / "state.npz"
    remote.run("export", "second@20", str(target), "--to", "npz")
    with np.load(target) as found:
        assert found["model.w"].tolist() == [2.0] * 2000


def test_words_are_completed_from_a_remote(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids and paths on a remote are completed; without a key, or a remote, there are none, and no question is asked."""
    # The process of a test must not end because the machine is busy.
    monkeypatch.setattr(completion, "_MAX_REMOTE_SECONDS", 120.0)
    monkeypatch.setenv("CIUIC_CONFIG", str(remote.home / "none.toml"))
    monkeypatch.setenv("CIUIC_REMOTE_KEY_FILE", remote.key_file)

    def context(url: str, **params: str) -> click.Context:
        made = click.Context(click.Command("show"), obj=Session(remote_option=url))
        made.params.update(params)
        return made

    def values(found: list[CompletionItem]) -> set[str]:
        return {one.value for one in found}

    complete, complete_path = completion.complete_snapshot, completion.complete_snapshot_path
    assert values(complete(context(remote.url), "")) == {*remote.ids, "latest"}
    assert values(complete_path(context(remote.url, snapshot_id="first@20"), "/fi")) == {"/first/"}
    names = values(complete_path(context(remote.url, snapshot_id="first@20"), "/first/"))
    assert "/first/state.json" in names
    assert complete(context(f"file://{remote.home}/nothing"), "") == []
    monkeypatch.delenv("CIUIC_REMOTE_KEY_FILE")
    monkeypatch.setattr(click, "prompt", lambda *_, **__: pytest.fail("a question was asked"))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert complete(context(remote.url), "") == []


def test_a_store_that_does_not_answer_ends_completion(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While a remote keeps a completion waiting, the process ends with nothing printed."""
    ended = threading.Event()
    monkeypatch.setattr(completion, "_MAX_REMOTE_SECONDS", 0.01)
    monkeypatch.setattr(os, "_exit", lambda status: ended.set())
    with completion._bounded(Session(remote_option="s3://bucket")):
        assert ended.wait(60)


def test_a_remote_that_does_not_open_says_what_would(remote: Remote) -> None:
    """Wrong keys, URLs and stores that are not there are named in one sentence, with what helps; never a traceback."""
    make_key_file(f"{remote.key_file}.other")
    nothing = f"file://{remote.home}/nothing"
    for code, words, url, variables in (
        (7, "CIUIC_REMOTE_KEY_FILE=PATH", remote.url, {"CIUIC_REMOTE_KEY_FILE": ""}),
        (7, "does not open the remote", remote.url, {"CIUIC_REMOTE_KEY_FILE": f"{remote.key_file}.other"}),
        (
            7,
            "no key slot for a passphrase",
            remote.url,
            {"CIUIC_REMOTE_PASSPHRASE": "x", "CIUIC_REMOTE_KEY_FILE": ""},
        ),
        (1, "is its file system mounted", nothing, {}),
        (3, "its bucket and its prefix", f"file://{remote.home}", {}),
    ):
        said = remote.run("--repo", url, "list", code=code, **variables)
        assert words in said
        assert "Traceback" not in said


def test_a_typed_key_is_asked_for_again(
    remote: Remote, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong passphrase and a typing error are said, and the right recovery key opens; after three it ends."""
    with closing(open_objects(remote.url)) as objects:
        opened = open_remote(objects, [read_key_file(remote.key_file)])
        key = os.urandom(32)
        add_slot(opened, "recovery", SlotSecret("recovery", key))
    text = show_recovery_key(key)
    typo = text[:-1] + ("7" if text[-1] != "7" else "8")
    monkeypatch.delenv("CIUIC_REMOTE_KEY_FILE", raising=False)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    for typed, is_right in ((["x", typo, text.lower().replace("-", " ")], True), (["x", typo, "y"], False)):
        monkeypatch.setattr(click, "prompt", lambda *_, typed=typed, **__: typed.pop(0))
        if is_right:
            with open_named_remote(remote.url, tuple) as found:
                assert len(found.snapshots.names()) == len(remote.ids)
        else:
            with pytest.raises(WrongKey):
                open_named_remote(remote.url, tuple)
        assert not typed
        said = capsys.readouterr().err
        assert "CIUIC_REMOTE_RECOVERY_KEY" in said
        assert "look at group 14" in said


def test_status_says_where_a_resume_would_start(tmp_path: Path) -> None:
    """For each training the newest step that is wholly on the remote, beside the newest here; the store is not asked."""
    host = Host(tmp_path / "host")
    host.run("remote", "init", f"file://{tmp_path}/nas")

    def save(job: str, step: int) -> str:
        with SnapshotManager(host.repository, name=job) as manager:
            saved = manager.save_snapshot(model={"w": np.full(2000, float(step))}, step=step, wait=True)
            assert saved is not None
            return str(saved.id)

    def trainings() -> dict[str, tuple[int | None, int | None]]:
        (document,) = host.json("remote", "status")["remotes"]
        return {
            one["training"]: tuple(one[side] and one[side]["step"] for side in ("stored", "local"))
            for one in document["trainings"]
        }

    assert trainings() == {}
    first = save("first", 10)
    assert trainings() == {"first": (None, 10)}
    assert (
        "first: nothing to resume from here (local: step 10)" in host.run("remote", "status").stdout.decode()
    )
    host.run("remote", "upload", "--once")
    save("second", 7)
    assert trainings() == {"first": (10, 10), "second": (None, 7)}
    host.run("remote", "upload", "--once")
    save("first", 20)
    (tmp_path / "nas").rename(tmp_path / "away")
    assert trainings() == {"first": (10, 20), "second": (7, 7)}
    said = host.run("remote", "status").stdout.decode()
    assert "first: a resume from here would start at step 10 (local: step 20)" in said
    assert "second: a resume from here would start at step 7 (local: step 7)" in said
    # Pruned here: the remote has it still.
    (tmp_path / "away").rename(tmp_path / "nas")
    host.run("remote", "upload", "--once")
    host.run("forget", "-y", first)
    assert trainings() == {"first": (20, 20), "second": (7, 7)}
