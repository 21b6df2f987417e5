"""Pairs (a training state and the files of the same instant) in `list` and `show`.

Guarantees: a half that is not there, not yet there, or of which nothing can be known is never shown as if it were.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ciuic.cli.shared import times
from ciuic.cli.shared.documents import Keys
from ciuic.cli.shared.messages import shown_text
from ciuic.cli.shared.output import Cell, out
from ciuic.cli.shared.session import Session
from ciuic.types import PAIRED, Pair, Snapshot

if TYPE_CHECKING:
    from ciuic.protocol.pairing import State
    from ciuic.repository import SnapshotInfo

PAIR = Keys(
    "of (`training` or `filesystem`), id|null, state (`committed`, `pending`, `failed`, `gone`, `unknown`, `none`), problem|null,"
    " repository|null, time, time_ns, apart_seconds, roots"
)
_WORDS: Final = {
    "pending": "not captured yet",
    "failed": "failed",
    "gone": "gone",
    "unknown": "not known here",
}


class Half(msgspec.Struct, frozen=True):
    """The other snapshot of a pair, its state, and the time of the snapshot at hand."""

    pair: Pair
    state: State
    time_ns: int


def halves(session: Session, infos: Iterable[SnapshotInfo]) -> dict[str, Half]:
    """Return the other half of each listed snapshot that has one, by snapshot id."""
    from ciuic.errors import CiuicError

    if session.remote_url is not None:
        # The other half may be anywhere: its repository is named by a path of the host that was lost.
        return {}
    store = session.repository.snapshots
    loaded = []
    for info in infos:
        # The catalogue has tags and no pairs: only snapshots with the tag are loaded from their files.
        if PAIRED in info.tags:
            try:
                loaded.append(store.load(info.id))
            except CiuicError:
                # The command reports the damage when it reads the snapshot.
                continue
    return looked_up(session, loaded)


def looked_up(session: Session, snapshots: Iterable[Snapshot]) -> dict[str, Half]:
    """Return the other half of each loaded snapshot that has one, by snapshot id."""
    having = [
        (snapshot, snapshot.pair) for snapshot in snapshots if snapshot.pair is not None and snapshot.pair.id
    ]
    if not having or session.remote_url is not None:
        return {}
    # Only where there is a pair: it takes 15 ms of processor time to import.
    from ciuic.protocol.pairing import states

    found = states(
        [pair for _, pair in having],
        session.repository_dir,
        session.repository.snapshots.names(),
        _socket(session),
    )
    return {str(snapshot.id): Half(pair, found[pair.id], snapshot.time_ns) for snapshot, pair in having}


def document(pair: Pair | None, half: Half | None) -> dict[str, Any] | None:
    """Return the pair as JSON has it. ``half``: the state that was looked up, if any."""
    if pair is None:
        return None
    return PAIR.of(
        pair,
        state=half.state if half is not None else "unknown" if pair.id else "none",
        time_ns=pair.time_ns or None,
        apart_seconds=_apart_seconds(half) if half is not None else None,
    )


def cell(half: Half | None) -> Any:
    """Return the pair's cell in the table of `list`."""
    if half is None:
        return ""
    if half.state == "committed":
        return half.pair.id
    return Cell(f"{half.pair.id} {_WORDS[half.state]}", "yellow")


def ids(found: Mapping[str, Half]) -> dict[str, str]:
    """Return the ids of the halves that exist."""
    return {id_: half.pair.id for id_, half in found.items() if half.state == "committed"}


def print_half(pair: Pair | None, half: Half | None) -> None:
    """Print the lines of `show` about the pair, with the command that shows the other half."""
    if pair is None:
        return
    if half is None and pair.id:
        out(f"pair     {pair.id}, of {shown_text(pair.repository)} on its host")
        return
    if half is None:
        out(f"pair     no snapshot of the files: {shown_text(pair.problem)}")
        return
    import shlex

    what = f"the files of {', '.join(pair.roots)}" if pair.of == "filesystem" else "the state of the training"
    when = f"{_apart_seconds(half):.3f} s {'after' if pair.of == 'filesystem' else 'before'}"
    state = "" if half.state == "committed" else f" ({_WORDS[half.state]})"
    out(f"pair     {pair.id}{state}: {shown_text(what)}, {when}, in {shown_text(pair.repository)}")
    # A command that cannot succeed is not offered.
    if half.state in ("gone", "failed"):
        return
    command = f"ciuic --repo {shlex.quote(pair.repository)}"
    if pair.of == "training":
        out(shown_text(f"         {command} show {pair.id}"))
    for root in pair.roots:
        out(shown_text(f"         {command} restore -s {pair.id} -p {shlex.quote(root)} -d DIR"))


def _apart_seconds(half: Half) -> float:
    return round(abs(half.pair.time_ns - half.time_ns) / times.NS, 6)


def _socket(session: Session) -> str:
    """Return the socket of a daemon that may be asked. An invalid configuration does not keep `list` from working."""
    from ciuic.config import Config
    from ciuic.errors import CiuicError
    from ciuic.protocol.pairing import SOCKET_NAME

    try:
        config = session.config
    except CiuicError:
        # The default runtime directory: at worst nobody answers there, and the state is "not known here".
        config = Config()
    return f"{config.runtime_dir}/{SOCKET_NAME}"
