"""`job_process`: a process of the daemon's for one job, from its start to its end.

Guarantees: when the block is left, in whatever way, the process was told to end and its pipes are closed; the kernel kills it before the job when
memory runs out. What it prints is read by the caller, who also limits that.
"""

from __future__ import annotations

import math
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
import trio
from trio.abc import ReceiveStream, SendStream

from ciuic.daemon.base.child_processes import mark_expendable
from ciuic.system.child_process import environment


class JobProcess(NamedTuple):
    """A process that has its job."""

    process: trio.Process
    stdin: SendStream
    stdout: ReceiveStream

    async def output(self) -> tuple[bytes, int]:
        """Return all that it prints, and its exit status; negative: the signal that ended it."""
        answer = b"".join([part async for part in self.stdout])
        return answer, await self.process.wait()


@asynccontextmanager
async def job_process(
    command: Sequence[str],
    job: msgspec.Struct,
    cwd: Path,
    *,
    at_once: bool = False,
    wait_seconds: float = math.inf,
) -> AsyncIterator[JobProcess]:
    """Start a process and send it its job, one line of JSON; end it if the block is left before it has ended.

    Args:
        command: program and arguments.
        job: what it is to do.
        cwd: its working directory.
        at_once: end it by SIGKILL, else by SIGTERM.
        wait_seconds: limit of the wait for its end then, also when this task is cancelled.
    """
    process = await trio.lowlevel.open_process(
        list(command),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        cwd=str(cwd),
        env=environment(),
    )
    mark_expendable(process.pid)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with suppress(trio.BrokenResourceError):  # it ended early; its exit status says how
            await process.stdin.send_all(msgspec.json.encode(job) + b"\n")
        yield JobProcess(process, process.stdin, process.stdout)
    finally:
        if process.returncode is None:
            if at_once:
                process.kill()
            else:
                process.terminate()
        with trio.move_on_after(wait_seconds, shield=True):
            await process.wait()
        with trio.CancelScope(shield=True):
            await process.stdin.aclose()
            await process.stdout.aclose()
