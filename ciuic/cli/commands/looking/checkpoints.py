"""``ciuic checkpoints``: the checkpoints in the newest snapshot of each root, and whether they are whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ciuic.cli.commands.looking.read_model import PassedOver, all_timelines
from ciuic.cli.shared import times
from ciuic.cli.shared.names import json_name, shown, shown_text
from ciuic.cli.shared.options import HOST_PATH, ID, FrameCommand
from ciuic.cli.shared.output import json_option, note, out_json
from ciuic.cli.shared.session import current

if TYPE_CHECKING:
    from ciuic.history import StoredCheckpoint

_COLOURS = {"GOOD": "green", "TORN": "red", "UNKNOWN": "yellow"}


@click.command("checkpoints", cls=FrameCommand)
@click.argument("snapshot_id", metavar="[ID]", required=False, type=ID)
@click.option("--root", type=HOST_PATH, help="Only in this root.")
@click.option("-n", "limit", type=click.IntRange(min=1), metavar="N", help="Only the N newest.")
@json_option
def command(snapshot_id: str | None, root: bytes | None, limit: int | None, as_json: bool) -> int:
    """List the checkpoints in a snapshot, newest first, with a verdict on each: GOOD, TORN or UNKNOWN.

    Without ID: the newest snapshot of each root. The verdict comes from the structure of the files, of which a few
    kilobytes are read, and from what the snapshot knows: open writers, holes, files overwritten in place.
    """
    from ciuic.history import checkpoints

    session = current()
    wanted = None if snapshot_id is None else session.snapshots.resolve(snapshot_id)
    found: list[StoredCheckpoint] = []
    passed_over = PassedOver()
    for repository, timeline in all_timelines(session, root, passed_over):
        chosen = (
            timeline.snapshots[:1]
            if wanted is None
            else [one for one in timeline.snapshots if one.id == wanted]
        )
        for snapshot in chosen:
            found += checkpoints(repository, timeline, snapshot, on_damage=passed_over.add)
    found.sort(key=lambda one: (-one.mtime_ns, one.checkpoint.path, one.host))
    found = found[:limit]
    if as_json:
        out_json({"checkpoints": [_document(one) for one in found]})
    elif found:
        _show(found, session.now_ns)
    else:
        note("no checkpoint of a known format")
    return passed_over.tell()


def _show(found: list[StoredCheckpoint], now_ns: int) -> None:
    from ciuic.cli.shared.output import Cell, Column, show_table
    from ciuic.units import human_duration, human_size

    columns = [
        Column("PATH", shrink=True),
        Column("VERDICT"),
        Column("AGE", right=True),
        Column("SIZE", right=True),
        Column("SNAPSHOT"),
        Column("FORMAT"),
        Column("REASON", shrink=True),
    ]
    rows = [
        (
            shown(one.checkpoint.path),
            Cell(one.checkpoint.verdict.state, _COLOURS[one.checkpoint.verdict.state]),
            human_duration(max(0, now_ns - one.mtime_ns) / times.NS),
            human_size(one.checkpoint.size_bytes),
            str(one.snapshot.id),
            one.checkpoint.verdict.format,
            shown_text(one.checkpoint.verdict.reason),
        )
        for one in found
    ]
    show_table(columns, rows)


def _document(one: StoredCheckpoint) -> dict[str, Any]:
    verdict = one.checkpoint.verdict
    return {
        **json_name("path", one.checkpoint.path),
        "verdict": verdict.state,
        "reason": verdict.reason,
        "format": verdict.format,
        "size_bytes": one.checkpoint.size_bytes,
        "mtime": times.rfc3339(one.mtime_ns),
        "mtime_ns": one.mtime_ns,
        "snapshot": str(one.snapshot.id),
        "snapshot_time": times.rfc3339(one.snapshot.time_ns),
        "host": one.host,
        "files": [json_name("path", name) for name in one.checkpoint.files],
    }
