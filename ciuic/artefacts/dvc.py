"""Export to a DVC directory: objects in its cache, and ``NAME.dvc``, which names them and the snapshot.

``dvc checkout`` makes the files out of the cache, ``dvc push`` sends them to a remote.

Guarantees: on return everything is durable. ``NAME.dvc`` is replaced last: an export that was interrupted leaves objects that no file names, and is
repeated by the same command. Names that git or DVC would obey in a working tree are left out.

References:
    https://dvc.org/doc/user-guide/project-structure/dvc-files (outs, meta)
    https://dvc.org/doc/user-guide/project-structure/internal-files (cache)
    dvc_data/hashfile/tree.py (`as_bytes`: content of a .dir object)
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from ciuic.artefacts.folder import ExportFolder, Manifest, Updated, Written
from ciuic.artefacts.git import is_obeyed
from ciuic.artefacts.snapshot_files import ExportedFile, LeftOut, SnapshotFiles
from ciuic.errors import DestinationExists, UsageError
from ciuic.printable import one_line
from ciuic.types import Snapshot

_CONFIG: Final = b".dvc/config"
# A directory that DVC itself makes without Git.
_NEW_CONFIG: Final = b"[core]\n    no_scm = True\n"
_OTHER_CACHE: Final = re.compile(rb"^\s*\[\s*cache\s*\][^\[]*?^\s*dir\s*=", re.MULTILINE)
_OBEYED: Final = (b".dvc", b".dvcignore")


class Stored(NamedTuple):
    """Result of an export."""

    updated: Updated
    left_out: tuple[LeftOut, ...]
    file: bytes
    """Name of the ``.dvc`` file in the destination."""


def export_dvc(
    snapshot: Snapshot,
    repository_id: str,
    path: bytes,
    found: SnapshotFiles,
    destination: Path,
    *,
    overwrite: bool = False,
) -> Stored:
    """Store files of a snapshot in the cache of a DVC directory, and name them in ``NAME.dvc``, durably on return.

    Args:
        snapshot: The snapshot.
        repository_id: Id of its repository.
        path: Path in the snapshot; its last name is NAME.
        found: What the snapshot has there.
        destination: A directory with ``.dvc``, an empty one, or the name of a new one in a directory that exists.
        overwrite: Whether to replace a ``NAME.dvc`` that no export has written.

    Raises:
        UsageError: the path has no name that DVC can use, or the cache of the directory is elsewhere.
        NotPermitted: the directory is another user's, or, for root, another user may write to it.
        DestinationExists: it has other things in it, or such a ``NAME.dvc``.
        Damaged: a file cannot be read; ``NAME.dvc`` is as it was.
    """
    name = path.rpartition(b"/")[2]
    if not _is_text(name) or not name or _why_not(name, None):
        raise UsageError(
            f"{one_line(path)} has no name that DVC can use", hint="-p names a directory below a root"
        )
    reasons = {one: _why_not(one, file) for one, file in found.files.items()}
    left_out = (*found.left_out, *(LeftOut(one, why) for one, why in reasons.items() if why))
    files = {one: file for one, file in found.files.items() if not reasons[one]}
    if not found.is_directory and not files:
        raise UsageError(f"{one_line(path)} is no file that DVC can hold: {left_out[0].reason}")
    with ExportFolder(destination, b".dvc/ciuic/new") as folder:
        updated = _Export(folder, name, files, is_file=not found.is_directory).run(
            snapshot, repository_id, path, overwrite=overwrite
        )
    return Stored(updated, tuple(sorted(left_out)), name + b".dvc")


class _Export:
    """One export to a directory that is locked."""

    def __init__(
        self, folder: ExportFolder, name: bytes, files: dict[bytes, ExportedFile], *, is_file: bool
    ) -> None:
        self._folder = folder
        self._files = files
        self._is_file = is_file
        self._name = name
        self._manifest_name = b".dvc/ciuic/" + name + b".json"
        self._dvc_name = name + b".dvc"

    def run(self, snapshot: Snapshot, repository_id: str, path: bytes, *, overwrite: bool) -> Updated:
        self._open()
        before = Manifest.decode(self._folder.read(self._manifest_name) or b"")
        known = (self._dvc_name,) if before.snapshot else ()
        self._folder.refuse_foreign((self._dvc_name,), known, overwrite=overwrite)
        self._folder.begin()
        if self._folder.status(_CONFIG) is None:
            self._folder.write(_CONFIG, (_NEW_CONFIG,))
        digests = {one.identity: one for one in before.files.values() if one.digest.startswith("md5:")}
        written: dict[bytes, Written] = {}
        written_bytes = 0
        for name, file in self._files.items():
            old = digests.get(file.identity)
            if old is None or not self._has(old):
                old = digests[file.identity] = Written(
                    file.identity, self._store(file.pieces()), file.size_bytes
                )
                written_bytes += file.size_bytes
            written[name] = old
        size_bytes = sum(one.size_bytes for one in written.values())
        if self._is_file:
            (one,) = written.values()
            out: dict[str, str | int] = {"md5": one.digest[4:], "size": size_bytes}
        else:
            listed = sorted((os.fsdecode(name), one.digest[4:]) for name, one in written.items())
            # Byte for byte as DVC writes it: the digest of this content is the name of the directory's version.
            tree = json.dumps(
                [{"md5": digest, "relpath": name} for name, digest in listed], sort_keys=True
            ).encode("ascii")
            digest = hashlib.md5(tree, usedforsecurity=False).hexdigest()
            if not self._has(Written("", f"md5:{digest}", len(tree)), b".dir"):
                self._store(iter((tree,)), b".dir")
            out = {"md5": f"{digest}.dir", "size": size_bytes, "nfiles": len(written)}
        self._folder.sync()
        when = str(snapshot.time_ns // 1_000_000_000)
        manifest = Manifest(str(snapshot.id), repository_id, path, when, written).encode()
        document = self._document(out, snapshot, path)
        # The manifest before the file that it speaks for: without it the next export would take that for the user's.
        for name, data in ((self._manifest_name, manifest), (self._dvc_name, document)):
            if self._folder.read(name) != data:
                self._folder.write(name, (data,))
                self._folder.sync()
        return Updated(len(written), size_bytes, written_bytes, len(before.files.keys() - written.keys()))

    def _open(self) -> None:
        """Refuse what is no DVC directory and not to become one, and a cache in another place."""
        if self._folder.status(b".dvc") is None and os.listdir(self._folder.fd):
            raise DestinationExists(
                f"{self._folder.path} is neither empty nor a DVC directory",
                hint="dvc init, or name another directory",
            )
        for name in (_CONFIG, b".dvc/config.local"):
            if _OTHER_CACHE.search(self._folder.read(name) or b""):
                raise UsageError(
                    f"{self._folder.path} has its cache in another place (cache.dir in {os.fsdecode(name)})",
                    hint="export to a directory with a cache of its own, and dvc import or dvc push from there",
                )

    def _has(self, written: Written, suffix: bytes = b"") -> bool:
        status = self._folder.status(_object_name(written.digest[4:], suffix))
        return status is not None and status.st_size == written.size_bytes

    def _store(self, pieces: Iterator[bytes], suffix: bytes = b"") -> str:
        """Store an object of the cache, read-only as DVC's own are; return its digest."""
        hashed = hashlib.md5(usedforsecurity=False)

        def passed() -> Iterator[bytes]:
            for piece in pieces:
                hashed.update(piece)
                yield piece

        self._folder.write(lambda: _object_name(hashed.hexdigest(), suffix), passed(), is_read_only=True)
        return f"md5:{hashed.hexdigest()}"

    def _document(self, out: dict[str, str | int], snapshot: Snapshot, path: bytes) -> bytes:
        """Return ``NAME.dvc``. JSON strings and numbers are YAML."""
        meta = {
            "snapshot": str(snapshot.id),
            "path": one_line(path),
            "time_ns": snapshot.time_ns,
            "host": one_line(snapshot.host),
        }
        fields = {**out, "hash": "md5", "path": os.fsdecode(self._name)}
        lines = ["outs:"]
        lines += [
            f"{'- ' if number == 0 else '  '}{key}: {json.dumps(value)}"
            for number, (key, value) in enumerate(fields.items())
        ]
        lines += ["meta:", "  ciuic:", *(f"    {key}: {json.dumps(value)}" for key, value in meta.items())]
        return "\n".join(lines).encode("ascii") + b"\n"


def _why_not(name: bytes, file: ExportedFile | None) -> str:
    """Return why a file cannot be in a directory of DVC; empty if it can."""
    if file is not None and file.entry.is_symlink:
        return "it is a symbolic link"
    if not _is_text(name):
        return "its name is not UTF-8"
    if is_obeyed(name):
        return "git would obey it"
    return "DVC would obey it" if any(part in _OBEYED for part in name.split(b"/")) else ""


def _is_text(name: bytes) -> bool:
    try:
        name.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _object_name(digest: str, suffix: bytes = b"") -> bytes:
    return f".dvc/cache/files/md5/{digest[:2]}/{digest[2:]}".encode("ascii") + suffix
