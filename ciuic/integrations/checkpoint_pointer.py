"""Files at the paths of a framework's checkpoints that name a snapshot, alone or as a part of the checkpoint itself.

Guarantees: a file is there whole or not at all; loading one returns the snapshot that it names, from the
repository that it names, or raises. No other snapshot is taken for it.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Final, NamedTuple

from ciuic.errors import NotFound
from ciuic.repository import Repository
from ciuic.system.disk import Disk
from ciuic.training.convert.exporting import read_record
from ciuic.training.loading import load_by_name
from ciuic.training.results import EXIT_SECONDS, State

_MARK: Final = "ciuic-snapshot"
"""Key in the file whose value is the snapshot's tag."""
_REPOSITORY: Final = "repository"
"""Key in the file whose value is the absolute path of the repository."""
# A larger file is a checkpoint of torch, and is not read as JSON.
_MAX_BYTES: Final = 4096
# Longest wait for a snapshot that another process is still storing: a training that saves meanwhile, or rank 0.
_ARRIVAL_SECONDS: Final = 30.0
_POLL_SECONDS: Final = 0.2
# Snapshots that an error names.
_MAX_LISTED: Final = 10


class Pointer(NamedTuple):
    """Content of such a file."""

    tag: str
    """Tag of the snapshot: its id is not known before the writer commits it."""
    repository: str
    """Absolute path of the repository."""
    is_whole: bool = False
    """True if the file has the checkpoint itself as well."""

    def is_in(self, save_dir: Path) -> bool:
        """Return whether the snapshot is in this repository."""
        try:
            return os.path.samefile(self.repository, save_dir)
        except OSError:
            return os.path.realpath(self.repository) == os.path.realpath(save_dir)


def write_pointer(path: str | os.PathLike[str], pointer: Pointer) -> None:
    """Write a file, parents included, durably on return."""
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    Disk().replace_file(os.path.abspath(path), encode_pointer(pointer), mode=None)


def encode_pointer(pointer: Pointer) -> bytes:
    """Return the content of such a file."""
    return json.dumps({_MARK: pointer.tag, _REPOSITORY: pointer.repository}).encode("ascii")


def read_pointer(path: str | os.PathLike[str]) -> Pointer | None:
    """Return the pointer in a file, or in a checkpoint that was written from one; None for any other file."""
    try:
        with open(path, "rb") as file:
            if os.path.getsize(path) <= _MAX_BYTES and (
                found := _decode(file.read(_MAX_BYTES), is_whole=False)
            ):
                return found
            file.seek(0)
            record = read_record(file)
    except OSError:
        return None
    return None if record is None else _decode(record, is_whole=True)


def _decode(data: bytes, *, is_whole: bool) -> Pointer | None:
    try:
        content = json.loads(data)
        return Pointer(str(content[_MARK]), str(content[_REPOSITORY]), is_whole)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def load_pointed(path: str | os.PathLike[str], pointer: Pointer, save_dir: Path) -> State:
    """Load the snapshot that a file names.

    Args:
        path: The file, for errors.
        pointer: Its content.
        save_dir: Repository to look in where the one that the file names is not there: a repository may have
            been moved together with its checkpoints.

    Raises:
        NotFound: The snapshot is not there; the message names those that are.
        Damaged: It is not as it was saved.
    """
    where = Path(pointer.repository)
    if not where.is_dir():
        where = save_dir
    # A checkpoint that has become a file was durable before.
    deadline = time.monotonic() + (0.0 if pointer.is_whole else _arrival_seconds(path))
    while True:
        with Repository.open(where) as repository:
            infos = repository.snapshots.list()
        for info in infos:
            if pointer.tag in info.tags:
                return load_by_name(where, info.id)
        if time.monotonic() >= deadline:
            break
        time.sleep(_POLL_SECONDS)
    left = ", ".join(info.id for info in infos[:_MAX_LISTED]) or "none"
    raise NotFound(
        f"the snapshot of the checkpoint {os.fspath(path)} is not in {where}: it was removed, or the run ended before it "
        f"was stored; the newest snapshots there: {left}",
        hint="SnapshotCheckpointIO.latest() returns the newest whole one, for fit(ckpt_path=…)",
    )


def _arrival_seconds(path: str | os.PathLike[str]) -> float:
    """Return how long the snapshot may still be on its way: the file is written before the snapshot is durable."""
    try:
        age_seconds = time.time() - os.stat(path).st_mtime
    except OSError:
        return 0.0
    return _ARRIVAL_SECONDS if abs(age_seconds) < EXIT_SECONDS else 0.0
