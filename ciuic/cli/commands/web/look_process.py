"""Process that answers one question of the page: `python -m ciuic.cli.commands.web.look_process`.

Standard input: one `LookJob` as a line of JSON. Standard output: the answer, or an error's document, as JSON. The process reads contents that users
have written, for as long as that takes: started by root, it becomes another user who can read everything and write nothing, and it has
limits of memory and processor time. The broker ends it when nobody waits for the answer any more.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Final
from urllib.parse import unquote_to_bytes

import click
import msgspec

from ciuic.cli.commands.web.comparing import contents_differ
from ciuic.cli.commands.web.confinement import MAX_MEMORY_BYTES, confine
from ciuic.cli.commands.web.jobs import CompareQuestion, FindQuestion, LookJob, Tensors, TensorsQuestion
from ciuic.cli.commands.web.reading import Catalogue, Reading
from ciuic.cli.commands.web.training import training_numbers
from ciuic.errors import CiuicError
from ciuic.protocol.control_types import ErrorDocument
from ciuic.structs import decode_json
from ciuic.system import syscall_profiles

MAX_SECONDS: Final = 60
"""Limit of the processor time; the broker waits as long for the answer."""


def _answer(job: LookJob) -> object:
    session = job.front.session()
    with click.Context(click.Command("web"), obj=session):
        reading = Reading(session, Catalogue(), bytes.fromhex(job.front.verdict_key))
        if isinstance(job.question, CompareQuestion):
            return contents_differ(reading, job.question)
        if isinstance(job.question, TensorsQuestion):
            return Tensors(lines=reading.tensors(job.question.snapshot, unquote_to_bytes(job.question.path)))
        if isinstance(job.question, FindQuestion):
            return reading.search(unquote_to_bytes(job.question.pattern), deleted=job.question.deleted)
        return training_numbers(reading)


def main() -> int:
    """Run the process and return its exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        job = decode_json(sys.stdin.buffer.readline(), LookJob)
        os.nice(5)
        # The front has said what is missing.
        confine(job.front, syscall_profiles.READER, MAX_SECONDS)
        found = _answer(job)
    except CiuicError as error:
        found = ErrorDocument.of(error)
    except (OSError, msgspec.DecodeError) as error:
        found = ErrorDocument(error=str(error))
    except MemoryError:
        found = ErrorDocument(error=f"this takes more than {MAX_MEMORY_BYTES >> 20} MiB of memory")
    sys.stdout.buffer.write(msgspec.json.encode(found))
    sys.stdout.buffer.flush()
    return 1 if isinstance(found, ErrorDocument) else 0


if __name__ == "__main__":
    code = main()
    # Threads of a store must not keep the process.
    os._exit(code)
