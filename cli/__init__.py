"""The command line: one module a command, imported when that command runs. The contract for its users is docs/cli.md.

Guarantees: ``main`` ends the process with an exit code of docs/cli.md and never with a traceback, unless ``-vv`` asked.
Leaves all the work to the library; only ``daemon_command`` imports ``ciuic.daemon``.
"""

from __future__ import annotations


def main() -> None:
    """What the installed ``ciuic`` and ``ciuric`` run."""
    from ciuic.cli.app import run

    run()
