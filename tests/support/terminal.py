"""Output of the program on a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path


def on_terminal(repository: Path, *arguments: str, code: int | None = 0, **environment: str) -> bytes:
    """Return what the program writes to a terminal of 100 columns, or of COLUMNS, that is its stdout and stderr."""
    ours, theirs = pty.openpty()
    variables = {
        **os.environ,
        "CIUIC_CONFIG": "/dev/null",
        "TERM": "xterm-256color",
        "COLUMNS": "100",
        **environment,
    }
    if "NO_COLOR" not in environment:
        variables.pop("NO_COLOR", None)
    with subprocess.Popen(
        [sys.executable, "-m", "ciuic", "--repo", str(repository), *arguments],
        stdout=theirs,
        stderr=theirs,
        env=variables,
    ) as process:
        os.close(theirs)
        output = b""
        while True:
            try:
                piece = os.read(ours, 65536)
            # EIO: the program has ended.
            except OSError:
                break
            if not piece:
                break
            output += piece
    os.close(ours)
    assert code is None or process.returncode == code, output
    return output
