"""Command line that the list of processes shows for a forked process."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from ciuic.system.child_process import shown_command


def rename(module: str, *words: str) -> None:
    """Show this process in the list of processes as ``python -m module words``, for people and their scripts.

    A forked process would be listed under the name of the one that forked it. The kernel shows as the command
    line (proc_pid_cmdline(5)) memory of the process itself, whose place and size are fields 48 and 49 of
    proc_pid_stat(5): it can be overwritten, and not made longer. A longer name is not shown.
    """
    shown = b"\0".join(map(os.fsencode, [*shown_command(module), *words]))
    try:
        # Field 2 is the program's name, which may contain blanks and parentheses: count from its last
        # parenthesis.
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return
    start, end = int(fields[45]), int(fields[46])
    if 0 < start < end - len(shown):
        ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)
