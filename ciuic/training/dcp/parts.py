"""Storing of ranks' parts in turn, and one snapshot of all of them: the connection of one rank to its writer process.

Guarantees: what `store` returned is durable; a snapshot exists when `commit` returned, and not before; while a
rank holds a claim nothing that was stored is swept.

References:
    docs/decisions/ranks-in-turn.md
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from ciuic.repository import Repository
from ciuic.repository.writing.shared_write_claim import Claim
from ciuic.training.arena import Slot
from ciuic.training.dcp.part import RankFiles
from ciuic.training.policy.retention_rules import Latest
from ciuic.training.remote.copies import RemoteCopies
from ciuic.training.remote.place import RemoteList, uploads_of
from ciuic.training.writer.client import GONE, WriterClient, manifest_files
from ciuic.training.writer.messages import (
    COMPRESSIONS,
    Begin,
    FromWriter,
    Manifest,
    Measured,
    Note,
    NotSaved,
    PreemptionNotice,
    Put,
    RetentionRules,
    Saved,
    StoredFile,
    StoredFiles,
)

log = logging.getLogger("ciuic")

_STATES: Final = slice(0, 2)
"""Arenas for states and parts of states."""
# Arena of the final commit; separate from `_STATES`, so that the end of one save does not wait for the start
# of others.
_METADATA: Final = slice(2, 3)
_POLL_SECONDS: Final = 0.005
"""Pause between two looks at the writer's messages."""
_CLOSE_SECONDS: Final = 120.0
"""Longest time for which `close` waits for the writer."""


class PartsWriter:
    """Writer process of one rank, for parts of snapshots and for the snapshots themselves."""

    def __init__(
        self,
        save_dir: Path,
        name: str,
        max_snapshots: int | None,
        nice: int,
        compression: str,
        remotes: RemoteList = (),
    ) -> None:
        """Open the repository, or create one; the writer process starts with the first part.

        Args:
            save_dir: directory of the repository.
            name: name of the run.
            max_snapshots: number of newest snapshots that stay; None keeps all.
            nice: niceness of the writer process.
            compression: one of `COMPRESSIONS`.
            remotes: remotes to which the writer process has snapshots uploaded.

        Raises:
            ValueError: an option is out of its range.
            CiuicError: there can be no repository at ``save_dir``.
            OSError: the same, as the file system says it.
        """
        if compression not in COMPRESSIONS:
            raise ValueError(f"compression must be one of {', '.join(COMPRESSIONS)}, got {compression!r}")
        uploads = uploads_of(save_dir, remotes)
        self.save_dir = save_dir
        rules = RetentionRules(keep=() if max_snapshots is None else (Latest(max_snapshots),))
        self.root = os.fsencode(f"/{name}")
        """Path of the run in its snapshots."""
        begin = Begin(
            repository=str(save_dir),
            root=self.root,
            rules=rules,
            nice=nice,
            compression=compression,
            uploads=uploads,
        )
        self.copies = RemoteCopies(str(save_dir), uploads)
        # Two for states and one for the commit (`_STATES`, `_METADATA`).
        self._client = WriterClient(begin, arenas=3)
        # A save writes on a thread of its own while the training stages the next state.
        self.lock = threading.RLock()
        self._answers: dict[int, list[FromWriter]] = {}
        self._claim: Claim | None = None

    def claim(self) -> None:
        """Let nothing be swept until `release`, in place of an earlier claim."""
        self.release()
        # Until the commit no snapshot refers to what the ranks store, and a prune would free it.
        with Repository.open(self.save_dir) as repository:
            self._claim = repository.claim()

    def release(self) -> None:
        """Release the claim, if there is one."""
        claim, self._claim = self._claim, None
        if claim is not None:
            claim.release()

    def free_slot(self, size_bytes: int, among: slice = _STATES) -> Slot | None:
        """Wait for a free arena; None if staged states hold all and nothing is being written.

        Call it with the lock held.
        """
        while (slot := self._client.free_slot(size_bytes, among)) is None and self._client.pending:
            self._hear()
            time.sleep(_POLL_SECONDS)
        return slot

    def begin(self, part: RankFiles, slot: Slot | None = None) -> int:
        """Copy a part into an arena and hand it over.

        Args:
            part: files of the part.
            slot: arena that has some of them already; None for a free one.

        Returns:
            The number to `wait_stored` for.

        Raises:
            OSError: there is no memory, or no writer.
        """
        with self.lock:
            return self._submit(part, _manifest(part, "", (), ()), slot, commit=False)

    def wait_stored(self, number: int) -> tuple[StoredFile, ...]:
        """Wait until a part is durable and return its files.

        Raises:
            OSError: it was not stored.
        """
        answers = self._wait(number)
        return tuple(file for one in answers if isinstance(one, StoredFiles) for file in one.files)

    def commit(
        self, part: RankFiles, stored: Sequence[StoredFile], message: str, tags: tuple[str, ...]
    ) -> str:
        """Make the snapshot of all ranks' stored files and the files of a last part; return its id.

        Raises:
            OSError: there is no snapshot.
        """
        with self.lock:
            number = self._submit(part, _manifest(part, message, tags, stored), None, commit=True)
        return next((str(one.id) for one in self._wait(number) if isinstance(one, Saved)), "")

    def close(self) -> None:
        """Release the claim, wait for the writer process and let it end."""
        self.release()
        with self.lock:
            self._client.close(_CLOSE_SECONDS)

    # -- inside

    def _submit(self, part: RankFiles, manifest: Manifest, slot: Slot | None, *, commit: bool) -> int:
        if slot is None:
            slot = self.free_slot(_needed(part, manifest), _METADATA if commit else _STATES)
            if slot is None:
                raise OSError("both arenas hold states that were staged and are not being saved")
            slot.layout = None
        assert slot.arena is not None
        part.fill(slot.arena.memory)
        number = self._client.submit(slot, manifest, part.end, commit=commit)
        self._answers[number] = []
        return number

    def _wait(self, number: int) -> list[FromWriter]:
        """Wait for the answer to a save and return all messages about it.

        Raises:
            OSError: it was not saved.
        """
        while True:
            with self.lock:
                self._hear()
                answers = self._answers[number]
                if answers and isinstance(answers[-1], (Saved, NotSaved, Put)):
                    del self._answers[number]
                    break
            # Outside of the lock: the training may stage the next state meanwhile.
            time.sleep(_POLL_SECONDS)
        if isinstance(answers[-1], NotSaved):
            raise OSError(f"not saved: {answers[-1].reason}")
        return answers

    def _hear(self) -> None:
        for message in self._client.poll():
            if isinstance(message, Note):
                # A lost writer is reported by the saves that it failed.
                if message.text != GONE:
                    log.warning("ciuic: %s", message.text)
            elif not isinstance(message, (PreemptionNotice, Measured)) and message.number in self._answers:
                self._answers[message.number].append(message)


def fits(slot: Slot, part: RankFiles) -> bool:
    """Return whether the files of a part, and what is said of them, fit into the slot's arena."""
    return slot.arena is not None and _needed(part, _manifest(part, "", (), ())) <= slot.arena.size_bytes


def _manifest(part: RankFiles, message: str, tags: tuple[str, ...], stored: Sequence[StoredFile]) -> Manifest:
    return Manifest(
        time_ns=time.time_ns(),
        message=message,
        tags=tags,
        files=manifest_files(part.files),
        stored=list(stored),
    )


def _needed(part: RankFiles, manifest: Manifest) -> int:
    """Return the bytes of arena that the files and the manifest take."""
    return part.end + len(msgspec.msgpack.encode(manifest))
