"""Replication of one repository to one remote.

Guarantees: a snapshot's commit is created only when every chunk that it refers to, with all bases, is in a
pack that is stored and that no collection has condemned as far as this log knows; a collection that the log
does not know yet has a fence in it before the commit (docs/remote-format.md, section 8). After SIGKILL the
next process goes on at the next object: packs that were stored and not committed are asked for, not sent
again. The repository is only read.

The newest snapshot goes first: it is what a lost host is resumed from.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from ciuic.errors import NotFound
from ciuic.remote.access.remote import Remote
from ciuic.remote.format.manifest import RemoteManifest, encode_manifest, object_digest
from ciuic.remote.format.names import PackRef, manifest_name
from ciuic.remote.index.remote_index import RemoteIndex
from ciuic.remote.log.writer_log import WriterLog
from ciuic.remote.upload.local_copies import LocalCopies
from ciuic.remote.upload.missing import WholeSnapshots
from ciuic.remote.upload.outbox import Outbox, persist
from ciuic.remote.upload.pack_size import PackSize
from ciuic.remote.upload.packing import Packing
from ciuic.remote.upload.uncommitted import UncommittedPacks
from ciuic.repository import Repository
from ciuic.repository import log as events
from ciuic.repository.config import read_file
from ciuic.repository.packs.pack_directory import Packs
from ciuic.types import Snapshot, SnapshotId

_Result = TypeVar("_Result")


class Labels(NamedTuple):
    """Labels of a snapshot for people; nothing depends on them."""

    job: str = ""
    """Name of the training; empty for a snapshot of files."""
    epoch: int | None = None
    step: int | None = None


class UploadedSnapshot(NamedTuple):
    """Snapshot that was committed on the remote."""

    id: SnapshotId
    manifest: str
    sent_bytes: int
    seconds: float


class Uploader:
    """Replication of one repository to one remote. For one thread."""

    def __init__(
        self,
        repository: Repository,
        packs: Packs,
        remote: Remote,
        log: WriterLog,
        index: RemoteIndex,
        uncommitted: UncommittedPacks,
        *,
        host: str,
        stop: threading.Event,
        bytes_per_second: float | None = None,
        labels: Callable[[Repository, Snapshot], Labels] = lambda repository, snapshot: Labels(),
        step: Callable[[], None] = lambda: None,
        problem: Callable[[str], None] = lambda text: None,
        sent: Callable[[int], None] = lambda size_bytes: None,
    ) -> None:
        """Take the parts; `begin` contacts the remote.

        Args:
            repository: Open repository; only read.
            packs: Packs of it.
            remote: Space of this repository in the remote.
            log: Log of this uploader in that space.
            index: Index of that space.
            uncommitted: Packs that earlier processes stored, and that no commit names.
            host: Name for people.
            stop: Set when the uploader has to end.
            bytes_per_second: Limit of the rate; None for none.
            labels: Names a snapshot for people.
            step: Called between pieces of work; pauses while others need the disk.
            problem: Told in words what is waited for; with an empty text when it is over.
            sent: Told of bytes that were handed over to be sent.
        """
        self._repository = repository
        self._copies = LocalCopies(repository, packs)
        self._remote = remote
        self._log = log
        self._index = index
        self._uncommitted = uncommitted
        self._host = host
        self._stop = stop
        self._labels = labels
        self._step = step
        self._problem = problem
        self._sent = sent
        self._whole = WholeSnapshots()
        self._size = PackSize(bytes_per_second)
        self._checked = -1
        self._previous = ""

    def begin(self) -> None:
        """Say hello in the log, and learn what is stored; also what an earlier process stored and did not commit.

        Raises:
            Stopped: the uploader was told to end.
            RolledBack: the remote is older than this host knows it to be.
            DamagedRemote: a log or round cannot be read.
        """
        self._persist(self._log.hello)
        self._refresh()

    def _refresh(self) -> None:
        self._whole.forget()
        self._index.follow(self._log.rounds)
        self._checked = self._log.rounds.version
        found = self._persist(lambda: self._index.refresh(self._remote.objects, self._remote.sealer))
        for ref, reason in found.unreadable.items():
            events.warning("remote_pack_unreadable", pack=ref, reason=reason)

    def upload(self, id_: SnapshotId) -> UploadedSnapshot:
        """Store the snapshot; on return it is committed on the remote.

        Raises:
            NotFound: the snapshot was removed meanwhile.
            Damaged: it cannot be read here; nothing of it was committed.
            Stopped: the uploader was told to end.
        """
        began = time.monotonic()
        snapshot = self._repository.snapshots.load(id_)
        sent_bytes = 0
        while True:
            if self._log.rounds.version != self._checked:
                # What only a removed snapshot still needed may be condemned now.
                self._refresh()
            checked = self._checked
            sent_bytes += self._store_chunks(snapshot)
            refs = self._uncommitted.refs
            # Under a new name each time: what an earlier attempt stored may be condemned.
            name, digest = self._store_manifest(snapshot, refs)
            if self._commit(snapshot.id, name, digest, refs, checked):
                break
        self._uncommitted.clear()
        self._whole.add()
        self._previous = digest
        return UploadedSnapshot(snapshot.id, name, sent_bytes, time.monotonic() - began)

    def give_up(self, manifests: Sequence[str]) -> None:
        """Give up the snapshots of these manifests; durable on return. A collection frees their space.

        Raises:
            Stopped: the uploader was told to end.
        """
        self._persist(lambda: self._log.remove(manifests))

    def _store_chunks(self, snapshot: Snapshot) -> int:
        outbox = Outbox(self._remote.objects, self._stop, self._size, problem=self._problem)
        packing = Packing(self._remote.sealer, self._index, outbox, self._size, self._uncommitted.add)
        try:
            for missing in self._whole.missing(self._repository, packing, snapshot):
                self._step()
                chunk = self._copies.read(missing)
                packing.put(chunk, missing.kind)
                self._sent(len(chunk.data))
            packing.finish()
        except BaseException:
            outbox.abandon()
            packing.settle()
            raise
        outbox.close()
        return packing.sent_bytes

    def _store_manifest(self, snapshot: Snapshot, refs: Sequence[PackRef]) -> tuple[str, str]:
        labels = self._labels(self._repository, snapshot)
        name = manifest_name(job=labels.job or "files", epoch=labels.epoch, step=labels.step, host=self._host)
        store = self._repository.snapshots
        try:
            marks = read_file(store.marks_path(snapshot.id))
        except FileNotFoundError:
            marks = b""
        try:
            file = read_file(store.path(snapshot.id))
        except FileNotFoundError:
            raise NotFound(f"the snapshot {snapshot.id} was removed while it was uploaded") from None
        manifest = RemoteManifest(
            snapshot=file,
            marks=marks,
            packs=tuple(refs),
            writer=self._log.writer,
            host=self._host,
            job=labels.job,
            epoch=labels.epoch,
            step=labels.step,
            previous=self._previous,
        )
        data = encode_manifest(self._remote.sealer, name, manifest)
        self._persist(lambda: self._remote.objects.put(name, [data]))
        return name, object_digest(data)

    def _commit(self, id_: SnapshotId, name: str, digest: str, refs: Sequence[PackRef], checked: int) -> bool:
        return self._persist(
            lambda: self._log.commit(
                snapshot=str(id_),
                manifest=name,
                digest=digest,
                packs=refs,
                checked=checked,
            )
        )

    def _persist(self, request: Callable[[], _Result]) -> _Result:
        return persist(request, self._stop, self._problem)
