"""Copy of a repository in use, into a directory that is empty or an earlier copy.

Guarantees: a copy lists only what it can restore, at every moment, also when it is killed: packs are durable in it before
the snapshots that need them, and nothing that an earlier copy needs is removed before its snapshots are. While packs are
copied, captures go on; pruning waits (`ciuic.repository.locks`). The index is not copied; the copy
makes its own.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Final, NamedTuple

from ciuic.errors import CiuicError, DestinationExists, UsageError
from ciuic.repository import Repository, RepositoryExists
from ciuic.repository.config import CONFIG_NAMES, MAX_FILE_BYTES, read_config
from ciuic.repository.locks import Claim, Lock
from ciuic.repository.repository import PACKS_DIR, exists, make_directories
from ciuic.repository.snapshots import MARKS_DIR, SNAPSHOTS_DIR
from ciuic.system.disk import Disk, open_regular, read_regular

_PACK: Final = re.compile(r"[0-9a-f]{16}\.pack\Z")
_NAME: Final = re.compile(r"cs-[0-9a-f]{6,32}\Z")
_STEP_BYTES: Final = 64 << 20
# Errors of copy_file_range(2) for a pair of file systems that it does not serve.
_NO_RANGE: Final = (errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM)

Progress = Callable[[str, int, int], None]
"""Function of (what is being done, bytes done, bytes in all)."""


class CopyResult(NamedTuple):
    """Result of a copy."""

    snapshots: int
    """Snapshots in the copy."""
    removed: int
    """Snapshots that the copy had, and the repository has no more."""
    copied_packs: int
    copied_bytes: int
    kept_packs: int
    """Packs that the copy had already."""


class _Pack(NamedTuple):
    size_bytes: int
    mtime_ns: int


class _Content(NamedTuple):
    """Content of the repository at one moment at which nobody wrote to it."""

    configs: dict[str, bytes]
    packs: dict[str, _Pack]
    snapshots: dict[str, bytes]
    marks: dict[str, bytes]


def copy_repository(
    repository: Repository,
    target: str | os.PathLike[str],
    *,
    wait_seconds: float = 0,
    progress: Progress | None = None,
    disk: Disk | None = None,
) -> CopyResult:
    """Make ``target`` a copy of the repository as it is now, durable on return.

    Packs that the copy has with the same size and time are not copied again. Snapshots and packs that the repository has
    no more are removed from the copy, last.

    Args:
        repository: The open repository.
        target: Directory that is missing, empty, or a copy of this repository.
        wait_seconds: How long to wait for a writer of either.
        progress: Called often.
        disk: Durable operations on the copy; None for the real disk.

    Raises:
        Busy: A writer, such as a prune, was not done in time.
        DestinationExists: The directory holds something else.
        UsageError: The directory is the repository, or lies in it.
        OSError: A disk failed, or is full. The copy lists what it listed before, or more.
    """
    disk = disk or Disk()
    source, where = os.path.realpath(repository.path), os.path.realpath(target)
    if f"{where}/".startswith(f"{source}/") or f"{source}/".startswith(f"{where}/"):
        raise UsageError(
            f"{where} and the repository {source} lie in one another", hint="name a directory on another disk"
        )
    _prepare(disk, where, repository.id)
    with ExitStack() as held:
        # Against a capture or prune that was told to use the copy.
        held.callback(Lock.acquire(where, wait_seconds=wait_seconds, command="ciuic copy").release)
        content = held.enter_context(_standing(repository, source, wait_seconds))
        _discard_unfinished(disk, where)
        for name, data in content.configs.items():
            _replace(disk, f"{where}/{name}", data)
        copied, copied_bytes = _copy_packs(disk, source, where, content.packs, progress)
        for name, data in content.snapshots.items():
            # Marks first: a held snapshot must not be there without its hold.
            if name in content.marks:
                _replace(disk, f"{where}/{MARKS_DIR}/{name}", content.marks[name])
            _replace(disk, f"{where}/{SNAPSHOTS_DIR}/{name}", data)
        gone = _remove_others(disk, f"{where}/{SNAPSHOTS_DIR}", _NAME, content.snapshots.keys())
        # Only now: what was removed above needed them until here.
        _remove_others(disk, f"{where}/{MARKS_DIR}", _NAME, content.marks.keys())
        _remove_others(disk, f"{where}/{PACKS_DIR}", _PACK, content.packs.keys())
    # Makes the index, from the packs; a list of many snapshots would read every file of them without it.
    with Repository.open(where) as made:
        made.writer(wait_seconds=wait_seconds, command="ciuic copy").close()
    return CopyResult(len(content.snapshots), gone, copied, copied_bytes, len(content.packs) - copied)


def _prepare(disk: Disk, where: str, repository_id: str) -> None:
    """Make the directory, or check that it is a copy of this repository."""
    if exists(where):
        other = read_config(where)
        if other.id != repository_id:
            raise DestinationExists(
                f"{where} is another repository, {other.id}",
                hint="name an empty directory, or a copy of this repository",
            )
        for name in (PACKS_DIR, SNAPSHOTS_DIR, MARKS_DIR):
            with suppress(FileExistsError):
                disk.make_dir(f"{where}/{name}")
        return
    try:
        make_directories(disk, where, refuse_foreign=True)
    except RepositoryExists:
        raise DestinationExists(
            f"{where} is neither empty nor a copy of this repository", hint="name an empty directory"
        ) from None
    # The new directory's own name, which nothing else syncs.
    disk.sync_dir(os.path.dirname(where))


@contextmanager
def _standing(repository: Repository, source: str, wait_seconds: float) -> Iterator[_Content]:
    """Yield the content of the repository; meanwhile nothing of it is removed, and new snapshots may come."""
    try:
        claim = Claim.acquire(source)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        # Nobody writes to a disk that is mounted read-only.
        yield _content(source)
        return
    try:
        # A sweep that began before the claim ends first: one that begins later sees the claim. And between two
        # writers packs end with what was committed.
        with repository.writer(wait_seconds=wait_seconds, command="ciuic copy"):
            content = _content(source)
        yield content
    finally:
        claim.release()


def _content(source: str) -> _Content:
    packs = {}
    with os.scandir(f"{source}/{PACKS_DIR}") as found:
        for item in found:
            if _PACK.match(item.name):
                state = item.stat(follow_symlinks=False)
                packs[item.name] = _Pack(state.st_size, state.st_mtime_ns)
    configs = {}
    for name in CONFIG_NAMES:
        with suppress(FileNotFoundError):
            configs[name] = read_regular(f"{source}/{name}", MAX_FILE_BYTES)
    snapshots, marks = (
        {
            name: read_regular(f"{source}/{part}/{name}", MAX_FILE_BYTES)
            for name in sorted(os.listdir(f"{source}/{part}"))
            if _NAME.match(name)
        }
        for part in (SNAPSHOTS_DIR, MARKS_DIR)
    )
    return _Content(
        configs, packs, snapshots, {name: data for name, data in marks.items() if name in snapshots}
    )


def _discard_unfinished(disk: Disk, where: str) -> None:
    for part in (".", PACKS_DIR, SNAPSHOTS_DIR, MARKS_DIR):
        for name in os.listdir(f"{where}/{part}"):
            if name.endswith(".tmp"):
                disk.unlink(f"{where}/{part}/{name}")


def _replace(disk: Disk, path: str, data: bytes) -> None:
    """Write the file unless it has this content already."""
    with suppress(OSError):
        if read_regular(path, MAX_FILE_BYTES) == data:
            return
    disk.replace_file(path, data)


def _copy_packs(
    disk: Disk, source: str, where: str, packs: dict[str, _Pack], progress: Progress | None
) -> tuple[int, int]:
    """Copy the packs that are missing or differ; return how many, and their bytes. All are durable on return."""
    wanted = {
        name: pack for name, pack in packs.items() if not _is_there(f"{where}/{PACKS_DIR}/{name}", pack)
    }
    total_bytes, done_bytes = sum(pack.size_bytes for pack in wanted.values()), 0
    for name, pack in sorted(wanted.items()):
        path = f"{where}/{PACKS_DIR}/{name}"
        try:
            for copied_bytes in _copy_pack(disk, f"{source}/{PACKS_DIR}/{name}", f"{path}.tmp", pack):
                if progress is not None:
                    progress("copying", done_bytes + copied_bytes, total_bytes)
            disk.rename(f"{path}.tmp", path)
        except BaseException:
            with suppress(OSError):
                disk.unlink(f"{path}.tmp")
            raise
        done_bytes += pack.size_bytes
    disk.sync_dir(f"{where}/{PACKS_DIR}")
    return len(wanted), total_bytes


def _is_there(path: str, pack: _Pack) -> bool:
    try:
        state = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    # By the time too: a pack that is still being filled may have lost its end, and have got as much again.
    return (state.st_size, state.st_mtime_ns) == pack


def _copy_pack(disk: Disk, source: str, target: str, pack: _Pack) -> Iterator[int]:
    """Copy the first ``size_bytes`` of a pack, durably at the end; yield the bytes copied so far.

    What a writer appends meanwhile belongs to later snapshots.
    """
    read_fd = open_regular(source, os.O_RDONLY)
    try:
        write_fd = disk.create(target)
        try:
            at = 0
            if pack.size_bytes and disk.share(read_fd, 0, 0, write_fd, 0):
                # Extents are shared to the end of the source, which may have grown.
                at = pack.size_bytes
                disk.truncate(write_fd, at)
            while at < pack.size_bytes:
                count = _copy_range(disk, read_fd, write_fd, at, min(_STEP_BYTES, pack.size_bytes - at))
                if not count:
                    raise CiuicError(f"{source} became shorter while it was copied", hint="ciuic check")
                disk.start_writing(write_fd, at, count)
                at += count
                yield at
            # Before the sync: the next copy goes by it.
            os.utime(write_fd, ns=(pack.mtime_ns, pack.mtime_ns))
            disk.sync(write_fd)
            # Pages of the copy are of no use to the job.
            disk.uncache(write_fd, 0, 0)
        finally:
            disk.close(write_fd)
    finally:
        os.close(read_fd)


def _copy_range(disk: Disk, source: int, target: int, offset: int, length: int) -> int:
    """Copy a range within the kernel where that is possible; return the number of bytes copied."""
    try:
        return os.copy_file_range(source, target, length, offset, offset)
    except OSError as error:
        if error.errno not in _NO_RANGE:
            raise
    data = os.pread(source, min(length, 8 << 20), offset)
    disk.write_at(target, [data], offset)
    return len(data)


def _remove_others(disk: Disk, directory: str, pattern: re.Pattern[str], wanted: Collection[str]) -> int:
    """Remove, durably, the files of this kind that are not wanted; return how many there were."""
    others = [name for name in os.listdir(directory) if pattern.match(name) and name not in wanted]
    for name in others:
        disk.unlink(f"{directory}/{name}")
    disk.sync_dir(directory)
    return len(others)
