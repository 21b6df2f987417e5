"""Lane: one contender in one suite, with its server and the process that measures it.

Guarantees: every wait has a limit; a step that does not answer in time ends the lane (first the server, which
releases the processes that wait for it, then the measuring process with all its descendants); ``close``
leaves neither a process nor a mount.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
from support import leftovers

from benchmarks.child import FURNISH, Answer, Request
from benchmarks.contenders import Contender, Place, Served
from benchmarks.suite import Job, Measured, Step, Suite
from ciuic.system.poll import readable

CHECKOUT = Path(__file__).parents[1]
FURNISH_SECONDS = 600.0
_END_SECONDS = 10.0


class StepFailed(Exception):
    """A step raised, or did not answer in time."""


class NoAnswer(StepFailed):
    """The measuring process did not answer in time: it hangs, or its request does."""


class Measurer:
    """The measuring process of a suite."""

    def __init__(self, suite: Suite) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.child", suite.name],
            cwd="/",  # a working directory below a mount would keep it busy
            env={**os.environ, "PYTHONPATH": f"{CHECKOUT}:{CHECKOUT / 'tests'}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._unread = b""

    def ask(self, step: int, job: Job, limit_seconds: float) -> Measured:
        """Run one step. StepFailed if it fails or takes too long."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(Request(step, job)) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise StepFailed("the measuring process is gone") from error
        answer = msgspec.json.decode(self._line(limit_seconds), type=Answer)
        if answer.measured is None:
            raise StepFailed(answer.error)
        return answer.measured

    def _line(self, limit_seconds: float) -> bytes:
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        deadline = time.monotonic() + limit_seconds
        while b"\n" not in self._unread:
            if not readable(fd, max(0.0, deadline - time.monotonic())):
                raise NoAnswer(f"no answer after {limit_seconds:.0f} s")
            more = os.read(fd, 1 << 20)
            if not more:
                raise StepFailed("the measuring process died")
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def close(self) -> None:
        """End the process and everything that it has started."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # its own session: no other process is in the group
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        if self._process.stdout is not None:
            self._process.stdout.close()


class Lane:
    """A contender that is being measured in a suite. Closed by its owner, also when a call raises."""

    def __init__(self, contender: Contender, suite: Suite, place: Place, source: Path) -> None:
        self.contender = contender
        self.suite = suite
        self._place = place
        self._source = source
        self.served: Served | None = None
        self._hung = False
        self._measurer = Measurer(suite)

    def furnish(self) -> None:
        """Furnish the plain directory for the suite, then serve it."""
        self._ask(FURNISH, FURNISH_SECONDS)
        self._serve()

    def measure(self, index: int) -> Measured:
        """Run one step."""
        step: Step = self.suite.steps[index]
        if step.before == "anew":
            self._unserve()
            for folder in (self._place.backing, self._place.beside):
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
            self.furnish()
        elif step.before == "remounted":
            self._unserve()
            self._serve()
        return self._ask(index, step.limit_seconds)

    def _ask(self, index: int, limit_seconds: float) -> Measured:
        try:
            return self._measurer.ask(index, self._job(), limit_seconds)
        except NoAnswer:
            self._hung = True
            raise

    def close(self) -> None:
        """Remove everything. Never raises, because a caller could do nothing about an error."""
        with contextlib.suppress(Exception):
            self._unserve()
        leftovers.unmount_below(self._place.backing)
        leftovers.unmount_below(self._place.own)
        self._measurer.close()

    def _serve(self) -> None:
        serve = self.contender.serve_with_daemon if self.suite.with_daemon else self.contender.serve
        assert serve is not None
        self.served = serve(self._place)

    def _unserve(self) -> None:
        served, self.served = self.served, None
        if served is not None:
            served.close(hung=self._hung)

    def _job(self) -> Job:
        served = self.served
        if served is None:
            return Job(
                directory=str(self._place.backing),
                source=str(self._source),
                scale=self._place.scale,
                contender=self.contender.name,
                beside=str(self._place.beside),
            )
        return Job(
            directory=str(served.directory),
            source=str(self._source),
            scale=self._place.scale,
            control=served.control,
            server_pid=served.server_pid,
            log=served.log,
            config=served.config,
            contender=self.contender.name,
            beside=str(self._place.beside),
        )
