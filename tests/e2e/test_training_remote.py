"""Trainings whose snapshots are uploaded: a lost host, a killed upload, a store that is away, two ranks."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from support import remote_training
from support.object_servers import SeaweedFS, environment_for_s3, seaweedfs
from support.remote_training import RemoteHost, host, stored_states
from support.until import until

from ciuic import SnapshotManager
from ciuic.errors import CiuicError, UsageError
from ciuic.remote.objects.model import RemoteUnreachable
from ciuic.repository import Repository
from ciuic.training import NoUsableSnapshot
from ciuic.training.remote.remote_options import remotes_from
from ciuic.training.remote.uploads import UploadLock, UploadOrder, is_uploading

__all__ = ["host", "seaweedfs"]

TRAINING = Path(remote_training.__file__).with_name("tiny_training.py")
UPLOAD = "ciuic.training.remote.upload_process"


@pytest.fixture
def nas(tmp_path: Path) -> Path:
    """Provide the directory of a remote."""
    place = tmp_path / "nas"
    place.mkdir()
    return place


def _local(host: RemoteHost) -> Path:
    (found,) = (host.place / "state" / "ciuic" / "trainings").iterdir()
    return found


@pytest.fixture(params=["file", "seaweedfs"])
def store(request: pytest.FixtureRequest, nas: Path, seaweedfs: SeaweedFS) -> tuple[str, dict[str, str]]:
    """Return the URL of a new remote, and the variables that lead to it."""
    if request.param == "file":
        return f"file://{nas}", {}
    return seaweedfs.new_url(), environment_for_s3(seaweedfs.endpoint)


def test_a_run_goes_on_elsewhere_to_the_bit(tmp_path: Path, store: tuple[str, dict[str, str]]) -> None:
    """A host is killed and lost in the middle; on another one, with the URL and the key, the run ends as if not."""
    url, variables = store
    lost, new, whole = (RemoteHost(tmp_path / name, variables) for name in ("lost", "new", "whole"))
    try:
        running = lost.start(TRAINING, url, "1000000", str(tmp_path / "never"), "0.05")
        trainings = lost.place / "state" / "ciuic" / "trainings"
        until(
            "a stored state",
            lambda: trainings.is_dir() and any(stored_states(one) for one in trainings.iterdir()),
        )
        lost.kill()
        running.wait()
        shutil.rmtree(lost.place)
        script = f"""
from ciuic import SnapshotManager
with SnapshotManager({url!r}) as manager:
    print(manager.load_latest_snapshot()["step"])
"""
        step = int(new.run(script).stdout)
        assert step > 0
        # More steps than were done when the host was lost.
        steps = str(step + 6)
        whole.run(TRAINING, str(tmp_path / "whole" / "snapshots"), steps, str(tmp_path / "expected"))
        new.run(TRAINING, url, steps, str(tmp_path / "found"))
    finally:
        lost.kill()
        new.kill()
    expected, found = (json.loads((tmp_path / name).read_text()) for name in ("expected", "found"))
    assert found["digest"] == expected["digest"]
    assert found["losses"] == expected["losses"]
    assert found["stats"] < expected["stats"]


def _save(manager: SnapshotManager, value: float) -> Any:
    save = manager.save_snapshot(weights={"w": np.full(50_000, value)}, wait=True)
    assert save is not None
    assert save.id is not None, save.error
    return save


def test_a_killed_upload_is_started_again(host: RemoteHost, nas: Path, tmp_path: Path) -> None:
    """The next save starts an upload that was killed, and what was committed before is not lost."""
    with SnapshotManager(tmp_path / "local", remote=f"file://{nas}") as manager:
        ids = []
        for value in range(3):
            ids.append(_save(manager, value).wait(remote_training.WAIT_SECONDS, remote=True))
            assert len(host.kill(UPLOAD)) == 1
        assert None not in ids
        assert stored_states(tmp_path / "local") == set(ids)
        # The lock of a killed process is free when the kernel has ended it.
        until("the end of the upload", lambda: not manager.remote_status()[0].uploading)
        (status,) = manager.remote_status()
        assert (status.stored, status.behind) == (3, 0)


def test_the_upload_outlives_the_training_and_ends(host: RemoteHost, nas: Path, tmp_path: Path) -> None:
    """A script that ends at once leaves an upload, which stores everything and then ends by itself."""
    host.run(
        f"""
