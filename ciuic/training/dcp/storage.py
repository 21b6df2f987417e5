"""Storage of `torch.distributed.checkpoint` over a repository, for states that are sharded over ranks.

Such states are those of FSDP2, DTensor and tensor parallelism.

    from torch.distributed import checkpoint as dcp
    from ciuic.training.dcp.storage import CiuicStorageReader, CiuicStorageWriter
    writer = CiuicStorageWriter("./snapshots", max_snapshots=10)             # on every rank, once
    dcp.save(state_dict, checkpoint_id="step-100", storage_writer=writer)    # or dcp.async_save
    reader = CiuicStorageReader("./snapshots")
    if reader.find() is not None:                                            # any number of ranks
        dcp.load(state_dict, storage_reader=reader)

Guarantees: a snapshot exists when every rank has stored its part, and not before: each rank's writer process
stores in its turn, then the coordinator's makes one snapshot of all parts. A rank that dies in the middle
leaves none. Nothing is pickled, and loading executes nothing that was stored: objects that are no tensors are
JSON (`structure`), and what only pickle could store is refused. Loaded content was checked byte for byte.

The directory must be the same for all ranks: one host's, or a shared file system with flock(2).

References:
    docs/decisions/ranks-in-turn.md
"""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ciuic.system.slurm import job_tags
from ciuic.training.dcp.metadata import METADATA_FILE, ItemLocation, encode_metadata
from ciuic.training.dcp.rank_files import (
    ArenaPlacer,
    PartsWriter,
    RankFiles,
    arena_bytes,
    copy_state,
    copy_to_heap,
    fits,
)
from ciuic.training.dcp.reading import CiuicStorageReader
from ciuic.training.format.reading import FACTS_FILE, Facts, encode_facts, facts_summary
from ciuic.training.remote.copies import RemoteProgress
from ciuic.training.remote.place import Remotes, place_of
from ciuic.training.results import EXIT_SECONDS
from ciuic.training.writer.client import Slot
from ciuic.training.writer.messages import StoredFile

__all__ = ["TAG", "CiuicStorageReader", "CiuicStorageWriter"]

TAG: Final = "dcp"


class _StagedState(NamedTuple):
    """State in an arena that `write_data` will submit."""

    slot: Slot
    placed: ArenaPlacer


