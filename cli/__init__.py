"""The command line: one module a command, imported when that command runs. The contract for its users is docs/cli.md.

Guarantees: ``main`` ends the process with an exit code of docs/cli.md and never with a traceback, unless ``-vv`` asked.
Leaves all the work to the library; only ``daemon_command`` imports ``ciuic.daemon``.
"""

from __future__ import annotations

import os
import sys
from typing import Final

INTERRUPTED: Final = 130
"""Exit code of a command that ^C, SIGTERM or SIGHUP ended."""


def main() -> None:
    """Run the installed ``ciuic`` or ``ciuric``."""
    try:
        _run()
    except SystemExit as leaving:
        _leave(leaving)
    except (
        KeyboardInterrupt
    ):  # during the imports, or a second ^C while the first one is told: nothing is left to say
        _leave(SystemExit(INTERRUPTED))


def _run() -> None:
    if sys.argv[1:2] == ["snapshot"]:
        from ciuic.cli.quick import run as run_quickly

        status = run_quickly(sys.argv[1:], os.environ)
        if status is not None:
            # All is written, nothing is open: 6 ms to take the interpreter down would be for nothing.
            os._exit(status)
    if sys.argv[1:2] != ["daemon"]:
        import gc

        gc.set_threshold(50_000)  # commands end soon: looking for cycles meanwhile takes 8 ms of their start
    from ciuic.cli.app import run

    run()


def _leave(leaving: SystemExit) -> None:
    """End the process without taking the interpreter down: 15 ms, where a command has imported most of the library.

    All is closed and written by now. Where something is still at work, or watches the run, the way out is the usual one.
    """
    import threading

    code = leaving.code
    watched = sys.gettrace() is not None or "coverage" in sys.modules
    if not isinstance(code, int) or watched or threading.active_count() > 1:
        raise leaving
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        raise leaving from None
    os._exit(code)
