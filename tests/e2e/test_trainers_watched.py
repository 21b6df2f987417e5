"""Trainers that die, fail, hang or end well, under a real daemon with a real mount: what it does, and what it leaves alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.live import Live, wait_for
from support.watched import Hook, incidents, trainer, watched

pytestmark = pytest.mark.mount

SLEEP = ["sleep", "300"]


@pytest.fixture
def hook(short_tmp: Path) -> Hook:
    return Hook(short_tmp)


@pytest.fixture
def site(short_tmp: Path, root: Path, hook: Hook) -> Iterator[Live]:
    """A daemon with a root, the alert command, and a trainer that is watched by its pid file."""
    more = f"""
[alert]
command = ["{hook.program}"]

[watch]
emergency_per_hour = 2

[[trainer]]
name = "filed"
pid_file = "{short_tmp}/pid"
heartbeat_file = "{short_tmp}/beat"
heartbeat = "2s"
"""
    with Live(short_tmp, more_config=more) as live:
        live.run("protect", str(root))
        live.start(root)
        wait_for("the first snapshot", live.list, 60)
        yield live


def test_a_trainer_that_dies_has_an_emergency_snapshot_and_somebody_is_told(
    site: Live, root: Path, hook: Hook
) -> None:
    """What a killed, and a failed, training has left is in a snapshot of that instant; one that ends well leaves none."""
    well = watched(site, "sleep", "1", name="well")
    (root / "log").write_text("step 17\n")
    killed = watched(site, *SLEEP, name="killed")
    child = trainer(site, "killed")
    assert child is not None
    os.kill(child["pid"], signal.SIGKILL)
    notice = hook.wait("trainer_died", "killed")
    assert killed.wait(60) == 128 + signal.SIGKILL
    (root / "log").write_text("overwritten by the next run\n")
    assert "SIGKILL" in notice["message"]
    assert f"trainer_died killed {notice['snapshot']}" in hook.environment()

    listed = wait_for("the commit", lambda: list(site.json("list", "--tag", "emergency")["snapshots"]), 60)
    assert [one["id"] for one in listed] == [notice["snapshot"]]
    site.run("restore", "-s", notice["snapshot"], "-p", f"{root}/log", "-d", f"{site.top}/back")
    assert (site.top / "back/log").read_text() == "step 17\n"
    shown = site.run("status").stdout.decode()
    assert "incident" in shown
    assert f"emergency snapshot {notice['snapshot']}" in shown

    gate = site.top / "gate"
    os.mkfifo(gate)
    failing = watched(site, "sh", "-c", f"read line < {gate}; exit 3", name="failing")
    gate.write_text("\n")
    assert failing.wait(60) == 3
    assert "status 3" in hook.wait("trainer_failed", "failing")["message"]
    assert well.wait(60) == 0
    assert incidents(site, "well") == []
    site.run("watch", "--forget", "failing")
    status = site.status()
    assert status is not None
    assert [alert["key"] for alert in status["alerts"]] == [f"trainer:killed:{os.getcwd()}"]
