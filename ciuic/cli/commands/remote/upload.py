"""``ciuic remote upload``: the process that sends snapshots to the remotes, in the foreground."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ciuic.cli.shared.names import plural
from ciuic.cli.shared.options import ID, FrameCommand
from ciuic.cli.shared.output import note
from ciuic.cli.shared.session import Session, current
from ciuic.errors import CiuicError, ConfigError, NotFound, Partial

if TYPE_CHECKING:
    from ciuic.config import Config
    from ciuic.protocol.stored_remotely import RemoteLag
    from ciuic.remote.upload.upload_status import UploadStatus
    from ciuic.remote.upload.uploader import Labels
    from ciuic.repository import Repository
    from ciuic.types import Snapshot

# Time after which the configuration is read again for a place of the repository.
_AGAIN_SECONDS = 5.0
_LOOK_SECONDS = 0.2


@click.command("upload", cls=FrameCommand)
@click.option("--once", is_flag=True, help="End when the remotes have everything.")
@click.option(
    "--again",
    multiple=True,
    metavar="ID",
    type=ID,
    help="Also this snapshot, which `ciuic forget --remote` gave up; may be repeated.",
)
def upload(once: bool, again: tuple[str, ...]) -> None:
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
        wanted = _ids(session, again)
        if not once:
            run(config, place, labels=_labels_of, again=wanted, stop=stop)
            return
        with _shown(session, config):
            run(config, place, labels=_labels_of, once=True, again=wanted, stop=stop)
        if not stop.is_set():
            _require_all(session, config)
            _say_sent(config)
    except NotFound as error:
        # Exit code 3 has one meaning for those who start this process.
        raise CiuicError(error.message, hint=error.hint) from error


def _ids(session: Session, texts: tuple[str, ...]) -> list[str]:
    return [str(session.repository.snapshots.resolve(text)) for text in texts]


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


@contextmanager
def _shown(session: Session, config: Config) -> Iterator[None]:
    """Show how much was sent of what the remotes lacked at the beginning, from the notes of the upload."""
    from ciuic.cli.shared.progress import progress

    with progress("upload") as reporter:
        if not reporter.shows:
            yield
            return
        total_bytes = sum(lag.size_bytes for lag in _lags(session, config).values())
        done = threading.Event()

        def watch() -> None:
            while not done.wait(_LOOK_SECONDS):
                sent_bytes = sum(status.sent_bytes for status in _own_statuses(config))
                # What is sent is not known before: less where the remote has it, more for tables and seals.
                reporter.update(bytes_done=sent_bytes, bytes_total=max(total_bytes, sent_bytes))

        thread = threading.Thread(target=watch, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def _own_statuses(config: Config) -> list[UploadStatus]:
    """Return what this process has noted of its uploads."""
    from ciuic.protocol.stored_remotely import upload_state_dir
    from ciuic.remote.upload.upload_status import read_status

    found = [read_status(remote.name, upload_state_dir()) for remote in config.remotes]
    return [status for status in found if status is not None and status.pid == os.getpid()]


def _say_sent(config: Config) -> None:
    """Say that nothing is missing, and what was sent."""
    from ciuic.units import human_size

    statuses = _own_statuses(config)
    requests = sum(sum(status.requests.values()) for status in statuses)
    sent = human_size(sum(status.sent_bytes for status in statuses))
    names = ", ".join(remote.name for remote in config.remotes)
    note(f"{names}: everything is stored; {sent} sent, {plural(requests, 'request')}")


def _lags(session: Session, config: Config) -> dict[str, RemoteLag]:
    """Return how far each remote is behind, by its name."""
    from ciuic.protocol.stored_remotely import remote_lag

    repository = session.repository
    infos = repository.snapshots.list()
    return {
        remote.name: remote_lag(remote.name, repository.id, infos, now_ns=time.time_ns())
        for remote in config.remotes
    }


def _require_all(session: Session, config: Config) -> None:
    """Raise Partial if a remote still lacks snapshots that it wants, such as ones that cannot be read."""
    lags = _lags(session, config)
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
    from ciuic.training.remote.uploads import labels_of

    return labels_of(repository, snapshot)