import numpy as np
from ciuic import SnapshotManager
manager = SnapshotManager({str(tmp_path / "local")!r}, remote="file://{nas}")
manager.save_snapshot(weights={{"w": np.ones(50_000)}})
"""
    )
    until("the end of all processes", lambda: not host.processes())
    with Repository.open(tmp_path / "local") as repository:
        ids = repository.snapshots.names()
    assert len(ids) == 1
    assert stored_states(tmp_path / "local") == ids


def test_a_store_that_is_away_delays_no_save(host: RemoteHost, nas: Path, tmp_path: Path) -> None:
    """Saves are durable while the store is away; the status says so, and the upload goes on when it is back."""
    local = tmp_path / "local"
    with SnapshotManager(local, remote=f"file://{nas}") as manager:
        first = _save(manager, 0).wait(remote_training.WAIT_SECONDS, remote=True)
    until("the end of the upload", lambda: not host.processes(UPLOAD))
    nas.rename(tmp_path / "away")
    with SnapshotManager(local, remote=f"file://{nas}", max_snapshots=1) as manager:
        ids = [_save(manager, value).id for value in range(1, 4)]
        assert not manager.wait_remote(0.5)
        (status,) = manager.remote_status()
        assert status.behind == 3
        # The rules would keep one; what the remote lacks stays.
        assert {one.id for one in manager.list_snapshots()} >= set(ids)
        until("an upload that waits", lambda: manager.remote_status()[0].waits_for)
        (tmp_path / "away").rename(nas)
        assert manager.wait_remote(remote_training.WAIT_SECONDS)
        until("the upload of all", lambda: not manager.remote_status()[0].behind)
        last = _save(manager, 9).wait(remote_training.WAIT_SECONDS, remote=True)
    assert stored_states(local) >= {last}
    with SnapshotManager(local) as manager:
        # What the remote has is removed by the rules again.
        assert first not in {one.id for one in manager.list_snapshots()}


def test_a_store_that_is_away_is_no_new_beginning(host: RemoteHost, nas: Path, tmp_path: Path) -> None:
    """Without a whole snapshot here, a remote that cannot be reached is an error of `resume` and of a new directory."""
    url = f"file://{nas}"
    with SnapshotManager(tmp_path / "empty", remote=url) as manager:
        assert manager.load_latest_snapshot() is None
        assert manager.resume() is None
        nas.rename(tmp_path / "away")
        with pytest.raises(RemoteUnreachable, match="something to resume"):
            manager.load_latest_snapshot()
        with pytest.raises(RemoteUnreachable, match="something to resume"):
            manager.resume()
    with pytest.raises(CiuicError, match="cannot make a repository"):
        SnapshotManager(tmp_path / "new", remote=url)
    assert not (tmp_path / "new").exists()


def test_a_host_that_comes_back_goes_on_from_the_remote(
    host: RemoteHost, nas: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A directory with older snapshots than the remote's resumes from the remote; from itself if that is away."""
    url = f"file://{nas}"
    with SnapshotManager(tmp_path / "first", remote=url) as manager:
        old = _save(manager, 1).wait(remote_training.WAIT_SECONDS, remote=True)
    with SnapshotManager(tmp_path / "second", remote=url) as manager:
        new = _save(manager, 2).wait(remote_training.WAIT_SECONDS, remote=True)
    with SnapshotManager(tmp_path / "first", remote=url) as manager:
        state = manager.load_latest_snapshot()
        assert state is not None
        assert (state.id, float(state["weights"]["w"][0])) == (new, 2.0)
        nas.rename(tmp_path / "away")
        assert (manager.load_latest_snapshot() or {})["weights"]["w"][0] == 1.0
        assert "without looking at the remote" in caplog.text
        (tmp_path / "away").rename(nas)
        newest = _save(manager, 3)
        state = manager.load_latest_snapshot()
        assert state is not None
        assert state.id == newest.id != old


