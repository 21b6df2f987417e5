"""`SnapshotManager(filesystem=True)`: a state and the files of its instant, with a real daemon and mount."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from support.live import Live
from support.second_user import User, run_as
from support.tiny_training import Model, Optimizer
from support.until import until

from ciuic import SnapshotManager
from ciuic.protocol.pairing import SOCKET_NAME
from ciuic.training.writer import paired_files
from ciuic.training.writer.messages import Manifest

pytestmark = pytest.mark.mount
TRAINER = User(54321, 54321)
AS_TRAINER = (
    "setpriv", f"--reuid={TRAINER.uid}", f"--regid={TRAINER.gid}", "--clear-groups",
    "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search",
)  # fmt: skip
"""Command prefix for the trainer's user, who can read the checkout and the interpreter wherever those are.

The daemon's answers do not depend on it.
"""
TRAINING = """
    import os, sys, torch
    from ciuic import SnapshotManager
    root, save_dir = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = torch.nn.Linear(64, 512)
    optimizer = torch.optim.Adam(model.parameters())
    manager = SnapshotManager(save_dir, every_steps=4, filesystem=[root + "/logs"])
    manager.register(model=model, optimizer=optimizer)
    with open(root + "/config.json", "w") as file:
        file.write("{}")
    os.mkdir(root + "/logs")
    with open(root + "/logs/log", "wb", buffering=0) as log:
        for number in range(1, 13):
            loss = model(torch.randn(4, 64)).square().mean()
            loss.backward()
            log.write(b"%d\\n" % number)
            optimizer.step()
            if number % 4 == 0:
                manager.wait()
    manager.close()
    print(manager.stats.saved, manager.stats.filesystem, manager.stats.last_filesystem_error)
"""


@pytest.fixture
def daemon(protected: Live, monkeypatch: pytest.MonkeyPatch) -> Live:
    """Start a daemon as `protected` does; send this process's requests to it."""
    monkeypatch.setenv("CIUIC_CONFIG", str(protected.config))
    return protected


def _listed(live: Live, repository: Path | None = None) -> list[dict[str, Any]]:
    arguments = [] if repository is None else ["--repo", str(repository)]
    snapshots: list[dict[str, Any]] = live.json(*arguments, "list")["snapshots"]
    return snapshots


def _paired(live: Live, repository: Path | None = None) -> list[dict[str, Any]]:
    """Wait until all halves of the snapshots in a repository are there."""

    def found() -> list[dict[str, Any]]:
        having = [one for one in _listed(live, repository) if one["pair"] is not None]
        if all(one["pair"]["state"] == "committed" for one in having):
            return having
        # Each look is a process.
        time.sleep(0.3)
        return []

    snapshots: list[dict[str, Any]] = until("the pairs", found)
    return snapshots


