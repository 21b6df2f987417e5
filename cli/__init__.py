"""The command line: one module a command, imported when that command runs. The contract for its users is docs/cli.md.

Guarantees: ``main`` ends the process with an exit code of docs/cli.md and never with a traceback, unless ``-vv`` asked.
Leaves all the work to the library; only ``daemon_command`` imports ``ciuic.daemon``.
"""

from __future__ import annotations


def main() -> None:
    """What the installed ``ciuic`` and ``ciuric`` run."""
    import os
    import sys

    if sys.argv[1:2] == ["snapshot"]:
        from ciuic.cli.quick import run as run_quickly

        status = run_quickly(sys.argv[1:], os.environ)
        if status is not None:
            os._exit(
                status
            )  # all is written, nothing is open: 6 ms to take the interpreter down would be for nothing
    from ciuic.cli.app import run

    run()
