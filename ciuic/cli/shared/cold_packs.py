"""Cold packs of a remote as the commands meet them: refuse a restore that needs some, and open their storage classes.

Guarantee: a restore that would stop at an archived pack is refused before anything is changed, with the command that thaws.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ciuic.cli.shared.messages import plural, shown
from ciuic.repository.errors import Archived
from ciuic.units import human_size

if TYPE_CHECKING:
    from ciuic.cli.shared.session import Session
    from ciuic.remote.objects.storage_classes import ObjectClasses
    from ciuic.repository import Repository
    from ciuic.repository.lookup import Located

# Every object store that archives takes hours for the speed that is the default.
_TIME = "this takes the store some hours; --status of the same command says until when"


def refuse_archived(repository: Repository, snapshot: str, selected: Sequence[Located]) -> None:
    """Raise Archived if the content of these files and directories cannot all be read before it is thawed.

    Args:
        repository: Repository of the snapshot; nothing is asked unless it is one of a remote.
        snapshot: Id of the snapshot.
        selected: Files and directories to restore.
    """
    from ciuic.remote.reading.remote_repository import RemoteRepository
    from ciuic.remote.upkeep.cold_packs import cold_needs

    if not isinstance(repository, RemoteRepository):
        return
    packs = cold_needs(repository, selected)
    if not packs:
        return
    paths = " ".join(f"-p {shlex.quote(shown(source.path))}" for source in selected)
    size = human_size(sum(pack.size_bytes for pack in packs))
    verb = "is" if len(packs) == 1 else "are"
    raise Archived(
        f"{plural(len(packs), 'pack')} of {snapshot} ({size}) {verb} archived in the store; nothing was changed",
        hint=f"thaw first: ciuic --repo {shlex.quote(repository.reader.space.objects.url)} remote thaw {snapshot} {paths}\n"
        f"{_TIME}",
    )


def open_session_classes(session: Session, url: str) -> ObjectClasses:
    """Open the storage classes of the remote with this URL, as the configuration says where it is.

    Raises:
        UsageError: the store has none that can be changed from here, or its library is not installed.
    """
    from ciuic.cli.shared.remotes import configured_remote, settings_of
    from ciuic.remote.objects.opening import open_classes

    config = configured_remote(url, lambda: session.config.remotes)
    return open_classes(url, settings_of(config))
