"""Capture process that standby.py forks: everything that it may need is imported before the fork.

Guarantees: `main` is `capture.process.main` for the descriptors of a job and of the answers, and ends the
process itself. Imports modules that the repository imports lazily for the sake of commands that only read, so
that no capture spends time on it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from ciuic.daemon.capture import process
from ciuic.repository import (
    block_maps,
    chunk_lookup,
    chunk_reader,
    directory_trees,
    pack_directory,
    snapshot_format,
)
from ciuic.repository.writing import writer
from ciuic.system.child_process import rename_process

PRELOADED = (block_maps, chunk_reader, chunk_lookup, pack_directory, snapshot_format, directory_trees, writer)


def main(arguments: Sequence[str]) -> int:
    """Capture one job and end the process.

    Args:
        arguments: numbers of the descriptors of the job and of the messages.
    """
    job_fd, messages_fd = map(int, arguments)
    rename_process("ciuic.daemon.capture.process")
    status = process.serve(job_fd, messages_fd)
    # os._exit flushes no buffers, and the log would lose its last lines.
    sys.stderr.flush()
    # os._exit skips the interpreter's shutdown, which takes 10 ms to free what the kernel frees anyway.
    os._exit(status)
