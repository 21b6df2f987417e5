"""`StorageReader` of `torch.distributed.checkpoint` over a repository and its remotes; see `dcp.storage`.

Of a shard that is cut anew (saved by n ranks, loaded by m) a rank reads only the rows it needs.

Guarantees: the newest snapshot is the newest of both, the local repository and the remotes; a remote that cannot be read
is an error where the local repository has nothing, and a warning where it has something. The local repository is never
made.
"""

from __future__ import annotations

import io
import os
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ciuic import __version__
from ciuic.errors import CiuicError, Damaged, NotFound
from ciuic.repository import Repository, SnapshotInfo
from ciuic.training import ranks
from ciuic.training.dcp.metadata import METADATA_FILE, ItemLocation, decode_metadata
from ciuic.training.dcp.rank_files import OBJECTS_FILE, OBJECTS_VERSION, loaded_ns
from ciuic.training.format import structure
from ciuic.training.format.layout import SUFFIX
from ciuic.training.format.reading import NoUsableSnapshot, PassedOver
from ciuic.training.format.stored_files import (
    RangeReader,
    ReadFrom,
    SnapshotRef,
    arrays_of,
)
from ciuic.training.free_resources import reader_count
from ciuic.training.json_documents import decode_json
from ciuic.training.logs import log
from ciuic.training.remote.copies import RemoteCandidate, RemoteTraining
from ciuic.training.remote.place import Remotes, place_of
from ciuic.training.writer.housekeeping import read_back

if TYPE_CHECKING:
    from ciuic.config import RemoteConfig


HERE = ""
"""Name of a candidate's remote if it is in the local repository."""


class _SnapshotSource:
    """Snapshots of one run, here and on its remotes. Connects when it is asked for what is not here."""

    def __init__(self, save_dir: Path, root: bytes, remotes: Sequence[RemoteConfig] = ()) -> None:
        """Open nothing yet.

        Args:
            save_dir: Local repository; need not exist where there are remotes.
            root: Path of the run in its snapshots.
            remotes: Remotes of the run.
        """
        self.save_dir = save_dir
        self._root = root
        self._remotes = tuple(remotes)
        self._training = RemoteTraining(self._remotes, root)

    @property
    def has_remotes(self) -> bool:
        """True if there are remotes."""
        return bool(self._remotes)

    def named(self, wanted: str) -> RemoteCandidate:
        """Return the snapshot with a tag (the newest that has it), an id or its beginning, or another name of one.

        The local repository comes first: a remote is asked for what it lacks.

        Raises:
            NotFound: There is no such snapshot.
            CiuicError: A remote cannot be read.
        """
        try:
            with Repository.open(self.save_dir) as repository:
                return RemoteCandidate(HERE, 0, 0, _named(repository, self._root, wanted))
        except NotFound:
            if not self._remotes:
                raise
        self._look_again()
        return self._training.named(lambda repository: _named(repository, self._root, wanted))

    def tagged(self, tag: str) -> RemoteCandidate:
        """Return the newest snapshot on a remote that has a tag; raises as `named`."""
        self._look_again()
        return self._training.named(lambda repository: _tagged(repository, self._root, tag))

    def newest_whole(self, passed_over: list[PassedOver]) -> RemoteCandidate:
        """Return the newest whole snapshot.

        One of the local repository is read through, because a damaged one must be found before it overwrites a
        part of the state. One of a remote is checked while it is loaded: reading it twice would cost twice.

        Args:
            passed_over: Takes newer snapshots that are damaged.

        Raises:
            NoUsableSnapshot: There are snapshots, and none is whole.
            NotFound: There is none.
            CiuicError: There is none here, and a remote cannot be read.
        """
        here = self._here()
        if self._remotes:
            self._look_again()
            for one in self._elsewhere(bool(here)):
                if not here or one.time_ns > here[0].time_ns:
                    loaded_ns[self._root] = max(one.time_ns, loaded_ns.get(self._root, 0))
                    return one
                break
        with Repository.open(self.save_dir) as repository:
            for info in here:
                reason = read_back(repository, info.id)
                if not reason:
                    return RemoteCandidate(HERE, 0, info.time_ns, info.id)
                log.warning("ciuic: %s is damaged and passed over: %s", info.id, reason)
                passed_over.append(PassedOver(info.id, reason))
        if passed_over and (others := self._elsewhere(True)):
            log.warning("ciuic: no snapshot here is whole, so that a remote is read")
            return others[0]
        if passed_over:
            raise NoUsableSnapshot(passed_over)
        raise NotFound(f"there is no checkpoint of {os.fsdecode(self._root)[1:]} in {self.save_dir}")

    def place(self, candidate: RemoteCandidate) -> ReadFrom:
        """Return where a candidate is read from, until `close` or the next search.

        Raises:
            CiuicError: The remote cannot be read.
        """
        return str(self.save_dir) if candidate.remote == HERE else self._training.opener(candidate)

    def close(self) -> None:
        self._training.close()

    def _here(self) -> list[SnapshotInfo]:
        if self._remotes and not Repository.exists(self.save_dir):
            return []
        with Repository.open(self.save_dir) as repository:
            return repository.snapshots.list(root=self._root)

    def _elsewhere(self, may_fail: bool) -> list[RemoteCandidate]:
        """Return the snapshots on remotes, newest first; none where these cannot be read and need not."""
        try:
            return self._training.candidates()
        except CiuicError as error:
            if not may_fail:
                raise
            log.warning("ciuic: loading from this directory without looking at the remote: %s", error.message)
            return []

    def _look_again(self) -> None:
        """Forget what the remotes had: there may be newer snapshots."""
        self._training.close()
        self._training = RemoteTraining(self._remotes, self._root)


