"""A capture that standby.py forks: everything that it may need is imported before, and nothing is left to parse.

Guarantees: ``main`` is ``capture.main`` for the descriptors of a job and of the answers; it ends the process itself. Imports
what the repository imports late for the sake of commands that read, so that no capture pays for it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from ciuic.daemon import capture
from ciuic.fuse_layer.standby import rename
from ciuic.repository import blockmaps, chunks, finder, packs, snapformat, trees, writer

PRELOADED = (blockmaps, chunks, finder, packs, snapformat, trees, writer)


def main(arguments: Sequence[str]) -> int:
    """``arguments``: the numbers of the two descriptors."""
    job_fd, words_fd = map(int, arguments)
    rename("ciuic.daemon.capture")
    status = capture.serve(job_fd, words_fd)
    sys.stderr.flush()
    # Not by way of the interpreter's end, which takes 10 ms to free what the kernel frees anyway.
    os._exit(status)
