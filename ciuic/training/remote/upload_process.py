"""Process that uploads the snapshots of one training directory to one remote.

    python -m ciuic.training.remote.upload_process SAVE_DIR ORDER

It starts beside a writer process, has a session of its own, outlives the training, and ends by itself: when
no training saves here any more and the remote has everything. Where SAVE_DIR was removed and made anew it begins
again with what is there. A second one for the same remote ends at once.
It runs at idle priority, except before a deadline that is announced in ``SAVE_DIR/remotes`` (`ciuic.remote.upload_deadline`); its
messages go to ``SAVE_DIR/remotes/NAME/log``.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from ciuic.config import Config
from ciuic.errors import CiuicError
from ciuic.remote.replication import run
from ciuic.remote.upload_status import read_status
from ciuic.repository import Repository
from ciuic.structs import decode_json
from ciuic.system.poll import wait_until
from ciuic.system.privileges import no_core_files
from ciuic.training.remote.uploads import LOG_NAME, UploadLock, UploadOrder, labels_of, record_of, state_dir

_POLL_SECONDS: Final = 0.5
# Longer than the uploader waits before it tries a snapshot again that could not be read.
GIVE_UP_SECONDS: Final = 1800.0
_NICE: Final = 19
_MAX_LOG_BYTES: Final = 1 << 20
_TURN_SECONDS: Final = 1.0
_TRY_SECONDS: Final = 0.05


def main(save_dir: str, order: UploadOrder) -> None:
    """Upload until nobody saves here any more and the remote has everything."""
    no_core_files()
    urgent_nice = os.getpriority(os.PRIO_PROCESS, 0)
    with suppress(OSError):
        os.nice(_NICE)
    while _upload(save_dir, order, urgent_nice):
        pass


def _upload(save_dir: str, order: UploadOrder, urgent_nice: int) -> bool:
    """Upload a repository to its end; return whether another one lies in the directory now.

    It is false at once where another process uploads.
    """
    uploader = UploadLock.uploader(save_dir, order.name)
    if not _acquired(uploader):
        return False
    with suppress(OSError):
        _limit_log(state_dir(save_dir) / order.name / LOG_NAME)
    stop = threading.Event()
    users = UploadLock.users(save_dir, order.name)
    end = _End(save_dir, order, users)
    threading.Thread(target=_watch, args=(end, stop), name="end", daemon=True).start()
    run(
        Config(remotes=(order.config(),)),
        Path(save_dir),
        labels=labels_of,
        stop=stop,
        state_dir=state_dir(save_dir),
        urgent_nice=urgent_nice,
    )
    # In this order: a writer that waits for `users` must find this one free.
    uploader.release()
    users.release()
    return end.is_replaced


def _acquired(uploader: UploadLock) -> bool:
    """Take the lock; return whether no other process has it."""
    # Again: a process that asks whether an upload runs holds it for a moment.
    return wait_until(uploader.acquire, _TURN_SECONDS, _TRY_SECONDS)


def _limit_log(log: Path) -> None:
    if log.stat().st_size > _MAX_LOG_BYTES:
        os.truncate(log, 0)


class _End:
    """Decides when the process ends."""

    def __init__(self, save_dir: str, order: UploadOrder, users: UploadLock) -> None:
        self._save_dir = save_dir
        self._order = order
        self._users = users
        self._began_with = self._repository_id()
        self.is_replaced = False
        """Another repository lies in the directory than the one that was there in the beginning."""
        self._seen: object = None
        self._since = time.monotonic()

    def has_come(self) -> bool:
        """Return whether the upload is to end; then no other training can begin to save until it has ended.

        That does not hold where the directory was removed and made anew. What this process has open is gone then.
        """
        found = self._repository_id()
        self._began_with = self._began_with or found
        self.is_replaced = found not in ("", self._began_with)
        if self.is_replaced:
            return True
        if not self._users.acquire():
            return False
        if self._is_done():
            return True
        self._users.release()
        return False

    def _repository_id(self) -> str:
        """Return the id of the repository in the directory; empty where there is none that can be opened."""
        try:
            with Repository.open(self._save_dir) as repository:
                return repository.id
        except (CiuicError, OSError):
            return ""

    def _is_done(self) -> bool:
        if not Repository.exists(self._save_dir):
            return True
        try:
            with Repository.open(self._save_dir) as repository:
                here = repository.snapshots.names()
                record = record_of(self._save_dir, self._order, repository.id)
        except CiuicError:
            return False
        lacking = here if record is None else here - record.stored - record.passed_over
        return not lacking or self._is_stuck(frozenset(lacking))

    def _is_stuck(self, lacking: frozenset[str]) -> bool:
        """Return whether nothing has come off for long, although the store answers.

        Then the snapshots that are left cannot be read.
        """
        status = read_status(self._order.name, state_dir(self._save_dir))
        waits = status is None or bool(status.waits_for)
        seen = lacking, None if status is None else status.sent_bytes
        if waits or seen != self._seen:
            self._seen, self._since = seen, time.monotonic()
        return time.monotonic() - self._since > GIVE_UP_SECONDS


def _watch(end: _End, stop: threading.Event) -> None:
    while not stop.wait(_POLL_SECONDS):
        try:
            if end.has_come():
                stop.set()
                return
        # A file system that has no locks now may have some later; without an end the process only lives on.
        except OSError:
            continue


if __name__ == "__main__":
    main(sys.argv[1], decode_json(sys.argv[2], UploadOrder))
