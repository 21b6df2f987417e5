"""Cache on this host, of a remote or of figures: files in a directory that no other user may write to.

Guarantees: the directory and everything above it can be changed by root and this user alone. A file appears whole or not at
all, and is not synced: readers verify each file. Any file may be gone at any time.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import xxhash

from ciuic.errors import NotPermitted
from ciuic.remote.access import Remote
from ciuic.repository import log as events
from ciuic.system.disk import Disk, open_locked, open_regular
from ciuic.system.ownership import find_flaw, temporary_directory

ROOT_CACHE: Final = Path("/var/cache/ciuic/remotes")
"""Cache of root where XDG_CACHE_HOME is not set."""
DEFAULT_LIMIT_BYTES: Final = 4 << 30
"""Size at which files that were not used for the longest time are deleted."""
# Processes that may each have an index of their own; a further one takes an index in memory.
_INDEX_SLOTS: Final = 4
_PERMISSIONS: Final = 0o700


def cache_root(environ: Mapping[str, str] | None = None) -> Path:
    """Return where the caches of all remotes lie.

    It is ``$XDG_CACHE_HOME/ciuic/remotes`` if that is set, else /var/cache/ciuic/remotes for root and
    ~/.cache/ciuic/remotes for others.
    """
    variables = os.environ if environ is None else environ
    # The specification: a path that is not absolute is ignored.
    if (home := variables.get("XDG_CACHE_HOME", "")).startswith("/"):
        return Path(home) / "ciuic" / "remotes"
    if os.geteuid() == 0:
        return ROOT_CACHE
    return Path(variables.get("HOME") or os.path.expanduser("~")) / ".cache" / "ciuic" / "remotes"


class CacheDirectory:
    """Cached files of one remote, or of the space of one repository in it. May be used by several threads.

    Args:
        path: The directory, which is there.
        limit_bytes: Limit of the cached objects; indexes do not count.
    """

    def __init__(self, path: Path, *, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> None:
        self.path = path
        self._objects = path / "objects"
        self._limit_bytes = limit_bytes
        self._written_bytes: int | None = None

    def load(self, name: str) -> bytes | None:
        """Return the content of a cached object; None if there is none."""
        fd = self.open(name)
        if fd is None:
            return None
        with open(fd, "rb") as file:
            return file.read()

    def open(self, name: str) -> int | None:
        """Return a descriptor of a cached object; None if there is none."""
        try:
            fd = open_regular(self._objects / name, os.O_RDONLY)
        except OSError:
            return None
        # The time of change says when it was used last: access times may be off (noatime).
        with suppress(OSError):
            os.utime(fd)
        return fd

    def store(self, name: str, data: bytes) -> None:
        """Keep an object, unless the disk refuses."""
        try:
            self._objects.mkdir(_PERMISSIONS, exist_ok=True)
            Disk().replace_file(self._objects / name, data, durable=False, shared=True)
        except OSError as error:
            events.warning("remote_cache_not_written", path=str(self._objects), error=str(error))
            return
        self._trim(len(data))

    def remove(self, name: str) -> None:
        """Forget an object."""
        with suppress(OSError):
            os.unlink(self._objects / name)

    def _trim(self, added_bytes: int) -> None:
        """Delete what was not used for the longest time once the limit is passed."""
        if self._written_bytes is not None and self._written_bytes + added_bytes <= self._limit_bytes:
            self._written_bytes += added_bytes
            return
        found = []
        with suppress(OSError), os.scandir(self._objects) as items:
            for item in items:
                # Another process may remove files meanwhile.
                with suppress(OSError):
                    facts = item.stat(follow_symlinks=False)
                    found.append((facts.st_mtime_ns, facts.st_size, item.name))
        left = sum(size for _, size, _ in found)
        for _, size, name in sorted(found):
            if left <= self._limit_bytes:
                break
            self.remove(name)
            left -= size
        self._written_bytes = left

    @contextmanager
    def index_path(self) -> Iterator[str | None]:
        """Return the path of an index file that this process alone uses; None if all are in use."""
        for slot in range(_INDEX_SLOTS):
            try:
                # An index is written by one process at a time: its packs are kept in memory besides.
                fd = open_locked(self.path / f"index-{slot}.lock")
            except BlockingIOError:
                continue
            except OSError:
                break
            try:
                yield str(self.path / f"index-{slot}.sqlite")
            finally:
                os.close(fd)
            return
        yield None


@contextmanager
def open_cache(remote: Remote, space: Remote, root: Path | None = None) -> Iterator[CacheDirectory]:
    """Return the cache of a space of a remote, made if need be; one that is deleted at the end if the disk refuses.

    Args:
        remote: The remote.
        space: The remote itself, or the space of one repository in it.
        root: Where caches lie; None for `cache_root`.

    Raises:
        NotPermitted: another user may write there.
    """
    # By place as well: a copy of a remote in another bucket has its id, and may be older.
    where = f"{remote.id}-{xxhash.xxh3_64_hexdigest(remote.objects.url.encode())}"
    with open_cache_at((cache_root() if root is None else root) / where / space.id) as cache:
        yield cache


@contextmanager
def open_cache_at(path: Path) -> Iterator[CacheDirectory]:
    """Return the cache in a directory, made if need be; one that is deleted at the end if the disk refuses.

    Raises:
        NotPermitted: another user may write there.
    """
    try:
        # Before and after: nothing is made where another user's links lead.
        check_own(path)
        os.makedirs(path, mode=_PERMISSIONS, exist_ok=True)
        check_own(path)
        os.chmod(path, _PERMISSIONS)
    except OSError as error:
        events.warning("remote_cache_not_usable", path=str(path), error=str(error))
    else:
        yield CacheDirectory(path)
        return
    temporary = tempfile.mkdtemp(prefix="ciuic-", dir=temporary_directory())
    try:
        yield CacheDirectory(Path(temporary))
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_own(path: Path) -> None:
    """Raise NotPermitted where another user may change what a path of a cache leads to."""
    flaw = find_flaw(path)
    if flaw is not None:
        raise NotPermitted(
            f"the cache of remotes must be this user's own, and so must every directory above it; the {flaw.found}",
            hint=f"{flaw.remedy}; or set XDG_CACHE_HOME to another place",
        )
