"""Snapshots of a remote, those of all hosts or of some, from their manifests in the cache or the bucket.

The id of a snapshot is chosen by its repository, so that two hosts may have one id. Within a remote such snapshots are named
``HOST/cs-…``, and every other one by its id. ``HOST/`` may stand before any text that names a snapshot, and restricts it to that
host.

Guarantee: a manifest is returned only if its bytes have the digest that the log names, and its seal opens.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple, TypeVar

import msgspec

from ciuic.errors import Damaged, NotFound, UsageError
from ciuic.remote.access import Remote
from ciuic.remote.documents import LiveManifest, RemoteManifest, decode_manifest, object_digest, read_document
from ciuic.remote.errors import DamagedRemote
from ciuic.remote.log_reader import LogReader
from ciuic.remote.object_names import ManifestName, PackRef, as_label, parse_manifest
from ciuic.remote.objects.model import NoSuchObject, Objects
from ciuic.remote.reading.cache_directory import CacheDirectory
from ciuic.remote.sealing.sealer import Sealer
from ciuic.repository import log as events
from ciuic.repository.errors import DamagedSnapshot, UnsupportedFormat
from ciuic.repository.index_database import info_of
from ciuic.repository.model import SnapshotInfo, UnreadableSnapshot
from ciuic.repository.snapshot_format import (
    StoredMarks,
    apply_marks,
    decode_any_snapshot,
    decode_marks,
    decode_snapshot,
)
from ciuic.repository.snapshots import UNREADABLE_MARKS, CommittedSnapshots, resolve
from ciuic.types import Snapshot, SnapshotId, order_of


class MissingManifest(DamagedSnapshot):
    """A log commits the snapshot, and its manifest is not there."""


class Manifests:
    """Manifests of one space of a remote. May be used from several threads."""

    def __init__(
        self,
        space: Remote,
        cache: CacheDirectory,
        logs: LogReader | None = None,
        *,
        prefer: Callable[[Iterable[PackRef], int], None] = lambda refs, around_ns: None,
    ) -> None:
        """Take the parts.

        Args:
            space: A remote, or the space of one repository in it.
            cache: Cache of the space.
            logs: Reader of its logs, which says of a missing manifest whether its snapshot was removed; None: it was not.
            prefer: Told of the packs that were uploaded for a snapshot that is to be read, and of its time.
        """
        self._space = space
        self._cache = cache
        self._logs = logs
        self.prefer: Final = prefer
        self._lock = threading.Lock()
        # Digests of manifests that were read from the bucket since `read_anew`; None: the cache is believed.
        self._seen: set[str] | None = None

    def read_anew(self) -> None:
        """Read each manifest from the bucket once more from now on, as a verification of the bucket has to."""
        with self._lock:
            self._seen = set()

    @property
    def url(self) -> str:
        """URL of the space, for messages."""
        return self._space.objects.url

    def path(self, live: LiveManifest) -> str:
        """Return the URL of the manifest of a snapshot."""
        return f"{self._space.objects.url}/{live.manifest}"

    def read(self, live: LiveManifest, *, asks_logs: bool = True) -> RemoteManifest:
        """Return the manifest of a snapshot.

        Args:
            live: What its log says of it.
            asks_logs: Read the logs once more where it is missing; who reads many asks `removed` once for all of them.

        Raises:
            NotFound: the snapshot was removed since the logs were read; only with ``asks_logs``.
            MissingManifest: it is missing.
            DamagedSnapshot: it is not what was committed.
            UnsupportedFormat: a later version of ciuic wrote it.
            RemoteUnreachable: the store did not answer for too long.
        """
        name = live.manifest
        anew = self._seen is not None and live.digest not in self._seen
        data = None if anew else self._cache.load(live.digest)
        # Named by its digest: whatever else lies there is no manifest.
        if data is None or object_digest(data) != live.digest:
            try:
                data = self._fetch(live)
            except MissingManifest:
                if asks_logs and self.removed([live]):
                    raise NotFound(
                        f"the snapshot {live.snapshot} was removed from the remote meanwhile"
                    ) from None
                raise
            self._cache.store(live.digest, data)
            with self._lock:
                if self._seen is not None:
                    self._seen.add(live.digest)
        try:
            return decode_manifest(self._space.sealer, name, data)
        except DamagedRemote as error:
            raise DamagedSnapshot(live.snapshot, error.message) from None

    def _fetch(self, live: LiveManifest) -> bytes:
        try:
            return read_document(self._space.objects, live.manifest, lambda data: _committed(live, data))
        except NoSuchObject:
            raise MissingManifest(
                live.snapshot, f"its manifest {live.manifest} is missing in the remote"
            ) from None
        except DamagedRemote as error:
            raise DamagedSnapshot(live.snapshot, error.message) from None

    def removed(self, lives: Iterable[LiveManifest]) -> set[str]:
        """Return the names of those of these manifests that no log commits any more; reads what is new in the logs."""
        if self._logs is None:
            return set()
        with self._lock:
            self._logs.refresh()
            return {live.manifest for live in lives}.difference(self._logs.live())


def stored_manifest(objects: Objects, sealer: Sealer, name: str) -> LiveManifest | None:
    """Return what a stored manifest says of its snapshot, whatever logs say; None for one that nobody can read."""

    def decode(data: bytes) -> LiveManifest:
        stored = decode_any_snapshot(decode_manifest(sealer, name, data).snapshot)
        return LiveManifest(stored.repository, stored.id, name, object_digest(data))

    try:
        return read_document(objects, name, decode)
    except (NoSuchObject, Damaged, NotFound, UnsupportedFormat):
        return None


def _committed(live: LiveManifest, data: bytes) -> bytes:
    """Return the bytes if they are those that were committed. DamagedSnapshot otherwise."""
    if object_digest(data) != live.digest:
        raise DamagedSnapshot(
            live.snapshot, f"its manifest {live.manifest} in the remote is not the one that was committed"
        )
    return data


# Manifests that are read at the same time.
_THREADS: Final = 8
_RANDOM_DIGITS: Final = 8
_DIGEST_DIGITS: Final = 32

# Inside the class, `list` is the method.
_Infos = list[SnapshotInfo]
_Loaded = tuple[list[Snapshot], list[UnreadableSnapshot]]
_Kept = TypeVar("_Kept", Snapshot, SnapshotInfo)
_LoadedAs = tuple[list[_Kept], list[UnreadableSnapshot]]


class CommittedEntry(NamedTuple):
    """Snapshot that a log commits."""

    live: LiveManifest
    manifests: Manifests
    """Manifests of its space."""
    also: tuple[str, ...] = ()
    """Further manifests that commit the same snapshot."""
    is_given_up: bool = False
    """A log has given it up, and no collection has deleted its manifest."""

    @property
    def host(self) -> str:
        """Label of the host, as in the name of the manifest, which the log's seal covers."""
        name = parse_manifest(self.live.manifest)
        return "" if name is None else name.host

    @property
    def exact_host(self) -> str:
        """Label of the host and the beginning of the manifest's random part, for hosts of one name."""
        name = parse_manifest(self.live.manifest)
        return "" if name is None else f"{name.host}~{name.random[:_RANDOM_DIGITS]}"

    @property
    def unique_host(self) -> str:
        """Label of the host and a digest of where the manifest is, which no other manifest has, whatever name its writer chose."""
        return f"{self.host}~{object_digest(self.manifests.path(self.live).encode())[:_DIGEST_DIGITS]}"

    @property
    def origin(self) -> str:
        """Label of the host and the beginning of its repository's id, for hosts of one name and for several repositories of a host."""
        return f"{self.host}~{self.live.repository[:_RANDOM_DIGITS]}"


