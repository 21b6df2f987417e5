"""Packs that were stored and that no commit names yet, kept in a local file.

A commit names them so that other hosts learn of them without a listing. If the file is lost, they find the packs when they list;
nothing else depends on it.
"""

from __future__ import annotations

from typing import Final

import msgspec

from ciuic.remote.format.log_entry import PackRefs
from ciuic.remote.format.names import PackRef
from ciuic.remote.upload.outbox import ClosedPack
from ciuic.repository.notes import read_note, write_note

_NAME: Final = "uncommitted"


class _Note(msgspec.Struct, frozen=True, kw_only=True):
    packs: PackRefs


class UncommittedPacks:
    """Packs of this uploader that no commit names. For one thread."""

    def __init__(self, directory: str) -> None:
        """Read what an earlier process left in this directory of the uploader's own."""
        self._directory = directory
        note = read_note(directory, _NAME, _Note)
        self._refs: list[PackRef] = [] if note is None else [PackRef(ref) for ref in note.packs]

    @property
    def refs(self) -> tuple[PackRef, ...]:
        """The packs, oldest first."""
        return tuple(self._refs)

    def add(self, pack: ClosedPack) -> None:
        """Add a pack that was stored."""
        self._refs.append(pack.ref)
        self._write()

    def clear(self) -> None:
        """Forget them: a commit names them."""
        self._refs.clear()
        self._write()

    def _write(self) -> None:
        write_note(self._directory, _NAME, _Note(packs=tuple(self._refs)), durable=False)
