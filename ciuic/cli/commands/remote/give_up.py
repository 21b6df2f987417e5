"""``ciuic forget --remote``: give up snapshots of a remote, of any host.

Guarantees: nothing is given up before every id is resolved and a person (or ``-y``) has said yes.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from ciuic.cli.shared import times
from ciuic.cli.shared.messages import complain
from ciuic.cli.shared.names import plural, shown_text
from ciuic.cli.shared.output import note, out_json
from ciuic.cli.shared.session import Session
from ciuic.errors import CiuicError, Damaged, UsageError

if TYPE_CHECKING:
    from ciuic.types import SnapshotId


def forget_remote(session: Session, texts: Sequence[str], *, yes: bool, held: bool, as_json: bool) -> None:
    """Give up the snapshots that the texts mean, in the remote that the session reads."""
    from ciuic.remote.upkeep.collect import give_up_snapshots, resolve_snapshots

    chosen = resolve_snapshots(session.remote, texts, held=held)
    if not yes:
        _ask(session, chosen)
    give_up_snapshots(session.remote, chosen, host=socket.gethostname())
    if as_json:
        out_json({"removed": [str(id_) for id_ in chosen]})
    else:
        note(f"removed {', '.join(chosen)} from the remote; `ciuic prune --remote` frees the space")


def _ask(session: Session, ids: Sequence[SnapshotId]) -> None:
    if not sys.stdin.isatty():
        raise UsageError(
            "forget asks before it deletes, and there is nobody to ask; nothing was removed", hint="give -y"
        )
    for id_ in ids:
        try:
            snapshot = session.remote.snapshots.load(id_)
        except Damaged as error:
            complain(f"  {id_}  cannot be read: {shown_text(error.message)}")
        else:
            complain(f"  {id_}  {times.clock(snapshot.time_ns)}  {shown_text(', '.join(snapshot.tags))}")
    if not click.confirm(f"Delete {plural(len(ids), 'snapshot')} of the remote for good?", err=True):
        raise CiuicError("nothing was removed")
