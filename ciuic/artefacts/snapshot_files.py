"""The files that a snapshot has at a path, as an export takes them: relative names, content by pieces, an id of each content.

Guarantees: every name is relative and has no empty part, ``.`` or ``..``; symbolic links of the snapshot are not followed. What has no content, such
as a pipe, is not among the files and named with the reason.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from ciuic.errors import Damaged, UsageError
from ciuic.printable import one_line
from ciuic.repository import Repository
from ciuic.repository.lookup import Located, children, find, join
from ciuic.types import FLAG_MOUNTPOINT, Entry, Snapshot
from ciuic.units import human_size
from ciuic.verdicts.sources import SnapshotFile

_PIECE_BYTES: Final = 4 << 20


class LeftOut(NamedTuple):
    """Something of the snapshot that is not exported."""

    name: bytes
    """Name relative to the path that is exported."""
    reason: str


class ExportedFile:
    """A regular file or a symbolic link of a snapshot."""

    def __init__(self, repository: Repository, snapshot: Snapshot, at: Located) -> None:
        self.entry: Final[Entry] = at.entry
        self.may_be_later: Final = at.entry.is_file and snapshot.may_be_later(at.entry)
        self.source: Final = SnapshotFile(repository, snapshot, at, lambda time_ns: None)
        self._key = bytes.fromhex(repository.id)

    @property
    def size_bytes(self) -> int:
        """Size of the content; of a symbolic link, that of its target."""
        return len(self.entry.target) if self.entry.is_symlink else self.entry.size_bytes

    @property
    def is_executable(self) -> bool:
        """True for a file that its owner may execute."""
        return self.entry.is_file and bool(self.entry.mode & stat.S_IXUSR)

    @property
    def identity(self) -> str:
        """Id that equal content of this repository has, 32 hexadecimal digits.

        Ids of chunks are secrets of a repository (docs/format.md), and artefacts are published: this is a hash of them.
        """
        content = b"l" + self.entry.target if self.entry.is_symlink else b"f" + self.source.identity
        return hashlib.blake2b(content, digest_size=16, key=self._key).hexdigest()

    def pieces(self) -> Iterator[bytes]:
        """Yield the content.

        Raises:
            Damaged: the repository cannot give it.
        """
        if self.entry.is_symlink:
            yield self.entry.target
            return
        for offset in range(0, self.size_bytes, _PIECE_BYTES):
            yield self.source.read(offset, _PIECE_BYTES)


class SnapshotFiles(NamedTuple):
    """Entry of a snapshot at a path."""

    files: dict[bytes, ExportedFile]
    """Files by relative name, in byte order of the names. A path that is a file itself is known by its last name."""
    left_out: list[LeftOut]
    is_directory: bool
    """False if the path is that of one file."""

    @property
    def may_be_later(self) -> int:
        """Number of files whose content may be later than the cut."""
        return sum(file.may_be_later for file in self.files.values())


def files_of(repository: Repository, snapshot: Snapshot, path: bytes) -> SnapshotFiles:
    """Return the files that a snapshot has at an absolute path.

    Raises:
        NotFound: the snapshot has nothing there.
        Damaged: a tree cannot be read.
    """
    top = find(repository, snapshot, path)
    files: dict[bytes, ExportedFile] = {}
    left_out: list[LeftOut] = []
    waiting = [(b"" if top.entry.is_dir else top.path.rpartition(b"/")[2], top)]
    while waiting:
        name, at = waiting.pop()
        entry = at.entry
        if entry.is_dir:
            if entry.flags & FLAG_MOUNTPOINT:
                left_out.append(LeftOut(name, "another file system was mounted there"))
                continue
            for child in children(repository, at.root, entry):
                if child.name in (b"", b".", b"..") or b"/" in child.name:
                    raise Damaged(
                        f"{one_line(at.path)} has an entry {one_line(child.name)}, which no file can be called"
                    )
                below = Located(at.root, join(at.path, child.name), child)
                waiting.append((name + b"/" + child.name if name else child.name, below))
        elif entry.is_file or entry.is_symlink:
            files[name] = ExportedFile(repository, snapshot, at)
        else:
            left_out.append(LeftOut(name, "it is no file, directory or symbolic link"))
    return SnapshotFiles(dict(sorted(files.items())), sorted(left_out), top.entry.is_dir)


def require_place(found: SnapshotFiles, path: bytes, destination: Path) -> None:
    """Refuse a file that is larger than the file system of a destination, which has to be read and hashed to its end.

    Raises:
        UsageError: there is such a file: one of holes has any size at once, and no artefact has holes.
        OSError: the destination lies in no directory.
    """
    place = destination if destination.is_dir() else destination.absolute().parent
    status = os.statvfs(place)
    all_bytes = status.f_blocks * status.f_frsize
    for name, file in found.files.items():
        if file.size_bytes > all_bytes:
            at = join(path, name) if found.is_directory else path
            raise UsageError(
                f"{one_line(at)} has {human_size(file.size_bytes)}, and the file system of {one_line(str(place))} "
                f"has {human_size(all_bytes)}; an artefact has holes as zeros",
                hint="-p names a part without this file",
            )
