"""``ciuic history``: the versions of a path over all snapshots, newest first."""

from __future__ import annotations

import heapq
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from ciuic.cli.commands.looking.read_model import PassedOver, Places, timelines_with
from ciuic.cli.shared import times
from ciuic.cli.shared.names import json_name, shown, shown_text
from ciuic.cli.shared.options import SNAPSHOT_PATH, FrameCommand
from ciuic.cli.shared.output import json_option, note, out_json
from ciuic.cli.shared.session import current
from ciuic.errors import NotFound

if TYPE_CHECKING:
    from ciuic.history import FoundPath, PathVersion
    from ciuic.types import Snapshot

_COLOURS = {"added": "green", "gone": "red", "retyped": "magenta", "changed": "yellow"}


@click.command("history", cls=FrameCommand)
@click.argument("path", type=SNAPSHOT_PATH)
@click.option("-n", "limit", type=click.IntRange(min=1), metavar="N", help="Only the N newest versions.")
@click.option(
    "--deleted",
    is_flag=True,
    help="Of a directory: what was below it and is not there any more, each with its last snapshot.",
)
@json_option
def command(path: bytes, limit: int | None, deleted: bool, as_json: bool) -> int:
    """Show the versions of a file or directory over all snapshots, newest first.

    A line is a version: the oldest snapshot that has it, the newest, its size, and what changed. GONE says since
    when the path is not there.
    """
    from ciuic.history import versions

    passed_over = PassedOver()
    places = timelines_with(current(), path, passed_over)
    path = places.path
    if deleted:
        _show_deleted(places, limit, as_json, passed_over)
        return passed_over.tell()
    streams = [
        versions(repository, timeline, path, on_damage=passed_over.add)
        for repository, timeline in places.timelines
    ]
    # Of several hosts: each is newest first by itself.
    found = list(islice(heapq.merge(*streams, key=lambda version: -version.last.order_ns), limit))
    code = passed_over.tell()
    if not found:
        raise NotFound(f"no snapshot has {shown(path)}", hint="ciuic find NAME searches for it elsewhere")
    if as_json:
        out_json({**json_name("path", path), "versions": [_document(version) for version in found]})
    else:
        _show(found)
    return code


def _show(found: list[PathVersion]) -> None:
    from ciuic.cli.shared.output import Cell, Column, Row, show_table
    from ciuic.units import human_size

    several = len({version.host for version in found}) > 1
    columns = [
        Column("SINCE"),
        Column("FIRST IN"),
        Column("LAST IN"),
        Column("SIZE", right=True),
        Column("CHANGE", shrink=True),
        *([Column("HOST", shrink=True)] if several else []),
    ]
    rows: list[Row] = []
    for version in found:
        entry = version.entry
        change = "GONE" if entry is None else ", ".join(version.details) or version.kind
        size = "" if entry is None else human_size(entry.total_bytes if entry.is_dir else entry.size_bytes)
        rows.append(
            (
                times.clock(version.first.time_ns),
                Cell(_name(version.first), "bold"),
                _name(version.last),
                size,
                Cell(change, _COLOURS[version.kind]),
                *([shown_text(version.host)] if several else []),
            )
        )
    show_table(columns, rows)


def _name(snapshot: Snapshot) -> str:
    """Return the id, marked where `list` hides the snapshot."""
    return f"{snapshot.id} (safety)" if snapshot.is_safety else str(snapshot.id)


def _document(version: PathVersion) -> dict[str, Any]:
    entry = version.entry
    return {
        "kind": version.kind,
        "first": str(version.first.id),
        "first_time": times.rfc3339(version.first.time_ns),
        "first_safety": version.first.is_safety,
        "last": str(version.last.id),
        "last_safety": version.last.is_safety,
        "last_time": times.rfc3339(version.last.time_ns),
        "snapshots": version.snapshots,
        "details": list(version.details),
        "host": version.host,
        "size_bytes": None if entry is None else entry.total_bytes if entry.is_dir else entry.size_bytes,
        "mtime_ns": None if entry is None else entry.mtime_ns,
        "mode": None if entry is None else f"{entry.mode & 0o7777:04o}",
    }


def _show_deleted(places: Places, limit: int | None, as_json: bool, passed_over: PassedOver) -> None:
    from ciuic.cli.commands.looking.find import show_found
    from ciuic.history import GlobMatcher, search

    everything = GlobMatcher(b"*")
    found: list[FoundPath] = []
    for repository, timeline in places.timelines:
        walked = search(repository, timeline, everything, places.path, on_damage=passed_over.add)
        found += [one for one in walked if one.is_deleted]
    found.sort(key=lambda one: (-one.snapshot.order_ns, one.path))
    if not found and not as_json:
        note(f"nothing below {shown(places.path)} is gone")
    show_found(found[:limit], as_json=as_json)