class RemoteSnapshots(CommittedSnapshots):
    """Committed snapshots of a remote. May be used from several threads.

    Args:
        entries: Snapshots by their names within the remote, from `named_entries`.
    """

    def __init__(self, entries: Mapping[str, CommittedEntry]) -> None:
        self.entries: Final = dict(entries)
        self._infos: _Infos | None = None

    def only(self, ids: Iterable[str]) -> RemoteSnapshots:
        """Return these snapshots alone."""
        return RemoteSnapshots({id_: self.entries[id_] for id_ in ids})

    def hosts(self) -> list[str]:
        """Return the labels of all hosts."""
        return sorted({entry.host for entry in self.entries.values()})

    def by_origin(self) -> dict[str, RemoteSnapshots]:
        """Return the snapshots of each repository of each host, by the name that `of_host` takes: the host's, where that is enough."""
        found: dict[str, dict[str, list[str]]] = {}
        for id_, entry in self.entries.items():
            found.setdefault(entry.host, {}).setdefault(entry.origin, []).append(id_)
        return {
            host if len(origins) == 1 else origin: self.only(ids)
            for host, origins in sorted(found.items())
            for origin, ids in sorted(origins.items())
        }

    def of_host(self, name: str) -> RemoteSnapshots:
        """Return the snapshots of one host, or of one of its repositories.

        Raises:
            NotFound: it has none.
        """
        label = as_label(name)
        chosen = [
            id_
            for id_, entry in self.entries.items()
            if entry.host == label
            or ("~" in name and name in (entry.exact_host, entry.unique_host, entry.origin))
        ]
        if not chosen:
            known = ", ".join(self.hosts()) or "none"
            raise NotFound(f"the remote has no snapshot of a host {name}", hint=f"hosts there are: {known}")
        return self.only(chosen)

    def labelled(
        self,
        job: str | None = None,
        epoch: int | None = None,
        step: int | None = None,
        host: str | None = None,
    ) -> RemoteSnapshots:
        """Return the snapshots with these labels alone; None: any. No manifest is read.

        Raises:
            NotFound: no snapshot is of this host.
        """
        chosen = self if host is None else self.of_host(host)
        label = None if job is None else as_label(job)

        def fits(name: ManifestName) -> bool:
            pairs = (label, name.job), (epoch, name.epoch), (step, name.step)
            return all(wanted is None or wanted == found for wanted, found in pairs)

        ids = [id_ for id_ in chosen.entries if (name := chosen.label(id_)) is not None and fits(name)]
        return chosen.only(ids)

    def label(self, id_: str) -> ManifestName | None:
        """Return job, epoch, step and host of a snapshot, from the name of its manifest."""
        entry = self.entries.get(id_)
        return None if entry is None else parse_manifest(entry.live.manifest)

    def names(self) -> set[str]:
        """Return the names of all snapshots, readable or not."""
        return set(self.entries)

    def infos(self) -> _Infos:
        """Return a line of `list` for each snapshot that can be read."""
        # Read once: manifests never change, and this object has the snapshots of one moment.
        if self._infos is None:
            # Not by way of `load_all`: what a root's entry says takes many times the memory of its line.
            self._infos = self._load_each(info_of)[0]
        return list(self._infos)

    def load(self, id_: SnapshotId) -> Snapshot:
        """Return the snapshot with its marks applied; its packs are looked into first from now on."""
        entry = self.entries.get(id_)
        if entry is None:
            raise NotFound(f"the remote has no snapshot {id_}", hint="ciuic list shows those there are.")
        snapshot, packs = self._load(id_, entry)
        entry.manifests.prefer(packs, snapshot.time_ns)
        return snapshot

    def _load(
        self, id_: str, entry: CommittedEntry, *, asks_logs: bool = True
    ) -> tuple[Snapshot, Sequence[PackRef]]:
        live = entry.live
        manifest = entry.manifests.read(live, asks_logs=asks_logs)
        stored = decode_snapshot(live.snapshot, manifest.snapshot, live.repository)
        snapshot = apply_marks(stored, _marks(live.snapshot, manifest.marks))
        if snapshot.id != id_:
            snapshot = msgspec.structs.replace(snapshot, id=SnapshotId(id_))
        return snapshot, [PackRef(ref) for ref in manifest.packs]

    def load_all(self) -> _Loaded:
        """Return every snapshot, newest first, and those that cannot be read; several manifests are read at a time."""
        return self._load_each(lambda snapshot: snapshot)

    def _load_each(self, keep: Callable[[Snapshot], _Kept]) -> _LoadedAs[_Kept]:
        """Return what is to be kept of every snapshot, newest first, and the snapshots that cannot be read."""
        missing: list[CommittedEntry] = []

        def load(name: str) -> _Kept | UnreadableSnapshot:
            entry = self.entries[name]
            try:
                return keep(self._load(name, entry, asks_logs=False)[0])
            except (Damaged, UnsupportedFormat) as error:
                if isinstance(error, MissingManifest):
                    missing.append(entry)
                return UnreadableSnapshot(name, self.path(name), error.message)

        with ThreadPoolExecutor(_THREADS) as pool:
            results = list(pool.map(load, sorted(self.entries)))
        loaded = [one for one in results if not isinstance(one, UnreadableSnapshot)]
        loaded.sort(key=order_of, reverse=True)
        # Asked once: a log may commit tens of thousands that never were there.
        removed = {
            (manifests, name)
            for manifests in {entry.manifests for entry in missing}
            for name in manifests.removed(one.live for one in missing if one.manifests is manifests)
        }
        unreadable = [one for one in results if isinstance(one, UnreadableSnapshot)]
        return loaded, [
            one
            for one in unreadable
            if (self.entries[one.id].manifests, self.entries[one.id].live.manifest) not in removed
        ]

    def path(self, id_: str) -> str:
        """Return the URL of the manifest."""
        entry = self.entries.get(id_)
        return "" if entry is None else entry.manifests.path(entry.live)

    def resolve(self, text: str, root: bytes | None = None) -> SnapshotId:
        """Return the name of the snapshot that ``text`` means; see `CommittedSnapshots.resolve`.

        ``JOB@STEP`` is the newest state of a training with this step, ``JOB@`` before any other text what that text
        means among the states of this training.

        Raises:
            NotFound: no snapshot fits, or no host of that name has one.
            UsageError: ``text`` is ambiguous: the ids that it could be are named.
        """
        if (of_set := self._resolve_of_set(text)) is not None:
            return of_set
        host, slash, rest = text.rpartition("/")
        if slash:
            return self.of_host(host).resolve(rest, root)
        job, at, rest = text.rpartition("@")
        if at:
            return self._resolve_of_job(job, rest, root)
        plain: dict[str, list[str]] = {}
        for id_, entry in self.entries.items():
            plain.setdefault(entry.live.snapshot, []).append(id_)
        if not plain:
            raise NotFound("the remote has no snapshot", hint="ciuic remote status on its hosts says why")
        found = resolve(text, plain, lambda: self.list(root=root, safety=False))
        # The name of a snapshot, from a list, or the id of one or more.
        names = plain.get(found, [found])
        if len(names) > 1:
            raise UsageError(
                f"{text} is a snapshot of several hosts: {', '.join(sorted(names))}",
                hint="name the host as well",
            )
        return SnapshotId(names[0])

    def _resolve_of_job(self, job: str, rest: str, root: bytes | None) -> SnapshotId:
        of_job = self.labelled(job)
        if not of_job.entries:
            jobs = sorted({name.job for id_ in self.entries if (name := self.label(id_)) is not None})
            raise NotFound(
                f"the remote has no training {job}", hint=f"jobs there are: {', '.join(jobs) or 'none'}"
            )
        if not rest.isdecimal():
            return of_job.resolve(rest, root)
        at_step = of_job.labelled(step=int(rest))
        # A step that was trained again after a resume is there twice: the newer one is the run's own.
        found = at_step.list(root=root, limit=1)
        if not found:
            steps = sorted({name.step for id_ in of_job.entries if (name := self.label(id_)) is not None})
            raise NotFound(
                f"{job} has no state of step {rest}",
                hint=f"its last steps are: {', '.join(map(str, steps[-8:]))}",
            )
        return found[0].id


