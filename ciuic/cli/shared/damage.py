"""Recording of damage that a command finds in the repository of this host (ciuic.protocol.known_damage)."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ciuic.cli.shared.messages import shown_text, warn
from ciuic.cli.shared.session import Session

if TYPE_CHECKING:
    from ciuic.protocol.known_damage import DamagedPlace


def note(
    session: Session,
    found: Sequence[DamagedPlace],
    refuted: Callable[[DamagedPlace], bool] = lambda known: False,
) -> None:
    """Record damage for status, alerts and `list`, and remove what is refuted; ignores remotes and other users' repositories."""
    from ciuic.protocol.known_damage import note_damage
    from ciuic.repository.trust import foreign_flaw

    if session.remote_url is not None:
        return
    place = session.repository_dir
    if foreign_flaw(place) is not None and not session.trusts_repository:
        return
    try:
        note_damage(place, found, refuted=refuted)
    except OSError as error:
        # A reader without write permission and a full disk are common; that nothing was found need not be noted.
        if found:
            warn(
                f"the damage could not be noted in {shown_text(os.fspath(place))}: {error.strerror}",
                hint="ciuic status, list and doctor do not show it",
            )
