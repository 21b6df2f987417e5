"""`StorageReader` of `torch.distributed.checkpoint` over a ciuic repository; see `dcp`.

Of a shard that is cut anew (saved by n ranks, loaded by m) a rank reads the rows it needs and no others.
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ciuic.errors import CiuicError, Damaged, NotFound
from ciuic.repository import Repository
from ciuic.training import rank_messages, structure
from ciuic.training.arrays import arrays_of
from ciuic.training.dcp_metadata import METADATA_FILE, Place, decode_metadata
from ciuic.training.dcp_part import OBJECTS_FILE, OBJECTS_VERSION
from ciuic.training.documents import decode_json
from ciuic.training.files import Files, read_file, top_of
from ciuic.training.housekeeping import read_back
from ciuic.training.layout import SUFFIX
from ciuic.training.reading import NothingGood, PassedOver
from ciuic.training.tensors import empty_buffer
from ciuic.types import Entry, SnapshotId

log = logging.getLogger("ciuic")
_THREADS: Final = 4


class CiuicStorageReader(StorageReader):
    """For one load after the other, of any number of ranks."""

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        snapshot: str | None = None,
        *,
        name: str = "dcp",
        process_group: Any = None,
    ) -> None:
        """``snapshot``, or the ``checkpoint_id`` of `dcp.load`: a tag (the newest that has it), an id or the beginning of one,
        ``latest~2``, a time. With neither: the newest that is whole, which rank 0 of ``process_group`` (the default one) looks for,
        reading it all; then every rank of that must load."""
        self.save_dir = Path(os.path.abspath(os.fspath(save_dir)))
        self.id = ""
        """Of the snapshot that is read."""
        self.passed_over: list[PassedOver] = []
        """Newer ones that are damaged, and why; on rank 0."""
        self._root = os.fsencode(f"/{name}")
        self._given = self._wanted = snapshot or ""
        self._group = process_group
        self._metadata: Metadata | None = None

    def find(self) -> str | None:
        """The id of what the next load without a ``checkpoint_id`` will read; None if there is no checkpoint, so that the run begins.
        To be called by every rank. NothingGood if there are some and none is whole."""
        try:
            self._given = self._wanted = self._find()
        except NotFound:
            return None
        return self._given

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(os.fspath(checkpoint_id))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._wanted = os.fspath(checkpoint_id) if checkpoint_id else self._given
        self._metadata, self.id = None, ""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """NotFound; Damaged, NothingGood; ValueError for a later version's."""
        if self._metadata is None:
            self.id = self._find()
            with Repository.open(self.save_dir) as repository:
                self._metadata = decode_metadata(_files(repository, self.id).read(METADATA_FILE))
            self._metadata.storage_meta = StorageMeta(checkpoint_id=self.id)
        return self._metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Damaged where anything is not as it was saved; then the state it was to be loaded into is in part the old one."""
        objects = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        wanted = [self._rows(item, planner) for item in plan.items if item.type != LoadItemType.BYTE_IO]
        with _Readers(self.save_dir, self.id) as readers:
            for rows, data in readers.read(wanted):
                _put(rows, data, planner)
        self._load_objects(objects, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    # -- inside

    def _find(self) -> str:
        if self._wanted:
            with Repository.open(self.save_dir) as repository:
                tagged = repository.snapshots.list(root=self._root, tag=self._wanted, limit=1)
                return tagged[0].id if tagged else repository.snapshots.resolve(self._wanted)
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size(self._group) == 1:
            return self._newest_whole()
        return self._agreed()

    def _agreed(self) -> str:
        """What rank 0 found, or why it found none, told to all: they must not read different ones."""
        found: list[Any] = ["", "", False]
        data = None
        if dist.get_rank(self._group) == 0:
            try:
                found[0] = self._newest_whole()
            except (CiuicError, OSError) as error:
                found = ["", str(error), isinstance(error, NotFound)]
            data = rank_messages.encode(found)
        try:
            found = list(rank_messages.decode(rank_messages.broadcast(data, self._group)))
        except (ValueError, TypeError) as error:
            raise Damaged(f"which snapshot to read cannot be agreed with rank 0: {error}") from None
        if found[1]:
            raise NotFound(found[1]) if found[2] else Damaged(found[1])
        return str(found[0])

    def _newest_whole(self) -> str:
        passed_over: list[PassedOver] = []
        with Repository.open(self.save_dir) as repository:
            for info in repository.snapshots.list(root=self._root):
                reason = read_back(repository, info.id)
                if not reason:
                    self.passed_over = passed_over
                    return info.id
                log.warning("ciuic: %s is passed over: %s", info.id, reason)
                passed_over.append(PassedOver(info.id, reason))
        if passed_over:
            raise NothingGood(passed_over)
        raise NotFound(f"there is no checkpoint of {os.fsdecode(self._root)[1:]} in {self.save_dir}")

    def _rows(self, item: ReadItem, planner: LoadPlanner) -> _Rows:
        assert self._metadata is not None
        place: Place = self._metadata.storage_data[item.storage_index]
        one = self._metadata.state_dict_metadata[item.storage_index.fqn]
        assert isinstance(one, TensorStorageMetadata)
        sizes = next(chunk.sizes for chunk in one.chunks if chunk.offsets == item.storage_index.offset)
        return _Rows.of(item, place, one.properties.dtype, sizes)

    def _load_objects(self, items: list[ReadItem], planner: LoadPlanner) -> None:
        assert self._metadata is not None
        folders: dict[str, dict[str, Any]] = {}
        for item in items:
            place: Place = self._metadata.storage_data[item.storage_index]
            if place.path not in folders:
                folders[place.path] = _read_objects(self.save_dir, self.id, place.path)
            try:
                value = folders[place.path][item.storage_index.fqn]
            except KeyError:
                raise Damaged(f"{item.storage_index.fqn} is not in {place.path}/{OBJECTS_FILE}") from None
            # Planners take what torch.save writes. These bytes were made here and now: nothing that was stored is unpickled.
            made = io.BytesIO()
            torch.save(value, made)
            made.seek(0)
            planner.load_bytes(item, made)


class _Rows(NamedTuple):
    """What is to be read of one file for one item: whole rows of the shard that it holds."""

    item: ReadItem
    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of what is read; the first dimension is cut."""
    start: int
    """In the file, of the first byte."""
    size_bytes: int

    @classmethod
    def of(cls, item: ReadItem, place: Place, dtype: torch.dtype, sizes: torch.Size) -> _Rows:
        if not sizes:
            return cls(item, place.path, dtype, (), place.start, dtype.itemsize)
        first, number = item.storage_offsets[0], item.lengths[0]
        row_bytes = prod(sizes[1:]) * dtype.itemsize
        shape = (number, *sizes[1:])
        return cls(item, place.path, dtype, shape, place.start + first * row_bytes, number * row_bytes)


