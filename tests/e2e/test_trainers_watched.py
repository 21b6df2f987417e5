"""Trainers that die, fail, hang or end well, watched by a real daemon with a real mount.

The trainings are real processes with heartbeats; an alert command records its notices.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from support.live import Live
from support.until import until

from ciuic.protocol.control import ControlClient
from ciuic.protocol.control_types import Incident, StatusDocument, TrainerStatus
from ciuic.protocol.watch_client import Hello, introduce

T = TypeVar("T")

_HOOK = """#!/bin/sh
cat >> {notices}
echo >> {notices}
echo "$CIUIC_EVENT $CIUIC_TRAINER $CIUIC_SNAPSHOT" >> {notices}.env
"""


class Hook:
    """Private alert command; ``notices`` has the notices read so far."""

    def __init__(self, top: Path) -> None:
        self._notices = top / "notices"
        self.program = top / "hook.sh"
        self.program.write_text(_HOOK.format(notices=self._notices))
        self.program.chmod(0o755)

    def notices(self) -> list[dict[str, Any]]:
        if not self._notices.exists():
            return []
        # The last line may be half written.
        return [json.loads(line) for line in self._notices.read_text().split("\n")[:-1] if line]

    def environment(self) -> list[str]:
        return Path(f"{self._notices}.env").read_text().splitlines()

    def wait(self, event: str, trainer: str) -> dict[str, Any]:
        """Return the first notice of this event about this trainer, as soon as it arrives."""

        def found() -> dict[str, Any] | None:
            mine = (
                one
                for one in self.notices()
                if one["event"] == event and one.get("trainer", {}).get("name") == trainer
            )
            return next(mine, None)

        try:
            return until(f"{event} of {trainer}", found)  # type: ignore[no-any-return]
        except TimeoutError as error:
            raise AssertionError(f"{error}; notices: {self.notices()}") from None


def watched(
    live: Live, *words: str, name: str, options: tuple[str, ...] = (), inside: tuple[str, ...] = ()
) -> subprocess.Popen[bytes]:
    """Run a command under `ciuic watch`; yield when the daemon knows of it.

    ``inside``: a program that starts both.
    """
    program = str(Path(sys.executable).parent / "ciuic")
    process = subprocess.Popen(
        [*inside, program, "watch", "--name", name, *options, "--", *words],
        env=live.env,
        stdin=subprocess.DEVNULL,
    )
    until(f"the watch of {name}", lambda: trainer(live, name))
    return process


def train(
    live: Live, name: str, how: str, *, heartbeat: float = 3600.0, steps: int = 100_000, wait: bool = True
) -> subprocess.Popen[bytes]:
    """Start a training that saves to this directory; return after its first step, or at once."""
    here = Path(__file__).parents[1]
    words = ["-m", "support.watched_training", str(live.top / name), str(heartbeat), str(steps), how]
    process = subprocess.Popen(
        [sys.executable, *words],
        env={**live.env, "PYTHONPATH": f"{here}:{here.parent}"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if wait else subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    if process.stdout is not None:
        assert process.stdout.readline() == b"stepped\n"
        process.stdout.close()
    return process


def status(live: Live) -> StatusDocument:
    """Return the status from the socket: a command per query would take processor time from the trainings."""
    with ControlClient(live.top / "run/control.sock") as client:
        return client.status()


def _is_named(live: Live, trainer: TrainerStatus, name: str) -> bool:
    return name == trainer.name or str(live.top / name) == trainer.where


def trainer(live: Live, name: str) -> TrainerStatus | None:
    """Return the trainer by its name or save directory; None while it is not watched."""
    return next((one for one in status(live).trainers if _is_named(live, one, name)), None)


def incidents(live: Live, name: str) -> list[Incident]:
    """Return the incidents, oldest first."""
    return [one for one in reversed(status(live).incidents) if _is_named(live, one.trainer, name)]


@contextmanager
def ended_after(*processes: subprocess.Popen[bytes]) -> Iterator[None]:
    """Check that these processes have ended when the block has."""
    try:
        yield
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait(60)


def introduced_by(uid: int, socket: Path) -> str:
    """Return the answer to a process of this user that asks to have this process watched."""
    life = os.pidfd_open(os.getpid())
    hello = Hello(name="introduced", where="", kind="pid", pid=os.getpid(), start_ticks=0)
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            introduce(socket, hello, [life], seconds=30)
            os.write(write_end, b"welcome")
        except BaseException as error:
            os.write(write_end, str(error).encode())
        os._exit(0)
    os.close(write_end)
    os.close(life)
    os.waitpid(child, 0)
    with open(read_end) as answer:
        return answer.read()


pytestmark = pytest.mark.mount

SLEEP = ["sleep", "300"]


@pytest.fixture
def hook(short_tmp: Path) -> Hook:
    return Hook(short_tmp)


@pytest.fixture
def site(short_tmp: Path, root: Path, hook: Hook) -> Iterator[Live]:
    """Provide a daemon with a root, the alert command, and a trainer watched by its pid file."""
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
        until("the first snapshot", live.list)
        yield live


def test_a_dying_trainer_causes_an_emergency_snapshot_and_an_alert(
    site: Live, root: Path, hook: Hook
) -> None:
    """A killed training gets a snapshot and an alert, a failed one an alert, a finished one none."""
    well = watched(site, "sleep", "1", name="well")
    (root / "log").write_text("step 17\n")
    killed = watched(site, *SLEEP, name="killed")
    child = trainer(site, "killed")
    assert child is not None
    os.kill(child.pid, signal.SIGKILL)
    notice = hook.wait("trainer_died", "killed")
    assert killed.wait(60) == 128 + signal.SIGKILL
    (root / "log").write_text("overwritten by the next run\n")
    assert "SIGKILL" in notice["message"]
    assert f"trainer_died killed {notice['snapshot']}" in hook.environment()

    listed = until("the commit", lambda: site.json("list", "--tag", "emergency")["snapshots"])
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

    # A trainer in a pid namespace of its own, as in a container, reports another number.
    apart = watched(site, *SLEEP, name="apart", inside=("unshare", "--pid", "--fork", "--mount-proc"))
    child = trainer(site, "apart")
    assert child is not None
    assert Path(f"/proc/{child.pid}/comm").read_text() == "sleep\n"
    os.kill(child.pid, signal.SIGKILL)
    hook.wait("trainer_died", "apart")
    apart.wait(60)
    site.run("watch", "--forget", "apart")
    site.run("watch", "--forget", "failing")
    shown_now = status(site)
    assert [alert.key for alert in shown_now.alerts] == [f"trainer:killed:{os.getcwd()}"]
    # What is forgotten is no incident any more, on the page neither.
    assert {one.trainer.name for one in shown_now.incidents} == {"killed"}


def test_a_crash_loop_has_its_share_of_snapshots(site: Live, root: Path, hook: Hook) -> None:
    """The third death within the hour is reported, with the reason why it has no snapshot.

    A pid file is followed from process to process, and no user may register another user's process.
    """
    pid_file = site.top / "pid"
    for number in (1, 2, 3):
        process = subprocess.Popen(SLEEP)
        with ended_after(process):
            pid_file.write_text(str(process.pid))
            until("the watch", lambda pid=process.pid: _pid(site) == pid)  # type: ignore[misc]
        until("the incident", lambda wanted=number: len(incidents(site, "filed")) == wanted)  # type: ignore[misc]
    *others, newest = incidents(site, "filed")
    assert newest.no_snapshot == "it has had 2 within the hour"
    assert all(one.snapshot for one in others)
    assert len(site.json("list", "--tag", "emergency")["snapshots"]) <= 2
    assert hook.wait("trainer_died", "filed")["trainer"]["pid"] > 0
    process = subprocess.Popen(SLEEP)
    with ended_after(process):
        pid_file.write_text(str(process.pid))
        until("the watch", lambda: _pid(site) == process.pid)
        process.send_signal(signal.SIGINT)
    until("its end", lambda: _pid(site) == 0)
    # Since Linux 6.15 the kernel reports that ^C ended it.
    assert len(incidents(site, "filed")) in (3, 4)

    socket = site.top / "run/watch.sock"
    for directory in (site.top.parent, site.top, socket.parent):
        directory.chmod(0o755)
    assert "does not watch trainers of user 4711" in introduced_by(4711, socket)
    os.chown(root, 4711, -1)
    assert "belongs to somebody else" in introduced_by(4711, socket)
    assert introduced_by(0, socket) == "welcome"
    assert trainer(site, "introduced") is not None


def _pid(live: Live) -> int:
    """Return the pid of the process in the pid file; between two processes there is none."""
    found = trainer(live, "filed")
    return found.pid if found is not None else 0


def test_a_training_is_watched_without_asking(site: Live, hook: Hook) -> None:
    """A training with SnapshotManager is watched without a request.

    An exception, also through a `finally`, and an exit status are failures; its normal end is none. A stopped
    training has one incident, with a snapshot; continued it is well again, and may hang again.
    """
    endings = ("end", "raise", "finally", "exit", "vanish")
    running = [train(site, how, how, steps=30, wait=False) for how in endings]
    hanging = train(site, "hangs", "end", heartbeat=1.0)
    with ended_after(hanging, *running):
        for process in running:
            process.wait(60)
        for round_ in (1, 2):
            hanging.send_signal(signal.SIGSTOP)
            until("the hang", lambda n=round_: len(incidents(site, "hangs")) == 2 * n - 1)  # type: ignore[misc]
            found = trainer(site, "hangs")
            assert found is not None
            assert found.state == "hung"
            # For as long again, and more.
            time.sleep(2.0 / round_)
            assert len(incidents(site, "hangs")) == 2 * round_ - 1
            hanging.send_signal(signal.SIGCONT)
            until("its return", lambda n=round_: len(incidents(site, "hangs")) == 2 * n)  # type: ignore[misc]
        assert [one.kind for one in incidents(site, "hangs")] == ["hung", "recovered"] * 2
        assert not any("hangs" in alert.key for alert in status(site).alerts)
        assert hook.wait("trainer_recovered", "training")
        assert hook.wait("trainer_hung", "training")["snapshot"].startswith("cs-")
        assert not any(trainer(site, how) for how in endings)

    def reported(how: str) -> list[tuple[str, str]]:
        return [(one.kind, one.reason) for one in incidents(site, how)]

    until("the word of their writers", lambda: reported("raise") and reported("finally"))
    assert reported("raise") == [("failed", "ValueError: loss is nan")]
    assert reported("finally") == [("failed", "ValueError: loss is inf")]
    # Since Linux 6.15 a daemon learns how a process ended that is no child of its own.
    assert reported("exit") in ([], [("failed", "ended with status 3")])
    assert reported("end") == reported("vanish") == []


def test_a_job_that_hangs_gets_a_snapshot_before_it_is_restarted(site: Live, tmp_path: Path) -> None:
    """The daemon reports a hang with its reason and takes a snapshot, and reports that the job goes on when it is started again."""
    here = Path(__file__).parents[1]
    words = [
        str(here / "support/hanging_training.py"),
        str(tmp_path / "saves"),
        "200",
        str(tmp_path / "result"),
        "hang",
    ]
    again = ["sh", "-c", 'until "$@"; do :; done', "sh", sys.executable, *words]
    job = watched(
        site,
        *again,
        name="hangs",
        options=("--restart-hung", "2s"),
        inside=("env", f"PYTHONPATH={here}:{here.parent}"),
    )
    with ended_after(job):
        assert job.wait(180) == 0
    kinds = [(one.kind, one.snapshot[:3]) for one in incidents(site, "hangs")]
    assert kinds == [("hung", "cs-"), ("recovered", "")]
    assert "has made no step for" in incidents(site, "hangs")[0].reason
    until("the end of the job", lambda: not status(site).trainers or trainer(site, "hangs") is None)


def test_another_daemon_goes_on_watching(site: Live, root: Path) -> None:
    """The next daemon after a kill knows its predecessor's trainers, the living and those that died since."""
    named = subprocess.Popen(SLEEP)
    lives, dies = train(site, "lives", "end"), train(site, "dies", "end")
    with ended_after(named, lives, dies):
        site.run("watch", "--name", "named", "--pid", str(named.pid))
        until("both trainings", lambda: trainer(site, "lives") and trainer(site, "dies"))
        site.stop(signal.SIGKILL)
        dies.kill()
        dies.wait()
        site.start(root)
        until("the word of its writer", lambda: incidents(site, "dies"))
        lives.kill()
        named.kill()
        until("their incidents", lambda: incidents(site, "lives") and incidents(site, "named"))
        for name in ("lives", "named"):
            assert [one.kind for one in incidents(site, name)] == ["died"]
        # Lost, where the daemon looked before its writer had told the end.
        assert [one.kind for one in incidents(site, "dies")] in (["died"], ["lost"])
