"""`torch.distributed.checkpoint` over a ciuic repository: states that are sharded over ranks (FSDP2, DTensor, tensor parallel).

    from torch.distributed import checkpoint as dcp
    from ciuic.training.dcp import CiuicStorageReader, CiuicStorageWriter
    writer = CiuicStorageWriter("./snapshots", max_snapshots=10)             # on every rank, once
    dcp.save(state_dict, checkpoint_id="step-100", storage_writer=writer)    # or dcp.async_save
    reader = CiuicStorageReader("./snapshots")
    if reader.find() is not None:                                            # any number of ranks
        dcp.load(state_dict, storage_reader=reader)

Guarantees: a snapshot exists when every rank has stored its part, and not before: each rank's writer process stores in its turn, and
then the coordinator's makes one snapshot of it all. A rank that dies in the middle leaves none. Nothing is pickled, and loading
executes nothing that was stored: what is no tensor is JSON (`structure`), and what only pickle could store is refused. What is
loaded was checked byte for byte.

The directory must be the same for all ranks: one host's, or a shared file system with flock(2).
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ciuic.repository import Repository
from ciuic.repository.claim import Claim
from ciuic.training.dcp_metadata import METADATA_FILE, Place, encode_metadata
from ciuic.training.dcp_part import Part
from ciuic.training.dcp_reading import CiuicStorageReader
from ciuic.training.dcp_staging import InArena, copied, on_heap, room_for
from ciuic.training.messages import (
    COMPRESSIONS,
    Begin,
    FromWriter,
    Manifest,
    Measured,
    Note,
    Notice,
    NotSaved,
    Put,
    Rules,
    Saved,
    StoredFile,
)
from ciuic.training.messages import Part as PartMessage
from ciuic.training.places import ensure_repository
from ciuic.training.preservation import Latest
from ciuic.training.reading import FACTS_FILE, Facts
from ciuic.training.writer_client import GONE, Slot, WriterClient, files_of

__all__ = ["TAG", "CiuicStorageReader", "CiuicStorageWriter"]
log = logging.getLogger("ciuic")

TAG: Final = "dcp"
_STATES: Final = slice(0, 2)
_METADATA: Final = slice(2, 3)
"""Which arenas are for what: the end of one save must not wait for the beginning of others."""
_POLL_SECONDS: Final = 0.005
_CLOSE_SECONDS: Final = 120.0


class _Written(NamedTuple):
    """What a rank tells the coordinator of one item."""

    place: Place
    files: tuple[StoredFile, ...]
    """All that the rank stored, with its first item; () with the others."""


class _Staged(NamedTuple):
    slot: Slot
    placed: InArena


class CiuicStorageWriter(StorageWriter, AsyncStager):
    """One for each rank, for all saves of a run. It is the stager of `dcp.async_save` as well."""

    _synchronize_after_execute = False

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        *,
        name: str = "dcp",
        max_snapshots: int | None = None,
        tags: tuple[str, ...] = (),
        nice: int = 10,
        compression: str = "none",
    ) -> None:
        """Opens the repository at ``save_dir``, or makes one there. ``max_snapshots``: so many of the newest stay; None keeps all.
        ``name``: of the run, where several share a repository. ``nice``, ``compression``: as of `SnapshotManager`; codecs make
        it a quarter smaller and take as long again as writing it. ValueError; CiuicError or OSError."""
        if compression not in COMPRESSIONS:
            raise ValueError(f"compression is one of {', '.join(COMPRESSIONS)}, not {compression!r}")
        self.save_dir = Path(os.path.abspath(os.fspath(save_dir)))
        self.tags = tags
        self.step: int | None = None
        """The program's to set, with the next two; the coordinator's are kept with the snapshot."""
        self.epoch: int | None = None
        self.metrics: dict[str, float] = {}
        self.last_id = ""
        """Of the snapshot that was made last; on the coordinator."""
        ensure_repository(self.save_dir)
        rules = Rules(keep=() if max_snapshots is None else (Latest(max_snapshots),))
        begin = Begin(
            repository=str(self.save_dir),
            root=os.fsencode(f"/{name}"),
            rules=rules,
            nice=nice,
            compression=compression,
        )
        self._client = WriterClient(begin, arenas=3)
        self._lock = threading.RLock()  # `dcp.async_save` writes in a thread of its own
        self._answers: dict[int, list[FromWriter]] = {}
        self._staged: list[_Staged] = []
        self._claim: Claim | None = None
        self._checkpoint_id = ""
        self._rank = 0

    # -- torch's StorageWriter, in the order in which it is called

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any text: it becomes a tag."""
        return bool(os.fspath(checkpoint_id))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._checkpoint_id = os.fspath(checkpoint_id) if checkpoint_id else ""
        self._release()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise ValueError("a snapshot is made of all ranks' parts, so use_collectives=False cannot be")
        self._rank = kwargs.get("rank") or 0

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator, before any rank stores: from here until the snapshot is made, nothing is swept."""
        self._release()
        with Repository.open(self.save_dir) as repository:
            self._claim = repository.claim()
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            results = self._write(plan, planner)
        except BaseException:
            self._release()
            raise
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator: the snapshot exists on return. OSError: there is none."""
        try:
            self._commit(metadata, results)
        finally:
            self._release()

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self._checkpoint_id or None)

    # -- torch's AsyncStager

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy of it, in memory that the writer process has as well. Waits while both arenas are still being written."""
        size_bytes = room_for(state_dict)
        with self._lock:
            slot = self._free_slot(2 * size_bytes if size_bytes < 1 << 20 else size_bytes + (size_bytes >> 4))
            if slot is None:
                return dict(copied(state_dict, on_heap))
            assert slot.arena is not None
            memory = memoryview(slot.arena.map)
            slot.layout = None  # not a `staging.stage` layout any more
            slot.staged = weakref.ref(memory)
            placed = InArena(memory, slot.arena)
            self._staged.append(_Staged(slot, placed))
        try:
            return dict(copied(state_dict, placed))
        finally:
            placed.wait()

    def synchronize_staging(self) -> None:
        """Nothing is left to wait for when `stage` has returned."""

    def close(self) -> None:
        """Waits for the writer process and lets it go. To be called after the last save."""
        self._release()
        with self._lock:
            self._client.close(_CLOSE_SECONDS)

    # -- inside

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        if not isinstance(planner, DefaultSavePlanner):
            raise TypeError(
                "the planner is no DefaultSavePlanner, so what it makes of objects could be read by pickle alone"
            )
        found = [(item, item.type == WriteItemType.BYTE_IO) for item in plan.items]
        objects = {item.index.fqn: planner.lookup_object(item.index) for item, plain in found if plain}
        values = [(item, _tensor(planner.resolve_data(item))) for item, plain in found if not plain]
        with self._lock:
            staged = self._staged_for([tensor.data_ptr() for _, tensor in values])
            part = Part(self._rank, staged.placed.end, staged.placed.starts) if staged else Part(self._rank)
            part.add_tensors(values)
            part.add_objects(objects)
            manifest = self._manifest("", part, [])
            if staged and not _fits(staged.slot, part, manifest):
                part, staged = Part(self._rank), None
                part.add_tensors(values)
                part.add_objects(objects)
                manifest = self._manifest("", part, [])
            number = self._submit(part, manifest, staged.slot if staged else None, commit=False)
        said = self._wait(number)
        if staged:
            staged.slot.staged = None  # whoever still looks at it has no business with it any more
        files = tuple(file for one in said if isinstance(one, PartMessage) for file in one.files)
        return _results(part, plan, files)

    def _commit(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places: dict[MetadataIndex, Place] = {}
        stored: list[StoredFile] = []
        for result in (one for of_rank in results for one in of_rank):
            written: _Written = result.storage_data
            places[result.index] = written.place
            stored += written.files
        facts = Facts(
            step=self.step,
            epoch=self.epoch,
            metrics=self.metrics,
            reason="torch.distributed.checkpoint",
            objects=tuple(dict.fromkeys(name.partition(".")[0] for name in metadata.state_dict_metadata)),
            world_size=len(results),
            size_bytes=sum(file.size_bytes for file in stored),
        )
        part = Part(self._rank)
        part.add_file(METADATA_FILE, encode_metadata(metadata, places))
        part.add_file(FACTS_FILE, msgspec.json.format(msgspec.json.encode(facts), indent=1))
        with self._lock:
            manifest = self._manifest(_message(self._checkpoint_id, facts), part, stored)
            number = self._submit(part, manifest, None, commit=True)
        for answer in self._wait(number):
            if isinstance(answer, Saved):
                self.last_id = answer.id
        metadata.storage_data = places

    def _manifest(self, message: str, part: Part, stored: list[StoredFile]) -> Manifest:
        own = (self._checkpoint_id,) if self._checkpoint_id else ()
        return Manifest(
            time_ns=time.time_ns(),
            message=message,
            tags=(TAG, *own, *self.tags),
            files=files_of(part.files),
            stored=stored,
        )

    def _submit(self, part: Part, manifest: Manifest, slot: Slot | None, *, commit: bool) -> int:
        """OSError where there is no memory, or no writer."""
        if slot is None:
            slot = self._free_slot(_needed(part, manifest), _METADATA if commit else _STATES)
            if slot is None:
                raise OSError("both arenas hold states that were staged and are not being saved")
            slot.layout = None
        assert slot.arena is not None
        part.fill(slot.arena.memory)
        number = self._client.submit(slot, manifest, part.end, commit=commit)
        self._answers[number] = []
        return number

    def _free_slot(self, size_bytes: int, among: slice = _STATES) -> Slot | None:
        """Waits for the writer; None while nobody writes and what was staged holds all."""
        while (slot := self._client.free_slot(size_bytes, among)) is None and self._client.pending:
            self._hear()
            time.sleep(_POLL_SECONDS)
        return slot

    def _staged_for(self, addresses: list[int]) -> _Staged | None:
        """What was staged and is now to be written."""
        self._staged = [one for one in self._staged if one.slot.staged is not None and one.slot.staged()]
        for one in self._staged:
            if any(address in one.placed.starts for address in addresses):
                return one
        return None

    def _wait(self, number: int) -> list[FromWriter]:
        """Until the writer has done it; what it said. OSError if it could not."""
        while True:
            with self._lock:
                self._hear()
                said = self._answers[number]
                if said and isinstance(said[-1], (Saved, NotSaved, Put)):
                    del self._answers[number]
                    break
            time.sleep(_POLL_SECONDS)
        if isinstance(said[-1], NotSaved):
            raise OSError(f"not saved: {said[-1].reason}")
        return said

    def _hear(self) -> None:
        for message in self._client.poll():
            if isinstance(message, Note):
                if message.text != GONE:
                    log.warning("ciuic: %s", message.text)
            elif not isinstance(message, (Notice, Measured)) and message.number in self._answers:
                self._answers[message.number].append(message)

    def _release(self) -> None:
        claim, self._claim = self._claim, None
        if claim is not None:
            claim.release()


def _tensor(value: object) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError("the planner made bytes of a tensor, which could be read by pickle alone")
    return value


def _results(part: Part, plan: SavePlan, files: tuple[StoredFile, ...]) -> list[WriteResult]:
    results = []
    for item in plan.items:
        written = _Written(part.places[item.index], files)
        results.append(WriteResult(item.index, item.tensor_storage_size() or 0, written))
        files = ()
    return results


def _needed(part: Part, manifest: Manifest) -> int:
    return part.end + len(msgspec.msgpack.encode(manifest))


def _fits(slot: Slot, part: Part, manifest: Manifest) -> bool:
    return slot.arena is not None and _needed(part, manifest) <= slot.arena.size_bytes


def _message(checkpoint_id: str, facts: Facts) -> str:
    parts = [checkpoint_id] if checkpoint_id else []
    parts += [] if facts.epoch is None else [f"epoch {facts.epoch}"]
    parts += [] if facts.step is None else [f"step {facts.step}"]
    parts += [f"{key} {value:.4g}" for key, value in _floats(facts.metrics).items()]
    return ", ".join(parts)


def _floats(metrics: Mapping[str, float]) -> dict[str, float]:
    return {key: float(value) for key, value in metrics.items()}