def _put(rows: _Rows, data: torch.Tensor, planner: LoadPlanner) -> None:
    tensor = data.view(rows.dtype).view(rows.shape)
    for dimension in range(1, len(rows.shape)):
        tensor = tensor.narrow(dimension, rows.item.storage_offsets[dimension], rows.item.lengths[dimension])
    target = planner.resolve_tensor(rows.item).detach()
    if target.size() != tensor.size():
        raise ValueError(
            f"{rows.item.storage_index.fqn} is {tuple(tensor.size())}, and {tuple(target.size())} is asked for"
        )
    target.copy_(tensor)
    planner.commit_tensor(rows.item, target)


class _Readers:
    """Threads, each with a repository of its own. As many reads are under way as there are threads, so memory stays small."""

    def __init__(self, save_dir: Path, id_: str) -> None:
        self._files: list[tuple[Repository, Files]] = []
        self._save_dir, self._id = save_dir, id_

    def __enter__(self) -> _Readers:
        for _ in range(_THREADS):
            repository = Repository.open(self._save_dir)
            self._files.append((repository, _files(repository, self._id)))
        return self

    def __exit__(self, *exception: object) -> None:
        for repository, _ in self._files:
            repository.close()

    def read(self, wanted: list[_Rows]) -> Iterator[tuple[_Rows, torch.Tensor]]:
        with ThreadPoolExecutor(_THREADS, "ciuic-load") as pool:
            for first in range(0, len(wanted), _THREADS):
                some = wanted[first : first + _THREADS]
                yield from zip(some, pool.map(_read_rows, self._files, some), strict=False)


def _read_rows(source: tuple[Repository, Files], rows: _Rows) -> torch.Tensor:
    """The bytes, checked."""
    repository, files = source
    entry = files.entry(rows.path)
    if rows.start + rows.size_bytes > entry.size_bytes:
        raise Damaged(f"{rows.path} is shorter than {METADATA_FILE} has it")
    if not rows.size_bytes:
        return torch.empty(0, dtype=torch.uint8)
    first, start, stop = _blocks(entry, rows, repository.block_size)
    room, memory = empty_buffer(stop - start)
    read_file(repository, entry, memory, first)
    data: torch.Tensor = room[rows.start - start : rows.start - start + rows.size_bytes]
    # A view of another dtype must begin at a multiple of its size.
    return data if data.storage_offset() % rows.dtype.itemsize == 0 else data.clone()


def _blocks(entry: Entry, rows: _Rows, block_size: int) -> tuple[int, int, int]:
    """(first block, its first byte, the byte behind the last block) that hold them."""
    first = rows.start // block_size
    stop = -(-(rows.start + rows.size_bytes) // block_size) * block_size
    return first, first * block_size, min(stop, entry.size_bytes)


def _files(repository: Repository, id_: str) -> Files:
    snapshot = repository.snapshots.load(SnapshotId.parse(id_))
    return Files(repository, top_of(snapshot.roots[0].entry if snapshot.roots else None, id_))


def _read_objects(save_dir: Path, id_: str, folder: str) -> dict[str, Any]:
    with Repository.open(save_dir) as repository:
        files = _files(repository, id_)
        document = decode_json(files.read(f"{folder}/{OBJECTS_FILE}"), f"{folder}/{OBJECTS_FILE}")
        if not isinstance(document, dict) or document.get("version") != OBJECTS_VERSION:
            raise ValueError(f"{folder}/{OBJECTS_FILE} was written by a later version of ciuic")
        beside = f"{folder}_objects"
        names = [name for name in files.names() if name.startswith(f"{beside}/") and name.endswith(SUFFIX)]
        lookup = arrays_of(str(save_dir), files, names).lookup(beside)
        found = structure.unpack(document["objects"], lookup)
    if not isinstance(found, dict):
        raise ValueError(f"{folder}/{OBJECTS_FILE} is not as it should be")
    return found
