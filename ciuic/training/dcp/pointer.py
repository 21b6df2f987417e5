"""`.metadata` in the directory of a checkpoint: names the snapshot that holds the checkpoint.

torch's `FileSystemWriter` puts a pickle there when a checkpoint is complete, and programs look for that file.
Ours is JSON: ``version``; ``repository``, a path that is absolute or relative to the directory; ``name`` of the
run in the repository; ``tag`` of the snapshot; ``path`` of the directory when the checkpoint was saved.

Guarantees: the file is there whole or not at all, and only when the snapshot is durable. Nothing is unpickled.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Final, NamedTuple

from ciuic import __version__
from ciuic.errors import NotFound
from ciuic.repository import Repository
from ciuic.system.disk import Disk, read_regular
from ciuic.training.json_documents import decode_json

POINTER_FILE: Final = ".metadata"
_VERSION: Final = 1
# The paths in it are at most 4 KiB each, and six bytes a character as JSON escapes them.
_MAX_BYTES: Final = 1 << 16
_PICKLE: Final = b"\x80"
"""First byte of what torch writes."""


class CheckpointPointer(NamedTuple):
    """Content of the file."""

    repository: str
    """Directory of the repository, absolute or relative to the checkpoint's directory."""
    name: str
    """Name of the run in the repository."""
    tag: str
    """Tag of the snapshot, unique to the save."""
    path: str
    """Directory of the checkpoint when it was saved, which is a tag of the snapshot too."""


def pointer_path(directory: Path, rank: int | None = None) -> Path:
    """Return the path of the file; of one rank if ranks save without each other."""
    return directory / (POINTER_FILE if rank is None else f"__{rank}{POINTER_FILE}")


def write_checkpoint_pointer(file: Path, pointer: CheckpointPointer) -> None:
    """Replace the file atomically; its name and that of its directory are durable on return."""
    disk = Disk()
    disk.replace_file(
        str(file),
        json.dumps({"version": _VERSION, **pointer._asdict()}, separators=(",", ":")).encode("ascii"),
    )
    # The directory may be new: without this sync a power failure could take it away with the file in it.
    disk.sync_dir(str(file.parent.parent))


def read_checkpoint_pointer(file: Path) -> CheckpointPointer:
    """Read the file.

    Raises:
        FileNotFoundError: There is none, so the directory has no complete checkpoint.
        ValueError: It is not ours, or of a later version.
    """
    data = read_regular(file, _MAX_BYTES + 1)
    if data.startswith(_PICKLE):
        raise ValueError(
            f"{file} is a pickle of torch's FileSystemWriter, which is not opened here: load the checkpoint with "
            "torch.distributed.checkpoint.FileSystemReader, and save it anew with this writer"
        )
    return decode_checkpoint_pointer(data, str(file))


def decode_checkpoint_pointer(data: bytes, what: str = POINTER_FILE) -> CheckpointPointer:
    """Decode the content of the file.

    Args:
        data: The content.
        what: What errors call it.

    Raises:
        ValueError: `write_checkpoint_pointer` did not write it, or that of a later version did.
    """
    if len(data) > _MAX_BYTES:
        raise ValueError(f"{what} is longer than {_MAX_BYTES} bytes")
    document = decode_json(data, what)
    if not isinstance(document, dict) or document.get("version") != _VERSION:
        raise ValueError(
            f"{what} was written by a later version of ciuic than {__version__}, or by another program"
        )
    values = [document.get(key) for key in CheckpointPointer._fields]
    if not all(isinstance(value, str) and value and "\0" not in value for value in values):
        raise ValueError(f"{what} is malformed: expected the texts {', '.join(CheckpointPointer._fields)}")
    return CheckpointPointer(*map(str, values))


def find_snapshot(repository_dir: Path, pointer: CheckpointPointer) -> str:
    """Return the id of the snapshot that a pointer names.

    Raises:
        NotFound: It was removed.
    """
    root = os.fsencode(f"/{pointer.name}")
    with Repository.open(repository_dir) as repository:
        # A crash between a save's commit and its pointer leaves the pointer of the save before, whose snapshot
        # may have been removed by then: the newest snapshot of the directory is what was saved last.
        for tag in (pointer.tag, pointer.path):
            found = repository.snapshots.list(root=root, tag=tag, limit=1)
            if found:
                return found[0].id
    raise NotFound(
        f"the snapshot of the checkpoint {pointer.path} is not in {repository_dir}: it was removed",
        hint=f"ciuic --repo {repository_dir} list shows those there are.",
    )
