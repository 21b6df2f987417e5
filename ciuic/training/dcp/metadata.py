"""Encode torch's `Metadata` of a checkpoint as JSON and decode it, without pickle.

`dcp.json` in a snapshot:

============  ========================================================================================
``version``   1
``tensors``   by full name: ``dtype`` (torch's), ``shape`` of the whole, ``requires_grad``, and ``chunks``, each with ``offsets``
              and ``sizes`` in the whole, the ``file`` it lies in and the byte ``start`` of its first element there
``objects``   by full name: the ``folder`` that the rank which saved it wrote
``planner``   what the planner keeps (how nested states were flattened), as `structure.pack` writes it
``storage``   not always there: ``checkpoint_id``, ``save_id``, ``modules`` and ``version``, as torch's metadata has them
============  ========================================================================================

Decoding creates the classes named here and nothing else.

`.metadata` in the directory of a checkpoint: names the snapshot that holds the checkpoint.

torch's `FileSystemWriter` puts a pickle there when a checkpoint is complete, and programs look for that file.
Ours is JSON: ``version``; ``repository``, a path that is absolute or relative to the directory; ``name`` of the
run in the repository; ``tag`` of the snapshot; ``path`` of the directory when the checkpoint was saved.

Guarantees: the file is there whole or not at all, and only when the snapshot is durable. Nothing is unpickled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ciuic import __version__
from ciuic.errors import NotFound
from ciuic.repository import Repository
from ciuic.system.disk import Disk, read_regular
from ciuic.training.format import structure
from ciuic.training.format.tensors import Unsaveable, torch_dtype
from ciuic.training.json_documents import MALFORMED, decode_json

POINTER_FILE: Final = ".metadata"
_POINTER_VERSION: Final = 1
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
        json.dumps({"version": _POINTER_VERSION, **pointer._asdict()}, separators=(",", ":")).encode("ascii"),
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
    if not isinstance(document, dict) or document.get("version") != _POINTER_VERSION:
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


METADATA_FILE: Final = "dcp.json"
_VERSION: Final = 1
_MAX_NUMBER: Final = 1 << 63


class ItemLocation(NamedTuple):
    """Location of one item of a checkpoint; `storage_data` of the metadata has one for each."""

    path: str
    """File of a tensor; of an object the folder of the rank that saved it."""
    start: int = 0
    """Offset of a tensor's first byte in its file."""


def encode_metadata(metadata: Metadata, places: Mapping[MetadataIndex, ItemLocation]) -> bytes:
    """Encode the metadata.

    Raises:
        Unsaveable: the planner keeps what only pickle could store.
        KeyError: an item has no location.
    """
    tensors: dict[str, Any] = {}
    objects: dict[str, Any] = {}
    for name, one in metadata.state_dict_metadata.items():
        if isinstance(one, TensorStorageMetadata):
            tensors[name] = _encode_tensor(name, one, places)
        else:
            objects[name] = {"folder": places[MetadataIndex(name)].path}
    packed = structure.pack(metadata.planner_data, "what the planner keeps")
    # dcp.json has no file beside it for tensors.
    if packed.leaves:
        raise Unsaveable("planner_data contains tensors, which dcp.json cannot hold")
    # Strict JSON (allow_nan=False): a NaN would make the document unreadable to other parsers.
    document = {"version": _VERSION, "tensors": tensors, "objects": objects, "planner": packed.skeleton}
    if metadata.storage_meta is not None:
        document["storage"] = _encode_storage(metadata, metadata.storage_meta)
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode("ascii")


def decode_metadata(data: bytes | bytearray) -> Metadata:
    """Decode metadata, with an `ItemLocation` for every item.

    Raises:
        ValueError: `encode_metadata` did not write it.
    """
    document = decode_json(data, METADATA_FILE)
    if not isinstance(document, dict) or document.get("version") != _VERSION:
        raise ValueError(f"{METADATA_FILE} was written by a later version of ciuic than {__version__}")
    found: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[MetadataIndex, ItemLocation] = {}
    try:
        for name, one in document["tensors"].items():
            found[name] = _decode_tensor(name, one, places)
        for name, one in document["objects"].items():
            found[name] = BytesStorageMetadata()
            places[MetadataIndex(name)] = ItemLocation(str(one["folder"]))
        planner = structure.unpack(document["planner"], _no_tensor)
        metadata = Metadata(state_dict_metadata=found, planner_data=planner, storage_data=places)
        _decode_storage(document.get("storage", {}), metadata)
    except MALFORMED as error:
        raise ValueError(f"{METADATA_FILE} is malformed: {error!r}") from None
    return metadata


def _encode_storage(metadata: Metadata, meta: StorageMeta) -> dict[str, Any]:
    return {
        "checkpoint_id": None if meta.checkpoint_id is None else os.fspath(meta.checkpoint_id),
        "save_id": meta.save_id,
        "modules": list(meta.modules),
        # torch before 2.8 has no such field.
        "version": getattr(metadata, "version", None),
    }


def _decode_storage(storage: Mapping[str, Any], metadata: Metadata) -> None:
    """Set the storage's part of the metadata.

    Raises:
        ValueError: a value is no text.
    """
    texts = [storage.get(key) for key in ("checkpoint_id", "save_id", "version")]
    modules = list(storage.get("modules", ()))
    if not all(text is None or isinstance(text, str) for text in texts) or not all(
        isinstance(one, str) for one in modules
    ):
        raise ValueError(f"{METADATA_FILE} is malformed: expected texts in storage")
    metadata.storage_meta = StorageMeta(checkpoint_id=texts[0], save_id=texts[1], modules=modules)
    metadata.version = texts[2]


def _encode_tensor(
    name: str, one: TensorStorageMetadata, places: Mapping[MetadataIndex, ItemLocation]
) -> dict[str, Any]:
    chunks = []
    for chunk in one.chunks:
        place = places[MetadataIndex(name, chunk.offsets)]
        chunks.append(
            {
                "offsets": list(chunk.offsets),
                "sizes": list(chunk.sizes),
                "file": place.path,
                "start": place.start,
            }
        )
    return {
        "dtype": str(one.properties.dtype).removeprefix("torch."),
        "shape": list(one.size),
        "requires_grad": bool(one.properties.requires_grad),
        "chunks": chunks,
    }


def _decode_tensor(
    name: str, one: Mapping[str, Any], places: dict[MetadataIndex, ItemLocation]
) -> TensorStorageMetadata:
    dtype = torch_dtype(one["dtype"])
    chunks = []
    for chunk in one["chunks"]:
        offsets, sizes = torch.Size(chunk["offsets"]), torch.Size(chunk["sizes"])
        chunks.append(ChunkStorageMetadata(offsets, sizes))
        start = int(chunk["start"])
        # Checked before any arithmetic: a damaged document must not make a reader allocate or seek beyond 63
        # bits.
        if any(not 0 <= number < _MAX_NUMBER for number in (start, *offsets, *sizes, *one["shape"])):
            raise ValueError(f"{METADATA_FILE} has a number out of range for {name}")
        places[MetadataIndex(name, offsets)] = ItemLocation(str(chunk["file"]), start)
    properties = TensorProperties(dtype=dtype, requires_grad=bool(one["requires_grad"]))
    return TensorStorageMetadata(properties, torch.Size(one["shape"]), chunks)


def _no_tensor(name: str, _: object) -> Any:
    raise ValueError(f"{METADATA_FILE} refers to a tensor {name} in planner_data, which cannot contain any")