def named_entries(entries: Sequence[CommittedEntry]) -> dict[str, CommittedEntry]:
    """Return committed snapshots by names that are unique: their ids, with the host where an id occurs twice.

    A snapshot that was committed twice, as by two uploaders of one cloned disk, is there once.
    """
    counts = Counter(entry.live.snapshot for entry in entries)
    named = {entry.live.snapshot: entry for entry in entries if counts[entry.live.snapshot] == 1}
    again: dict[str, list[CommittedEntry]] = {}
    for entry in sorted(entries, key=lambda entry: entry.live.manifest):
        if counts[entry.live.snapshot] > 1:
            again.setdefault(entry.live.snapshot, []).append(entry)
    for id_, several in again.items():
        several = _different(several)
        if len(several) == 1:
            named[id_] = several[0]
            continue
        hosts = Counter(entry.host for entry in several)
        exact = Counter(entry.exact_host for entry in several)
        for entry in several:
            # Each writer draws the random part itself, so that one may repeat that of another.
            host = entry.exact_host if exact[entry.exact_host] == 1 else entry.unique_host
            named[f"{entry.host if hosts[entry.host] == 1 else host}/{id_}"] = entry
    return named


def _different(entries: Sequence[CommittedEntry]) -> list[CommittedEntry]:
    """Return the entries without those that commit the same bytes of the same repository as one before."""
    found: dict[tuple[str, bytes], CommittedEntry] = {}
    for entry in entries:
        try:
            content = entry.manifests.read(entry.live, asks_logs=False).snapshot
        except (Damaged, UnsupportedFormat):
            # Equal to nothing: it stays, and is reported when it is loaded.
            content = entry.live.manifest.encode()
        key = (entry.live.repository, content)
        first = found.setdefault(key, entry)
        if first is not entry:
            found[key] = first._replace(also=(*first.also, entry.live.manifest))
    return list(found.values())


def _marks(id_: str, data: bytes) -> StoredMarks:
    if not data:
        return StoredMarks(id=id_)
    try:
        return decode_marks(id_, data)
    except (DamagedSnapshot, UnsupportedFormat) as error:
        events.warning("marks_unreadable", snapshot=id_, error=str(error))
        return StoredMarks(id=id_, held=True, hold_reason=UNREADABLE_MARKS)
