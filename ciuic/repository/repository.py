"""A repository on disk: create it, open it, and reach its parts.

Creating takes no directory from another user. A crash leaves directories that the next attempt takes up again;
without its configuration none of them is a repository. Opening reads one small file. Nothing here takes a lock
or writes but `create`, `unmake_empty`, `writer` and `claim`.

A repository counts as the caller's own only if root or the caller owns its directory, all that is read first
in it and every directory on the way to it, and if no other user may write there. The callers decide what to do
with another one: a restore leaves special files out, a repair reads no live files.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from ciuic.errors import CiuicError, Damaged, NotFound, NotPermitted
from ciuic.repository.config import (
    CODECS_VERSION,
    CONFIG_NAMES,
    StoredConfig,
    check_block_size,
    config_problems,
    encode_config,
    new_config,
    read_config,
)
from ciuic.repository.errors import RepositoryExists
from ciuic.repository.identity import Identity
from ciuic.repository.index_database import DAMAGED, INDEX_NAME
from ciuic.repository.model import CLAIM_NAME, LOCK_NAME, PackDamage, PackInfo, PackRecord
from ciuic.repository.snapshots import MARKS_DIR, SNAPSHOTS_DIR, CommittedSnapshots, SnapshotStore
from ciuic.system.disk import Disk
from ciuic.system.ownership import find_flaw

if TYPE_CHECKING:
    from ciuic.repository.block_maps import BlockMaps
    from ciuic.repository.bulk_reader import BulkReader, IntoMemory
    from ciuic.repository.chunk_lookup import ReaderFinder
    from ciuic.repository.chunk_reader import ChunkLookup, ChunkReader, PackSource
    from ciuic.repository.directory_trees import Trees
    from ciuic.repository.locks import Claim
    from ciuic.repository.pack_directory import Packs
    from ciuic.repository.writing.writer import Writer


PACKS_DIR = "packs"
UPLOADS_DIR = "remotes"
"""Directory of the processes that upload from a repository of a training. It comes back if the repository is removed while one ends."""
# All that a crashed `create` may have left, which is taken up again, or a removed repository.
_OWN = {
    PACKS_DIR,
    UPLOADS_DIR,
    SNAPSHOTS_DIR,
    MARKS_DIR,
    LOCK_NAME,
    CLAIM_NAME,
    "config.tmp",
    "config.copy.tmp",
    "config.copy",
}
# The index of packs that are not there; SQLite's own files beside it.
_REBUILT = {INDEX_NAME, *(f"{INDEX_NAME}{suffix}" for suffix in ("-journal", "-wal", "-shm"))}


def exists(path: str | os.PathLike[str]) -> bool:
    """Return whether there is a repository at this path, healthy or not."""
    return any(os.path.lexists(os.path.join(path, name)) for name in CONFIG_NAMES)


def unmake_empty(where: str, disk: Disk | None = None) -> bool:
    """Take the configuration away from a repository that holds nothing, so that `create` can make another one there.

    A crash leaves the repository as it was, or a directory that `create` takes up.

    Args:
        where: Absolute path of the repository.
        disk: Durable operations; None for the real disk.

    Returns:
        False if it holds, or may hold, snapshots, promises or chunks; then nothing was changed.

    Raises:
        Busy: a writer is at work.
        NotPermitted: the directory cannot be written.
    """
    # Imported here, as below: readers take no lock.
    from ciuic.repository.locks import Lock

    disk = disk or Disk()
    try:
        # Against a writer that stores the first chunks just now.
        lock = Lock.acquire(where, command="ciuic: replacing an empty repository")
        try:
            found = set(os.listdir(where))
            if found - _OWN - set(CONFIG_NAMES) - _REBUILT:
                return False
            if any(os.listdir(f"{where}/{name}") for name in found & {PACKS_DIR, SNAPSHOTS_DIR, MARKS_DIR}):
                return False
            # The configuration first, and durably: without it the rest is nothing.
            for name in CONFIG_NAMES:
                if name in found:
                    disk.remove_file(f"{where}/{name}")
            for name in found & _REBUILT:
                disk.remove_file(f"{where}/{name}")
        finally:
            lock.release()
    except PermissionError as error:
        raise NotPermitted(f"cannot change {where}: {error.strerror}", hint="Run as root.") from None
    return True


def _make_dir(disk: Disk, path: str) -> None:
    # Another process makes the same repository.
    with suppress(FileExistsError):
        disk.make_dir(path)


def make_directories(disk: Disk, where: str, refuse_foreign: bool) -> None:
    """Make the directory with its empty parts.

    Raises:
        RepositoryExists: it is neither missing, nor empty, nor begun by a crashed `create`.
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
    # Packs are data, even where the configuration is lost: nothing is made over them.
    if found - _OWN or any(os.listdir(f"{where}/{PACKS_DIR}") for _ in found & {PACKS_DIR}):
        what = "is a repository already" if exists(where) else "is not empty"
        raise RepositoryExists(f"{where} {what}")
    # By descriptor, like the check of the owner: another user may exchange what the name means.
    os.fchmod(fd, 0o700)
    for name in (PACKS_DIR, SNAPSHOTS_DIR, MARKS_DIR):
        if name not in found:
            # Durable with the name of the configuration, which is written later into the same directory.
            _make_dir(disk, f"{where}/{name}")


