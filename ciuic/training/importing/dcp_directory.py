"""Reading of a checkpoint of `torch.distributed.checkpoint`, as torch's `FileSystemWriter` wrote it.

Guarantees: `.metadata` is interpreted as data and never unpickled; tensors and objects are loaded with
``weights_only=True``; no file outside of the directory is opened.
"""

from __future__ import annotations

import io
import stat
from math import prod
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ciuic.training.export.state_source import load_everything
from ciuic.training.importing.foreign_files import load_plain
from ciuic.training.importing.inert_pickle import Made, Name, read_pickle
from ciuic.training.util.documents import MALFORMED

METADATA: Final = ".metadata"
_METADATA_MODULE: Final = "torch.distributed.checkpoint.metadata"
_MAX_METADATA_BYTES: Final = 1 << 30
_MAX_NUMBER: Final = 1 << 63
# Of a list that torch's planner fills up to the largest index: far more than parameters of any model.
_MAX_INDEX: Final = 1 << 20
# Private names of torch: there is no public way to load without a state to fill.
_EmptyPlanner: Any = vars(default_planner)["_EmptyStateDictLoadPlanner"]
_set_element: Any = vars(default_planner)["set_element"]


def read_dcp(path: Path) -> dict[str, Any]:
    """Return the state in a checkpoint, with whole tensors on the CPU.

    Raises:
        ValueError: It is malformed, or has what only pickle could load.
        OSError: It cannot be read.
    """
    data_file = path / METADATA
    if data_file.stat().st_size > _MAX_METADATA_BYTES:
        raise ValueError(f"{data_file} must have at most {_MAX_METADATA_BYTES} bytes")
    metadata = decode_torch_metadata(data_file.read_bytes())
    _check_files(path, metadata)
    try:
        return load_everything(_Reader(path, metadata), _Planner())
    # What torch raises for content that does not fit the metadata.
    except MALFORMED as error:
        raise ValueError(f"{path} is malformed: {error!r}") from None


def decode_torch_metadata(data: bytes) -> Metadata:
    """Return torch's metadata of a checkpoint, made from its pickle by table.

    Raises:
        ValueError: The data is not such a pickle, or a number in it is impossible.
    """
    try:
        fields = _state(read_pickle(data), "Metadata")
        tensors = {str(name): _item(one) for name, one in fields["state_dict_metadata"].items()}
        planner = fields.get("planner_data")
        paths = None if planner is None else {str(name): _path(one) for name, one in planner.items()}
        places = {_index(key): _place(one) for key, one in fields["storage_data"].items()}
    except MALFORMED as error:
        raise ValueError(f"the metadata is malformed: {error!r}") from None
    return Metadata(tensors, planner_data=paths, storage_data=places, storage_meta=StorageMeta())


def _state(value: Any, name: str, module: str = _METADATA_MODULE) -> Any:
    """Return the state of an object of this class."""
    if not isinstance(value, Made) or not value.is_of(module, name):
        raise ValueError(f"the metadata must have a {name} there")
    return {} if value.state is None else value.state


def _item(value: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if isinstance(value, Made) and value.is_of(_METADATA_MODULE, "BytesStorageMetadata"):
        return BytesStorageMetadata()
    fields = _state(value, "TensorStorageMetadata")
    properties = _state(fields["properties"], "TensorProperties")
    named = properties[0]
    # A name from the file may be that of anything in torch, so what comes back is checked.
    dtype = getattr(torch, named.name, None) if isinstance(named, Name) and named.module == "torch" else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"this torch has no dtype {named}")
    chunks = [_state(one, "ChunkStorageMetadata") for one in fields["chunks"]]
    return TensorStorageMetadata(
        TensorProperties(dtype=dtype),
        _size(fields["size"]),
        [ChunkStorageMetadata(_size(one["offsets"]), _size(one["sizes"])) for one in chunks],
    )


def _size(value: Any) -> torch.Size:
    if not isinstance(value, Made) or not value.is_of("torch", "Size"):
        raise ValueError("the metadata must have a torch.Size there")
    return torch.Size([_number(one) for one in value.arguments[0]])


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MAX_NUMBER:
        raise ValueError(f"the metadata has an impossible number {value!r}")
    return value


def _path(value: Any) -> tuple[str | int, ...]:
    # torch's planner makes a list as long as the largest number says.
    for key in value:
        if type(key) is not str and not (type(key) is int and 0 <= key < _MAX_INDEX):
            raise ValueError(f"the metadata has an impossible key {key!r}")
    return tuple(value)


def _index(value: Any) -> MetadataIndex:
    fields = _state(value, "MetadataIndex")
    offset = fields.get("offset")
    return MetadataIndex(str(fields["fqn"]), None if offset is None else _size(offset))


def _place(value: Any) -> _StorageInfo:
    fields = _state(value, "_StorageInfo", "torch.distributed.checkpoint.filesystem")
    name = fields["relative_path"]
    # A name within the directory: a path could lead to any file.
    if type(name) is not str or not name or "/" in name or "\0" in name or name in (".", ".."):
        raise ValueError(f"the metadata names a file outside of its directory: {name!r}")
    if fields.get("transform_descriptors"):
        raise ValueError("the checkpoint is compressed by an extension, which is not supported")
    return _StorageInfo(name, _number(fields["offset"]), _number(fields["length"]))


def _check_files(path: Path, metadata: Metadata) -> None:
    """Check that all files are there, and that the tensors are no larger than they."""
    sizes = {}
    for name in {place.relative_path for place in metadata.storage_data.values()}:
        status = (path / name).lstat()
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path / name} must be a regular file")
        sizes[name] = status.st_size
    for place in metadata.storage_data.values():
        if place.offset + place.length > sizes[place.relative_path]:
            raise ValueError(f"{path / place.relative_path} is shorter than the metadata says")
    needed = sum(
        prod(one.size) * one.properties.dtype.itemsize
        for one in metadata.state_dict_metadata.values()
        if isinstance(one, TensorStorageMetadata)
    )
    # Before memory is allocated: the metadata may claim any shape.
    if needed > sum(sizes.values()):
        raise ValueError(
            f"the tensors must have at most the {sum(sizes.values())} bytes of the files, got {needed}"
        )


class _Reader(FileSystemReader):
    """torch's reader with metadata that was not unpickled."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._metadata


class _Planner(_EmptyPlanner):  # type: ignore[misc]
    """torch's planner for a state that is made of the metadata, with objects loaded by ``weights_only=True``."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        _set_element(self.original_state_dict, self.mappings[name], load_plain(value, name))
