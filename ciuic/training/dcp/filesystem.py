"""`FileSystemWriter` and `FileSystemReader`: torch's names and arguments, over a repository.

    from ciuic.training.dcp import FileSystemReader, FileSystemWriter    # instead of torch.distributed.checkpoint
    dcp.save(state_dict, storage_writer=FileSystemWriter("checkpoints/step-100"))
    dcp.load(state_dict, storage_reader=FileSystemReader("checkpoints/step-100"))

A checkpoint is a directory, as with torch's classes: ``checkpoint_id`` is its path, `.metadata` in it appears
when the checkpoint is complete, and the directory can be moved, copied and removed. Its content is a repository
`ciuic` inside, in which the last save is kept; or with ``repository=`` one repository for many directories, which
stores once what the checkpoints have in common, and in which ``max_snapshots`` decides what is kept.

What is guaranteed, and what is refused, is as for `dcp.storage`.
"""

from __future__ import annotations

import os
import threading
import uuid
import warnings
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from torch.distributed.checkpoint import filesystem as of_torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ciuic.errors import CiuicError, NotFound
from ciuic.training.dcp.metadata import (
    CheckpointPointer,
    find_snapshot,
    pointer_path,
    read_checkpoint_pointer,
    write_checkpoint_pointer,
)
from ciuic.training.dcp.reading import HERE, CiuicStorageReader
from ciuic.training.dcp.storage import CiuicStorageWriter
from ciuic.training.remote.copies import RemoteCandidate
from ciuic.training.remote.place import Remotes
from ciuic.training.results import EXIT_SECONDS

__all__ = ["FileSystemReader", "FileSystemWriter"]

# Below the checkpoint's directory, which may contain other files (a config.json, an export).
_OWN_REPOSITORY: Final = "ciuic"
_NAME: Final = "dcp"
# torch 2.6 has no formats.
_TORCH_SAVE: Final = getattr(getattr(of_torch, "SerializationFormat", None), "TORCH_SAVE", None)
_DCP_VERSION: Final = getattr(of_torch, "CURRENT_DCP_VERSION", "1.0.0")