def _open_directory(where: str, refuse_foreign: bool) -> int:
    """Return a descriptor of the directory, with ``refuse_foreign`` of one's own.

    Owner and mode are checked by descriptor: between two lookups of the name another user may exchange the
    directory where everybody may make names (/tmp). A directory of one's own keeps its name, there as well.

    Raises:
        NotPermitted: another user owns it or may write to it.
        OSError: the disk failed.
    """
    # Without O_NOFOLLOW, the save_dir of a training may be a link, as its user has made it.
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


_PARTS = ("", *CONFIG_NAMES, "packs", "snapshots", "marks")


def foreign_reason(path: str | os.PathLike[str]) -> str:
    """Return why a user other than root and the caller may have written this; empty if none may."""
    for part in _PARTS:
        try:
            flaw = find_flaw(os.path.join(path, part) if part else path)
        except OSError:
            # Unreadable: the caller's open reports it.
            continue
        if flaw is not None:
            return flaw.found
    return ""


# Smaller blocks cost processor time for each, larger ones more bytes for a change in place
# (docs/decisions/block-size.md).
DEFAULT_BLOCK_SIZE = 262144
# Making a repository takes milliseconds; another process that makes the same one is waited for.
_MAKING_SECONDS = 10.0


class Repository:
    """Repository that is open for reading; context manager. Not thread-safe: `reopen` it in each thread.

    A subclass may read from elsewhere: it gives its snapshots to `__init__`, and replaces `reopen`, `close`,
    `_pack_source`, `_chunk_lookup`, `writer`, `claim`, and what is said of packs (`packs` to `config_damage`).
    """

    def __init__(
        self, path: Path, config: StoredConfig, disk: Disk, snapshots: CommittedSnapshots | None = None
    ) -> None:
        """Make the object for `create`, `open` and subclasses."""
        self.path = path
        self.id = config.id
        """Id chosen at creation, 32 hexadecimal digits."""
        self.block_size = config.block_size
        """Bytes in a block of a file; a power of two from 4 KiB to 8 MiB."""
        self.config = config
        self.snapshots: CommittedSnapshots = snapshots or SnapshotStore(str(path), config.id)
        self._identity: Identity | None = None
        self._disk = disk
        # Readers are made on first use: `ciuic list` opens a repository and reads no chunk.
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
        identity: Identity | None = None,
        disk: Disk | None = None,
        refuse_foreign: bool = False,
    ) -> Repository:
        """Make a repository (directory 0700, configuration 0600), durable on return, and open it.

        A crash leaves a directory that `create` takes up again.

        Args:
            path: Directory of the repository; missing, or empty.
            block_size: Bytes in a block of a file.
            identity: Hash, key and seed, to share chunks with a remote; None for XXH3 and a random seed. With a
                key the repository has format 3, which no repository is raised to later.
            disk: Durable operations; None for the real disk.
            refuse_foreign: Refuse a directory that another user owns or may write to, also if it was made
                just now and where ``path`` is a link.

        Raises:
            RepositoryExists: the directory is not empty.
            ValueError: ``block_size`` is not a power of two in the allowed range.
            NotFound: the parent directory is missing.
            NotPermitted: the directory cannot be written, or ``refuse_foreign`` refuses it.
        """
        check_block_size(block_size)
        from ciuic.repository.locks import Lock

        disk = disk or Disk()
        where = os.path.abspath(os.fspath(path))
        if refuse_foreign:
            # Links above it are resolved once, here; the directory itself is opened without following one.
            where = os.path.realpath(where)
        make_directories(disk, where, refuse_foreign)
        config = new_config(identity, block_size)
        # The lock file is made here, so that later a full disk cannot stop the first writer from freeing
        # space. And of several processes that were told to use this directory, only one makes the repository.
        lock = Lock.acquire(where, wait_seconds=_MAKING_SECONDS, command="ciuic: making the repository")
        try:
            if os.path.lexists(f"{where}/{CONFIG_NAMES[0]}"):
                raise RepositoryExists(f"{where} is a repository already")
            # The copy that makes this a repository comes last: without it nothing was stored here.
            for name in reversed(CONFIG_NAMES):
                disk.replace_file(f"{where}/{name}", encode_config(config))
        finally:
            lock.release()
        # The new directory's own name, which nothing has synced yet.
        disk.sync_dir(os.path.dirname(where))
        return cls(Path(os.path.abspath(os.fspath(path))), config, disk)

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, disk: Disk | None = None) -> Repository:
        """Open a repository for reading.

        Raises:
            NotFound: there is none.
            DamagedRepository: neither copy of the configuration is good.
            UnsupportedFormat: a later version of ciuic wrote it.
            NotPermitted: this process may not read it.
        """
        where = os.path.abspath(os.fspath(path))
        return cls(Path(where), read_config(where), disk or Disk())

    def reopen(self) -> Repository:
        """Return the same repository open once more, for another thread; may be called from any thread."""
        return Repository.open(self.path, disk=self._disk)

    @staticmethod
    def exists(path: str | os.PathLike[str]) -> bool:
        """Return whether there is a repository at this path, healthy or not."""
        return exists(path)

    def close(self) -> None:
        """Close all descriptors; the object can be used again."""
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
    def identity(self) -> Identity:
        """Hash, key and seed. MissingHash if the hash function is not installed."""
        if self._identity is None:
            self._identity = self.config.identity()
        return self._identity

    def _pack_source(self) -> PackSource:
        """Return the packs that readers of chunks read from."""
        return self._pack_files()

    def _chunk_lookup(self) -> ChunkLookup:
        """Return the lookup that they use."""
        return self._find()

    @property
    def chunks(self) -> ChunkReader:
        """Reader of chunks by id. What a writer has put and not committed may be invisible here."""
        if self._chunks is None:
            from ciuic.repository.chunk_reader import ChunkReader

            self._chunks = ChunkReader(self._pack_source(), self._chunk_lookup(), self.identity)
        return self._chunks

    @property
    def bulk(self) -> BulkReader:
        """Reader of many chunks in the order of their positions."""
        if self._bulk is None:
            from ciuic.repository.bulk_reader import BulkReader

            self._bulk = BulkReader(self._pack_source(), self._chunk_lookup(), self.identity)
        return self._bulk

    @property
    def into_memory(self) -> IntoMemory:
        """Reader of many chunks into buffers of the caller."""
        if self._into_memory is None:
            from ciuic.repository.bulk_reader import IntoMemory

            self._into_memory = IntoMemory(self._pack_source(), self._chunk_lookup(), self.identity)
        return self._into_memory

    @property
    def trees(self) -> Trees:
        """Reader of directory trees."""
        if self._trees is None:
            from ciuic.repository.directory_trees import Trees

            self._trees = Trees(self.chunks)
        return self._trees

    @property
    def block_maps(self) -> BlockMaps:
        """Reader of block maps."""
        if self._block_maps is None:
            from ciuic.repository.block_maps import BlockMaps

            self._block_maps = BlockMaps(self.chunks)
        return self._block_maps

    def writer(self, *, wait_seconds: float = 0, command: str = "", pack_bytes: int | None = None) -> Writer:
        """Take the lock, repair what a crash left, and return the writer.

        Args:
            wait_seconds: How long to wait for the lock.
            command: Text that other processes see while the lock is held.
            pack_bytes: Seal packs at this size; None for 64 MiB.

        Raises:
            Busy: another process holds the lock; the message names it.
            NotPermitted: the repository cannot be written.
            OSError: the disk failed.
        """
        from ciuic.repository.locks import Lock
        from ciuic.repository.pack_directory import Packs
        from ciuic.repository.writing.writer import Writer

        try:
            lock = Lock.acquire(str(self.path), wait_seconds=wait_seconds, command=command)
        except PermissionError as error:
            raise NotPermitted(
                f"cannot write to {self.path}: {error.strerror}", hint="Run as root."
            ) from None
        except OSError as error:
            # A read-only file system is a matter of permission, not a failing disk.
            if error.errno != errno.EROFS:
                raise
            raise NotPermitted(f"cannot write to {self.path}: {error.strerror}") from None
        packs = Packs(f"{self.path}/{PACKS_DIR}", bytes.fromhex(self.id), self.config.hash)
        try:
            return Writer(self, lock, self._disk, packs, self.identity, pack_bytes=pack_bytes)
        except BaseException:
            packs.close()
            lock.release()
            raise

    def claim(self) -> Claim:
        """Take a shared claim, for content that several writers store in turn for one snapshot.

        Raises:
            OSError: the disk failed.
        """
        from ciuic.repository.locks import Claim

        return Claim.acquire(str(self.path))

    def packs(self) -> list[PackInfo]:
        """Return all packs by number."""
        files = self._pack_files()
        infos = []
        for number in files.sizes():
            try:
                infos.append(files.facts(number))
            except NotFound:
                # Prune dropped it meanwhile.
                continue
        return infos

    def pack_records(self, number: int, *, salvage: bool = False) -> Iterator[PackRecord]:
        """Return all records of the pack, from its footer or by a scan.

        Args:
            number: Number of the pack.
            salvage: Return whatever can still be listed.

        Raises:
            DamagedPack: something may be missing from the list (raised before the first record).
            NotFound: the pack is gone.
        """
        if salvage:
            return iter(self._pack_files().records(number))
        return iter(self._pack_files().strict_records(number))

    def forget_pack(self, number: int) -> None:
        """Close a deleted pack: its space is freed only when no process has it open."""
        if self._packs is not None:
            self._packs.forget(number)

    @property
    def may_have_bases(self) -> bool:
        """True if chunks may be stored as differences.

        The configuration is read each time, because a writer elsewhere may have begun to store some.
        """
        try:
            return read_config(str(self.path)).format >= CODECS_VERSION
        # Unknown counts as yes: the caller then reads the lists of packs, and keeps every base.
        except CiuicError:
            return True

    def foreign_reason(self) -> str:
        """Return why a user other than root and the caller may have written this; empty if none may."""
        return foreign_reason(self.path)

    def misses_no_snapshot(self) -> bool:
        """Return whether none was ever made, or the last was removed on purpose.

        False also if that is not known any more (the index was lost).
        """
        from ciuic.repository.chunk_lookup import known_without_snapshots

        return not self.snapshots.names() and known_without_snapshots(f"{self.path}/{INDEX_NAME}")

    def pack_path(self, number: int) -> str:
        """Return where a pack is stored, for messages."""
        return self._pack_files().path(number)

    def pack_sizes(self) -> dict[int, int]:
        """Return the size in bytes of every pack by its number, damaged ones included."""
        return self._pack_files().sizes()

    def stored_bytes(self) -> int:
        """Return the size of all packs together."""
        return sum(self.pack_sizes().values())

    def scrub(
        self,
        progress: Callable[[int, int], None] | None = None,
        *,
        after: int = -1,
        goes_on: Callable[[int], bool] = lambda number: True,
        between: Callable[[], None] = lambda: None,
    ) -> Iterator[PackDamage]:
        """Read every byte of every pack and check it, referred to or not.

        Content that was not in the page cache before is dropped from it again.

        Args:
            progress: Called with (bytes done, bytes in all).
            after: Check only packs with higher numbers.
            goes_on: Called with each checked pack, lowest number first; the scrub ends when it returns False.
            between: Called often.
        """
        from ciuic.repository.scrub import scrub

        return scrub(
            self._pack_files(), f"{self.path}/{INDEX_NAME}", self.identity, progress, after, goes_on, between
        )

    def check_index(self) -> list[str]:
        """Return in words where index and packs, or catalogue and snapshot files, disagree."""
        from ciuic.repository.scrub import index_problems

        return (
            index_problems(self._pack_files(), f"{self.path}/{INDEX_NAME}")
            + self.snapshots.catalogue_problems()
        )

    def lacks_index(self) -> bool:
        """Return True if there are packs and no index, which the next writer makes."""
        return not os.path.exists(f"{self.path}/{INDEX_NAME}") and bool(self.pack_sizes())

    def pack_problems(self) -> list[tuple[int, str]]:
        """Return what is wrong with headers, sizes and footers of packs; contents are not read."""
        from ciuic.repository.scrub import pack_problems

        return list(pack_problems(self._pack_files(), f"{self.path}/{INDEX_NAME}"))

    def is_spent_copy(self, damage: PackDamage) -> bool:
        """Return whether the index knows of a damaged copy and a good one is read in its place."""
        if damage.chunk is None:
            return False
        marked = any(
            (where.pack, where.offset) == (damage.pack, damage.offset) and where.flags & DAMAGED
            for where in self._chunk_lookup().find(damage.chunk)
        )
        if not marked:
            return False
        try:
            self.chunks.get(damage.chunk)
        except Damaged:
            return False
        return True

    def config_damage(self) -> list[str]:
        """Return what is wrong with either copy of the configuration, in words; empty when both are good."""
        return config_problems(str(self.path))

    def _find(self) -> ReaderFinder:
        if self._finder is None:
            from ciuic.repository.chunk_lookup import ReaderFinder

            self._finder = ReaderFinder(self._pack_files(), f"{self.path}/{INDEX_NAME}")
        return self._finder

    def _pack_files(self) -> Packs:
        if self._packs is None:
            from ciuic.repository.pack_directory import Packs

            self._packs = Packs(f"{self.path}/{PACKS_DIR}", bytes.fromhex(self.id), self.config.hash)
        return self._packs
