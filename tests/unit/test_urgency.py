"""A take-over is ahead of every process at the default priority, and ends at the priority that it began with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.ci import needs

from ciuic.child_process import environment
from ciuic.fuse_layer import urgency
from ciuic.fuse_layer.standby import SpareProcess

PROGRAM = """
import json, os, threading
from ciuic.fuse_layer import urgency

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
    """What is forked inherits it across setsid, all threads of it are back at the first value, and so is its group."""
    needs("" if _can_raise() else "this machine lets nobody raise a priority (CAP_SYS_NICE)")
    first, raised, inherited, lowered, forker = _run()
    usual = first["nice"][0]
    assert (raised["nice"], inherited["nice"]) == ([urgency.NICE], [urgency.NICE])
    assert lowered["nice"] == [usual, usual]
    assert forker["nice"] == [urgency.NICE]
    if first["group"] is not None:
        groups = (raised["group"], inherited["group"], lowered["group"])
        assert groups == (urgency.NICE, urgency.NICE, 0)


def test_a_daemon_at_a_low_priority_takes_over_above_the_job_all_the_same() -> None:
    """Started with nice 15 and SCHED_BATCH, the take-over has neither; serving is back at 15."""
    needs("" if _can_raise() else "this machine lets nobody raise a priority (CAP_SYS_NICE)")
    first, raised, _, lowered, _ = _run("nice", "-n", "15", "chrt", "--batch", "0")
    assert (first["nice"], first["policy"]) == ([15], os.SCHED_BATCH)
    assert (raised["nice"], raised["policy"]) == ([urgency.NICE], os.SCHED_OTHER)
    assert set(lowered["nice"]) == {15}


def test_where_it_is_not_permitted_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without CAP_SYS_NICE everything is as it was, and nothing is to be taken back."""

    def refuse(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    monkeypatch.setattr(urgency, "_AUTOGROUP", "/dev/null")
    urgency.raise_priority()
    assert not urgency.is_raised()
    urgency.lower_priority()


@pytest.mark.parametrize("module", ["ciuic.fuse_layer.worker", "ciuic.daemon.capture_forked"])
def test_only_the_process_that_forks_workers_is_ahead(tmp_path: Path, module: str) -> None:
    """What forks captures, which are to yield, stays where it is."""
    needs("" if _can_raise() else "this machine lets nobody raise a priority (CAP_SYS_NICE)")
    spare = SpareProcess(tmp_path, environment(), module)
    spare.prepare()
    try:
        assert spare._child is not None
        spare.become(["--nonsense"], [])  # answered when it is ready
        raised = os.getpriority(os.PRIO_PROCESS, spare._child.pid) == urgency.NICE
        assert raised == module.endswith("worker")
    finally:
        spare.close()
