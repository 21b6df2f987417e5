"""Watched trainings: real processes with heartbeats, and an alert command that records its notices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from support.live import Live, wait_for

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
            return wait_for(f"{event} of {trainer}", found, 60)  # type: ignore[no-any-return]
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
    wait_until_true(lambda: trainer(live, name), f"the watch of {name}")
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


def wait_until_true(condition: Callable[[], T], what: str) -> T:
    """Wait for the condition's first true value and return it."""
    return wait_for(what, condition, 60)  # type: ignore[no-any-return]


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
