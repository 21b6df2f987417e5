"""``ciuic diff``: what was added, changed, removed or retyped between two snapshots, or a snapshot and now."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from ciuic.cli.shared import times
from ciuic.cli.shared.contents import as_recorded
from ciuic.cli.shared.messages import warn
from ciuic.cli.shared.names import json_name, shown
from ciuic.cli.shared.options import ID, SNAPSHOT_PATH, FrameCommand
from ciuic.cli.shared.output import json_option, note, out, out_json
from ciuic.cli.shared.session import Session, current

if TYPE_CHECKING:
    from ciuic.compare.diff import PathChange
    from ciuic.types import Entry

_SIGNS = {"added": "+", "removed": "-", "changed": "M", "retyped": "T"}
_COLOURS = {"added": "green", "removed": "red", "changed": "yellow", "retyped": "magenta"}


@click.command("diff", cls=FrameCommand)
@click.argument("snapshot_id", metavar="ID", type=ID)
@click.argument("other", metavar="[ID2]", required=False, type=ID)
@click.option("-p", "--path", type=SNAPSHOT_PATH, metavar="PATH", help="Only at and below this path.")
@json_option
def command(snapshot_id: str, other: str | None, path: bytes | None, as_json: bool) -> None:
    """Compare two snapshots, or a snapshot with the files as they are now.

    + added, - removed, M changed (in brackets what: content, size, mode, owner, mtime, xattrs …), T another type.
    """
    session = current()
    changes = _changes(session, snapshot_id, other, path)
    if as_json:
        out_json({"changes": [_document(change) for change in changes]})
        return
    # Printed as they are found: a comparison of large trees has results from the start, and holds no list of
    # them.
    count = 0
    for change in changes:
        count += 1
        out(f"{_SIGNS[change.kind]} ", newline=False, fg=_COLOURS[change.kind])
        details = f"  [{', '.join(change.details)}]" if change.details else ""
        out(shown(change.path) + details)
        if session.stdout_gone:
            # `| head`: nobody reads the rest, and it may be long.
            return
    if not count:
        note("no difference")


def _changes(
    session: Session, snapshot_id: str, other: str | None, path: bytes | None
) -> Iterator[PathChange]:
    from ciuic.compare.diff import diff_live, diff_snapshots

    store = session.repository.snapshots
    old = store.load(store.resolve(snapshot_id))
    path = path if path is None else as_recorded(old, path)
    if other is None:
        return diff_live(session.repository, old, path)
    new = store.load(store.resolve(other))
    # With a path below such a root the comparison itself refuses.
    for snapshot in (old, new) if path is None else ():
        for root in snapshot.left_out:
            warn(f"{shown(root.path)} is not compared: {snapshot.id} was made without it")
    return diff_snapshots(session.repository, old, new, path)


def _document(change: PathChange) -> dict[str, Any]:
    return {
        "kind": change.kind,
        **json_name("path", change.path),
        "details": list(change.details),
        "old": _entry(change.old),
        "new": _entry(change.new),
    }


def _entry(entry: Entry | None) -> dict[str, Any] | None:
    if entry is None:
        return None
    return {
        "mode": f"{entry.mode & 0o7777:04o}",
        "uid": entry.uid,
        "gid": entry.gid,
        "size_bytes": entry.size_bytes,
        "mtime": times.rfc3339(entry.mtime_ns),
        "mtime_ns": entry.mtime_ns,
    }
