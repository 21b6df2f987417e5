"""Tests that a take-over runs ahead of processes at the default priority, and then at its first one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.ci import needs

from ciuic.fuse_layer.prefork.client import SpareProcess
from ciuic.fuse_layer.system import takeover_priority
from ciuic.system.child_process import environment

PROGRAM = """
import json, os, threading
from ciuic.fuse_layer.system import takeover_priority as urgency

def now():
    group = "/proc/self/autogroup"
    nice = [os.getpriority(os.PRIO_PROCESS, int(task)) for task in os.listdir("/proc/self/task")]
    return {"nice": nice, "policy": os.sched_getscheduler(0),
            "group": int(open(group).read().split()[-1]) if os.path.exists(group) else None}

os.setsid()
said = [now()]
urgency.raise_priority()
said.append(now())
reader, writer = os.pipe()
if os.fork() == 0:  # as the standby process forks a worker, which lowers itself before it starts threads
    os.setsid()
    urgency.take_own_group()
    inherited = now()
    urgency.lower_priority()
    thread = threading.Thread(target=threading.Event().wait, daemon=True)
    thread.start()
    os.write(writer, json.dumps([inherited, now()]).encode())
    os._exit(0)
os.wait()
print(json.dumps(said + json.loads(os.read(reader, 4096)) + [now()]))
"""


def _can_raise() -> bool:
    pid = os.fork()
    if pid == 0:
        try:
            os.setpriority(os.PRIO_PROCESS, 0, -1)
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _run(*prefix: str) -> list[dict[str, Any]]:
    words = [*prefix, sys.executable, "-c", PROGRAM]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=60, check=True, start_new_session=False
    )
    return list(json.loads(done.stdout))


def test_the_priority_is_raised_inherited_and_lowered_again() -> None:
    """The raised priority is inherited across setsid by a fork, and all threads and the group are reset."""
    needs("" if _can_raise() else "this machine lets nobody raise a priority (CAP_SYS_NICE)")
    first, raised, inherited, lowered, forker = _run()
    usual = first["nice"][0]
    assert (raised["nice"], inherited["nice"]) == ([takeover_priority.NICE], [takeover_priority.NICE])
    assert lowered["nice"] == [usual, usual]
    assert forker["nice"] == [takeover_priority.NICE]
    if first["group"] is not None:
        groups = (raised["group"], inherited["group"], lowered["group"])
        assert groups == (takeover_priority.NICE, takeover_priority.NICE, 0)


def test_a_daemon_at_a_low_priority_takes_over_above_the_job_all_the_same() -> None:
    """A take-over of a daemon at a low priority and SCHED_BATCH has neither, and then serves at that priority."""
    needs("" if _can_raise() else "this machine lets nobody raise a priority (CAP_SYS_NICE)")
    first, raised, _, lowered, _ = _run("nice", "-n", "15", "chrt", "--batch", "0")
    # nice(1) adds to the priority at which the tests themselves run.
    low = min(os.getpriority(os.PRIO_PROCESS, 0) + 15, 19)
    assert (first["nice"], first["policy"]) == ([low], os.SCHED_BATCH)
    assert (raised["nice"], raised["policy"]) == ([takeover_priority.NICE], os.SCHED_OTHER)
    assert set(lowered["nice"]) == {low}


def test_priority_is_unchanged_without_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    """Priorities do not change without CAP_SYS_NICE, and nothing is to be reset."""

    def refuse(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    monkeypatch.setattr(takeover_priority, "_AUTOGROUP", "/dev/null")
    takeover_priority.raise_priority()
    assert not takeover_priority.is_raised()
    takeover_priority.lower_priority()


@pytest.mark.parametrize("module", ["ciuic.fuse_layer.worker", "ciuic.daemon.capture.forked"])
def test_only_the_process_that_forks_workers_is_raised(tmp_path: Path, module: str) -> None:
    """Only the process that forks workers is raised, not the one that forks captures."""
    needs("" if _can_raise() else "this machine lets nobody raise a priority (CAP_SYS_NICE)")
    spare = SpareProcess(tmp_path, environment(), module)
    spare.prepare()
    try:
        assert spare._child is not None
        # The request is answered when the process is ready.
        spare.become(["--nonsense"], [])
        raised = os.getpriority(os.PRIO_PROCESS, spare._child.pid) == takeover_priority.NICE
        assert raised == module.endswith("worker")
    finally:
        spare.close()
