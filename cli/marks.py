"""Holding and releasing, one act with two commands.

Guarantees: every id is resolved before anything is changed, so a typing error changes nothing; each mark is durable
when it is reported. Takes the repository's lock, and waits for it a little: a capture may be at work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ciuic.cli.output import note, out_json
from ciuic.cli.session import Session, current
from ciuic.types import SnapshotId

LOCK_WAIT_SECONDS: Final = 10.0


def resolve_all(session: Session, texts: Sequence[str]) -> list[SnapshotId]:
    """The ids that the texts mean, each once, in the order given. NotFound or UsageError names the bad one."""
    store = session.repository.snapshots
    return list(dict.fromkeys(store.resolve(text) for text in texts))


def change_hold(texts: Sequence[str], *, hold: bool, reason: str, as_json: bool) -> None:
    """Sets or ends the hold of these snapshots and says so."""
    session = current()
    ids = resolve_all(session, texts)
    word = "held" if hold else "released"
    done = []
    with session.own_repository.writer(wait_seconds=LOCK_WAIT_SECONDS, command=f"ciuic {word}") as writer:
        for snapshot_id in ids:
            marked = writer.set_marks(snapshot_id, hold=hold, reason=reason if hold else None)
            done.append({"id": str(snapshot_id), "held": marked.held, "hold_reason": marked.hold_reason})
            note(f"{snapshot_id} {word}")
    if as_json:
        out_json({"snapshots": done})
