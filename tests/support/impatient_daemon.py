"""The daemon with short pauses before it looks again or tries again, for tests that would wait for these and for nothing else."""

from __future__ import annotations

import sys
from pathlib import Path

PROGRAM = Path(__file__)


def main() -> None:
    """Run the command with the pauses of this module."""
    # Modules beside this one have names that others may import.
    del sys.path[0]
    from ciuic import cli
    from ciuic.daemon import housekeeping
    from ciuic.daemon.roots import supervisor
    from ciuic.daemon.snapshots import pending

    housekeeping._PERIOD_SECONDS = 1.0
    # Long enough for what is told between two attempts to be seen on a busy machine.
    pending._STORE_RETRY_SECONDS = 4.0
    supervisor._PROBE_PERIOD_SECONDS = 0.5
    supervisor._PROBE_ANSWER_SECONDS = 1.5
    cli.main()


if __name__ == "__main__":
    main()
