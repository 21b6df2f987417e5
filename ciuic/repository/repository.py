"""A repository on disk: make it, open it, and reach its parts.

Opening reads one small file. Nothing here takes a lock except `writer`, and nothing writes except through a
writer.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from ciuic.errors import CiuicError, Damaged, NotFound, NotPermitted
from ciuic.repository.claim import CLAIM_NAME, Claim
from ciuic.repository.config import (
    CODECS_VERSION,
    CONFIG_NAMES,
    FORMAT_VERSION,
    RepositoryConfig,
    check_block_size,
    config_problems,
    encode_config,
    read_config,
)
from ciuic.repository.disk import Disk
from ciuic.repository.errors import RepositoryExists
from ciuic.repository.index import DAMAGED, INDEX_NAME
from ciuic.repository.lock import LOCK_NAME, Lock
from ciuic.repository.model import PackDamage, PackInfo, PackRecord
from ciuic.repository.snapshots import MARKS_DIR, SNAPSHOTS_DIR, SnapshotStore

if TYPE_CHECKING:
    from ciuic.repository.blockmaps import BlockMaps
    from ciuic.repository.bulk import BulkReader
    from ciuic.repository.chunks import ChunkReader
    from ciuic.repository.finder import ReaderFinder
    from ciuic.repository.intomemory import IntoMemory
    from ciuic.repository.packs import Packs
    from ciuic.repository.trees import Trees
    from ciuic.repository.writer import Writer

DEFAULT_BLOCK_SIZE = 262144
PACKS_DIR = "packs"
_MAKING_SECONDS = 10.0


class Repository:
    """One repository, open for reading; context manager. Not for several threads at once: open one in each."""

    def __init__(self, path: Path, config: RepositoryConfig, disk: Disk) -> None:
        """For `create` and `open`."""
        self.path = path
        self.id = config.id
        """32 hexadecimal digits, chosen at creation."""
        self.block_size = config.block_size
        """Bytes in a block of a file; a power of two from 4 KiB to 8 MiB."""
        self.config = config
        self.snapshots = SnapshotStore(str(path), config.id)
        self._disk = disk
        self._packs: Packs | None = None
        self._finder: ReaderFinder | None = None
        self._chunks: ChunkReader | None = None
        self._bulk: BulkReader | None = None
        self._into_memory: IntoMemory | None = None
        self._trees: Trees | None = None
        self._block_maps: BlockMaps | None = None

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        *,
        block_size: int = DEFAULT_BLOCK_SIZE,
        disk: Disk | None = None,
        refuse_foreign: bool = False,
    ) -> Repository:
        """Makes a repository (directory 0700, configuration 0600), durable on return, and opens it.

        The directory may exist if it is empty; RepositoryExists otherwise. ValueError for an unfit block
        size. A crash leaves a directory that `create` takes up again.

        ``refuse_foreign``: NotPermitted for a directory that another user owns or may write to, also if it came to be just now
        and where the place is a link.
        """
        check_block_size(block_size)
        disk = disk or Disk()
        where = os.path.abspath(os.fspath(path))
        if refuse_foreign:
            where = os.path.realpath(where)
        _make_directories(disk, where, refuse_foreign)
        config = RepositoryConfig(
            format=FORMAT_VERSION,
            id=os.urandom(16).hex(),
            hash="xxh3-128",
            seed=os.urandom(8).hex(),
            block_size=block_size,
            created_ns=time.time_ns(),
        )
        # Made here, so that later a full disk cannot stop the first writer from freeing space; and of several processes that
        # were told to use this directory one makes the repository.
        lock = Lock.acquire(where, wait_seconds=_MAKING_SECONDS, command="ciuic: making the repository")
        try:
            if os.path.lexists(f"{where}/{CONFIG_NAMES[0]}"):
                raise RepositoryExists(f"{where} is a repository already")
            # The configuration last: without it this is no repository, and nothing was put into it.
            for name in reversed(CONFIG_NAMES):
                disk.replace_file(f"{where}/{name}", encode_config(config))
        finally:
            lock.release()
        disk.sync_dir(os.path.dirname(where))
        return cls(Path(os.path.abspath(os.fspath(path))), config, disk)

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, disk: Disk | None = None) -> Repository:
        """Opens for reading. NotFound when there is none; DamagedRepository; UnsupportedFormat; NotPermitted."""
        where = os.path.abspath(os.fspath(path))
        return cls(Path(where), read_config(where), disk or Disk())

    @staticmethod
    def exists(path: str | os.PathLike[str]) -> bool:
        """Whether there is a repository at this path (it need not be a healthy one)."""
        return any(os.path.lexists(os.path.join(path, name)) for name in CONFIG_NAMES)

    def close(self) -> None:
        """Closes descriptors; the object can be used again."""
        if self._finder is not None:
            self._finder.close()
        if self._packs is not None:
            self._packs.close()
        self._packs = self._finder = self._chunks = self._trees = self._block_maps = None
        self._bulk = self._into_memory = None

    def __enter__(self) -> Repository:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def chunks(self) -> ChunkReader:
        """Chunks by id. What a writer has put and not committed may not be visible here."""
        if self._chunks is None:
            from ciuic.repository.chunks import ChunkReader

            self._chunks = ChunkReader(self._pack_files(), self._find(), self._seed)
        return self._chunks

    @property
    def bulk(self) -> BulkReader:
        """Many chunks at once."""
        if self._bulk is None:
            from ciuic.repository.bulk import BulkReader

            self._bulk = BulkReader(self._pack_files(), self._find(), self._seed)
        return self._bulk

    @property
    def into_memory(self) -> IntoMemory:
        """Many chunks, each to where the caller wants it."""
        if self._into_memory is None:
            from ciuic.repository.intomemory import IntoMemory

            self._into_memory = IntoMemory(self._pack_files(), self._find(), self._seed)
        return self._into_memory

    @property
    def trees(self) -> Trees:
        if self._trees is None:
            from ciuic.repository.trees import Trees

            self._trees = Trees(self.chunks)
        return self._trees

    @property
    def block_maps(self) -> BlockMaps:
        if self._block_maps is None:
            from ciuic.repository.blockmaps import BlockMaps

            self._block_maps = BlockMaps(self.chunks)
        return self._block_maps

    def writer(self, *, wait_seconds: float = 0, command: str = "", pack_bytes: int | None = None) -> Writer:
        """Takes the lock and puts right what a crash left. Busy names the owner; NotPermitted; OSError.

        ``command``: shown to who finds it busy. ``pack_bytes``: seal packs at this size (default 64 MiB).
        """
        from ciuic.repository.packs import Packs
        from ciuic.repository.writer import Writer

        try:
            lock = Lock.acquire(str(self.path), wait_seconds=wait_seconds, command=command)
        except PermissionError as error:
            raise NotPermitted(
                f"cannot write to {self.path}: {error.strerror}", hint="Run as root."
            ) from None
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
            raise NotPermitted(f"cannot write to {self.path}: {error.strerror}") from None
        packs = Packs(f"{self.path}/{PACKS_DIR}", bytes.fromhex(self.id))
        try:
            return Writer(self, lock, self._disk, packs, self._seed, pack_bytes=pack_bytes)
        except BaseException:
            packs.close()
            lock.release()
            raise

    def claim(self) -> Claim:
        """For content that several writers store in turn for one snapshot: see `claim`. OSError."""
        return Claim.acquire(str(self.path))

    def packs(self) -> list[PackInfo]:
        """All packs, by number."""
        files = self._pack_files()
        infos = []
        for number in files.sizes():
            try:
                infos.append(files.facts(number))
            except NotFound:
                continue  # garbage collection dropped it meanwhile
        return infos

    def pack_records(self, number: int, *, salvage: bool = False) -> Iterator[PackRecord]:
        """All that the pack holds, from its footer or, where it has none, by scanning it.

        DamagedPack (before the first record) when something may be missing from the list; NotFound. With
        ``salvage`` whatever can still be listed.
        """
        from ciuic.repository.maintenance import strict_records

        if salvage:
            return iter(self._pack_files().records(number))
        return iter(strict_records(self._pack_files(), number))

    def forget_pack(self, number: int) -> None:
        """Closes a pack that was deleted: its space is free only when nobody has it open."""
        if self._packs is not None:
            self._packs.forget(number)

    @property
    def may_have_bases(self) -> bool:
        """Whether chunks may be stored as differences from others. Asked anew: a writer elsewhere may have begun to."""
        try:
            return read_config(str(self.path)).format >= CODECS_VERSION
        except CiuicError:
            return True

    def misses_no_snapshot(self) -> bool:
        """Whether there is no snapshot although none is missing: none was ever made, or the last was removed on purpose.

        False also where that is not known any more (the index was lost).
        """
        from ciuic.repository.finder import known_without_snapshots

        return not self.snapshots.names() and known_without_snapshots(f"{self.path}/{INDEX_NAME}")

    def stored_bytes(self) -> int:
        """Size of all packs together."""
        return sum(self._pack_files().sizes().values())

    def scrub(
        self,
        progress: Callable[[int, int], None] | None = None,
        *,
        after: int = -1,
        goes_on: Callable[[int], bool] = lambda number: True,
        between: Callable[[], None] = lambda: None,
    ) -> Iterator[PackDamage]:
        """Reads every byte of every pack and checks it, referred to or not. ``progress(bytes done, bytes in
        all)``.

        ``after``: only packs with higher numbers. ``goes_on`` is told each pack that is done, lowest number first, and ends
        the work by a no. ``between`` is called often. What was not in the page cache is not left there.
        """
        from ciuic.repository.scrub import scrub

        return scrub(
            self._pack_files(), f"{self.path}/{INDEX_NAME}", self._seed, progress, after, goes_on, between
        )

    def check_index(self) -> list[str]:
        """What the index says that packs do not, or the other way round, and where the catalogue differs from the
        snapshot files, in words; empty when all agrees.
        """
        from ciuic.repository.scrub import index_problems

        return (
            index_problems(self._pack_files(), f"{self.path}/{INDEX_NAME}")
            + self.snapshots.catalogue_problems()
        )

    def pack_problems(self) -> list[tuple[int, str]]:
        """What is wrong with headers, sizes and footers of packs, with their numbers; contents are not read."""
        from ciuic.repository.scrub import pack_problems

        return list(pack_problems(self._pack_files(), f"{self.path}/{INDEX_NAME}"))

    def is_spent_copy(self, damage: PackDamage) -> bool:
        """Whether the index knows of a damaged copy, and a good one is read in its place."""
        if damage.chunk is None:
            return False
        marked = any(
            (where.pack, where.offset) == (damage.pack, damage.offset) and where.flags & DAMAGED
            for where in self._find().find(damage.chunk)
        )
        if not marked:
            return False
        try:
            self.chunks.get(damage.chunk)
        except Damaged:
            return False
        return True

    def config_damage(self) -> list[str]:
        """What is wrong with either copy of the configuration, in words; empty when both are good."""
        return config_problems(str(self.path))

    @property
    def _seed(self) -> int:
        return int(self.config.seed, 16)

    def _find(self) -> ReaderFinder:
        if self._finder is None:
            from ciuic.repository.finder import ReaderFinder

            self._finder = ReaderFinder(self._pack_files(), f"{self.path}/{INDEX_NAME}")
        return self._finder

    def _pack_files(self) -> Packs:
        if self._packs is None:
            from ciuic.repository.packs import Packs

            self._packs = Packs(f"{self.path}/{PACKS_DIR}", bytes.fromhex(self.id))
        return self._packs


def _make_dir(disk: Disk, path: str) -> None:
    with suppress(FileExistsError):  # another process makes the same repository
        disk.make_dir(path)


def _make_directories(disk: Disk, where: str, refuse_foreign: bool) -> None:
    """Make the directory with its empty parts. RepositoryExists unless it was missing, empty, or begun by a
    crashed create.
    """
    try:
        if not os.path.isdir(where):
            _make_dir(disk, where)
        fd = _open_directory(where, refuse_foreign)
        try:
            _make_parts(disk, where, fd)
        finally:
            os.close(fd)
    except FileNotFoundError:
        raise NotFound(f"cannot make a repository at {where}: its parent directory is missing") from None
    except PermissionError as error:
        raise NotPermitted(
            f"cannot make a repository at {where}: {error.strerror}", hint="Run as root."
        ) from None


def _make_parts(disk: Disk, where: str, fd: int) -> None:
    found = set(os.listdir(fd))
    own = {
        PACKS_DIR,
        SNAPSHOTS_DIR,
        MARKS_DIR,
        LOCK_NAME,
        CLAIM_NAME,
        "config.tmp",
        "config.copy.tmp",
        "config.copy",
    }
    if found - own or any(os.listdir(f"{where}/{PACKS_DIR}") for _ in found & {PACKS_DIR}):
        what = "is a repository already" if Repository.exists(where) else "is not empty"
        raise RepositoryExists(f"{where} {what}")
    os.fchmod(fd, 0o700)
    for name in (PACKS_DIR, SNAPSHOTS_DIR, MARKS_DIR):
        if name not in found:
            # Durable with the name of the configuration, which comes after.
            _make_dir(disk, f"{where}/{name}")


def _open_directory(where: str, refuse_foreign: bool) -> int:
    """A descriptor of the directory; with ``refuse_foreign`` it is ours. NotPermitted; OSError.

    Owner and mode are asked by descriptor: between two looks at the name another user may exchange what it means where everybody
    may make names (/tmp). What is ours stays under its name, there as well.
    """
    # Without O_NOFOLLOW the save_dir of a training may be a link, as its user has made it.
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (os.O_NOFOLLOW if refuse_foreign else 0)
    try:
        fd = os.open(where, flags)
    except OSError as error:
        if refuse_foreign and error.errno in (errno.ELOOP, errno.ENOTDIR) and os.path.islink(where):
            raise NotPermitted(f"{where} became a link while a repository was made there") from None
        raise
    status = os.fstat(fd)
    if refuse_foreign and (status.st_uid != os.geteuid() or status.st_mode & 0o022):
        os.close(fd)
        raise NotPermitted(
            f"a repository must be made in a directory of one's own: {where} belongs to uid {status.st_uid}, "
            f"mode {status.st_mode & 0o7777:04o}",
            hint="remove it, or name another place",
        )
    return fd
