"""``ciuic list``: the snapshots, newest first.

Guarantees: one row or line a committed snapshot, from the catalogue alone; ``--machine-readable`` prints exactly
``id|YYYY-MM-DD HH:MM:SS|size_bytes`` and nothing else. A snapshot file that cannot be read is never passed over in
silence: stderr names it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ciuic.cli import pairs, times
from ciuic.cli.names import json_name, shown_text
from ciuic.cli.options import HOST_PATH, FrameCommand
from ciuic.cli.output import json_option, note, out, out_json, warn
from ciuic.cli.session import Session, current
from ciuic.types import TAG_INCOMPLETE, TAG_NOT_HELD, TAG_PARTIAL

if TYPE_CHECKING:
    from ciuic.repository import SnapshotInfo


@click.command("list", cls=FrameCommand)
@click.option("--root", type=HOST_PATH, help="Only snapshots of this root.")
@click.option("--tag", help="Only snapshots with this tag.")
@click.option(
    "--since", metavar="TIME", help="Only those taken then or later: a time, or 2d for two days ago."
)
@click.option("--until", metavar="TIME", help="Only those taken then or earlier.")
@click.option("-n", "limit", type=click.IntRange(min=0), metavar="N", help="Only the N newest of these.")
@click.option(
    "--machine-readable",
    is_flag=True,
    help="One line a snapshot: id|YYYY-MM-DD HH:MM:SS|size_bytes, local time.",
)
@click.option(
    "--pairs",
    "with_pairs",
    is_flag=True,
    help="A fourth field in these lines: the id of the snapshot that belongs to it, if that is there.",
)
@json_option
def command(
    root: bytes | None,
    tag: str | None,
    since: str | None,
    until: str | None,
    limit: int | None,
    machine_readable: bool,
    with_pairs: bool,
    as_json: bool,
) -> None:
    """List the snapshots, newest first.

    size is what the snapshot shows (logical bytes), new what it added to the repository.
    """
    if machine_readable and as_json:
        raise click.UsageError("--machine-readable and --json exclude one another")
    session = current()
    store = session.repository.snapshots
    infos = store.list(
        root=root,
        tag=tag,
        since_ns=None if since is None else times.parse_when(since, session.now_ns),
        until_ns=None if until is None else times.parse_when(until, session.now_ns, end_of_day=True),
        limit=limit,
    )
    if machine_readable:
        lines = [f"{info.id}|{times.clock(info.time_ns)}|{info.size_bytes}\n" for info in infos]
        if with_pairs:
            others = pairs.ids(pairs.halves(session, infos))
            lines = [
                f"{line[:-1]}|{others.get(info.id, '')}\n" for line, info in zip(lines, infos, strict=True)
            ]
        out("".join(lines), newline=False)  # at once: each echo is a write(2)
    elif as_json:
        found = pairs.halves(session, infos)
        out_json(
            {
                "repository": str(session.repository_dir),
                "snapshots": [{**as_document(info), "pair": _pair(found.get(info.id))} for info in infos],
            }
        )
    elif infos:
        _table(session, infos)
    else:
        note("no snapshots" + (" match" if any((root, tag, since, until)) else " yet"))
    filtered = any(choice is not None for choice in (root, tag, since, until, limit))
    _warn_of_unreadable(session, len(store.list() if filtered else infos))


def as_document(info: SnapshotInfo) -> dict[str, Any]:
    """A snapshot in JSON, here and in other commands' documents."""
    return {
        "id": str(info.id),
        "time": times.rfc3339(info.time_ns),
        "time_ns": info.time_ns,
        "size_bytes": info.size_bytes,
        "new_bytes": info.new_bytes,
        "files": info.files,
        "tags": list(info.tags),
        "message": info.message,
        "state": "committed",
        "is_incomplete": TAG_INCOMPLETE in info.tags,
        # Older name; in the documents of `snapshot` it is a list of what could not be read. Kept for scripts.
        "incomplete": TAG_INCOMPLETE in info.tags,
        "partial": TAG_PARTIAL in info.tags,
        "not_held": TAG_NOT_HELD in info.tags,
        "held": info.held,
        "hold_reason": info.hold_reason,
        "parent": info.parent or None,
        "host": info.host,
        "roots": [json_name("path", path) for path in info.roots],
    }


def _pair(half: pairs.Half | None) -> dict[str, Any] | None:
    return None if half is None else pairs.document(half.pair, half)


def _table(session: Session, infos: list[SnapshotInfo]) -> None:
    from ciuic.cli.tables import Cell, Column, show_table
    from ciuic.units import human_duration, human_size

    columns = [
        Column("ID"),
        Column("TIME"),
        Column("AGE", right=True),
        Column("SIZE", right=True),
        Column("NEW", right=True),
        Column("FILES", right=True),
        Column("TAGS", shrink=True),
        Column("STATE"),
    ]
    found = pairs.halves(session, infos)
    if found:
        columns.append(Column("PAIR"))
    rows = [
        (
            Cell(str(info.id), "bold"),
            times.clock(info.time_ns),
            human_duration((session.now_ns - info.time_ns) / times.NS),
            human_size(info.size_bytes),
            human_size(info.new_bytes),
            str(info.files),
            shown_text(", ".join(info.tags)),
            state_cell(info),
            *([pairs.cell(found.get(info.id))] if found else []),
        )
        for info in infos
    ]
    show_table(columns, rows)


def state_cell(info: SnapshotInfo) -> Any:
    """``committed``, ``held``, ``incomplete``, ``partial``: what a person must know before choosing it."""
    from ciuic.cli.tables import Cell

    lacks = [tag for tag in (TAG_PARTIAL, TAG_INCOMPLETE) if tag in info.tags]
    if lacks:
        return Cell(", ".join([*lacks, *(["held"] if info.held else [])]), "yellow")
    return Cell("held", "cyan") if info.held else Cell("committed", "green")


def _warn_of_unreadable(session: Session, listed: int) -> None:
    """Names the files that no listing shows. They are read only when the count says that there are some: it takes a while."""
    store = session.repository.snapshots
    if listed == len(store.names()):
        return
    for bad in store.unreadable():
        warn(
            f"snapshot file {shown_text(bad.path)} cannot be read: {shown_text(bad.reason)}",
            hint="it is not listed, and nothing is pruned while it is there; see: ciuic check",
        )
