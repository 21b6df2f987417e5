"""Signals to daemon, worker and keeper at a chosen request of the protocol between them.

The daemon sends every request, so they are counted in it: a plan says which request is the one, who gets which signal then, and is
removed in the same moment. Without imports of the tests' own, because the daemon under test has it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

from ciuic.fuse_layer.prefork.messages import KEEPER_PREFIX
from ciuic.protocol.worker_client import WorkerControlClient, peer_pid
from ciuic.system.poll import readable
from ciuic.system.unix_sockets import credentials

PLAN = "CIUIC_TEST_PLAN"
"""Environment variable with the path of the plan."""
VERSION = "CIUIC_TEST_VERSION"
"""Environment variable with the version that the daemon believes to be."""


def keeper_pids(runtime: Path) -> list[int]:
    """Return the pids of the keepers that answer in a runtime directory."""
    found = []
    for path in runtime.glob(f"{KEEPER_PREFIX}*.sock"):
        # The process was killed.
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe,
            contextlib.suppress(OSError),
        ):
            probe.setblocking(False)
            probe.connect(str(path))
            pid = credentials(probe).pid
            # Until the keeper has imported its modules, the listener is the daemon that made the socket.
            if b"fuse_layer.standby" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def send(pid: int, number: int) -> None:
    """Send a signal, and wait until it has taken effect."""
    pidfd = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(pidfd, number)
        if number == signal.SIGKILL:
            readable(pidfd, 10)
    finally:
        os.close(pidfd)
    # The thread that takes SIGSTOP stops the others, which may answer before.
    while number == signal.SIGSTOP and not all(map(_is_stopped, Path(f"/proc/{pid}/task").iterdir())):
        time.sleep(0.001)


def _is_stopped(task: Path) -> bool:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0] in "TZX"
    except OSError:
        # It has ended.
        return True


def count_requests(before: Callable[[str], None], patch: Callable[[type, str, Any], None] = setattr) -> None:
    """Have ``before`` called with the name of each request to a worker that this process is going to send."""
    real = WorkerControlClient._ask

    def ask(client: WorkerControlClient, do: str, **rest: Any) -> Any:
        before(do)
        return real(client, do, **rest)

    patch(WorkerControlClient, "_ask", ask)


def carry_out(plan: Path) -> None:
    """Carry out the plan at this path, whenever there is one, in this process, which is the daemon."""
    from ciuic.daemon.roots.sessions import _Predecessor
    from ciuic.fuse_layer.prefork.client import SpareProcess

    lock = threading.Lock()
    seen: dict[str, int] = {}

    def before(do: str) -> None:
        # Probes come by the clock.
        if do == "alive":
            return
        with lock:
            try:
                text = plan.read_text()
            except FileNotFoundError:
                return
            wanted, number = json.loads(text), seen.get(text, 0)
            seen[text] = number + 1
            if number != wanted["step"]:
                return
            plan.rename(plan.with_suffix(".done"))
            structlog.get_logger(__name__).warning("injected", at=do, number=number)
            worker = peer_pid(Path(wanted["control"]))
            pids = {
                "worker": [worker] if worker is not None else [],
                "keeper": keeper_pids(Path(wanted["runtime"])),
                "daemon": [os.getpid()],
            }
            for target in wanted["targets"]:
                for pid in pids[target]:
                    with contextlib.suppress(ProcessLookupError):
                        send(pid, wanted["signal"])

    count_requests(before)
    spare_ask, predecessor_ask = SpareProcess._ask, _Predecessor.ask

    def ask_spare(spare: SpareProcess, what: Any, *rest: Any) -> Any:
        if spare._keeps:
            before(str(what)[:20])
        return spare_ask(spare, what, *rest)

    def ask_predecessor(predecessor: _Predecessor, what: str, root: str) -> Any:
        before(what)
        return predecessor_ask(predecessor, what, root)

    SpareProcess._ask = ask_spare  # type: ignore[assignment,method-assign]
    _Predecessor.ask = ask_predecessor  # type: ignore[assignment,method-assign]
