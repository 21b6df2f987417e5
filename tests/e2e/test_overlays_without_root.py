"""Overlays that no root claims any more: a daemon finds them, takes what is owed, and lets them go."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from support.live import Live, installed
from support.until import until

from ciuic.config.owed_snapshots import owed_snapshots
from ciuic.system import mountinfo

pytestmark = pytest.mark.mount


def _mounted(below: Path) -> list[bytes]:
    """Return the mount points below a directory."""
    top = os.fsencode(below) + b"/"
    return [mount.mount_point for mount in mountinfo.read() if mount.mount_point.startswith(top)]


def _hook(live: Live, name: str, job: int, path: Path) -> subprocess.CompletedProcess[str]:
    variables = {
        "SLURM_JOB_ID": str(job), "SLURM_JOB_UID": str(os.geteuid()), "SLURM_JOB_COMMENT": f"ciuic={path}",
        "XDG_STATE_HOME": str(live.top / "state"),
    }  # fmt: skip
    return subprocess.run(
        [installed(), "slurm", name], env={**live.env, **variables}, cwd="/", check=False, capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip


def _kill_daemon(live: Live) -> None:
    assert live.daemon is not None
    live.daemon.kill()
    live.daemon.wait()


@pytest.mark.parametrize("is_wanted_again", [False, True])
def test_the_daemon_settles_what_an_epilog_left_to_it(
    live: Live, short_tmp: Path, is_wanted_again: bool
) -> None:
    """A last snapshot that an epilog could not ask for is taken at the next start; the root then goes, unless another job has named it."""
    run = short_tmp / "jobs" / "run"
    run.mkdir(parents=True)
    (run / "result").write_text("all of it")
    live.start()
    assert _hook(live, "prolog", 1, run).returncode == 0
    _kill_daemon(live)
    ended = _hook(live, "epilog", 1, run)
    assert (ended.returncode, "takes the last snapshot" in ended.stderr) == (0, True), ended.stderr
    if is_wanted_again:
        assert _hook(live, "prolog", 2, run).returncode == 0
    live.start()
    until("the settling", lambda: not owed_snapshots(live.config))
    (taken,) = live.json("list", "--tag", "slurm-job=1")["snapshots"]
    assert live.run("cat", taken["id"], str(run / "result")).stdout == b"all of it"
    if is_wanted_again:
        assert _mounted(run.parent) == [os.fsencode(run)]
        assert _hook(live, "epilog", 2, run).returncode == 0
    until("the end of the mount", lambda: not _mounted(run.parent))
    assert str(run) not in live.config.read_text()


def test_an_overlay_whose_root_went_while_no_daemon_ran_is_let_go(live: Live, short_tmp: Path) -> None:
    """`unprotect` without a daemon says that one that is started lets go of the overlay, and it does."""
    root = short_tmp / "jobs" / "run"
    root.mkdir(parents=True)
    live.run("protect", str(root))
    live.start(root)
    _kill_daemon(live)
    refused = live.run("unprotect", str(root), expect=5)
    assert b"start the daemon, which lets go of it" in refused.stderr
    live.start()
    until("the end of the mount", lambda: not _mounted(root.parent))


@pytest.mark.parametrize("daemon_runs", [True, False])
def test_an_overlay_that_was_moved_is_let_go(live: Live, short_tmp: Path, daemon_runs: bool) -> None:
    """The overlay of a root goes where it is when a directory above it was renamed, and its last snapshot is named as lost."""
    run = short_tmp / "jobs" / "run"
    run.mkdir(parents=True)
    live.start()
    assert _hook(live, "prolog", 1, run).returncode == 0
    if not daemon_runs:
        _kill_daemon(live)
        assert _hook(live, "epilog", 1, run).returncode == 0
    run.parent.rename(short_tmp / "moved")
    if daemon_runs:
        _hook(live, "epilog", 1, run)
    else:
        live.start()
        until(
            "the alert",
            lambda: (
                [
                    one["key"]
                    for one in live.json("status")["alerts"]
                    if "last snapshot" in one["message"] and "could not be taken" in one["message"]
                ]
                == [f"owed:{run}"]
            ),
        )
    until("the end of the mount", lambda: not _mounted(short_tmp / "moved"))
    assert str(run) not in live.config.read_text()
