"""The daemon with short pauses before it looks again or tries again, for tests that would wait for these and for nothing else."""

from __future__ import annotations

import os
import sys
from pathlib import Path

PROGRAM = Path(__file__)


def main() -> None:
    """Run the command with the pauses of this module."""
    # Modules beside this one have names that others may import.
    sys.path[0] = str(PROGRAM.parents[1])
    from support import injection

    del sys.path[0]
    import ciuic
    from ciuic import cli
    from ciuic.daemon import housekeeping
    from ciuic.daemon.roots import supervisor
    from ciuic.daemon.snapshots import pending

    housekeeping._PERIOD_SECONDS = 1.0
    # Long enough for what is told between two attempts to be seen on a busy machine.
    pending._STORE_RETRY_SECONDS = 4.0
    supervisor._PROBE_PERIOD_SECONDS = 0.5
    supervisor._PROBE_ANSWER_SECONDS = 1.5
    if injection.PLAN in os.environ:
        from ciuic.daemon.roots import mount_hooks, sessions, worker_process
        from ciuic.fuse_layer.prefork import client

        worker_process._ADOPTION_SECONDS = mount_hooks._PROBE_TIMEOUT_SECONDS = 0.5
        sessions._ANSWER_SECONDS = client._ANSWER_SECONDS = 2.0  # type: ignore[misc]
        supervisor._PROBE_ANSWER_SECONDS = 0.5
        worker_process._FIRST_ANSWER_SECONDS = 3.0
        injection.carry_out(Path(os.environ[injection.PLAN]))
        ciuic.__version__ = os.environ.get(injection.VERSION, ciuic.__version__)
    cli.main()


if __name__ == "__main__":
    main()
