"""A repository on disk: make it, open it, and reach its parts.

Opening reads one small file. Nothing here takes a lock except `writer`, and nothing writes except through a
writer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from ciuic.repository.disk import Disk
from ciuic.repository.model import PackDamage, PackInfo, PackRecord
from ciuic.repository.snapshots import SnapshotStore

if TYPE_CHECKING:
    from ciuic.repository.blockmaps import BlockMaps
    from ciuic.repository.chunks import ChunkReader
    from ciuic.repository.trees import Trees
    from ciuic.repository.writer import Writer

DEFAULT_BLOCK_SIZE = 262144


class Repository:
    """One repository, open for reading; context manager."""

    path: Path
    id: str
    """32 hexadecimal digits, chosen at creation."""
    block_size: int
    """Bytes in a block of a file; a power of two from 4 KiB to 8 MiB."""
    snapshots: SnapshotStore

    @classmethod
    def create(
        cls, path: str | os.PathLike[str], *, block_size: int = DEFAULT_BLOCK_SIZE, disk: Disk | None = None
    ) -> Repository:
        """Makes a repository (directory 0700, configuration 0600), durable on return, and opens it.

        The directory may exist if it is empty; RepositoryExists otherwise. ValueError for an unfit block
        size.
        """
        raise NotImplementedError

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, disk: Disk | None = None) -> Repository:
        """Opens for reading. NotFound when there is none; DamagedRepository; UnsupportedFormat; NotPermitted."""
        raise NotImplementedError

    @staticmethod
    def exists(path: str | os.PathLike[str]) -> bool:
        """Whether there is a repository at this path (it need not be a healthy one)."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Repository:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def chunks(self) -> ChunkReader:
        raise NotImplementedError

    @property
    def trees(self) -> Trees:
        raise NotImplementedError

    @property
    def block_maps(self) -> BlockMaps:
        raise NotImplementedError

    def writer(self, *, wait_seconds: float = 0, command: str = "") -> Writer:
        """Takes the lock and puts right what a crash left. Busy names the owner. ``command``: shown to who
        finds it busy.
        """
        raise NotImplementedError

    def packs(self) -> list[PackInfo]:
        """All packs, by number."""
        raise NotImplementedError

    def pack_records(self, number: int) -> Iterator[PackRecord]:
        """What the pack holds, from its footer or, where it has none, by scanning it. DamagedPack, NotFound."""
        raise NotImplementedError

    def stored_bytes(self) -> int:
        """Size of all packs together."""
        raise NotImplementedError

    def scrub(self, progress: Callable[[int, int], None] | None = None) -> Iterator[PackDamage]:
        """Reads every byte of every pack and checks it against its checksum, referred to or not."""
        raise NotImplementedError

    def check_index(self) -> list[str]:
        """What the index and catalogue say that packs and snapshot files do not, in words; empty when all
        agrees.
        """
        raise NotImplementedError

    def config_damage(self) -> list[str]:
        """What is wrong with either copy of the configuration, in words; empty when both are good."""
        raise NotImplementedError
