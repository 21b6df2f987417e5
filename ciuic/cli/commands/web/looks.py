"""Processes that answer questions of the page which take long (`look_process`), as the broker starts them.

Guarantees: no more than `_MAX_AT_ONCE` run; each ends within `MAX_SECONDS`, and as soon as nobody waits for its answer.
"""

from __future__ import annotations

import subprocess
from typing import Final

import msgspec
import trio

from ciuic.cli.commands.web.jobs import FrontJob, LookJob, Question
from ciuic.errors import Busy, CiuicError
from ciuic.protocol.http_server import Reply
from ciuic.system.child_process import environment, module_command

LOOK_MODULE: Final = "ciuic.cli.commands.web.look_process"
MAX_SECONDS: Final = 60
_MAX_AT_ONCE: Final = 2
_MAX_ANSWER_BYTES: Final = 8 << 20


class Looks:
    """Questions to processes of their own.

    Args:
        job: What the front shows.
        secrets: Variables of the environment that open a remote.
    """

    def __init__(self, job: FrontJob, secrets: dict[str, str]) -> None:
        self._job = job
        self._secrets = secrets
        self._count = 0

    async def reply(self, question: Question) -> Reply:
        """Answer a question.

        Raises:
            Busy: enough of them are being answered.
            CiuicError: it takes too long.
        """
        if self._count >= _MAX_AT_ONCE:
            raise Busy(
                f"{_MAX_AT_ONCE} pages that take long are being made already", hint="try again in a minute"
            )
        self._count += 1
        try:
            return await self._ask(question)
        finally:
            self._count -= 1

    async def _ask(self, question: Question) -> Reply:
        process = await trio.lowlevel.open_process(
            module_command(LOOK_MODULE),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**environment(), **self._secrets},
            cwd="/",
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        found = bytearray()
        try:
            with trio.move_on_after(MAX_SECONDS):
                await process.stdin.send_all(
                    msgspec.json.encode(LookJob(front=self._job, question=question)) + b"\n"
                )
                async for piece in process.stdout:
                    found += piece
                    if len(found) > _MAX_ANSWER_BYTES:
                        raise CiuicError("the answer is too large for a page")
                code = await process.wait()
                if code >= 0 and found:
                    return Reply(500 if code else 200, bytes(found))
        except trio.BrokenResourceError as error:
            raise CiuicError("the process that was to answer has ended") from error
        finally:
            # Also where the browser has gone.
            if process.returncode is None:
                process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()
                await process.stdin.aclose()
                await process.stdout.aclose()
        raise CiuicError(f"this takes longer than {MAX_SECONDS} s, and was given up")
