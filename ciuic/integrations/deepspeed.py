"""DeepSpeed: a checkpoint engine that stores what `save_checkpoint` saves as one snapshot of all ranks.

    engine, *_ = deepspeed.initialize(model=model, config=config)
    save_in(engine, "./snapshots", max_snapshots=10)
    engine.save_checkpoint("checkpoints")              # as before; ZeRO 0 to 3
    engine.load_checkpoint("checkpoints")

Where a framework creates the engine (Hugging Face `Trainer`, Accelerate's `save_state` and `load_state`):

    with snapshot_checkpoints("./snapshots", max_snapshots=10):
        trainer.train(resume_from_checkpoint=…)

Guarantees: when `save_checkpoint` returns, the checkpoint of all ranks is durable and whole, or every rank has the
same error and an earlier checkpoint of the same tag is as it was. `.metadata` in the checkpoint's directory names the
snapshot; the files that DeepSpeed looks for are there by name alone. `latest` names a whole checkpoint whenever the
process is killed: it is replaced before DeepSpeed writes it, and mended by the next engine. Nothing is pickled and nothing unpickled: what
only pickle could store is refused by its path.

Not supported: tools that read those files with torch.load (`zero_to_fp32.py`, `ds_to_universal`), before
`export_checkpoint` has written them; checkpoints that DeepSpeed's own engines have saved; offload to NVMe, whose files
DeepSpeed copies by itself. Pipelines and experts were not tried.
"""

from __future__ import annotations

import os
import sys
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from torch import distributed as dist

from ciuic.errors import CiuicError
from ciuic.repository import Repository
from ciuic.system.disk import Disk
from ciuic.training import ranks
from ciuic.training.dcp.metadata import (
    POINTER_FILE,
    CheckpointPointer,
    find_snapshot,
    pointer_path,
    read_checkpoint_pointer,
    write_checkpoint_pointer,
)
from ciuic.training.dcp.rank_files import PartsWriter, RankFiles
from ciuic.training.dcp.reading import read_objects
from ciuic.training.format import structure
from ciuic.training.format.reading import FACTS_FILE, Facts, encode_facts
from ciuic.training.format.stored_files import SnapshotRef
from ciuic.training.format.tensors import Unsaveable
from ciuic.training.logs import quietly
from ciuic.training.remote.place import Remotes, place_of
from ciuic.training.writer.messages import StoredFile

TAG: Final = "deepspeed"
_STATE: Final = "state"
"""Name of what one call of `save` was given, in its folder of the snapshot."""
_LATEST_FILE: Final = "latest"
_LATEST_TAG: Final = "latest:"
"""Begin of the tag of a snapshot that `latest` is to name; DeepSpeed's tag follows."""
_STAND_IN: Final = b'{"ciuic": "the content is in the snapshot that .metadata names"}\n'
_VALUES: Final = (
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
    ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
)
"""Classes of DeepSpeed's own values in a state, of which the attributes are stored."""
_KNOWN_KINDS: Final = (
    ("deepspeed.utils.tensor_fragment", "fragment_address"),
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"),
    ("deepspeed.runtime.zero.config", "OffloadDeviceEnum"),
)
"""Named tuples and enums of DeepSpeed in a state."""
_Value = TypeVar("_Value")


