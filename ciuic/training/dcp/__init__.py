"""Storage of torch.distributed.checkpoint in a ciuic repository.

`CiuicStorageWriter` and `CiuicStorageReader` name snapshots of one repository; `FileSystemWriter` and
`FileSystemReader` take the arguments of torch's classes, for programs in which a checkpoint is a directory.

The package may import what lies below `ciuic.training.save_pipeline`, and torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ciuic.deferred_imports import lazy_attributes

if TYPE_CHECKING:
    from ciuic.training.dcp.filesystem import FileSystemReader, FileSystemWriter
    from ciuic.training.dcp.reading import CiuicStorageReader
    from ciuic.training.dcp.storage import CiuicStorageWriter

__all__ = ["CiuicStorageReader", "CiuicStorageWriter", "FileSystemReader", "FileSystemWriter"]

# Lazy: its parts that need no torch.distributed can be imported where there is none.
__getattr__ = lazy_attributes(
    __name__,
    {
        "filesystem": "FileSystemReader FileSystemWriter",
        "reading": "CiuicStorageReader",
        "storage": "CiuicStorageWriter",
    },
)