def test_each_state_has_the_files_of_its_instant(daemon: Live, root: Path, short_tmp: Path) -> None:
    """The files that an ordinary user's training wrote at the boundary are restored from the other half.

    Either half is found from the other by the installed commands, and the user can see that it is there.
    """
    pytest.importorskip("torch", reason="no CPU build of PyTorch is offered here")
    save_dir = short_tmp / "snapshots"
    save_dir.mkdir()
    (daemon.top / "run").chmod(0o755)
    for directory in (short_tmp.parent, short_tmp, daemon.top):
        directory.chmod(0o755)
    for directory in (root, save_dir):
        os.chown(directory, TRAINER.uid, TRAINER.gid)
    done = subprocess.run(
        [*AS_TRAINER, sys.executable, "-c", textwrap.dedent(TRAINING), str(root), str(save_dir)],
        env={**daemon.env, "HOME": str(short_tmp)}, cwd="/", capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["3", "3"], done.stdout + done.stderr
    states = _paired(daemon, save_dir)
    assert [one["message"].split(", ")[-1] for one in states] == ["step 12", "step 8", "step 4"]
    of_files = {one["id"]: one for one in _listed(daemon)}
    for step, state in zip((12, 4), states[::2], strict=True):
        files = state["pair"]
        assert (files["of"], files["repository"]) == ("filesystem", str(daemon.repository))
        assert files["apart_seconds"] >= 0
        assert files["time_ns"] >= state["time_ns"]
        out = short_tmp / f"out-{step}"
        daemon.run("restore", "-s", files["id"], "-p", str(root), "-d", str(out))
        lines = (out / "root/logs/log").read_text().split()
        assert lines[:step] == [str(number) for number in range(1, step + 1)]
        assert (out / "root/config.json").exists()
        other = of_files[files["id"]]
        assert (other["pair"]["of"], other["pair"]["id"]) == ("training", state["id"])
        assert other["pair"]["state"] == "committed"
        assert other["pair"]["time_ns"] == state["time_ns"]
    newest = states[0]
    table = daemon.run("--repo", str(save_dir), "list").stdout.decode()
    assert table.splitlines()[0].split()[-1] == "PAIR"
    assert newest["pair"]["id"] in table
    lines = daemon.run("--repo", str(save_dir), "list", "--machine-readable", "--pairs").stdout.decode()
    assert [line.split("|")[3] for line in lines.splitlines()] == [one["pair"]["id"] for one in states]
    shown = daemon.run("--repo", str(save_dir), "show", newest["id"]).stdout.decode()
    assert f"restore -s {newest['pair']['id']} -p {root} -d DIR" in shown
    assert _seen_by_user(daemon, newest["pair"]) == "committed"
    daemon.run("forget", "-y", newest["pair"]["id"])
    assert [one["pair"]["state"] for one in _listed(daemon, save_dir)] == ["gone", "committed", "committed"]
    # The training's repository belongs to its user: root changes it only when told to.
    daemon.run("--repo", str(save_dir), "--trust-repository", "forget", "-y", states[1]["id"])
    (left,) = [one for one in _listed(daemon) if one["id"] == states[1]["pair"]["id"]]
    assert left["pair"]["state"] == "gone"


def _seen_by_user(daemon: Live, pair: dict[str, Any]) -> str:
    """Return the other half as shown to a user who cannot read the daemon's repository."""
    half = f"Pair(of='filesystem', id={pair['id']!r}, repository={pair['repository']!r})"
    script = f"print(*states([{half}], '/', [], {str(daemon.top / 'run' / SOCKET_NAME)!r}).values())"
    imports = "from ciuic.protocol.pairing import states; from ciuic.types import Pair"
    return run_as(TRAINER, script, imports=imports).stdout.strip()


def test_a_training_saves_its_state_without_a_working_daemon(
    daemon: Live,
    root: Path,
    short_tmp: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A state is saved, and says why it is alone, with a daemon that hangs, refuses or is missing."""
    caplog.set_level(logging.WARNING, "ciuic")
    monkeypatch.setattr(paired_files, "ANSWER_SECONDS", 0.2)
    assert daemon.daemon is not None
    save_dir, model = short_tmp / "snapshots", Model()
    with SnapshotManager(save_dir, filesystem=True) as manager:

        def problem(**more: Any) -> str:
            save = manager.save_snapshot(model, wait=True, **more)
            assert save is not None
            assert (save.error, save.filesystem) == (None, None)
            found = manager.list_snapshots()[0]
            assert found.id == save.id
            assert found.filesystem is not None
            return found.filesystem.problem

        daemon.daemon.send_signal(signal.SIGSTOP)
        try:
            assert problem() == "the daemon did not answer in time"
        finally:
            daemon.daemon.send_signal(signal.SIGCONT)
        # The daemon was asked, and cuts all the same: that half names the state it belongs to.
        late = _paired(daemon)
        assert late[0]["pair"]["id"] == manager.stats.last_id
        monkeypatch.setattr(paired_files, "ANSWER_SECONDS", 30.0)
        assert problem(filesystem=["/etc"]).startswith("/etc is not protected")
        daemon.stop(signal.SIGKILL)
        # The daemon's receiver of messages notices a moment later, and takes connections until then.
        until("nobody takes connections", lambda: not _takes_connections(daemon))
        caplog.clear()
        assert [problem().partition(" on ")[0] for _ in range(3)] == ["no daemon answers"] * 3
        assert caplog.text.count("no snapshot of the files was made") == 1
        state_only = manager.save_snapshot(model, wait=True, filesystem=False)
        assert state_only is not None
        assert manager.list_snapshots()[0].filesystem is None
        assert (manager.stats.saved, manager.stats.filesystem, manager.stats.filesystem_failed) == (6, 0, 5)
        daemon.start(root)
        until("somebody takes connections", lambda: _takes_connections(daemon))
        again = manager.save_snapshot(model, wait=True)
        assert again is not None
        assert again.filesystem
    shown = daemon.run("--repo", str(save_dir), "show", "latest~2").stdout.decode()
    assert "no snapshot of the files: no daemon answers" in shown
    assert [one["id"] for one in _paired(daemon, save_dir)] == [again.id]


def _takes_connections(daemon: Live) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        try:
            connection.connect(str(daemon.top / "run" / SOCKET_NAME))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        return True


def test_a_half_is_held_with_the_other_and_may_be_left_alone(daemon: Live, short_tmp: Path) -> None:
    """A held state holds its files; files of a trainer that died name a state that listings show as gone."""
    with SnapshotManager(short_tmp / "snapshots") as manager:
        save = manager.save_snapshot(Model(), Optimizer(Model()), 3, hold="paper", filesystem=True, wait=True)
    assert save is not None
    (files,) = _paired(daemon)
    assert files["id"] == save.filesystem
    assert (files["held"], files["hold_reason"]) == (True, "paper")
    asker = paired_files.FilesystemPairing(True, short_tmp / "snapshots").requester(None)
    assert asker is not None
    asked = asker(Manifest(time_ns=1, message="step 1", tags=(), files=[], id="cs-12345678"))
    asked.close()

    def gone_ids() -> list[str]:
        return [
            one["pair"]["id"] for one in _listed(daemon) if one["pair"] and one["pair"]["state"] == "gone"
        ]

    assert until("the files", gone_ids) == ["cs-12345678"]
    assert "cs-12345678 gone" in daemon.run("list").stdout.decode()


def test_both_halves_may_share_a_repository_or_a_root(
    daemon: Live, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Both halves may share a repository, and one in a protected directory is stored twice, as is logged."""
    caplog.set_level(logging.WARNING, "ciuic")
    with SnapshotManager(daemon.repository, filesystem=True, max_snapshots=2) as manager:
        saves = [manager.save_snapshot(Model(), epoch=epoch, wait=True) for epoch in range(3)]
    assert caplog.text == ""
    saved_ids = {save.id for save in saves[1:] if save is not None}

    def committed_halves() -> dict[str, Any]:
        found = {one["id"]: one["pair"] for one in _listed(daemon) if one["pair"]}
        found = {id_: pair for id_, pair in found.items() if pair["state"] == "committed"}
        return found if found.keys() >= saved_ids and len(found) == 4 else {}

    found = until("the files", committed_halves)
    assert all(found[pair["id"]]["id"] == id_ for id_, pair in found.items())
    with SnapshotManager(root / "run/snapshots", filesystem=True) as manager:
        for epoch in range(2):
            manager.save_snapshot(Model(), epoch=epoch, wait=True)
    assert caplog.text.count('exclude = ["/run/snapshots"]') == 1
    newest = _paired(daemon, root / "run/snapshots")[0]
    out = daemon.top / "out"
    daemon.run("restore", "-s", newest["pair"]["id"], "-p", str(root / "run"), "-d", str(out))
    # Its own half was not committed at its instant.
    assert len(_listed(daemon, out / "run/snapshots")) == 1
    daemon.run("--repo", str(out / "run/snapshots"), "verify", "--all", "--checksum")