class SnapshotCheckpointEngine(CheckpointEngine):  # type: ignore[misc, unused-ignore]
    """Checkpoint engine of one rank; DeepSpeed calls its methods in the order in which they stand here."""

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        *,
        name: str = "deepspeed",
        max_snapshots: int | None = None,
        nice: int = 10,
        compression: str = "none",
        remote: Remotes = None,
    ) -> None:
        """Open the repository at ``save_dir``, or create one there. Every rank gives the same arguments.

        Args:
            save_dir: Directory of the repository; on a file system that all ranks share.
            name: Name of the run, where several share a repository.
            max_snapshots: Number of newest checkpoints that stay; None keeps all.
            nice: Niceness of the writer process.
            compression: As of `SnapshotManager`.
            remote: Remotes to which each checkpoint is uploaded, as of `SnapshotManager`.

        Raises:
            ValueError: An option is out of its range.
            CiuicError: There can be no repository at ``save_dir``.
        """
        super().__init__()
        self.name = type(self).__name__
        place = place_of(save_dir, remote)
        self.save_dir = Path(place.directory)
        self.last_id = ""
        """Id of the last snapshot, on every rank."""
        self._run = name
        self._parts = PartsWriter(self.save_dir, name, max_snapshots, nice, compression, place.remotes)
        self._directory = ""
        """Directory of the checkpoint that is being saved."""
        self._collective = False
        """True once every rank is known to save this checkpoint."""
        self._stored: dict[str, int] = {}
        """Folders in the snapshot, and the numbers under which the writer process stores them."""
        self._problem = ""
        # DeepSpeed ends only engines that write on their own.
        self._finalizer = weakref.finalize(self, _close, self._parts, os.getpid())
        if _rank() == 0:
            # Rank 0 alone must not raise: the others wait for it.
            with quietly("it is not known whether `latest` names a whole checkpoint"):
                self._complete_last_save()
        # The other ranks read `latest` next.
        _broadcast(True if _rank() == 0 else None)

    def create(self, info: Any) -> None:
        """Begin a checkpoint."""
        self._directory = os.path.abspath(os.path.join(info.save_dir, info.tag))
        self._collective, self._stored, self._problem = False, {}, ""
        # On each rank: from here to the commit no snapshot refers to what it stores.
        self._parts.claim()

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a directory."""
        os.makedirs(path, exist_ok=exist_ok)
        # DeepSpeed makes the checkpoint's own directory on every rank, and on none for a file of rank 0 alone
        # (save_16bit_model): only the first kind is committed by all.
        self._collective = self._collective or os.path.abspath(path) == self._directory

    def save(self, state_dict: Any, path: str) -> None:
        """Copy the state and begin to store it; `commit` reports what fails.

        A file outside of the checkpoint's directory, such as that of `save_16bit_model`, is for other programs: it is
        written as DeepSpeed's own engine writes it.
        """
        if os.path.dirname(os.path.abspath(path)) != self._directory:
            torch.save(state_dict, path)
            return
        folder = _folder_of(path)
        _register_values()
        try:
            part = RankFiles(_rank())
            part.add_objects({_STATE: state_dict}, folder)
            self._stored[folder] = self._parts.begin(part)
            Path(path).write_bytes(_STAND_IN)
        except (Unsaveable, OSError) as error:
            # Raised by `commit`, on all ranks: a rank that raised alone would leave the others waiting.
            self._problem = self._problem or f"rank {_rank()}, {os.path.basename(path)}: {error}"

    def load(self, path: str, map_location: Any = None) -> Any:
        """Return what was saved at a path, checked byte for byte.

        Args:
            path: File of a checkpoint.
            map_location: A device, or its name; anything else means the CPU.

        Raises:
            ValueError: DeepSpeed's own engine saved it, with pickle.
            NotFound: Its snapshot was removed.
            Damaged: Content is not as it was saved.
        """
        _register_values()
        directory = Path(path).parent
        try:
            pointer = read_checkpoint_pointer(pointer_path(directory))
        except FileNotFoundError:
            raise ValueError(
                f"{directory} has no {POINTER_FILE}: the checkpoint is not complete, or another checkpoint engine saved "
                "it, with pickle; load it with that engine and save it once more with this one"
            ) from None
        where = Path(os.path.abspath(directory / pointer.repository))
        snapshot = SnapshotRef(str(where), find_snapshot(where, pointer))
        return _moved(read_objects(snapshot, _folder_of(path))[_STATE], map_location)

    def commit(self, info: Any) -> bool:
        """Make one snapshot of what all ranks have saved, and name it; durable on return. Collective.

        Raises:
            OSError: There is no snapshot; the message has the reason of every rank that failed.
        """
        try:
            if not self._collective:
                return True
            everybody = _gather([self._problem, *self._wait()])
            answer = self._commit_all(everybody, info) if everybody is not None else None
            self.last_id, problem = _broadcast(answer)
        finally:
            self._parts.release()
            self._collective = False
        if problem:
            raise OSError(f"the checkpoint {info.tag} was not saved: {problem}")
        return True

    def cleanup(self) -> None:
        """Wait for the writer process and let it end."""
        self._finalizer()

    def preserves_storage_sharing(self) -> bool:
        """Return False: of a tensor that is a view only its own elements are stored, so it need not be cloned."""
        return False

    # -- inside

    def _wait(self) -> list[list[Any]]:
        """Return this rank's stored files, as the messages between ranks have them."""
        files: list[list[Any]] = []
        for folder, number in self._stored.items():
            try:
                found = self._parts.wait_stored(number)
            except OSError as error:
                return [[f"rank {_rank()}, {folder}: {error}"]]
            files += [[one.path, one.size_bytes, one.content, one.map_height] for one in found]
        return files

    def _commit_all(self, everybody: list[list[Any]], info: Any) -> list[str]:
        """Make the snapshot on rank 0; return its id and the reason why there is none."""
        problems = [problem for problem, *_ in everybody if problem]
        stored = [file for _, *files in everybody for file in files]
        problems += [file[0] for file in stored if len(file) == 1]
        if problems:
            return ["", "; ".join(problems)]
        files = [StoredFile(*file) for file in stored]
        facts = Facts(
            reason="DeepSpeed",
            objects=tuple(sorted({file.path.partition("/")[0] for file in files})),
            world_size=len(everybody),
            size_bytes=sum(file.size_bytes for file in files),
        )
        part = RankFiles(0)
        part.add_file(FACTS_FILE, encode_facts(facts))
        token = str(uuid.uuid4())
        latest = [f"{_LATEST_TAG}{info.tag}"] if info.save_latest else []
        tags = (TAG, os.path.basename(self._directory), self._directory, token, *latest)
        try:
            id_ = self._parts.commit(part, files, os.path.basename(self._directory), tags)
            self._name_checkpoint(token, self._directory, info.tag if info.save_latest else None)
        except (OSError, CiuicError) as error:
            return ["", str(error)]
        return [id_, ""]

    def _name_checkpoint(self, token: str, directory: str, latest: str | None) -> None:
        """Write `latest`, and `.metadata` of a checkpoint whose snapshot is durable."""
        if latest is not None:
            Disk().replace_file(_latest_path(directory, latest), latest.encode())
        pointer = CheckpointPointer(str(self.save_dir), self._run, token, directory)
        # Last: it also makes the names of the files durable that DeepSpeed will look for.
        write_checkpoint_pointer(pointer_path(Path(directory)), pointer)

    def _complete_last_save(self) -> None:
        """Name the newest checkpoint where a kill came between its snapshot and the files that lead to it.

        A `latest` that names another checkpoint beside a complete one is the program's own choice, and stays.
        """
        with Repository.open(self.save_dir) as repository:
            found = repository.snapshots.list(root=os.fsencode(f"/{self._run}"), tag=TAG, limit=1)
        if not found:
            return
        _, _, directory, token, *more = found[0].tags
        latest = next((tag[len(_LATEST_TAG) :] for tag in more if tag.startswith(_LATEST_TAG)), None)
        # The program may have removed the checkpoint, or moved it.
        if not os.path.isdir(directory):
            return
        is_named = pointer_path(Path(directory)).exists()
        # DeepSpeed truncates it and then writes.
        is_cut = latest is not None and _is_empty(_latest_path(directory, latest))
        if not is_named or is_cut:
            self._name_checkpoint(token, directory, latest)