def _named(repository: Repository, root: bytes, wanted: str) -> str:
    # A checkpoint id is a tag; ids of snapshots and times come after.
    try:
        return _tagged(repository, root, wanted)
    except NotFound:
        return repository.snapshots.resolve(wanted)


def _tagged(repository: Repository, root: bytes, tag: str) -> str:
    found = repository.snapshots.list(root=root, tag=tag, limit=1)
    if not found:
        raise NotFound(f"there is no checkpoint {tag} of {os.fsdecode(root)[1:]}")
    return found[0].id


class CiuicStorageReader(StorageReader):
    """Storage reader for any number of loads, one after the other, by any number of ranks."""

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        snapshot: str | None = None,
        *,
        name: str = "dcp",
        process_group: Any = None,
        remote: Remotes = None,
    ) -> None:
        """Choose what to read.

        With neither ``snapshot`` nor the ``checkpoint_id`` of `dcp.load`, the newest whole snapshot is read.
        Rank 0 looks for it by reading it all, and every rank of the process group must load then. With remotes the
        newest is that of any host; it is checked while it is loaded, and each rank reads its part alone.

        Args:
            save_dir: directory of the repository, or the URL of a remote; need not exist where there is a remote.
            snapshot: a tag (the newest that has it), an id or its beginning, ``latest~2``, a time.
            name: name of the run, as of the writer.
            process_group: ranks that load together; None for torch's default group.
            remote: remotes, as of `SnapshotManager`, from which a snapshot is read that is not here.
        """
        place = place_of(save_dir, remote)
        self.save_dir = Path(place.directory)
        self.id = ""
        """Id of the snapshot that is read."""
        self.passed_over: list[PassedOver] = []
        """Newer snapshots that are damaged, and why; on rank 0."""
        self._root = os.fsencode(f"/{name}")
        self._given = self._wanted = snapshot or ""
        self._group = process_group
        self._metadata: Metadata | None = None
        self._source = _SnapshotSource(self.save_dir, self._root, place.remotes)
        self._chosen: RemoteCandidate | None = None
        """Result of `find`, for the next load."""
        self._place: ReadFrom = str(self.save_dir)
        self._fixed_place: ReadFrom | None = None
        weakref.finalize(self, self._source.close)

    @classmethod
    def of(cls, snapshot: SnapshotRef) -> CiuicStorageReader:
        """Return a reader of one snapshot, wherever it is."""
        reader = cls(os.curdir, snapshot.id)
        reader._chosen = RemoteCandidate(HERE, 0, 0, snapshot.id)
        reader._fixed_place = snapshot.path
        return reader

    def find(self) -> str | None:
        """Return the id of what the next load without a ``checkpoint_id`` will read. Collective.

        Returns:
            The id; None if there is no checkpoint, so that the run begins.

        Raises:
            NoUsableSnapshot: there are checkpoints, and none is whole.
        """
        try:
            # Kept for the next load, which must read this snapshot even if a newer one is made meanwhile.
            self._chosen = self._find()
        # dcp.load wraps every error in one of its own, so a run that begins could not be told from a damaged
        # repository there.
        except NotFound:
            return None
        self._given = self._wanted = self._chosen.id
        return self._given

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether it is a non-empty text."""
        return bool(os.fspath(checkpoint_id))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a load."""
        self._wanted = os.fspath(checkpoint_id) if checkpoint_id else self._given
        self._metadata, self.id = None, ""
        if self._chosen is not None and self._wanted != self._chosen.id:
            self._chosen = None

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return the checkpoint's metadata.

        Raises:
            NotFound: there is no such snapshot.
            Damaged: it cannot be read; `NoUsableSnapshot` if none can.
            ValueError: a later version wrote it.
        """
        if self._metadata is None:
            found = self._chosen or self._find()
            self.id, self._place = found.id, self._fixed_place or self._source.place(found)
            with self._snapshot.open() as files:
                self._metadata = decode_metadata(files.read(METADATA_FILE))
            meta = self._metadata.storage_meta or StorageMeta()
            meta.checkpoint_id = meta.checkpoint_id or self.id
            self._metadata.storage_meta = meta
        return self._metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Take the metadata from torch."""
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's items into the planner's tensors.

        Raises:
            Damaged: content is not as it was saved; part of the target state may have been overwritten.
        """
        objects = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        wanted = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        threads = reader_count()
        with (
            closing(RangeReader(self._snapshot)) as source,
            ThreadPoolExecutor(threads, "ciuic-load") as pool,
        ):
            # A few reads at a time keep memory small.
            for first in range(0, len(wanted), threads):
                some = wanted[first : first + threads]
                for item, tensor in zip(some, pool.map(partial(self._read_item, source), some), strict=True):
                    _put(item, tensor, planner)
        self._load_objects(objects, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    # -- inside

    @property
    def _snapshot(self) -> SnapshotRef:
        return SnapshotRef(self._place, self.id)

    def _find(self) -> RemoteCandidate:
        """Return the snapshot to read."""
        if self._wanted:
            return self._source.named(self._wanted)
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size(self._group) == 1:
            return self._newest_whole()
        return self._agree_on_newest()

    def _agree_on_newest(self) -> RemoteCandidate:
        """Return the snapshot that rank 0 found; ranks must not read different ones."""
        found: list[Any] = [["", 0, 0, ""], "", False]
        data = None
        if dist.get_rank(self._group) == 0:
            try:
                # Rank 0 alone: reading a whole snapshot on every rank would cost as many times its size.
                found[0] = list(self._newest_whole())
            except (CiuicError, OSError) as error:
                found = [["", 0, 0, ""], str(error), isinstance(error, NotFound)]
            data = ranks.encode(found)
        try:
            candidate, problem, is_absent = ranks.decode(ranks.broadcast(data, self._group))
            chosen = RemoteCandidate(*candidate)
        except (ValueError, TypeError) as error:
            raise Damaged(f"rank 0 sent no valid id of a snapshot: {error}") from None
        # Errors are told to all ranks too: one that raised alone would leave the others waiting.
        if problem:
            raise NotFound(problem) if is_absent else Damaged(problem)
        return chosen

    def _newest_whole(self) -> RemoteCandidate:
        passed_over: list[PassedOver] = []
        found = self._source.newest_whole(passed_over)
        self.passed_over = passed_over
        return found

    def _read_item(self, source: RangeReader, item: ReadItem) -> torch.Tensor:
        """Return the item's part of its stored shard, verified."""
        assert self._metadata is not None
        index = item.storage_index
        tensor = self._metadata.state_dict_metadata[index.fqn]
        assert isinstance(tensor, TensorStorageMetadata)
        sizes = next(chunk.sizes for chunk in tensor.chunks if chunk.offsets == index.offset)
        place: ItemLocation = self._metadata.storage_data[index]
        found: torch.Tensor = source.read_block(
            place.path, place.start, tensor.properties.dtype, sizes, item.storage_offsets, item.lengths
        )
        return found

    def _load_objects(self, items: list[ReadItem], planner: LoadPlanner) -> None:
        assert self._metadata is not None
        folders: dict[str, dict[str, Any]] = {}
        for item in items:
            place: ItemLocation = self._metadata.storage_data[item.storage_index]
            if place.path not in folders:
                folders[place.path] = read_objects(self._snapshot, place.path)
            try:
                value = folders[place.path][item.storage_index.fqn]
            except KeyError:
                raise Damaged(f"{item.storage_index.fqn} is not in {place.path}/{OBJECTS_FILE}") from None
            # Planners take what torch.save writes. These bytes are made here from checked JSON: nothing that
            # was stored is unpickled.
            made = io.BytesIO()
            torch.save(value, made)
            made.seek(0)
            planner.load_bytes(item, made)


