"""Place of a training: its local directory, whose repository is created where there is none, and its remotes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from ciuic.errors import CiuicError, UsageError
from ciuic.repository import Repository
from ciuic.repository.model import LOCK_NAME
from ciuic.repository.repository import UPLOADS_DIR
from ciuic.system.poll import wait_until
from ciuic.training import arguments
from ciuic.training.remote.uploads import UploadOrder

if TYPE_CHECKING:
    from ciuic.config import RemoteConfig
    from ciuic.training.remote.remote_options import Naming


# While another rank creates the repository some of these names exist already.
_OF_REPOSITORY: Final = frozenset(("config", "packs", "snapshots", "marks"))
_OTHERS_SECONDS: Final = 10.0
_POLL_SECONDS: Final = 0.02


def ensure_repository(path: Path, naming: Callable[[], Naming] | None = None) -> None:
    """Make sure that there is a repository at ``path``; create it, parents included, if there is none.

    All ranks of a run may call this at once: one of them creates it, and the others wait for that.

    Args:
        path: Directory of the repository.
        naming: Asked only for a new repository; None: names of its own.

    Raises:
        CiuicError: There can be none.
        OSError: The same, as the file system says it.
    """
    if Repository.exists(path):
        # Opened, so that one of a later version is an error here and not at the first save.
        Repository.open(path).close()
        return
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file: give save_dir a directory that is empty, or is not there yet")
    # A mistaken save_dir, such as the home directory, must not be filled with packs.
    names = {one.name for one in path.iterdir()} if path.exists() else set()
    # What is left where a directory was removed while a process still opened its lock, or ended its upload, is
    # no other file.
    if names - {LOCK_NAME, UPLOADS_DIR} and names.isdisjoint(_OF_REPOSITORY):
        raise UsageError(
            f"{path} has other files ({min(names)} …): "
            "give save_dir a directory that is empty, or is not there yet"
        )
    chosen = None if naming is None else naming()
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        if chosen is None:
            Repository.create(path).close()
        else:
            Repository.create(path, identity=chosen.identity, block_size=chosen.block_size).close()
    # Another rank was first: it may need some time until the repository is complete.
    except (CiuicError, FileExistsError):
        if not wait_until(lambda: Repository.exists(path), _OTHERS_SECONDS, _POLL_SECONDS):
            raise


Remotes: TypeAlias = (
    "str | bool | Mapping[str, Any] | RemoteConfig | Iterable[str | Mapping[str, Any] | RemoteConfig] | None"
)
"""Types that the option ``remote`` takes."""
RemoteList: TypeAlias = "tuple[RemoteConfig, ...]"


class Place(NamedTuple):
    """Local directory and remotes of a training."""

    directory: str
    remotes: tuple[RemoteConfig, ...]


def place_of(save_dir: Any, remote: Any) -> Place:
    """Return where the options of a manager have it save.

    Args:
        save_dir: Directory, or the URL of a remote.
        remote: Further remotes; see `remote_options.remotes_from`.

    Raises:
        UsageError: A URL or a setting is wrong.
        TypeError: An option has the wrong type.
    """
    url = save_dir if is_url(save_dir) else None
    if url is None and remote is None:
        return Place(arguments.directory(save_dir), ())
    # Only here: trainings without a remote need none of it.
    from ciuic.training.remote import remote_options

    remotes = remote_options.remotes_from(remote)
    if url is None:
        return Place(arguments.directory(save_dir), remotes)
    first = remote_options.remotes_from(url)
    # The same place once more, with its settings, is the one that is meant.
    if any(one.url == first[0].url for one in remotes):
        first = ()
    return Place(str(remote_options.local_directory(url)), (*first, *remotes))


def is_url(save_dir: Any) -> bool:
    """Return whether ``save_dir`` names a remote, and no directory."""
    return isinstance(save_dir, str) and re.match(r"[a-z][a-z0-9]*://", save_dir) is not None


def uploads_of(save_dir: Path, remotes: RemoteList) -> tuple[UploadOrder, ...]:
    """Create the repository if there is none, as the first remote names chunks; return what is to be uploaded.

    Raises:
        CiuicError: There can be no repository, or the first remote cannot be opened.
        OSError: The same, as the file system says it.
    """
    if not remotes:
        ensure_repository(save_dir)
        return ()
    # Only here: it imports the clients of stores.
    from ciuic.training.remote.remote_options import naming_of

    ensure_repository(save_dir, lambda: naming_of(remotes[0]))
    return tuple(UploadOrder.of(one) for one in remotes)
