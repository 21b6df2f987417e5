"""Place of a training: its local directory, and its remotes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ciuic.training.remote.uploads import UploadOrder
from ciuic.training.state import validation
from ciuic.training.util.repository_dir import ensure_repository

if TYPE_CHECKING:
    from ciuic.config import RemoteConfig

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
        remote: Further remotes; see `targets.remotes_from`.

    Raises:
        UsageError: A URL or a setting is wrong.
        TypeError: An option has the wrong type.
    """
    url = save_dir if is_url(save_dir) else None
    if url is None and remote is None:
        return Place(validation.directory(save_dir), ())
    # Only here: trainings without a remote need none of it.
    from ciuic.training.remote import targets

    remotes = targets.remotes_from(remote)
    if url is None:
        return Place(validation.directory(save_dir), remotes)
    first = targets.remotes_from(url)
    # The same place once more, with its settings, is the one that is meant.
    if any(one.url == first[0].url for one in remotes):
        first = ()
    return Place(str(targets.local_directory(url)), (*first, *remotes))


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
    from ciuic.training.remote.joining import naming_of

    ensure_repository(save_dir, lambda: naming_of(remotes[0]))
    return tuple(UploadOrder.of(one) for one in remotes)
