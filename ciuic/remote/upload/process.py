"""The process that uploads: one thread for each configured remote, until SIGTERM.

It needs to read the repository and to write its state directory, and no other privilege. It runs at idle I/O priority and pauses
while other processes wait for the disk. Nothing waits for it but a caller that asked for its snapshot to be on a remote.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

from ciuic.config import Config, RemoteConfig
from ciuic.errors import CiuicError, NotFound
from ciuic.protocol.stored_remotely import upload_state_dir
from ciuic.remote.access import configured_objects, configured_secrets, open_configured
from ciuic.remote.objects.model import Objects
from ciuic.remote.objects.wrappers import CountingObjects, LimitedObjects, RateLimit
from ciuic.remote.upload.replication import Replication
from ciuic.remote.upload.upload_status import StatusWriter
from ciuic.remote.upload.uploader import Labels, Stopped, persist
from ciuic.repository import Repository
from ciuic.repository import log as events
from ciuic.repository.new_directory import PACKS_DIR
from ciuic.repository.packs.pack_directory import Packs
from ciuic.system.io_throttle import Pace, gauges, processor_waits, waits_files, yield_to_others
from ciuic.system.urgency import REQUESTED_MIN_SHARE
from ciuic.types import Snapshot

# An upload is never urgent, and still must end on a busy machine.
_MIN_SHARE: Final = 0.05
# Time after which a remote that was refused, or a repository that is not there yet, is tried again.
_AGAIN_SECONDS: Final = 30.0

LabelsOf = Callable[[Repository, Snapshot], Labels]


def run(
    config: Config,
    repository_dir: Path,
    *,
    labels: LabelsOf = lambda repository, snapshot: Labels(),
    once: bool = False,
    again: Collection[str] = (),
    stop: threading.Event | None = None,
    state_dir: Path | None = None,
) -> None:
    """Upload to all configured remotes until SIGTERM or SIGINT; with ``once`` until each has everything.

    Args:
        config: Configuration.
        repository_dir: Repository, which is only read; may be made later.
        labels: Names a snapshot for people.
        once: Return when nothing is missing.
        again: Snapshots to upload although an operator gave them up.
        stop: Ends the process when it is set; None: signals alone.
        state_dir: State directory; None: `upload_state_dir`.

    Each remote is on its own: one that is away, or refuses, keeps none of the others waiting.

    Raises:
        NotFound: no remote is configured.
        CiuicError: with ``once``, when all have ended: what stopped the upload to the first that failed.
    """
    if not config.remotes:
        raise NotFound("no remote is configured", hint="ciuic remote init URL makes one")
    event = stop or threading.Event()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: event.set())
    if not once:
        with suppress(OSError):
            yield_to_others("idle", _MIN_SHARE)
    place = state_dir or upload_state_dir()
    os.makedirs(place, mode=0o755, exist_ok=True)
    failures: list[BaseException] = []

    def upload(remote: RemoteConfig) -> None:
        try:
            _RemoteUpload(config, remote, repository_dir, place, event, labels, again).run(once=once)
        except Stopped:
            return
        except (CiuicError, OSError) as error:
            # With ``once``: the others go on to their end.
            failures.append(error)
        except BaseException as error:
            # A defect: nothing is known of the state of this process, and its service manager starts it again.
            failures.insert(0, error)
            event.set()

    threads = [threading.Thread(target=upload, args=(remote,), name=remote.name) for remote in config.remotes]
    for thread in threads:
        thread.start()
    for thread in threads:
        # In slices, so that signals are handled meanwhile.
        while thread.is_alive():
            thread.join(0.5)
    if failures:
        raise failures[0]


class _RemoteUpload:
    """Upload to one remote."""

    def __init__(
        self,
        config: Config,
        remote: RemoteConfig,
        repository_dir: Path,
        state_dir: Path,
        stop: threading.Event,
        labels: LabelsOf,
        again: Collection[str],
    ) -> None:
        self._config = config
        self._remote = remote
        self._repository_dir = repository_dir
        self._state_dir = state_dir
        self._stop = stop
        self._labels = labels
        self._again = again
        self._objects: Objects | None = None
        self._status = StatusWriter(remote.name, state_dir, os.getpid())

    def run(self, *, once: bool) -> None:
        """Upload; without ``once`` also what fails is tried again."""
        try:
            while not self._stop.is_set():
                try:
                    return self._upload(once=once)
                except (CiuicError, OSError) as error:
                    if once:
                        raise
                    text = error.message if isinstance(error, CiuicError) else str(error)
                    events.warning("upload_failed", remote=self._remote.name, error=text)
                    self._status.problem(text)
                    self._stop.wait(_AGAIN_SECONDS)
        finally:
            if self._objects is not None:
                self._objects.close()

    def _store(self) -> Objects:
        """Return the store. RemoteUnreachable while the directory of a ``file`` URL is not there."""
        if self._objects is None:
            counted = CountingObjects(configured_objects(self._remote))
            self._status.counts(counted)
            limit = RateLimit(self._remote.bandwidth_bytes)
            self._objects = LimitedObjects(counted, limit, RateLimit(None))
        return self._objects

    def _upload(self, *, once: bool) -> None:
        with ExitStack() as closing:
            repository = closing.enter_context(Repository.open(self._repository_dir))
            packs = Packs(
                f"{self._repository_dir}/{PACKS_DIR}", bytes.fromhex(repository.id), repository.config.hash
            )
            closing.callback(packs.close)
            objects = self._store() if once else persist(self._store, self._stop, self._status.problem)
            secrets = configured_secrets(self._remote)
            remote = persist(
                lambda: open_configured(self._remote, objects, secrets),
                self._stop,
                self._status.problem,
            )
            self._status.opened(remote.id)
            pace = Pace(
                gauges(waits_files(str(self._config.runtime_dir))),
                # Somebody waits for the end of a single run.
                min_share=REQUESTED_MIN_SHARE if once else _MIN_SHARE,
                processor_waits=processor_waits(),
            )

            def step() -> None:
                pace.step()
                self._status.step()

            replication = Replication(
                repository,
                packs,
                self._remote,
                self._state_dir,
                host=socket.gethostname(),
                stop=self._stop,
                labels=self._labels,
                step=step,
                problem=self._status.problem,
                uploaded=self._status.uploaded,
                waiting=self._status.waiting,
                again=self._again,
            )
            if once:
                replication.catch_up(remote)
            else:
                replication.run(remote)