def save_in(engine: Any, save_dir: str | os.PathLike[str], **options: Any) -> SnapshotCheckpointEngine:
    """Let a DeepSpeed engine save to and load from a repository. Every rank calls it.

    Args:
        engine: What `deepspeed.initialize` returned.
        save_dir: Directory of the repository.
        **options: As of `SnapshotCheckpointEngine`.

    Returns:
        The checkpoint engine.
    """
    engine.checkpoint_engine = SnapshotCheckpointEngine(save_dir, **options)
    return engine.checkpoint_engine  # type: ignore[no-any-return]


@contextmanager
def snapshot_checkpoints(save_dir: str | os.PathLike[str], **options: Any) -> Iterator[None]:
    """Let every DeepSpeed engine that is created meanwhile save to and load from a repository.

    Args:
        save_dir: Directory of the repository.
        **options: As of `SnapshotCheckpointEngine`.
    """
    from deepspeed.runtime import engine as module

    # Not a public name, but the one place in which an engine gets its checkpoint engine: a configuration can only
    # choose among DeepSpeed's own.
    before: Callable[..., Any] = module.create_checkpoint_engine
    module.create_checkpoint_engine = lambda *_, **__: SnapshotCheckpointEngine(save_dir, **options)
    try:
        yield
    finally:
        module.create_checkpoint_engine = before


