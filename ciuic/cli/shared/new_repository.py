"""A repository that a command makes: never below the mount point of a disk that is absent, and with the identity of its remote."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ciuic.cli.shared.messages import shown, shown_text
from ciuic.errors import CiuicError, NotFound, Unreachable, error_of

if TYPE_CHECKING:
    from ciuic.cli.shared.session import Session
    from ciuic.config import Config, RootConfig
    from ciuic.repository.identity import Identity


def refuse_absent_disk(session: Session, roots: Sequence[RootConfig], path: Path) -> None:
    """Raise NotFound where a repository would be made below the mount point of the disk that has the real one."""
    # A new one would fill the system's disk, and the list would lack every snapshot until somebody noticed.
    if missing := absent_repository(session, roots, path):
        raise NotFound(
            f"the repository is absent: {missing}",
            hint="mount its disk; to begin a new repository: ciuic protect --new-repository PATH",
        )


def absent_repository(session: Session, roots: Sequence[RootConfig], path: Path) -> str:
    """Return why a repository that existed is not at ``path``; empty if it is there, or none was made yet."""
    from ciuic.config.repository_mark import absent_mount_point, read_mark_at
    from ciuic.repository import Repository
    from ciuic.system import mountinfo

    if Repository.exists(path):
        return ""
    # The daemon first: it keeps the mark of a mounted root, which the overlay hides from everybody else.
    try:
        known = session.control.status().repository
        return known.missing if known.path == str(path) else ""
    except Unreachable:
        marks = [mark for root in roots if (mark := read_mark_at(root.path)) is not None]
        mount_point = absent_mount_point(path, marks, mountinfo.read())
        return (
            f"the file system of {shown_text(str(path))} belongs at {shown(mount_point)}"
            if mount_point
            else ""
        )


def make_repository(session: Session, path: Path, *, offline: bool) -> bool:
    """Make the repository if there is none; open an existing one, so that damage is reported now.

    Where a remote is configured the repository has its identity, so that this host shares chunks with the others.

    Args:
        session: State of the run.
        path: Where the repository is or will be.
        offline: Do not ask the remote: the repository gets an identity of its own.

    Returns:
        True if it was made.
    """
    from ciuic.repository import Repository
    from ciuic.repository.trust import require_own

    # Not session.trusts_repository: the file that says it may be written by this very command.
    trusted = session.config.trusts_repository
    require_own(path, trusted=trusted)
    if Repository.exists(path):
        Repository.open(path).close()
        return False
    identity, block_size = None, session.config.repository.block_size_bytes
    if session.config.remotes and not offline:
        identity, block_size = _identity_of_remote(session.config)
    path.parent.mkdir(parents=True, exist_ok=True)
    # refuse_foreign looks again after the directory is made: its owner could have exchanged it since
    # require_own.
    Repository.create(path, block_size=block_size, identity=identity, refuse_foreign=not trusted).close()
    return True


def _identity_of_remote(config: Config) -> tuple[Identity, int]:
    """Return identity and block size of the first remote of the configuration.

    Of several remotes one can share its chunks with the repository: the first.

    Raises:
        CiuicError: the remote cannot be opened; the hint says how to go on without it.
    """
    # The libraries of object stores, which few repositories need.
    from ciuic.remote.access import configured_objects, configured_secrets, open_configured

    remote = config.remotes[0]
    try:
        objects = configured_objects(remote)
        try:
            opened = open_configured(remote, objects, configured_secrets(remote))
        finally:
            objects.close()
    except CiuicError as error:
        without = "--offline makes a repository that shares no chunks with other hosts"
        # The class of its exit code: its own may take other arguments.
        raise error_of(
            error.exit_code,
            f"the new repository gets its identity from the remote {remote.name}, which cannot be opened: {error.message}",
            hint="\n".join(filter(None, (error.hint, without))),
        ) from error
    return opened.identity, opened.stored.block_size
