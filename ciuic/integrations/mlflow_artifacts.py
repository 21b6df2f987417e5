"""Snapshots as artifacts of MLflow: ``ciuic://REPOSITORY/SNAPSHOT/PATH``, found by MLflow as a plugin.

REPOSITORY is the absolute path of a local repository, SNAPSHOT a whole id, PATH the path in the snapshot as `ciuic show`
prints it, without the leading slash. Nothing of a location is percent-encoded.

Guarantees: read-only; nothing outside of the named snapshot is read, and a symbolic link in it is neither followed nor
listed, nor is anything else that is no file or directory; each byte that is downloaded was checked, and a file that
cannot be read whole is not left in part.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, NoReturn
from urllib.parse import unquote_to_bytes

from mlflow.entities import FileInfo
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INTERNAL_ERROR, INVALID_PARAMETER_VALUE, RESOURCE_DOES_NOT_EXIST
from mlflow.store.artifact.artifact_repo import ArtifactRepository

from ciuic.errors import CiuicError, NotFound, UsageError
from ciuic.printable import one_line
from ciuic.repository import Repository
from ciuic.repository.lookup import Located, children, find, is_within
from ciuic.types import Snapshot, SnapshotId
from ciuic.verdicts.sources import SnapshotFile

# MLflow takes locations apart, and puts them together again without the empty host.
_LOCATION: Final = re.compile(r"ciuic:(?://)?(/(?!/).*)", re.DOTALL)
_ID: Final = re.compile(r"cs-[0-9a-f]{6,32}\Z")
_READ_BYTES: Final = 8 << 20
_READ_ONLY: Final = (
    "a snapshot cannot be changed, and so takes no artifacts: log them to another location, or save the state with "
    "SnapshotManager.save_snapshot"
)


class SnapshotArtifactRepository(ArtifactRepository):  # type: ignore[misc, unused-ignore]
    """Artifacts below one location."""

    def __init__(self, artifact_uri: str, *args: Any, **kwargs: Any) -> None:
        """Open nothing yet."""
        super().__init__(artifact_uri, *args, **kwargs)
        self._location = artifact_uri

    def list_artifacts(self, path: str | None = None) -> list[Any]:
        """Return files and directories directly below a path, sizes in bytes; of a file nothing.

        Of a location without a snapshot: the snapshots of the repository.

        Raises:
            MlflowException: The path cannot be one, there is nothing, or it cannot be read.
        """
        # A name that is there counts as it is: `download_artifacts` asks with the name that it has found.
        if path and not self._is_there(path):
            path = self._unquoted(path)
        with self._opened(path) as (repository, snapshot, inner):
            prefix = f"{path.rstrip('/')}/" if path else ""
            if snapshot is None:
                return [FileInfo(prefix + one.id, True, None) for one in repository.snapshots.list()]
            return [
                FileInfo(prefix + os.fsdecode(name), size_bytes is None, size_bytes)
                for name, size_bytes in _listed(repository, snapshot, inner)
            ]

    def download_artifacts(self, artifact_path: str, dst_path: str | None = None, **options: Any) -> Any:
        """Write a file, or all files of a directory, below a local directory; return where. MlflowException."""
        return super().download_artifacts(self._unquoted(artifact_path) or "", dst_path, **options)

    def _download_file(self, remote_file_path: str, local_path: str) -> None:
        """Write a file of the snapshot to a local path; holes stay holes.

        Raises:
            MlflowException: There is no such file, or it cannot be read whole; then there is no local file.
        """
        with self._opened(remote_file_path) as (repository, snapshot, inner):
            if snapshot is None or not (at := find(repository, snapshot, inner)).entry.is_file:
                raise NotFound(f"{one_line(remote_file_path)} is no file of a snapshot")
            try:
                _write(SnapshotFile(repository, snapshot, at, lambda _: None), local_path)
            except BaseException:
                with suppress(OSError):
                    os.unlink(local_path)
                raise

    def log_artifact(self, local_file: str, artifact_path: str | None = None) -> NoReturn:
        """Refuse: snapshots are read-only."""
        raise MlflowException(_READ_ONLY, error_code=INVALID_PARAMETER_VALUE)

    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> NoReturn:
        """Refuse: snapshots are read-only."""
        raise MlflowException(_READ_ONLY, error_code=INVALID_PARAMETER_VALUE)

    def delete_artifacts(self, artifact_path: str | None = None) -> NoReturn:
        """Refuse: snapshots go by the rules of their repository."""
        raise MlflowException(f"{_READ_ONLY}; `ciuic forget` removes one", error_code=INVALID_PARAMETER_VALUE)

    def _unquoted(self, path: str | None) -> str | None:
        """Return a path as it is or, where there is none and MLflow has cut it from a URI, unquoted. MlflowException if both are there."""
        plain = _unquote(path or "")
        if not path or plain == path or not self._is_there(plain):
            return path
        if self._is_there(path):
            raise MlflowException(
                f"{one_line(path)} may be that file, or {one_line(plain)} in a URI: both are there",
                error_code=INVALID_PARAMETER_VALUE,
            )
        return plain

    def _is_there(self, path: str) -> bool:
        try:
            with self._opened(path) as (repository, snapshot, inner):
                return snapshot is not None and bool(find(repository, snapshot, inner))
        except MlflowException:
            return False

    @contextmanager
    def _opened(self, path: str | None) -> Iterator[tuple[Repository, Snapshot | None, bytes]]:
        """Open the repository of a path; errors of ciuic become MLflow's.

        Yields:
            Repository, snapshot or None, and the absolute path in the snapshot.
        """
        try:
            where, id_, inner = _parse(self._location, path or "")
            with Repository.open(where) as repository:
                yield repository, None if id_ is None else repository.snapshots.load(id_), inner
        except UsageError as error:
            raise MlflowException(str(error), error_code=INVALID_PARAMETER_VALUE) from error
        except NotFound as error:
            raise MlflowException(str(error), error_code=RESOURCE_DOES_NOT_EXIST) from error
        except (CiuicError, OSError) as error:
            raise MlflowException(str(error), error_code=INTERNAL_ERROR) from error


def _parse(location: str, path: str) -> tuple[str, SnapshotId | None, bytes]:
    """Return the path of the repository, the snapshot, and the path in it, of a path below a location.

    Raises:
        UsageError: They cannot be paths.
    """
    where_in = _LOCATION.fullmatch(location)
    if where_in is None:
        raise UsageError(
            f"an artifact location must be ciuic:///REPOSITORY/SNAPSHOT/PATH, with the absolute path of a local "
            f"repository, got {one_line(location)}"
        )
    if path.startswith("/"):
        raise UsageError(f"the path of an artifact must be relative, got {one_line(path)}")
    parts = [part for part in f"{_unquote(where_in[1])}/{path}".split("/") if part]
    if any(part in (".", "..") or "\0" in part for part in parts):
        raise UsageError(
            f"the path of an artifact must have no '.', '..' or NUL, got {one_line(path or location)}"
        )
    for at, part in enumerate(parts):
        where = "/" + "/".join(parts[:at])
        # The first that may be an id below a repository: a directory in the snapshot may be called like one, too.
        if _ID.match(part) and Repository.exists(where):
            return where, SnapshotId(part), b"/" + os.fsencode("/".join(parts[at + 1 :]))
    return "/" + "/".join(parts), None, b"/"


def _unquote(text: str) -> str:
    return os.fsdecode(unquote_to_bytes(text))


def _listed(repository: Repository, snapshot: Snapshot, path: bytes) -> list[tuple[bytes, int | None]]:
    """Return the names below a path of a snapshot with the sizes of files; None for directories.

    Above the roots of the snapshot there are the directories that lead to them.

    Raises:
        NotFound: The snapshot has nothing there.
    """
    above = [root.path for root in snapshot.roots if root.path != path and is_within(root.path, path)]
    if above and not any(is_within(path, root.path) for root in snapshot.roots):
        start = len(path.rstrip(b"/")) + 1
        return [(name, None) for name in sorted({root[start:].partition(b"/")[0] for root in above})]
    at: Located = find(repository, snapshot, path)
    if not at.entry.is_dir:
        return []
    return [
        (child.name, None if child.is_dir else child.size_bytes)
        for child in children(repository, at.root, at.entry)
        if child.is_dir or child.is_file
    ]


def _write(source: SnapshotFile, path: str) -> None:
    with open(path, "wb") as file:
        for offset in range(0, source.size_bytes, _READ_BYTES):
            data = source.read(offset, _READ_BYTES)
            file.seek(offset)
            # A hole stays one: a sparse file of a terabyte would fill the disk.
            if data.strip(b"\0"):
                file.write(data)
        file.truncate(source.size_bytes)