def test_damage_here_is_no_loss(host: RemoteHost, nas: Path, tmp_path: Path) -> None:
    """Where no snapshot here is whole, the remote's copy of the newest is loaded."""
    local = tmp_path / "local"
    with SnapshotManager(local, remote=f"file://{nas}", compression="none") as manager:
        save = _save(manager, 4)
        assert save.wait(remote_training.WAIT_SECONDS, remote=True)
    until("the end of all processes", lambda: not host.processes())
    for pack in (local / "packs").iterdir():
        data = bytearray(pack.read_bytes())
        data[len(data) // 4] ^= 1
        pack.write_bytes(data)
    with SnapshotManager(local) as manager, pytest.raises(NoUsableSnapshot):
        manager.load_latest_snapshot()
    with SnapshotManager(local, remote=f"file://{nas}") as manager:
        state = manager.load_latest_snapshot()
        assert state is not None
        assert (state.id, float(state["weights"]["w"][0])) == (save.id, 4.0)


def test_a_remote_is_made_with_a_key_alone(
    host: RemoteHost, nas: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a key the error names the command that makes a remote; nothing is made, here or there."""
    url = f"file://{nas}"
    monkeypatch.delenv("CIUIC_REMOTE_KEY_FILE")
    with pytest.raises(UsageError) as caught:
        SnapshotManager(tmp_path / "local", remote=url)
    assert f"ciuic remote init {url}" in caught.value.hint
    assert not list(nas.iterdir())
    assert not (tmp_path / "local").exists()
    with SnapshotManager(tmp_path / "local", remote={"url": url, "encryption": False}) as manager:
        assert _save(manager, 1).wait(remote_training.WAIT_SECONDS, remote=True)


def test_a_url_has_a_local_directory(host: RemoteHost, nas: Path) -> None:
    """With a URL as save_dir the snapshots are in the user's state directory first, and the manager says where."""
    url = f"file://{nas}"
    with SnapshotManager(url) as manager:
        save = _save(manager, 3)
        assert save.wait(remote_training.WAIT_SECONDS, remote=True) == save.id
        assert manager.save_dir == _local(host)
    with SnapshotManager(url) as manager:
        state = manager.load_latest_snapshot()
        assert state is not None
        assert state.id == save.id


def test_without_a_remote_there_is_nothing_to_wait_for(tmp_path: Path) -> None:
    """Waiting for a remote without one is an error that says what to pass."""
    with SnapshotManager(tmp_path / "local") as manager:
        assert manager.remote_status() == []
        with pytest.raises(ValueError, match="remote="):
            manager.wait_remote(1)
        with pytest.raises(ValueError, match="remote="):
            _save(manager, 1).wait(1, remote=True)


_PREEMPTED = """
import os, signal, sys
import numpy as np
from ciuic import SnapshotManager
from ciuic.training import BeforePreemption
rng = np.random.default_rng(1)
state = {"w": rng.random(50_000)}
rule = BeforePreemption(grace_seconds=40)
manager = SnapshotManager(sys.argv[1], remote=sys.argv[2], save_when=[rule])
manager.register(model=state)
manager.save_snapshot(step=1)
assert manager.wait_remote(60)
state["w"] = rng.random(int(sys.argv[3]))
manager.step = 2
# The state is another one now.
manager.boundary()
os.kill(os.getpid(), signal.SIGTERM)
manager.boundary()
"""


@pytest.mark.parametrize(("numbers", "step"), [(100_000, 2), (4_000_000, 1)])
def test_a_preempted_program_ends_with_what_was_promised(
    host: RemoteHost, nas: Path, tmp_path: Path, numbers: int, step: int
) -> None:
    """Over a line of half a megabyte a second a small state is waited for, and one of 32 MB is not begun; the log tells the step to resume at."""
    local, url = tmp_path / "local", f"file://{nas}"
    # Makes the directory and the remote.
    with SnapshotManager(local, remote=url):
        pass
    order = UploadOrder.of(remotes_from(url)[0])
    # Keeps the slow one from ending before there is anything, so that the training starts no other.
    users = UploadLock.users(str(local), order.name)
    assert users.acquire(shared=True)
    uploader = host.start(
        TRAINING.with_name("slow_uploader.py"), str(local), msgspec.json.encode(order).decode(), "5e5"
    )
    until("an upload", lambda: is_uploading(str(local), order.name))
    done = subprocess.run(
        [sys.executable, "-c", _PREEMPTED, str(local), url, str(numbers)],
        env=host.environment,
        capture_output=True,
        text=True,
        timeout=remote_training.WAIT_SECONDS,
        check=False,
    )
    # The machine goes.
    host.kill()
    uploader.wait()
    users.release()
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    with Repository.open(local) as repository:
        (newest, *_) = repository.snapshots.ids()
    if step == 2:
        assert f"{newest} is on {url}" in done.stderr
    else:
        assert f"{newest} is not on {url} and was not begun, which would take" in done.stderr
        assert "a resume from there starts at step 1 (cs-" in done.stderr
        assert sum(one.stat().st_size for one in (nas / "packs").rglob("*") if one.is_file()) < 1 << 20
    with SnapshotManager(tmp_path / "elsewhere", remote=url) as manager:
        assert manager.load_latest_snapshot()["step"] == step
