"""``ciuic remote upload``: the process that sends snapshots to the remotes, in the foreground."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ciuic.cli.shared.names import plural
from ciuic.cli.shared.options import FrameCommand
from ciuic.cli.shared.output import note
from ciuic.cli.shared.session import Session, current
from ciuic.errors import CiuicError, ConfigError, NotFound, Partial

if TYPE_CHECKING:
    from ciuic.config import Config
    from ciuic.remote.upload.uploader import Labels
    from ciuic.repository import Repository
    from ciuic.types import Snapshot

# Time after which the configuration is read again for a place of the repository.
_AGAIN_SECONDS = 5.0


@click.command("upload", cls=FrameCommand)
@click.option("--once", is_flag=True, help="End when the remotes have everything.")
def upload(once: bool) -> None:
    """Send snapshots to the configured remotes, in the foreground, until SIGTERM.

    It needs to read the repository, and nothing of the daemon. Exit code 3 means that no remote is configured. A repository
    that does not exist yet is waited for.
    """
    from ciuic.remote.upload.process import run

    session = current()
    config = session.config
    if not config.remotes:
        raise NotFound("no remote is configured", hint="ciuic remote init URL makes one")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    place = session.repository_dir if once else _repository_dir(session, stop)
    if place is None:
        return
    try:
        run(config, place, labels=_labels_of, once=once, stop=stop)
        if once and not stop.is_set():
            _require_all(session, config)
    except NotFound as error:
        # Exit code 3 has one meaning for those who start this process.
        raise CiuicError(error.message, hint=error.hint) from error


def _repository_dir(session: Session, stop: threading.Event) -> Path | None:
    """Return where the repository is or will be; wait while no directory is protected. None after SIGTERM."""
    told = False
    while not stop.is_set():
        try:
            return session.repository_dir
        except ConfigError as error:
            # With roots the configuration says something that cannot be.
            if session.config.roots:
                raise
            if not told:
                note(f"{error.message}; waiting until a directory is protected")
                told = True
        stop.wait(_AGAIN_SECONDS)
        session = Session(
            config_option=session.config_option,
            repo_option=session.repo_option,
            trust_option=session.trust_option,
        )
    return None


def _require_all(session: Session, config: Config) -> None:
    """Raise Partial if a remote still lacks snapshots that it wants, such as ones that cannot be read."""
    from ciuic.protocol.remote_lag import remote_lag

    repository = session.repository
    infos = repository.snapshots.list()
    lags = {
        remote.name: remote_lag(remote.name, repository.id, infos, now_ns=time.time_ns())
        for remote in config.remotes
    }
    lacking = [
        f"{name} lacks {plural(lag.snapshots, 'snapshot')}" for name, lag in lags.items() if lag.snapshots
    ]
    if lacking:
        raise Partial(
            f"not everything was uploaded: {', '.join(lacking)}",
            hint="ciuic verify says which snapshots cannot be read; those taken meanwhile go with the next run",
        )


def _labels_of(repository: Repository, snapshot: Snapshot) -> Labels:
    from ciuic.remote.upload.uploader import Labels

    if not snapshot.is_state:
        return Labels()
    # Half a second and 20 MiB, which most hosts never need: their snapshots are of files.
    from ciuic.training.remote.labels import labels_of

    return labels_of(repository, snapshot)