def export_checkpoint(directory: str | os.PathLike[str], target: str | os.PathLike[str]) -> list[Path]:
    """Write the files of a checkpoint as DeepSpeed's own engine does, with torch.save, for tools that read these.

    Args:
        directory: Directory of the checkpoint, ``SAVE_DIR/TAG``.
        target: Directory for the files; made if it is not there.

    Returns:
        The files.

    Raises:
        NotFound: The snapshot was removed.
        Damaged: Content is not as it was saved.
    """
    engine_load = SnapshotCheckpointEngine.load
    Path(target).mkdir(parents=True, exist_ok=True)
    written = []
    for file in sorted(Path(directory).glob("*.pt")):
        state = engine_load(None, str(file))  # type: ignore[arg-type]
        torch.save(state, Path(target) / file.name)
        written.append(Path(target) / file.name)
    return written


def _folder_of(path: str) -> str:
    """Return the folder in the snapshot of a file of a checkpoint."""
    return os.path.basename(path).removesuffix(".pt")


def _latest_path(directory: str, tag: str) -> str:
    """Return the path of `latest` beside the directory of a checkpoint of this tag, which may have slashes."""
    return os.path.join(directory[: -len(os.path.normpath(tag)) - 1] or "/", _LATEST_FILE)


def _is_empty(path: str) -> bool:
    return os.path.exists(path) and os.path.getsize(path) == 0


def _moved(value: Any, map_location: Any) -> Any:
    """Return the value with its tensors on a device."""
    if not isinstance(map_location, (str, torch.device)) or torch.device(map_location).type == "cpu":
        return value
    if isinstance(value, torch.Tensor):
        return value.to(map_location)
    if isinstance(value, dict):
        for key, item in value.items():
            value[key] = _moved(item, map_location)
        return value
    return (
        type(value)(_moved(item, map_location) for item in value) if type(value) in (list, tuple) else value
    )


def _register_values() -> None:
    """Make DeepSpeed's own values storable, which a program cannot be asked to register."""
    for module, name in (*_VALUES, *_KNOWN_KINDS):
        # Looked up, not imported: a state has them only if DeepSpeed has imported these.
        cls = getattr(sys.modules.get(module), name, None)
        if cls is None:
            continue
        if (module, name) in _KNOWN_KINDS:
            structure.register_type(cls)
        else:
            structure.register_type(cls, "", lambda value: dict(vars(value)), _remaker(cls))


def _remaker(cls: type) -> Callable[[dict[str, Any]], Any]:
    def remake(plain: dict[str, Any]) -> Any:
        made: Any = object.__new__(cls)
        for name, value in plain.items():
            object.__setattr__(made, name, value)
        return made

    return remake


def _rank() -> int:
    return dist.get_rank() if _is_distributed() else 0


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _gather(mine: list[Any]) -> list[list[Any]] | None:
    """Return every rank's value on rank 0, None on others."""
    if not _is_distributed():
        return [mine]
    found = ranks.gather(ranks.encode(mine), None)
    return None if found is None else [ranks.decode(one) for one in found]


def _broadcast(answer: _Value | None) -> _Value:
    """Return rank 0's value on all ranks."""
    if not _is_distributed():
        assert answer is not None
        return answer
    data = None if answer is None else ranks.encode(answer)
    found: _Value = ranks.decode(ranks.broadcast(data, None))
    return found


def _close(parts: PartsWriter, pid: int) -> None:
    """Close a writer of this process; a forked child must leave its parent's alone."""
    if os.getpid() == pid:
        parts.close()
