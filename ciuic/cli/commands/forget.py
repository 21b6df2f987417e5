"""``ciuic forget``, ``hold``, ``release`` and ``tag``: delete snapshots by name, exempt them from that and from pruning, rename what they are for.

Guarantees: nothing is deleted before every id is resolved, no held snapshot is among them, and a person (or ``-y``) has
said yes. The space comes back with the next prune. Works on a full disk, and on a snapshot file that cannot be read, if its
full id is given. Each change is durable when it is reported. With ``--remote`` snapshots of a remote are given up, of any host.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence

import click

from ciuic.cli.shared import times
from ciuic.cli.shared.messages import complain, plural, shown_text
from ciuic.cli.shared.options import ID, FrameCommand, Tag, Text, remote_options, use_remote
from ciuic.cli.shared.output import json_option, note, out_json
from ciuic.cli.shared.session import LOCK_WAIT_SECONDS, Session, current
from ciuic.cli.shared.sets import resolve_all
from ciuic.errors import CiuicError, Damaged, UsageError
from ciuic.repository import promised
from ciuic.types import EXPLAINED_TAGS, FACT_TAGS, SnapshotId


@click.command("forget", cls=FrameCommand)
@click.argument("ids", metavar="ID...", nargs=-1, required=True, type=ID)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("--held", is_flag=True, help="With --remote: also snapshots that were uploaded as held.")
@remote_options
@json_option
def forget_command(
    ids: tuple[str, ...], yes: bool, held: bool, remote: bool, name: str, as_json: bool
) -> None:
    """Delete snapshots for good.

    Held snapshots must be released first, except those that are held for an ordinary user. The space comes back with `ciuic prune`, or the daemon's next one.

    With --remote snapshots of a remote, of any host, also with the URL of one in --repo or CIUIC_REPO. A host that still has one keeps it, and uploads it again only with `ciuic remote upload --again ID`.
    """
    from ciuic.maintenance.prune import forget

    session = current()
    if session.remote_url is not None and not remote:
        # The URL may come from the environment, and the host's own snapshots may be meant.
        raise UsageError(
            f"{session.remote_url} is a remote: its snapshots are given up for all hosts",
            hint="to do that, add --remote",
        )
    if use_remote(session, remote, name):
        _forget_remote(session, ids, yes=yes, held=held, as_json=as_json)
        return
    if held:
        raise click.UsageError("--held goes with --remote; here: ciuic release ID")
    # own_repository: the right to write is checked before a question is asked. Every other form of an id is
    # resolved and its snapshot loaded, which fails for a damaged file.
    unreadable = {bad.id for bad in session.own_repository.snapshots.unreadable()}
    broken = [SnapshotId.parse(text) for text in ids if text in unreadable]
    lost = _lost(session, ids)
    chosen = [
        *resolve_all(session, [text for text in ids if text not in unreadable and text not in lost]),
        *broken,
    ]
    # All ids are resolved and checked before the first is removed: a typing error removes nothing.
    _refuse_held(session, [snapshot_id for snapshot_id in chosen if snapshot_id not in broken])
    if not yes:
        _ask(session, chosen, broken, lost)
    if chosen:
        # Looks for holds once more, under the lock: one may have been set while the question stood.
        forget(session.repository, chosen, wait_seconds=LOCK_WAIT_SECONDS)
    for snapshot_id in lost:
        promised.remove_promise(session.repository_dir, snapshot_id)
    if as_json:
        out_json({"removed": [*map(str, chosen), *lost]})
    else:
        note(f"removed {', '.join([*chosen, *lost])}{'; `ciuic prune` frees the space' if chosen else ''}")


def _lost(session: Session, ids: Sequence[str]) -> list[str]:
    """Full ids among these of snapshots that were promised and given up: nothing but their mention can be removed."""
    known = {
        promise.id for promise in promised.lost(session.repository_dir, session.repository.snapshots.names())
    }
    return [text for text in dict.fromkeys(ids) if text in known]


def _refuse_held(session: Session, ids: Sequence[SnapshotId]) -> None:
    loaded = (session.repository.snapshots.load(snapshot_id) for snapshot_id in ids)
    # A hold with a uid is one that a training of an ordinary user asked for. It yields to root, so that no
    # user can fill the disk with held snapshots (docs/security.md).
    held = [snapshot.id for snapshot in loaded if snapshot.held and snapshot.hold_uid is None]
    if held:
        raise CiuicError(
            f"{', '.join(held)} {'is' if len(held) == 1 else 'are'} held; nothing was removed",
            hint=f"release first: ciuic release {' '.join(held)}",
        )


def _ask(
    session: Session, ids: Sequence[SnapshotId], broken: Sequence[SnapshotId], lost: Sequence[str]
) -> None:
    # A script would answer with whatever comes next in its input, and a timer with nothing.
    if not sys.stdin.isatty():
        raise UsageError(
            "forget asks before it deletes, and there is nobody to ask; nothing was removed", hint="give -y"
        )
    for snapshot_id in ids:
        if snapshot_id in broken:
            complain(f"  {snapshot_id}  cannot be read")
            continue
        info = session.repository.snapshots.info(snapshot_id)
        complain(f"  {snapshot_id}  {times.clock(info.time_ns)}  {', '.join(info.tags)}")
    for text in lost:
        complain(f"  {text}  lost")
    # On stderr, because stdout is for results. A refusal is no success: a script that goes on would count on
    # the space.
    if not click.confirm(f"Delete {plural(len(ids) + len(lost), 'snapshot')} for good?", err=True):
        raise CiuicError("nothing was removed")


def _forget_remote(session: Session, texts: Sequence[str], *, yes: bool, held: bool, as_json: bool) -> None:
    """Give up the snapshots that the texts mean, in the remote that the session reads."""
    from ciuic.remote.upkeep.collect import give_up_snapshots, resolve_snapshots

    chosen = resolve_snapshots(session.remote, texts, held=held)
    if not yes:
        _ask_for_remote(session, chosen)
    give_up_snapshots(session.remote, chosen, host=socket.gethostname())
    if as_json:
        out_json({"removed": [str(id_) for id_ in chosen]})
    else:
        note(f"removed {', '.join(chosen)} from the remote; `ciuic prune --remote` frees the space")


def _ask_for_remote(session: Session, ids: Sequence[SnapshotId]) -> None:
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


@click.command("hold", cls=FrameCommand)
@click.argument("ids", metavar="ID...", nargs=-1, required=True, type=ID)
@click.option(
    "-m", "--message", "reason", default="", type=Text(), metavar="TEXT", help="Why: shown by list and prune."
)
@json_option
def hold_command(ids: tuple[str, ...], reason: str, as_json: bool) -> None:
    """Keep snapshots for ever, until they are released."""
    _change_hold(ids, hold=True, reason=reason, as_json=as_json)


@click.command("release", cls=FrameCommand)
@click.argument("ids", metavar="ID...", nargs=-1, required=True, type=ID)
@json_option
def release_command(ids: tuple[str, ...], as_json: bool) -> None:
    """Let the retention policy decide about held snapshots again."""
    _change_hold(ids, hold=False, reason="", as_json=as_json)


def _change_hold(texts: Sequence[str], *, hold: bool, reason: str, as_json: bool) -> None:
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


@click.command("tag", cls=FrameCommand)
@click.argument("ids", metavar="ID...", nargs=-1, required=True, type=ID)
@click.option(
    "--add",
    "added",
    multiple=True,
    type=Tag(),
    metavar="TAG",
    help="Give them this tag; may be given several times.",
)
@click.option(
    "--remove",
    "removed",
    multiple=True,
    type=Text(),
    metavar="TAG",
    help="Take this tag from those that have it; may be given several times.",
)
@click.option(
    "-m", "--message", type=Text(), metavar="TEXT", help="In place of their messages; empty for none."
)
@json_option
def tag_command(
    ids: tuple[str, ...], added: tuple[str, ...], removed: tuple[str, ...], message: str | None, as_json: bool
) -> None:
    """Change tags and messages of snapshots; prune keeps by the new tags.

    Tags that say what a snapshot is, such as safety or incomplete, stay as they are. A remote has those of the time of the upload.
    """
    if not added and not removed and message is None:
        raise UsageError("nothing to change", hint="give --add, --remove or -m")
    fixed = sorted(FACT_TAGS.intersection((*added, *removed)))
    if fixed:
        raise UsageError(f"{', '.join(fixed)} says what a snapshot is, and is neither added nor removed")
    session = current()
    chosen = resolve_all(session, ids)
    if message is not None:
        # Before the first is changed.
        for snapshot_id in chosen:
            explained = EXPLAINED_TAGS.intersection(session.own_repository.snapshots.load(snapshot_id).tags)
            if explained:
                raise CiuicError(
                    f"the message of {snapshot_id} says why it is {min(explained)}; nothing was changed"
                )
    done = []
    with session.own_repository.writer(wait_seconds=LOCK_WAIT_SECONDS, command="ciuic tag") as writer:
        for snapshot_id in chosen:
            tags = session.repository.snapshots.load(snapshot_id).tags
            kept = [tag for tag in tags if tag not in removed]
            marked = writer.set_marks(snapshot_id, tags=(*kept, *added), message=message)
            done.append({"id": str(snapshot_id), "tags": list(marked.tags), "message": marked.message})
            note(f"{snapshot_id} {shown_text(', '.join(marked.tags)) or 'has no tags'}")
    if as_json:
        out_json({"snapshots": done})