class CiuicStorageWriter(StorageWriter, AsyncStager):
    """Storage writer and stager of one rank, for all saves of a run."""

    # torch need not call `synchronize_staging`: the copy is complete when `stage` returns.
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
        remote: Remotes = None,
    ) -> None:
        """Open the repository at ``save_dir``, or create one there.

        Args:
            save_dir: directory of the repository; or the URL of a remote, as of `SnapshotManager`.
            name: name of the run, where several share a repository.
            max_snapshots: number of newest snapshots that stay; None keeps all.
            tags: tags of every snapshot.
            nice: niceness of the writer process.
            compression: as of `SnapshotManager`; codecs make a state a quarter smaller and take as long again
                as writing it.
            remote: remotes to which each snapshot is uploaded, as of `SnapshotManager`; the same on all ranks.

        Raises:
            ValueError: an option is out of its range.
            CiuicError: there can be no repository at ``save_dir``.
            OSError: the same, as the file system says it.
        """
        place = place_of(save_dir, remote)
        self.save_dir = Path(place.directory)
        self.tags = tags
        self.step: int | None = None
        """Step of the training, set by the program like `epoch` and `metrics`; the coordinator's are stored
        with the snapshot.
        """
        self.epoch: int | None = None
        self.metrics: dict[str, float] = {}
        self.last_id = ""
        """Id of the last snapshot, on the coordinator."""
        self._parts = PartsWriter(self.save_dir, name, max_snapshots, nice, compression, place.remotes)
        self._staged: list[_StagedState] = []
        self._checkpoint_id = ""
        self._rank = 0

    # -- torch's StorageWriter, in the order in which it is called

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether it is a non-empty text; it becomes a tag."""
        return bool(os.fspath(checkpoint_id))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a save."""
        # torch calls no `finish` where a rank has failed: the claim of that save ends here.
        self._checkpoint_id = os.fspath(checkpoint_id) if checkpoint_id else ""
        self._parts.release()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take the rank from torch.

        Raises:
            ValueError: `use_collectives=False`, with which no rank knows of the others' parts.
        """
        if not kwargs.get("use_collectives", True):
            raise ValueError("use_collectives=False is not supported: a snapshot is made of all ranks' parts")
        self._rank = kwargs.get("rank") or 0

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Claim the repository on the coordinator, before any rank stores.

        Nothing is swept until the commit.
        """
        self._parts.claim()
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Store this rank's part; it is durable when the returned future is done, which it is at once."""
        try:
            results = self._write(plan, planner)
        except BaseException:
            # A claim of a save that failed must not outlive it: nothing is swept while there is one.
            self._parts.release()
            raise
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make the snapshot, on the coordinator.

        Raises:
            OSError: there is no snapshot.
        """
        try:
            self._commit(metadata, results)
        finally:
            self._parts.release()

    def storage_meta(self) -> StorageMeta | None:
        """Return the checkpoint's id for torch's metadata."""
        return StorageMeta(checkpoint_id=self._checkpoint_id or None)

    # -- torch's AsyncStager

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy the state into memory that is shared with the writer process.

        Waits while both arenas are being written.
        """
        size_bytes = arena_bytes(state_dict)
        with self._parts.lock:
            # With room for headers, objects and the manifest. A guess: what does not fit goes to another
            # arena (`_fits`).
            slot = self._parts.free_slot(
                2 * size_bytes if size_bytes < 1 << 20 else size_bytes + (size_bytes >> 4)
            )
            if slot is None:
                # Both arenas hold states that were staged and not submitted: this copy will be copied once
                # more.
                return dict(copy_state(state_dict, copy_to_heap))
            assert slot.arena is not None
            memory = memoryview(slot.arena.map)
            slot.layout = None  # a cached layout of `save_pipeline` is not valid any more
            # torch keeps the copy as long as it likes: the slot is free when nothing refers to this memory
            # any more.
            slot.staged = weakref.ref(memory)
            placed = ArenaPlacer(memory, slot.arena)
            self._staged.append(_StagedState(slot, placed))
        try:
            return dict(copy_state(state_dict, placed))
        finally:
            placed.wait()

    def synchronize_staging(self) -> None:
        """Do nothing: `stage` returns when the copy is complete."""

    def wait_remote(self, timeout_seconds: float = EXIT_SECONDS) -> bool:
        """Wait until every remote has stored the newest snapshot; on the coordinator.

        Returns:
            Whether that came in time.

        Raises:
            ValueError: There is no remote.
        """
        return self._parts.copies.wait_newest(self._parts.root, timeout_seconds)

    def remote_status(self) -> list[RemoteProgress]:
        """Return how far each remote is; contacts nothing."""
        return self._parts.copies.progress()

    def close(self) -> None:
        """Wait for the writer process and let it end. Call it after the last save.

        An upload goes on without this process.
        """
        self._parts.close()

    # -- inside

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """Store this rank's part and return what torch collects of it."""
        if not isinstance(planner, DefaultSavePlanner):
            raise TypeError(
                f"the planner must derive from DefaultSavePlanner, got {type(planner).__name__}: "
                "others encode objects so that only pickle could read them"
            )
        found = [(item, item.type == WriteItemType.BYTE_IO) for item in plan.items]
        objects = {item.index.fqn: planner.lookup_object(item.index) for item, plain in found if plain}
        values = [(item, _as_tensor(planner.resolve_data(item))) for item, plain in found if not plain]
        # torch passes nothing from `stage` to `write_data` but the state: the addresses of its tensors tell
        # where it is.
        with self._parts.lock:
            staged = self._staged_for([tensor.data_ptr() for _, tensor in values])
            part = self._lay_out(values, objects, staged)
            if staged and not fits(staged.slot, part):
                staged = None
                part = self._lay_out(values, objects, None)
            number = self._parts.begin(part, staged.slot if staged else None)
        files = self._parts.wait_stored(number)
        if staged:
            # Stored: references that torch still has to the copy no longer keep the arena from being filled.
            staged.slot.staged = None
        return _item_results(part, plan, files)

    def _lay_out(
        self,
        values: list[tuple[WriteItem, torch.Tensor]],
        objects: dict[str, Any],
        staged: _StagedState | None,
    ) -> RankFiles:
        """Return this rank's files, around a staged state if there is one."""
        part = RankFiles(self._rank)
        if staged is not None:
            part = RankFiles(self._rank, staged.placed.end, staged.placed.starts)
        part.add_tensors(values)
        part.add_objects(objects)
        return part

    def _commit(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make the snapshot of all ranks' parts."""
        places: dict[MetadataIndex, ItemLocation] = {}
        stored: list[StoredFile] = []
        for result in (one for of_rank in results for one in of_rank):
            written: _ItemResult = result.storage_data
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
        metadata.storage_meta = metadata.storage_meta or self.storage_meta()
        part = RankFiles(self._rank)
        part.add_file(METADATA_FILE, encode_metadata(metadata, places))
        part.add_file(FACTS_FILE, encode_facts(facts))
        own = (self._checkpoint_id,) if self._checkpoint_id else ()
        message = ", ".join(filter(None, (self._checkpoint_id, facts_summary(facts))))
        self.last_id = self._parts.commit(part, stored, message, (TAG, *own, *job_tags(), *self.tags))
        metadata.storage_data = places

    def _staged_for(self, addresses: list[int]) -> _StagedState | None:
        """Return the staged state to which one of these tensors belongs."""
        # States whose copies torch has dropped will not be submitted any more.
        self._staged = [one for one in self._staged if one.slot.staged is not None and one.slot.staged()]
        for one in self._staged:
            if any(address in one.placed.starts for address in addresses):
                return one
        return None


class _ItemResult(NamedTuple):
    """Result of writing one item, sent from a rank to the coordinator."""

    place: ItemLocation
    files: tuple[StoredFile, ...]
    """All files of the rank, with its first item; () with the others."""


def _item_results(part: RankFiles, plan: SavePlan, files: tuple[StoredFile, ...]) -> list[WriteResult]:
    """Return torch's result of each item."""
    results = []
    for item in plan.items:
        written = _ItemResult(part.places[item.index], files)
        results.append(WriteResult(item.index, item.tensor_storage_size() or 0, written))
        # Sent once, with the first item.
        files = ()
    return results


def _as_tensor(value: object) -> torch.Tensor:
    """Return the value as a tensor.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError("the planner encoded a tensor as bytes, which only pickle could read")
    return value
