"""`ExportFolder`: a directory that exports write files into, and `Manifest`, which says what they have written.

Guarantees: no symbolic link below the directory is followed. A file appears at its name whole and synced. What no export has written is replaced
only where that was asked for. One export at a time works in a directory.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple

from ciuic.errors import Busy, DestinationExists, NotPermitted
from ciuic.printable import one_line
from ciuic.repository import is_zero
from ciuic.restore.destination import open_directory, open_way, stat_at, unlink_if_there
from ciuic.system.child_process import is_privileged
from ciuic.system.disk import NEW_FILE, open_regular, try_lock, write_all
from ciuic.system.ownership import find_flaw

MANIFEST: Final = b".ciuic-export.json"
_TEMPORARY: Final = b".ciuic-export.tmp"
OWN_NAMES: Final = (MANIFEST, _TEMPORARY)
"""Names that exports keep for themselves."""
_VERSION: Final = 1
_DIGEST: Final = re.compile(r"[a-z0-9]+:[0-9a-f]{32,64}\Z")
_PIECE_BYTES: Final = 1 << 20


class Written(NamedTuple):
    """Record of one exported file."""

    identity: str
    """Id of the content in its repository."""
    digest: str
    """Digest of what was written, hexadecimal; which one depends on the form."""
    size_bytes: int


class Updated(NamedTuple):
    """Outcome of an export."""

    files: int
    """Files of the artefact."""
    size_bytes: int
    written_bytes: int
    """Content that was read from the repository and written: of what has changed since the last export."""
    removed: int


class Manifest(NamedTuple):
    """Record of an export: its snapshot and its files; a JSON document in the artefact itself."""

    snapshot: str = ""
    repository: str = ""
    path: bytes = b""
    time: str = ""
    files: dict[bytes, Written] = {}  # noqa: RUF012 - never changed
    """Exported files by their names relative to the directory."""

    def encode(self) -> bytes:
        """Return the document. Bytes of names that are not UTF-8 are lone surrogates in it (PEP 383)."""
        document = {
            "version": _VERSION,
            "snapshot": self.snapshot,
            "repository": self.repository,
            "path": os.fsdecode(self.path),
            "time": self.time,
            "files": {os.fsdecode(name): list(file) for name, file in sorted(self.files.items())},
        }
        return json.dumps(document, indent=0).encode("ascii") + b"\n"

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Return the manifest in a document; an empty one for anything else: everything is then written anew."""
        try:
            found: dict[str, Any] = json.loads(data)
            if found["version"] != _VERSION:
                return cls()
            files = {os.fsencode(name): Written(*file) for name, file in found["files"].items()}
            texts = [str(found[key]) for key in ("snapshot", "repository", "path", "time")]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return cls()
        types = (str, str, int)
        for name, file in files.items():
            # A digest becomes part of a path.
            if not is_inside(name) or tuple(map(type, file)) != types or not _DIGEST.match(file.digest):
                return cls()
        return cls(texts[0], texts[1], os.fsencode(texts[2]), texts[3], files)


def is_inside(name: bytes) -> bool:
    """Return whether a relative name leads to a file below its directory, by names alone."""
    return b"\0" not in name and not {b"", b".", b".."} & set(name.split(b"/"))


def _directories_of(names: Iterable[bytes]) -> set[bytes]:
    """Return the directories that lead to these names."""
    found: set[bytes] = set()
    for name in names:
        above = name.rpartition(b"/")[0]
        while above and above not in found:
            found.add(above)
            above = above.rpartition(b"/")[0]
    return found


def _is_file_or_link(st: os.stat_result) -> bool:
    return stat.S_ISREG(st.st_mode) or stat.S_ISLNK(st.st_mode)