def _put(item: ReadItem, tensor: torch.Tensor, planner: LoadPlanner) -> None:
    """Copy an item into the planner's tensor."""
    # Detached: torch refuses to change a leaf that requires gradients in place.
    target = planner.resolve_tensor(item).detach()
    if target.size() != tensor.size():
        raise ValueError(
            f"{item.storage_index.fqn}: expected shape {tuple(tensor.size())} as saved, "
            f"got {tuple(target.size())}"
        )
    target.copy_(tensor)
    planner.commit_tensor(item, target)


def read_objects(snapshot: SnapshotRef, folder: str) -> dict[str, Any]:
    """Return the objects that `RankFiles.add_objects` stored in a folder, by full name.

    Raises:
        ValueError: a later version wrote them, or they are malformed.
    """
    with snapshot.open() as files:
        document = decode_json(files.read(f"{folder}/{OBJECTS_FILE}"), f"{folder}/{OBJECTS_FILE}")
        if not isinstance(document, dict) or document.get("version") != OBJECTS_VERSION:
            raise ValueError(
                f"{folder}/{OBJECTS_FILE} was written by a later version of ciuic than {__version__}"
            )
        beside = f"{folder}_objects"
        names = [name for name in files.names() if name.startswith(f"{beside}/") and name.endswith(SUFFIX)]
        lookup = arrays_of(snapshot, files, names).lookup(beside)
        found = structure.unpack(document["objects"], lookup)
    if not isinstance(found, dict):
        raise ValueError(
            f"{folder}/{OBJECTS_FILE} is malformed: expected a mapping, got {type(found).__name__}"
        )
    return found
