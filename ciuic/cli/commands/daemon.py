"""``ciuic daemon``: the service in the foreground. The only module of the command line that imports ``ciuic.daemon``."""

from __future__ import annotations

import sys

import click
from msgspec.structs import replace

from ciuic.cli.shared.options import FrameCommand
from ciuic.cli.shared.session import current


@click.command("daemon", cls=FrameCommand)
@click.option(
    "--workers", is_flag=True, help="Only fork overlay workers, for ciuic.service (ciuic-workers.service)."
)
def command(workers: bool) -> int:
    """Run the service in the foreground, for systemd or a container: it returns when the service ends.

    It mounts the protected roots, takes snapshots on schedule, applies retention and answers on the control socket,
    until SIGTERM, ^C or `ciuic stop`; then it unmounts. Nothing sees what is changed while a root is not
    mounted, so the first snapshot after that compares size, times and inode of every file, and reads those that differ.
    """
    # structlog imports rich wherever it is installed; the daemon draws nothing, and runs for months.
    sys.modules.setdefault("rich", None)  # type: ignore[arg-type]  # None: an import raises ImportError

    from ciuic.config import Config, load_config
    from ciuic.daemon import run, run_workers

    if workers:
        # Does not return: it becomes another program by exec(2). That needs no configuration, and a mistake
        # in the file must not keep workers from being replaced.
        run_workers()
    session = current()
    config = session.config

    def reload() -> Config:
        # The file found at the start, even if another has appeared since; --repo stays in force.
        return load_config(config.file, repository=session.repo_option, trust_repository=session.trust_option)

    if session.verbosity > 0:
        config = replace(config, log=replace(config.log, level="debug"))
    return run(config, reload=reload)
