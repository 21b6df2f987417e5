"""``ciuic find``: names over all snapshots, those of files that are gone as well."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from ciuic.cli.commands.looking.read_model import PassedOver, all_timelines
from ciuic.cli.shared import times
from ciuic.cli.shared.names import json_name, plural, shown, shown_text
from ciuic.cli.shared.options import HOST_PATH, FrameCommand
from ciuic.cli.shared.output import json_option, note, out_json
from ciuic.cli.shared.session import current
from ciuic.errors import UsageError

if TYPE_CHECKING:
    from ciuic.cli.shared.output import Cell
    from ciuic.history import FoundPath


@click.command("find", cls=FrameCommand)
@click.argument("pattern")
@click.option("--root", type=HOST_PATH, help="Only in this root.")
@click.option("--deleted", is_flag=True, help="Only what the newest snapshot does not have.")
@click.option(
    "--since", metavar="TIME", help="Only what was still there then: a time, or 2d for two days ago."
)
@click.option("-n", "limit", type=click.IntRange(min=1), metavar="N", help="Only N of them, last seen first.")
@json_option
def command(
    pattern: str, root: bytes | None, deleted: bool, since: str | None, limit: int | None, as_json: bool
) -> int:
    """Find files and directories by name in all snapshots.

    PATTERN is that of a shell (quote it): with * ? [ ], compared with the name; with a slash in it, with the end of the
    path, or with all of it if it begins with one. * does not match a slash, ** between slashes any number of directories. A
    slash at the end finds directories alone. For each path: the newest snapshot that has it.
    """
    from ciuic.history import GlobMatcher, search

    session = current()
    since_ns = None if since is None else times.parse_when(since, session.now_ns)
    try:
        matcher = GlobMatcher(os.fsencode(pattern))
    except ValueError as error:
        raise UsageError(f"the pattern {shown_text(pattern)!r} finds nothing: {error}") from None
    found: list[FoundPath] = []
    passed_over = PassedOver()
    for repository, timeline in all_timelines(session, root, passed_over):
        found += [
            one
            for one in search(repository, timeline, matcher, on_damage=passed_over.add)
            if (one.is_deleted or not deleted) and (since_ns is None or one.snapshot.time_ns >= since_ns)
        ]
    found.sort(key=lambda one: (-one.snapshot.order_ns, one.path, one.host))
    show_found(found[:limit], as_json=as_json)
    if not found:
        note("nothing found")
    elif limit is not None and len(found) > limit:
        note(f"{plural(len(found) - limit, 'more path')} not shown")
    return passed_over.tell()


def show_found(found: list[FoundPath], *, as_json: bool) -> None:
    """Print paths that were found in snapshots."""
    from ciuic.cli.shared.output import Cell, Column, show_table
    from ciuic.units import human_size

    if as_json:
        out_json({"found": [_document(one) for one in found]})
        return
    if not found:
        return
    several = len({one.host for one in found}) > 1
    columns = [
        Column("PATH", shrink=True),
        Column("LAST IN"),
        Column("TIME"),
        Column("SIZE", right=True),
        Column("STATE"),
        *([Column("HOST", shrink=True)] if several else []),
    ]
    rows = [
        (
            shown(one.path) + ("/" if one.entry.is_dir else ""),
            Cell(str(one.snapshot.id), "bold"),
            times.clock(one.snapshot.time_ns),
            human_size(_size(one)),
            _state(one),
            *([shown_text(one.host)] if several else []),
        )
        for one in found
    ]
    show_table(columns, rows)


def _state(one: FoundPath) -> Cell | str:
    """Return ``GONE``, and ``safety`` where the snapshot is one that `list` hides."""
    from ciuic.cli.shared.output import Cell

    words = ["GONE"] if one.is_deleted else []
    if one.snapshot.is_safety:
        words.append("safety")
    return Cell(", ".join(words), "red" if one.is_deleted else "cyan") if words else ""


def _size(one: FoundPath) -> int:
    return one.entry.total_bytes if one.entry.is_dir else one.entry.size_bytes


def _document(one: FoundPath) -> dict[str, Any]:
    return {
        **json_name("path", one.path),
        "is_directory": one.entry.is_dir,
        "size_bytes": _size(one),
        "mtime_ns": one.entry.mtime_ns,
        "snapshot": str(one.snapshot.id),
        "time": times.rfc3339(one.snapshot.time_ns),
        "deleted": one.is_deleted,
        "safety": one.snapshot.is_safety,
        "host": one.host,
    }
