"""Reading of a checkpoint of `torch.distributed.checkpoint`, as torch's `FileSystemWriter` wrote it.

Guarantees: `.metadata` is interpreted as data and never unpickled; tensors and objects are loaded with
``weights_only=True``; no file outside of the directory is opened.
"""

from __future__ import annotations

import errno
import io
import os
from math import prod
from typing import IO, Any, Final

import torch
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ciuic.errors import CiuicError
from ciuic.training.convert.export_state import load_everything
from ciuic.training.convert.foreign_files import ForeignDirectory, check_archive, load_plain, reason
from ciuic.training.inert_pickle import Made, Name, read_pickle
from ciuic.training.json_documents import MALFORMED

METADATA: Final = ".metadata"
_METADATA_MODULE: Final = "torch.distributed.checkpoint.metadata"
_MAX_METADATA_BYTES: Final = 1 << 30
_MAX_NUMBER: Final = 1 << 63
# Of a list that torch's planner fills up to the largest index: far more than parameters of any model.
_MAX_INDEX: Final = 1 << 20
# Private names of torch: there is no public way to load without a state to fill.
_EmptyPlanner: Any = vars(default_planner)["_EmptyStateDictLoadPlanner"]
_set_element: Any = vars(default_planner)["set_element"]


def read_dcp(directory: ForeignDirectory) -> dict[str, Any]:
    """Return the state in a checkpoint, with whole tensors on the CPU.

    Raises:
        ValueError: It is malformed, or has what only pickle could load.
        OSError: It cannot be read.
    """
    with directory.open(METADATA, _MAX_METADATA_BYTES) as file:
        metadata = decode_torch_metadata(file.read(_MAX_METADATA_BYTES))
    _check_files(directory, metadata)
    try:
        return load_everything(_Reader(directory, metadata), _Planner())
    except (CiuicError, ValueError, OSError, MemoryError):
        raise
    # What torch raises for content that does not fit the metadata, or that only pickle could load.
    except Exception as error:
        raise ValueError(f"{directory.path} is malformed: {type(error).__name__}: {reason(error)}") from None


def decode_torch_metadata(data: bytes) -> Metadata:
    """Return torch's metadata of a checkpoint, made from its pickle by table.

    Raises:
        ValueError: The data is not such a pickle, or a number in it is impossible.
    """
    try:
        fields = _state(read_pickle(data), "Metadata")
        tensors = {_text(name): _item(one) for name, one in fields["state_dict_metadata"].items()}
        planner = fields.get("planner_data")
        paths = None if planner is None else {_text(name): _path(one) for name, one in planner.items()}
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
        # Not the value itself: containers that hold each other have a text without end.
        raise ValueError("the metadata has an impossible number")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError("the metadata has a name that is no text")
    return value


def _path(value: Any) -> tuple[str | int, ...]:
    # torch's planner makes a list as long as the largest number says.
    for key in value:
        if type(key) is not str and not (type(key) is int and 0 <= key < _MAX_INDEX):
            raise ValueError("the metadata has an impossible key")
    return tuple(value)


def _index(value: Any) -> MetadataIndex:
    fields = _state(value, "MetadataIndex")
    offset = fields.get("offset")
    return MetadataIndex(_text(fields["fqn"]), None if offset is None else _size(offset))


def _place(value: Any) -> _StorageInfo:
    fields = _state(value, "_StorageInfo", "torch.distributed.checkpoint.filesystem")
    name = _text(fields["relative_path"])
    if fields.get("transform_descriptors"):
        raise ValueError("the checkpoint is compressed by an extension, which is not supported")
    return _StorageInfo(name, _number(fields["offset"]), _number(fields["length"]))


def _check_files(directory: ForeignDirectory, metadata: Metadata) -> None:
    """Check that all files are there, and that the tensors are no larger than they."""
    sizes = {}
    for name in {place.relative_path for place in metadata.storage_data.values()}:
        with directory.open(name) as file:
            sizes[name] = os.fstat(file.fileno()).st_size
    for place in metadata.storage_data.values():
        if place.offset + place.length > sizes[place.relative_path]:
            raise ValueError(f"{directory.path / place.relative_path} is shorter than the metadata says")
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


class _Files(FileSystem):
    """torch's file system with the files of one directory."""

    def __init__(self, directory: ForeignDirectory) -> None:
        super().__init__()
        self._directory = directory

    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Any:  # type: ignore[override, unused-ignore]
        return self._directory.open(os.path.basename(path))


class _Reader(FileSystemReader):
    """torch's reader with metadata that was not unpickled, and files that were opened safely."""

    def __init__(self, directory: ForeignDirectory, metadata: Metadata) -> None:
        super().__init__(directory.path)
        self.fs = _Files(directory)
        self._metadata = metadata

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._metadata

    def _slice_file(self, file: IO[bytes], sinfo: _StorageInfo) -> Any:
        found = _Slice(file, sinfo.offset, sinfo.length)
        check_archive(found, f"an item of {sinfo.relative_path}")
        return found


class _Slice(io.RawIOBase):
    """Range of a file. torch's own view cannot seek from its end, where an archive has its table."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        super().__init__()
        self._file = file
        self._start = start
        self._length = length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if at < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._at = at
        return at

    def readinto(self, buffer: Any, /) -> int:
        self._file.seek(self._start + self._at)
        count: int = self._file.readinto(memoryview(buffer)[: max(0, self._length - self._at)])  # type: ignore[attr-defined]
        self._at += count
        return count


class _Planner(_EmptyPlanner):  # type: ignore[misc]
    """torch's planner for a state that is made of the metadata, with objects loaded by ``weights_only=True``."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        _set_element(self.original_state_dict, self.mappings[name], load_plain(value, name))