class ExportFolder:
    """A directory to export into, locked; context manager.

    Args:
        path: The directory. It is made if it is missing, in a directory that exists.
        temporary: Name of a directory below it for files that are not complete; made if it is missing, removed at the end.
    """

    def __init__(self, path: Path, temporary: bytes = _TEMPORARY) -> None:
        self.path: Final = path
        self._temporary_name = temporary
        self._temporary = -1
        self._changed: set[bytes] = set()
        self._is_new = not os.path.lexists(path)
        if self._is_new:
            # Nothing is made where another user's link leads, as `open_way` makes nothing there.
            above = open_way(os.fsencode(path.absolute().parent))
            try:
                with suppress(FileExistsError):
                    os.mkdir(path.absolute().name, 0o777, dir_fd=above)
            finally:
                os.close(above)
        self.fd: Final = open_way(os.fsencode(path.absolute()))
        try:
            require_own_directory(path)
            self._lock()
        except BaseException:
            os.close(self.fd)
            raise

    def __enter__(self) -> ExportFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._temporary >= 0:
                os.close(self._temporary)
                above, _, name = self._temporary_name.rpartition(b"/")
                with suppress(OSError), self._above(above, make=False) as folder:
                    os.rmdir(name, dir_fd=folder)
        finally:
            os.close(self.fd)

    def begin(self) -> None:
        """Make the directory for files that are not complete, and remove what a killed export has left in it."""
        above, _, name = self._temporary_name.rpartition(b"/")
        with self._above(above) as folder:
            with suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=folder)
            self._temporary = open_directory(folder, name)
        for left in os.listdir(self._temporary):
            os.unlink(left, dir_fd=self._temporary)

    def _lock(self) -> None:
        if not try_lock(self.fd):
            raise Busy(f"another export writes to {self.path}", hint="wait for its end")

    def read(self, name: bytes) -> bytes | None:
        """Return the content of a regular file; None if there is none."""
        try:
            with self._above(name.rpartition(b"/")[0], make=False) as folder:
                fd = open_regular(name.rpartition(b"/")[2], os.O_RDONLY, dir_fd=folder)
        except (FileNotFoundError, DestinationExists):
            return None
        except OSError as error:
            if error.errno == errno.EINVAL:
                return None
            raise
        with os.fdopen(fd, "rb") as file:
            return file.read()

    def status(self, name: bytes) -> os.stat_result | None:
        """Return the status of what is at a name, None for nothing."""
        try:
            with self._above(name.rpartition(b"/")[0], make=False) as folder:
                return stat_at(folder, name.rpartition(b"/")[2])
        except (FileNotFoundError, DestinationExists):
            return None

    def has(self, name: bytes, size_bytes: int, mtime_ns: int, *, is_executable: bool) -> bool:
        """Return whether a file is there as an export has written it, as far as its status says."""
        st = self.status(name)
        return (
            st is not None
            and stat.S_ISREG(st.st_mode)
            and (st.st_size, st.st_mtime_ns) == (size_bytes, mtime_ns)
            and bool(st.st_mode & stat.S_IXUSR) == is_executable
        )

    def has_link(self, name: bytes, target: bytes) -> bool:
        """Return whether a symbolic link with this target is there."""
        try:
            with self._above(name.rpartition(b"/")[0], make=False) as folder:
                return os.readlink(name.rpartition(b"/")[2], dir_fd=folder) == target
        except (OSError, DestinationExists):
            return False

    def refuse_foreign(self, names: Iterable[bytes], known: Iterable[bytes], *, overwrite: bool) -> None:
        """Refuse to replace what no export has written.

        A directory gives way to a file if everything in it is known, and a file or symbolic link to a directory if it is known itself: what is known
        and not among the names is removed before they are written.

        Args:
            names: Names that will be written.
            known: Names that exports have written.
            overwrite: Whether files may be replaced. Directories, and what is where one must be, are refused also then.

        Raises:
            DestinationExists: there is something at one of the names, or in its way.
        """
        wanted, written = set(names), set(known)
        own_directories = _directories_of(written)
        for name in sorted(_directories_of(wanted) - own_directories - written):
            st = self.status(name)
            if st is not None and not stat.S_ISDIR(st.st_mode):
                raise self._in_the_way(name)
        for name in sorted(wanted - written | wanted & own_directories):
            st = self.status(name)
            if st is None:
                continue
            if stat.S_ISDIR(st.st_mode):
                foreign = self._foreign_in(name, written, own_directories)
                if foreign is not None:
                    raise DestinationExists(
                        f"{self.path} has {one_line(foreign)} already, which no export has written",
                        hint=f"move it away: {one_line(name)} is no directory in the snapshot, and --overwrite removes none",
                    )
            elif name not in written and not overwrite:
                raise DestinationExists(
                    f"{self.path} has {one_line(name)} already, which no export has written",
                    hint="choose another directory, or replace it with --overwrite",
                )

    def _foreign_in(self, top: bytes, known: Set[bytes], own_directories: Set[bytes]) -> bytes | None:
        """Return a name at or below a directory that no export has written, None for none."""
        waiting = [top]
        while waiting:
            name = waiting.pop()
            if name not in own_directories:
                return name
            with self._above(name, make=False) as folder:
                for last in sorted(os.listdir(folder)):
                    st = stat_at(folder, os.fsencode(last))
                    below = name + b"/" + os.fsencode(last)
                    if st is not None and stat.S_ISDIR(st.st_mode):
                        waiting.append(below)
                    elif below not in known or (st is not None and not _is_file_or_link(st)):
                        return below
        return None

    def write(
        self,
        name: bytes | Callable[[], bytes],
        pieces: Iterable[bytes],
        *,
        is_executable: bool = False,
        is_read_only: bool = False,
        mtime_ns: int | None = None,
    ) -> None:
        """Replace a file, synced before it has its name. Pieces of zeros become holes.

        Args:
            name: Name below the directory, or a function that knows it once all pieces were taken.
            pieces: The content.
            is_executable: Whether it may be executed.
            is_read_only: Whether nobody may write to it.
            mtime_ns: Its time; None for now.

        Raises:
            DestinationExists: something else is in the way.
        """
        mode = 0o444 if is_read_only else 0o777 if is_executable else 0o666
        fd = os.open(b"new", NEW_FILE, mode, dir_fd=self._temporary)
        try:
            at = 0
            for piece in pieces:
                if is_zero(piece):
                    at += len(piece)
                    continue
                write_all(fd, piece, at)
                at += len(piece)
            os.ftruncate(fd, at)
            if mtime_ns is not None:
                os.utime(fd, ns=(mtime_ns, mtime_ns))
            # Before the rename: a name must never lead to content that a power cut can take away.
            os.fsync(fd)
            self._rename(name if isinstance(name, bytes) else name())
        except BaseException:
            unlink_if_there(self._temporary, b"new")
            raise
        finally:
            os.close(fd)

    def link(self, name: bytes, target: bytes) -> None:
        """Replace a symbolic link."""
        os.symlink(target, b"new", dir_fd=self._temporary)
        try:
            self._rename(name)
        except BaseException:
            unlink_if_there(self._temporary, b"new")
            raise

    def copy(self, source: bytes) -> Iterator[bytes]:
        """Yield the content of another file of the directory. OSError if it is gone."""
        with self._above(source.rpartition(b"/")[0], make=False) as folder:
            fd = open_regular(source.rpartition(b"/")[2], os.O_RDONLY, dir_fd=folder)
        with os.fdopen(fd, "rb", buffering=0) as file:
            while piece := file.read(_PIECE_BYTES):
                yield piece

    def remove(self, name: bytes) -> None:
        """Remove a file or symbolic link, and the directories that are empty without it. What else is there stays."""
        above, _, last = name.rpartition(b"/")
        # What is gone already may have left its directories: an export was killed between the two.
        with suppress(FileNotFoundError, DestinationExists), self._above(above, make=False) as folder:
            st = stat_at(folder, last)
            if st is not None:
                if not _is_file_or_link(st):
                    return
                os.unlink(last, dir_fd=folder)
                self._changed.add(above)
        while above:
            upper, _, last = above.rpartition(b"/")
            try:
                with self._above(upper, make=False) as folder:
                    os.rmdir(last, dir_fd=folder)
                self._changed.add(upper)
            except (FileNotFoundError, DestinationExists):
                pass
            except OSError:
                return
            above = upper

    def sync(self) -> None:
        """Make all names durable that have changed since the last call."""
        for name in sorted(self._changed):
            # Directories that were removed meanwhile: the one above has changed as well.
            with suppress(FileNotFoundError, DestinationExists), self._above(name, make=False) as folder:
                os.fsync(folder)
        self._changed.clear()
        if self._is_new:
            above = open_way(os.fsencode(self.path.absolute().parent))
            try:
                os.fsync(above)
            finally:
                os.close(above)
            self._is_new = False

    def _rename(self, name: bytes) -> None:
        above, _, last = name.rpartition(b"/")
        with self._above(above) as folder:
            try:
                os.rename(b"new", last, src_dir_fd=self._temporary, dst_dir_fd=folder)
            except IsADirectoryError:
                raise self._in_the_way(name) from None
        self._changed.add(above)

    def _in_the_way(self, name: bytes) -> DestinationExists:
        return DestinationExists(
            f"{self.path} has something else at {one_line(name)}, which is not replaced",
            hint="remove it yourself",
        )

    def _above(self, name: bytes, *, make: bool = True) -> _Opened:
        """Open a directory below, step by step, without following a link."""
        fd = os.dup(self.fd)
        walked = b""
        try:
            for part in name.split(b"/") if name else ():
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(part, 0o777, dir_fd=fd)
                        self._changed.add(walked)
                walked = walked + b"/" + part if walked else part
                below = open_directory(fd, part)
                os.close(fd)
                fd = below
        except BaseException as error:
            os.close(fd)
            if isinstance(error, OSError) and error.errno in (errno.ENOTDIR, errno.ELOOP):
                raise self._in_the_way(walked) from None
            raise
        return _Opened(fd)


class _Opened:
    """Descriptor of a directory, closed at the end of a block."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __enter__(self) -> int:
        return self._fd

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def require_own_directory(path: Path) -> None:
    """Refuse a directory whose owner is another user and, as root, one in which another user may change anything.

    Raises:
        NotPermitted: it is not this user's own.
    """
    st = os.stat(path)
    hint = "export to a directory of your own, and copy or chown it afterwards; or run ciuic as its owner"
    if st.st_uid != os.geteuid():
        raise NotPermitted(f"{path} belongs to user {st.st_uid}, not to user {os.geteuid()}", hint=hint)
    flaw = find_flaw(path) if is_privileged() else None
    if flaw is not None:
        raise NotPermitted(f"root exports only to where no other user may write: {flaw.found}", hint=hint)
