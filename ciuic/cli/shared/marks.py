"""Hold and release of snapshots, for the commands of these names.

Guarantees: every id is resolved before anything is changed, so a typing error changes nothing; each mark is durable
when it is reported. Takes the repository's lock, and waits for it a little: a capture may be at work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ciuic.cli.shared.output import note, out_json
from ciuic.cli.shared.session import Session, current
from ciuic.types import SnapshotId

# Long enough for a snapshot of few changes; a first capture may take hours, and Busy (75) names who has the
# lock.
LOCK_WAIT_SECONDS: Final = 10.0


def resolve_all(session: Session, texts: Sequence[str]) -> list[SnapshotId]:
    """Resolve texts to snapshot ids, each once, in order. NotFound or UsageError names the bad text."""
    store = session.snapshots
    return list(dict.fromkeys(store.resolve(text) for text in texts))


def change_hold(texts: Sequence[str], *, hold: bool, reason: str, as_json: bool) -> None:
    """Set or end the hold of these snapshots and report it."""
    session = current()
    ids = resolve_all(session, texts)
    word = "held" if hold else "released"
    done = []
    with session.own_repository.writer(wait_seconds=LOCK_WAIT_SECONDS, command=f"ciuic {word}") as writer:
        for snapshot_id in ids:
            marked = writer.set_marks(snapshot_id, hold=hold, reason=reason if hold else None)
            done.append({"id": str(snapshot_id), "held": marked.held, "hold_reason": marked.hold_reason})
            # Within the loop: should a later one fail, what was done is known.
            note(f"{snapshot_id} {word}")
    if as_json:
        out_json({"snapshots": done})