def _is_local_path(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Return whether a checkpoint can be saved there: a path below a directory that can be written to."""
    if isinstance(checkpoint_id, Path):
        return True
    text = os.fspath(checkpoint_id)
    return "://" not in text and any(
        parent.exists() and os.access(parent, os.W_OK) for parent in Path(text).parents
    )


class FileSystemWriter(StorageWriter, AsyncStager):
    """Storage writer and stager with the interface of torch's class of this name.

    Attributes:
        path: Directory of the checkpoint that is saved next.
        save_id: Id of the save, new with every `reset`.
        last_id: Id of the last snapshot, on the coordinator.
    """

    _synchronize_after_execute = False
    _store: CiuicStorageWriter | None
    _opened: tuple[Path, str] | None
    """Repository and name of the run of `_store`."""
    _finalizer: weakref.finalize[Any, Any] | None

    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Sequence[Any] | None = None,
        serialization_format: Any = _TORCH_SAVE,
        *,
        repository: str | os.PathLike[str] | None = None,
        max_snapshots: int | None = None,
        nice: int = 10,
        compression: str = "none",
        remote: Remotes = None,
    ) -> None:
        """Choose where to save; nothing is written before the first save.

        Args:
            path: Directory of the checkpoint.
            single_file_per_rank: Without effect: large shards always have files of their own.
            sync_files: Without effect: a checkpoint is always durable when its save returns.
            thread_count: Without effect: the writer process stores.
            per_thread_copy_ahead: Without effect.
            cache_staged_state_dict: Without effect: `stage` always copies into memory that is used again.
            overwrite: Whether a checkpoint that is there is replaced, by one step; otherwise it is an error.
            _extensions: torch's `ZStandard` alone, which stands for ``compression="small"``.
            serialization_format: Without effect: tensors are stored as safetensors.
            repository: Directory of a repository for many checkpoints; None: one in each checkpoint.
            max_snapshots: Number of newest checkpoints that stay in ``repository``; None keeps all.
            nice: Niceness of the writer process.
            compression: As of `CiuicStorageWriter`.
            remote: Remotes to which each checkpoint is uploaded, as of `SnapshotManager`; with ``repository`` alone.

        Raises:
            ValueError: There is a remote and no ``repository``, whose one upload serves all checkpoints.
            NotImplementedError: An extension that rewrites the bytes of files, for example to encrypt them.
        """
        super().__init__()
        self.path = Path(path)
        self.single_file_per_rank = single_file_per_rank
        self.sync_files = sync_files
        self.thread_count = thread_count
        self.per_thread_copy_ahead = per_thread_copy_ahead
        self.cache_staged_state_dict = cache_staged_state_dict
        self.overwrite = overwrite
        self.serialization_format = serialization_format
        self.save_id = str(uuid.uuid4())
        self.rank: int | None = None
        self.use_collectives = True
        self.last_id = ""
        if remote is not None and repository is None:
            raise ValueError(
                "remote= goes with repository=: one directory from which all checkpoints are uploaded"
            )
        self._shared = None if repository is None else Path(os.path.abspath(os.fspath(repository)))
        self._options: dict[str, Any] = {
            "max_snapshots": 1 if repository is None else max_snapshots,
            "nice": nice,
            "compression": "small" if _is_compressing(_extensions) else compression,
            "remote": remote,
        }
        self._forget_store()

    # -- torch's StorageWriter, in the order in which it is called

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether it is a local path at which a checkpoint can be saved."""
        return _is_local_path(checkpoint_id)

    @property
    def checkpoint_id(self) -> Path:
        """Directory of the checkpoint."""
        return self.path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a save, in another directory if one is given."""
        if checkpoint_id:
            self.path = Path(checkpoint_id)
        self.save_id = str(uuid.uuid4())

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take the rank from torch, and whether ranks save together."""
        self.rank = kwargs.get("rank")
        self.use_collectives = kwargs.get("use_collectives", True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Open the repository on this rank, and return the plan as it is.

        Raises:
            RuntimeError: There is a checkpoint, and it must not be overwritten.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        # torch's ranks that save alone look for that of rank 0 too.
        if os.path.lexists(pointer_path(self.path, None if self.use_collectives else 0)):
            if not self.overwrite:
                raise RuntimeError(f"Checkpoint already exists and {self.overwrite=}.")
            warnings.warn(f"a checkpoint in {self.path} is replaced, since {self.overwrite=}", stacklevel=2)
        store = self._open_store()
        store.tags = (self.save_id,)
        store.reset(str(self._absolute_path))
        store.set_up_storage_writer(is_coordinator=False, rank=self.rank)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Claim the repository on the coordinator, before any rank stores."""
        return self._open_store().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Store this rank's part; it is durable when the returned future is done, which it is at once."""
        return self._open_store().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make the checkpoint, on the coordinator; it is durable on return.

        Raises:
            OSError: There is no new checkpoint; one that was there before still is.
        """
        store = self._open_store()
        metadata.version = _DCP_VERSION
        metadata.storage_meta = self.storage_meta()
        store.finish(metadata, results)
        self.last_id = store.last_id
        pointer = CheckpointPointer(
            repository=self._named_repository(),
            name=self._name,
            tag=self.save_id,
            path=str(self._absolute_path),
        )
        alone = self.rank if not self.use_collectives else None
        write_checkpoint_pointer(pointer_path(self._absolute_path, alone), pointer)

    def storage_meta(self) -> StorageMeta | None:
        """Return the directory and the save's id for torch's metadata."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    # -- torch's AsyncStager

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy the state into memory that is shared with the writer process."""
        return self._open_store().stage(state_dict)

    def synchronize_staging(self) -> None:
        """Do nothing: `stage` returns when the copy is complete."""

    def wait_remote(self, timeout_seconds: float = EXIT_SECONDS) -> bool:
        """Wait until every remote has stored the newest checkpoint; as of `CiuicStorageWriter`."""
        return self._open_store().wait_remote(timeout_seconds)

    def close(self) -> None:
        """Let the writer process end; a later save starts another. Not required: the end of the object does it."""
        with self._lock:
            if self._finalizer is not None:
                self._finalizer()
            self._store = self._finalizer = None

    # -- inside

    @property
    def _absolute_path(self) -> Path:
        return Path(os.path.abspath(self.path))

    @property
    def _name(self) -> str:
        """Name of the run in the repository: ranks that save alone keep their checkpoints apart."""
        return _NAME if self.use_collectives or self.rank is None else f"{_NAME}-rank-{self.rank}"

    @property
    def _repository_dir(self) -> Path:
        return self._shared or self._absolute_path / _OWN_REPOSITORY

    def _named_repository(self) -> str:
        """Return the repository's path for the pointer: relative where both may be moved together."""
        path, repository = self._absolute_path, self._repository_dir
        return (
            os.path.relpath(repository, path) if repository.is_relative_to(path.parent) else str(repository)
        )

    def _open_store(self) -> CiuicStorageWriter:
        """Return the writer of the repository; open it, and close that of another."""
        wanted = self._repository_dir, self._name
        # `dcp.async_save` writes on a thread of its own while the training stages the next state.
        with self._lock:
            if self._store is not None and self._opened == wanted:
                return self._store
            self.close()
            store = CiuicStorageWriter(wanted[0], name=wanted[1], **self._options)
            # torch's writers need no `close`, so programs have none.
            self._finalizer = weakref.finalize(self, _close, store, os.getpid())
            self._store, self._opened = store, wanted
            return store

    def _forget_store(self) -> None:
        self._lock = threading.RLock()
        self._store = self._opened = self._finalizer = None

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but the writer process: `dcp.async_save` sends writers to a process of its own."""
        left_out = ("_lock", "_store", "_opened", "_finalizer")
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget_store()


class FileSystemReader(CiuicStorageReader):
    """Storage reader with the interface of torch's class of this name.

    Attributes:
        path: Directory of the checkpoint.
        load_id: Id of the load, new with every `reset`.
    """

    def __init__(
        self, path: str | os.PathLike[str], _extension_registry: Any = None, *, remote: Remotes = None
    ) -> None:
        """Choose what to load; nothing is read yet.

        Args:
            path: Directory of the checkpoint.
            _extension_registry: Without effect: what is stored was not rewritten by extensions.
            remote: Remotes, as of `SnapshotManager`, from which the newest checkpoint that was saved at this path
                is read where the directory has none.
        """
        super().__init__(Path(path) / _OWN_REPOSITORY, remote=remote)
        self.path = Path(path)
        self.load_id = str(uuid.uuid4())

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether it is a local path."""
        return _is_local_path(checkpoint_id)

    @property
    def checkpoint_id(self) -> Path:
        """Directory of the checkpoint."""
        return self.path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a load, from another directory if one is given."""
        super().reset()
        if checkpoint_id:
            self.path = Path(checkpoint_id)
        self.load_id = str(uuid.uuid4())

    def find(self) -> str | None:
        """Return the id of the snapshot that the next load will read; None if there is no checkpoint."""
        try:
            return self._find().id
        except FileNotFoundError:
            return None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the checkpoint's metadata; with ``rank`` that of a rank that saved alone.

        Raises:
            FileNotFoundError: There is no complete checkpoint in the directory.
            NotFound: Its snapshot was removed from the repository.
            Damaged: It cannot be read.
            ValueError: torch's own writer, or a later version of ciuic, wrote it.
        """
        # Read anew each time, as torch's class does: the checkpoint may have been overwritten.
        self._rank = kwargs.get("rank")
        self._metadata = None
        metadata = super().read_metadata()
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = self.load_id
        return metadata

    _rank: int | None = None

    def _find(self) -> RemoteCandidate:
        """Return the snapshot that `.metadata` names; where there is none, the newest of this path on a remote."""
        try:
            pointer = read_checkpoint_pointer(pointer_path(self.path, self._rank))
        except FileNotFoundError:
            if not self._source.has_remotes:
                raise
            try:
                return self._source.tagged(os.path.abspath(self.path))
            except NotFound as error:
                raise FileNotFoundError(f"there is no checkpoint in {self.path}: {error.message}") from error
        self.save_dir = Path(os.path.abspath(self.path / pointer.repository))
        self._source.save_dir = self.save_dir
        return RemoteCandidate(HERE, 0, 0, find_snapshot(self.save_dir, pointer))


def _is_compressing(extensions: Sequence[Any] | None) -> bool:
    """Return whether the extensions ask for compression.

    Raises:
        NotImplementedError: One is another kind of extension.
    """
    for one in extensions or ():
        # Ignoring an extension that encrypts would store what must not be stored.
        if type(one).__name__ != "ZStandard" or not type(one).__module__.startswith("torch."):
            raise NotImplementedError(
                f"_extensions: {type(one).__name__} would rewrite the bytes that are stored, which ciuic could then "
                "neither check nor share between checkpoints; ZStandard is possible"
            )
    return bool(extensions)


def _close(store: CiuicStorageWriter, pid: int) -> None:
    """Close a store of this process; a forked child must leave its parent's alone."""
    if os.getpid() == pid:
        with suppress(OSError, CiuicError):
            store.close()
