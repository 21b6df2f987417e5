"""Caches of a remote on this host: facts for retention, sizes of manifests, logs of other hosts, and the packs there.

Records of `ciuic.repository.record_files` in a directory of the uploader's own: what the cache lacks is read from the manifests. It may be
old; what was uploaded or given up by another process shows when that has noted it.

The packs that the remote had when this host last used it are for those that look at it without the index of the process that uploads.
Their file is ``packs`` in the directory of that process for the remote: the line ``rounds N`` (the last round whose deletions are
in it; -1 for none), then a line with size and reference for each pack. What a power cut or an interrupted write tore is no line
(the reference has a length), and is left out: a pack that is missing here is one that nobody misses.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from blake3 import blake3

from ciuic.errors import CiuicError, Damaged
from ciuic.protocol.stored_remotely import (
    ConfiguredRemote,
    is_doubted,
)
from ciuic.remote.access import (
    Remote,
)
from ciuic.remote.documents import LiveManifest, decode_manifest, read_document
from ciuic.remote.log_reader import LogReader, Rounds, is_uploader
from ciuic.remote.object_names import MANIFESTS_PREFIX, PackRef, parse_manifest
from ciuic.remote.objects.model import (
    NoSuchObject,
    Objects,
)
from ciuic.remote.remote_index import list_packs, packs_lacking
from ciuic.remote.sealing.sealer import Sealer
from ciuic.remote.uploader import (
    UploadedSnapshot,
)
from ciuic.repository import Repository, SnapshotInfo
from ciuic.repository import log as events
from ciuic.repository.errors import UnsupportedFormat
from ciuic.repository.record_files import read_note, write_note
from ciuic.repository.snapshot_format import StoredMarks, apply_marks, decode_marks, decode_snapshot
from ciuic.system.disk import Disk, open_to_write, read_regular
from ciuic.types import STATE_TAGS, Snapshot, SnapshotId
from ciuic.units import plural

_NAME: Final = "packs"
# 1.5 million packs; a terabyte has 65,000 of the largest ones.
_MAX_BYTES: Final = 64 << 20
_ROUNDS: Final = re.compile(rb"rounds (-1|[0-9]{1,10})\n")
_PACK: Final = re.compile(rb"^([0-9]{1,10}) ([dm][0-9a-f]{32})$", re.MULTILINE)


class KnownPacks(NamedTuple):
    """Content of the file."""

    rounds_finished: int
    sizes: dict[PackRef, int]
    """Size of each pack in bytes; 0: it was not noted."""


def write_known_packs(directory: str, rounds_finished: int, sizes: Mapping[PackRef, int]) -> None:
    """Replace the file; not durable: an older one names fewer packs."""
    lines = [f"rounds {rounds_finished}\n", *(f"{size_bytes} {ref}\n" for ref, size_bytes in sizes.items())]
    Disk().replace_file(f"{directory}/{_NAME}", "".join(lines).encode("ascii"), durable=False)


def add_known_pack(directory: str, ref: PackRef, size_bytes: int) -> None:
    """Add a pack that was stored. OSError where there is no file to add to."""
    with os.fdopen(open_to_write(f"{directory}/{_NAME}", os.O_WRONLY | os.O_APPEND), "wb", 0) as file:
        # The line end first, so that what an interrupted process wrote in part spoils no other line.
        file.write(f"\n{size_bytes} {ref}\n".encode("ascii"))


def read_known_packs(directory: str) -> KnownPacks | None:
    """Return the content of the file; None for none that can be read."""
    try:
        data = read_regular(f"{directory}/{_NAME}", _MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    head = _ROUNDS.match(data)
    if head is None or len(data) > _MAX_BYTES:
        return None
    found = _PACK.finditer(data)
    return KnownPacks(int(head[1]), {PackRef(one[2].decode("ascii")): int(one[1]) for one in found})


class LostObjects(NamedTuple):
    """Objects that are not there any more."""

    packs: list[PackRef]
    """Those that no round of a collection condemned; also those that have another size."""
    manifests: list[str]
    given_up: list[str]
    """Manifests that a collection removed: their snapshots are not stored either."""


def manifests_lacking(manifests: Mapping[str, int], objects: Objects) -> list[str]:
    """Return the manifests, with their sizes, that a remote lacks, or has with another size; a size of 0 is unknown. One listing."""
    listed = {info.name: info.size_bytes for info in objects.list(MANIFESTS_PREFIX)}
    return [
        name
        for name, size_bytes in manifests.items()
        if (found := listed.get(name)) is None or size_bytes not in (0, found)
    ]


def lost_objects(
    objects: Objects, sealer: Sealer, known: KnownPacks, manifests: Mapping[str, int]
) -> LostObjects:
    """Return what a remote has lost.

    It costs the listing of all packs and manifests, and a GET for each round since, where some are missing.

    Args:
        objects: Space of a repository in a remote.
        sealer: Its seals.
        known: Packs that were there; read before the call.
        manifests: Sizes of manifests that were there, by name; 0: it was not noted.

    Raises:
        RemoteUnreachable: the store does not answer.
        DamagedRemote: a round cannot be read.
    """
    packs = packs_lacking(known.sizes, list_packs(objects))
    missing = manifests_lacking(manifests, objects)
    if not packs and not missing:
        return LostObjects([], [], [])
    # After the listing, so that a round which deleted before it is read.
    rounds = Rounds(objects, sealer, known=known.rounds_finished)
    rounds.refresh()
    return LostObjects(
        [ref for ref in packs if ref not in rounds.condemned],
        [name for name in missing if name not in rounds.manifests],
        [name for name in missing if name in rounds.manifests],
    )


_FACTS_NAME: Final = "facts"


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
    manifest_bytes: int = 0
    """Size of the manifest; 0 if it was not noted."""

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


class StoredState(NamedTuple):
    """Newest state of a training that the remote has committed, and so has wholly."""

    snapshot: str
    time_ns: int
    epoch: int
    """0 where the training counts none, as in the names of manifests."""
    step: int


def newest_stored_states(
    state_dir: Path, remote: ConfiguredRemote, space_ids: Iterable[str]
) -> dict[bytes, StoredState]:
    """Return the newest state of each training on a remote, by the path of its root; the store is not asked.

    What another process uploads from now on, or gives up, shows when it has noted it.

    Args:
        state_dir: State directory of the process that uploads.
        remote: The remote.
        space_ids: Ids of the spaces that the repository may be stored in.
    """
    if is_doubted(remote, state_dir):
        return {}
    newest: dict[bytes, StoredFacts] = {}
    for space_id in space_ids:
        note = read_note(str(state_dir / remote.name / space_id), _FACTS_NAME, _Note)
        for one in () if note is None else note.facts:
            # An operator may have tagged a snapshot of files so: that one has no labels.
            if STATE_TAGS.isdisjoint(one.tags) or len(one.roots) != 1:
                continue
            before = newest.get(one.roots[0])
            if before is None or one.order_ns > before.order_ns:
                newest[one.roots[0]] = one
    found = {}
    for root, one in newest.items():
        manifest = parse_manifest(one.manifest)
        if manifest is not None:
            found[root] = StoredState(one.snapshot, one.time_ns, manifest.epoch, manifest.step)
    return found


class FactsOfRemote:
    """Facts about the snapshots of one repository on a remote. For one thread."""

    def __init__(self, directory: str, remote: Remote) -> None:
        """Read the file in this directory of the uploader's own."""
        self._directory = directory
        self._remote = remote
        # Logs that commit each snapshot, by its manifest.
        self._logs: dict[str, set[str]] = {}
        self.lost: dict[str, list[str]] = {}
        """Manifests that this host committed and that are gone or damaged, by the snapshot."""
        note = read_note(directory, _FACTS_NAME, _Note)
        self._facts: dict[str, StoredFacts] = (
            {} if note is None else {one.snapshot: one for one in note.facts}
        )

    def committed_in(self, logs: Collection[str]) -> dict[str, StoredFacts]:
        """Return the facts of the snapshots that one of these logs commits, by the id of the snapshot."""
        return {
            id_: one
            for id_, one in self._facts.items()
            if not self._logs.get(one.manifest, set()).isdisjoint(logs)
        }

    def learn(
        self,
        live: Mapping[str, LiveManifest],
        logs: Mapping[str, Collection[str]],
        repository_id: str,
        own_logs: Collection[str] = (),
        content_of: Callable[[str], str] = lambda id_: "",
    ) -> set[str]:
        """Make the facts those of the snapshots of this repository that the logs commit; return their ids.

        Two hosts of one cloned disk have one repository id, and may give one id to different snapshots. One whose
        content is not that of the snapshot here is left out: it is another host's.

        Args:
            live: Snapshots that exist.
            logs: Manifests that each log commits.
            repository_id: Id of the repository.
            own_logs: Logs of this host, whose snapshot counts where two that are not here have one id.
            content_of: Returns the `content_digest` of a snapshot here by its id; empty for one that is not here.

        Raises:
            RemoteUnreachable: a manifest could not be read now.
        """
        self._logs = {}
        for writer, manifests in logs.items():
            for name in manifests:
                self._logs.setdefault(name, set()).add(writer)
        names: dict[str, list[str]] = {}
        for name, one in live.items():
            if one.repository == repository_id:
                names.setdefault(one.snapshot, []).append(name)
        known: dict[str, StoredFacts] = {}
        stored: set[str] = set()
        there = {info.name: info.size_bytes for info in self._remote.objects.list(MANIFESTS_PREFIX)}
        self.lost = {}
        for id_, some in names.items():
            # Those of this host last, so that they stay.
            manifests = sorted(
                some, key=lambda name: (not self._logs.get(name, set()).isdisjoint(own_logs), name)
            )
            content = content_of(id_)
            before = self._facts.get(id_)
            is_known = (
                before is not None
                and before.manifest in manifests
                and before.manifest_bytes == there.get(before.manifest)
            )
            if before is not None and is_known and content in ("", before.content):
                found: list[StoredFacts | None] = [before]
            else:
                found = []
                for name in manifests:
                    try:
                        facts = self._read(id_, name, repository_id)
                        found.append(
                            facts and msgspec.structs.replace(facts, manifest_bytes=there.get(name, 0))
                        )
                    except (NoSuchObject, Damaged) as error:
                        events.warning("remote_manifest_lost", manifest=name, error=error.message)
                        if not self._logs.get(name, set()).isdisjoint(own_logs):
                            self.lost.setdefault(id_, []).append(name)
            # One whose manifest cannot be read is not stored, though a log commits it: nobody could restore it.
            for facts in found:
                if facts is not None and content in ("", facts.content):
                    stored.add(id_)
                    known[id_] = facts
        self._facts = known
        self._write()
        return stored

    def add(self, info: SnapshotInfo, done: UploadedSnapshot, content: str, log: str) -> None:
        """Add a snapshot that was committed in this log."""
        self._logs[done.manifest] = {log}
        self._facts[info.id] = StoredFacts(
            snapshot=str(info.id),
            manifest=done.manifest,
            manifest_bytes=done.manifest_bytes,
            time_ns=max(0, info.time_ns),
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
        """Return the facts in a manifest; None, and so no rule removes it, if this version cannot read it.

        Raises:
            NoSuchObject: it is gone.
            Damaged: nobody can read it.
        """
        try:
            manifest = read_document(
                self._remote.objects, name, lambda data: decode_manifest(self._remote.sealer, name, data)
            )
            stored = decode_snapshot(id_, manifest.snapshot, repository_id)
            marks = decode_marks(id_, manifest.marks) if manifest.marks else StoredMarks(id=id_)
            snapshot: Snapshot = apply_marks(stored, marks)
        except UnsupportedFormat as error:
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
        write_note(self._directory, _FACTS_NAME, _Note(facts=tuple(self._facts.values())), durable=False)


def stored_manifests(directory: str, stored: Collection[str]) -> dict[str, int]:
    """Return the manifests of the stored snapshots with their sizes, as far as they were noted.

    Args:
        directory: What this host remembers of the space of its repository.
        stored: Ids of snapshots that count as stored.
    """
    note = read_note(directory, _FACTS_NAME, _Note)
    return {
        one.manifest: one.manifest_bytes
        for one in (() if note is None else note.facts)
        if one.snapshot in stored
    }


_MAX_NAMED: Final = 5


def lacking_words(space: Remote, directory: str, repository: Repository) -> str:
    """Return which snapshots of a repository a remote had and lacks now, and which of them are not here; empty where that is unknown.

    Args:
        space: Where its snapshots go.
        directory: What this host remembers of that.
        repository: The repository.
    """
    note = read_note(directory, _FACTS_NAME, _Note)
    reader = LogReader(space.objects, space.sealer, skip_damaged=True)
    try:
        reader.refresh()
    except CiuicError:
        return ""
    there = {one.snapshot for one in reader.live().values() if one.repository == repository.id}
    facts = sorted(() if note is None else note.facts, key=lambda one: (-one.order_ns, one.snapshot))
    lacking = [one.snapshot for one in facts if one.snapshot not in there]
    if not lacking:
        return ""
    here = repository.snapshots.names()
    gone = [id_ for id_ in lacking if id_ not in here]
    text = f"; it lacks {plural(len(lacking), 'snapshot')} that it had: {_named(lacking)}"
    return f"{text}; not on this host either: {_named(gone)}" if gone else f"{text}; this host has them all"


def _named(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - _MAX_NAMED} more" if len(ids) > _MAX_NAMED else ""
    return f"{', '.join(ids[:_MAX_NAMED])}{more}"


_OTHERS_NAME: Final = "other-logs"
# In place of a number of snapshots: the log grew while this host had another one.
_GROWS: Final = -1


class _OthersNote(msgspec.Struct, frozen=True, kw_only=True):
    logs: dict[str, int]
    """Number of snapshots of this repository that each log committed when it was last seen, or `_GROWS`."""


class OtherLogs:
    """Logs beside this host's own that commit snapshots of its repository.

    They are those of a host with a copy of this disk, or of this host before its state was lost or restored. A log that
    never grew and that a collection has ended is taken for the latter: its snapshots are this host's.
    """

    def __init__(
        self, directory: str, space: Remote, logs: LogReader, repository_id: str, own: Collection[str]
    ) -> None:
        """Look at the logs, and keep what was seen in this directory of the uploader's own.

        Raises:
            RemoteUnreachable: a manifest could not be read now.
        """
        note = read_note(directory, _OTHERS_NAME, _OthersNote)
        seen = {} if note is None else dict(note.logs)
        self.adopted: set[str] = set()
        """Logs whose snapshots are this host's."""
        self.writers = 0
        """Logs to which another host may write."""
        for writer, summary in logs.logs.items():
            number = sum(one.repository == repository_id for one in summary.committed.values())
            if writer in own or not number:
                continue
            before = seen.get(writer, number)
            seen[writer] = _GROWS if before == _GROWS or number > before else number
            if not summary.retired:
                self.writers += is_uploader(space.objects, space.sealer, writer, summary, repository_id)
            elif seen[writer] != _GROWS:
                self.adopted.add(writer)
        if seen:
            write_note(directory, _OTHERS_NAME, _OthersNote(logs=seen), durable=False)
