"""Facts about the snapshots of one repository on a remote, for retention, kept in a local file.

The file is a cache: what it lacks is read from the manifests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

import msgspec
from blake3 import blake3

from ciuic.errors import Damaged
from ciuic.remote.access import Remote
from ciuic.remote.format.documents import LiveManifest, decode_manifest, read_document
from ciuic.remote.objects.model import NoSuchObject
from ciuic.repository import SnapshotInfo
from ciuic.repository import log as events
from ciuic.repository.errors import UnsupportedFormat
from ciuic.repository.notes import read_note, write_note
from ciuic.repository.snapshot_format import StoredMarks, apply_marks, decode_marks, decode_snapshot
from ciuic.types import Snapshot, SnapshotId

_NAME: Final = "facts"


def content_digest(data: bytes) -> str:
    """Return what tells the snapshot file of one host from that of another with the same id."""
    return blake3(data).hexdigest()


class StoredFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot on the remote, as far as retention asks (`ciuic.retention.SnapshotFacts`)."""

    snapshot: str
    manifest: str
    time_ns: int
    tags: tuple[str, ...] = ()
    message: str = ""
    held: bool = False
    roots: tuple[bytes, ...] = ()
    """Paths of the roots in the snapshot."""
    content: str = ""
    """`content_digest` of the snapshot file; empty if it was not noted."""
    placed_ns: int = 0
    """Place in the order of commits where it is not `time_ns`; 0: it is, or it was not noted."""

    @property
    def id(self) -> SnapshotId:
        """Id of the snapshot."""
        return SnapshotId.parse(self.snapshot)

    @property
    def order_ns(self) -> int:
        """Place in the order of commits."""
        return max(self.placed_ns, self.time_ns)


class _Note(msgspec.Struct, frozen=True, kw_only=True):
    facts: tuple[StoredFacts, ...]


class FactsOfRemote:
    """Facts about the snapshots of one repository on a remote. For one thread."""

    def __init__(self, directory: str, remote: Remote) -> None:
        """Read the file in this directory of the uploader's own."""
        self._directory = directory
        self._remote = remote
        note = read_note(directory, _NAME, _Note)
        self._facts: dict[str, StoredFacts] = (
            {} if note is None else {one.snapshot: one for one in note.facts}
        )

    @property
    def by_id(self) -> Mapping[str, StoredFacts]:
        """Facts by the id of the snapshot."""
        return self._facts

    def learn(
        self,
        live: Mapping[str, LiveManifest],
        repository_id: str,
        content_of: Callable[[str], str] = lambda id_: "",
    ) -> set[str]:
        """Make the facts those of the snapshots of this repository that the logs commit; return their ids.

        Two hosts of one cloned disk have one repository id, and may give one id to different snapshots. One whose
        content is not that of the snapshot here is left out: it is another host's.

        Args:
            live: Snapshots that exist.
            repository_id: Id of the repository.
            content_of: Returns the `content_digest` of a snapshot here by its id; empty for one that is not here.

        Raises:
            RemoteUnreachable: a manifest could not be read now.
        """
        names: dict[str, list[str]] = {}
        for name, one in live.items():
            if one.repository == repository_id:
                names.setdefault(one.snapshot, []).append(name)
        known: dict[str, StoredFacts] = {}
        stored: set[str] = set()
        for id_, manifests in names.items():
            content = content_of(id_)
            before = self._facts.get(id_)
            if before is not None and before.manifest in manifests and content in ("", before.content):
                found: list[StoredFacts | None] = [before]
            else:
                found = [self._read(id_, name, repository_id) for name in sorted(manifests)]
            fitting = [one for one in found if one is None or content in ("", one.content)]
            if fitting:
                # Also one whose manifest cannot be read: a log commits it.
                stored.add(id_)
            for facts in fitting:
                if facts is not None:
                    known[id_] = facts
        self._facts = known
        self._write()
        return stored

    def add(self, info: SnapshotInfo, manifest: str, content: str) -> None:
        """Add a snapshot that was committed."""
        self._facts[info.id] = StoredFacts(
            snapshot=str(info.id),
            manifest=manifest,
            time_ns=info.time_ns,
            tags=info.tags,
            message=info.message,
            held=info.held,
            roots=info.roots,
            content=content,
            placed_ns=info.placed_ns,
        )
        self._write()

    def remove(self, ids: Iterable[str]) -> None:
        """Remove snapshots that were given up."""
        for id_ in ids:
            self._facts.pop(id_, None)
        self._write()

    def _read(self, id_: str, name: str, repository_id: str) -> StoredFacts | None:
        """Return the facts in a manifest; None, and so no rule removes it, if it cannot be read."""
        try:
            manifest = read_document(
                self._remote.objects, name, lambda data: decode_manifest(self._remote.sealer, name, data)
            )
            stored = decode_snapshot(id_, manifest.snapshot, repository_id)
            marks = decode_marks(id_, manifest.marks) if manifest.marks else StoredMarks(id=id_)
            snapshot: Snapshot = apply_marks(stored, marks)
        except (NoSuchObject, Damaged, UnsupportedFormat) as error:
            events.warning("remote_manifest_unreadable", manifest=name, error=error.message)
            return None
        return StoredFacts(
            snapshot=id_,
            manifest=name,
            time_ns=snapshot.time_ns,
            tags=snapshot.tags,
            message=snapshot.message,
            held=snapshot.held,
            roots=tuple(root.path for root in snapshot.roots),
            content=content_digest(manifest.snapshot),
            placed_ns=snapshot.placed_ns,
        )

    def _write(self) -> None:
        write_note(self._directory, _NAME, _Note(facts=tuple(self._facts.values())), durable=False)
