"""``ciuic history``, ``find``, ``changed`` and ``checkpoints``: what happened to paths over all snapshots, newest first.

``history`` has the versions of a path; ``find`` has names, those of files that are gone as well; ``changed`` has bytes that were
added, overwritten and deleted since a time, by directory; ``checkpoints`` has those in the newest snapshot of each root, and
whether they are whole.
"""

from __future__ import annotations

import heapq
import os
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from ciuic.cli.shared import times
from ciuic.cli.shared.documents import Keys
from ciuic.cli.shared.messages import json_name, plural, shown, shown_text
from ciuic.cli.shared.options import HOST_PATH, ID, SNAPSHOT_PATH, FrameCommand, Text
from ciuic.cli.shared.output import (
    VERDICT_COLOURS,
    Cell,
    Column,
    Row,
    json_option,
    note,
    out,
    out_json,
    show_table,
)
from ciuic.cli.shared.session import current
from ciuic.cli.shared.timelines import PassedOver, Places, all_timelines, timelines_with
from ciuic.errors import Damaged, NotFound, UsageError
from ciuic.excludes import check_pattern, effective_patterns

if TYPE_CHECKING:
    from ciuic.history import DirectoryChanges, FoundPath, PathVersion, RootChanges, StoredCheckpoint, Total
    from ciuic.types import Snapshot


_VERSION = Keys(
    "kind (difference from the version before: `added`, `changed`, `retyped`, `gone`), first, first_time, first_safety (of the oldest"
    " snapshot that has it), last, last_safety, last_time (of the newest), snapshots (their number), details, host, size_bytes,"
    " mtime_ns, mode (null for `gone`)",
    "each of the `versions` of `history`",
)
_FOUND = Keys(
    "path, is_directory, size_bytes, mtime_ns, snapshot, time (of the newest snapshot that has it), deleted, safety, host",
    "each of the `found` of `find`",
)
_TOTALS = Keys("path, added, overwritten, deleted (each `files`, `size_bytes`)")
_CHANGES = Keys(
    "root, host, old, old_time, new, new_time, directories",
    "each of the `roots` of `changed`",
    directories=_TOTALS,
)
_CHECKPOINT = Keys(
    "path, verdict (`GOOD`, `TORN`, `UNKNOWN`), reason, format, not_finite (null: not all numbers were looked at), size_bytes, mtime,"
    " mtime_ns, snapshot, snapshot_time, host, files (each `path`)",
    "each of the `checkpoints` of `checkpoints`",
)

_COUNTED_BYTES = 1 << 30
"""Limit of the numbers that `checkpoints` reads where no verdict is stored: some seconds."""
_CHANGE_COLOURS = {"added": "green", "gone": "red", "retyped": "magenta", "changed": "yellow"}


@click.command("history", cls=FrameCommand)
@click.argument("path", type=SNAPSHOT_PATH)
@click.option("-n", "limit", type=click.IntRange(min=1), metavar="N", help="Only the N newest versions.")
@click.option(
    "--deleted",
    is_flag=True,
    help="Of a directory: what was below it and is not there any more, each with its last snapshot.",
)
@json_option
def history_command(path: bytes, limit: int | None, deleted: bool, as_json: bool) -> int:
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
        out_json({**json_name("path", path), "versions": [_version_document(version) for version in found]})
    else:
        _show_versions(found)
    return code


def _show_versions(found: list[PathVersion]) -> None:
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
                Cell(change, _CHANGE_COLOURS[version.kind]),
                *([shown_text(version.host)] if several else []),
            )
        )
    show_table(columns, rows)


def _name(snapshot: Snapshot) -> str:
    """Return the id, marked where `list` hides the snapshot."""
    return f"{snapshot.id} (safety)" if snapshot.is_safety else str(snapshot.id)


def _version_document(version: PathVersion) -> dict[str, Any]:
    entry, first, last = version.entry, version.first, version.last
    return _VERSION.of(
        version,
        first_time_ns=first.time_ns,
        first_safety=first.is_safety,
        last_safety=last.is_safety,
        last_time_ns=last.time_ns,
        size_bytes=None if entry is None else entry.total_bytes if entry.is_dir else entry.size_bytes,
        mtime_ns=None if entry is None else entry.mtime_ns,
        mode=None if entry is None else entry.mode,
    )


def _show_deleted(places: Places, limit: int | None, as_json: bool, passed_over: PassedOver) -> None:
    from ciuic.history import GlobMatcher, search

    everything = GlobMatcher(b"*")
    found: list[FoundPath] = []
    for repository, timeline in places.timelines:
        walked = search(repository, timeline, everything, places.path, on_damage=passed_over.add)
        found += [one for one in walked if one.is_deleted]
    found.sort(key=lambda one: (-one.snapshot.order_ns, one.path))
    if not found and not as_json:
        note(f"nothing below {shown(places.path)} is gone")
    _show_found(found[:limit], as_json=as_json)


@click.command("find", cls=FrameCommand)
@click.argument("pattern")
@click.option("--root", type=HOST_PATH, help="Only in this root.")
@click.option("--deleted", is_flag=True, help="Only what the newest snapshot does not have.")
@click.option(
    "--since", metavar="TIME", help="Only what was still there then: a time, or 2d for two days ago."
)
@click.option("-n", "limit", type=click.IntRange(min=1), metavar="N", help="Only N of them, last seen first.")
@json_option
def find_command(
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
    _show_found(found[:limit], as_json=as_json)
    if not found:
        note("nothing found")
    elif limit is not None and len(found) > limit:
        note(f"{plural(len(found) - limit, 'more path')} not shown")
    return passed_over.tell()


def _show_found(found: list[FoundPath], *, as_json: bool) -> None:
    """Print paths that were found in snapshots."""
    from ciuic.units import human_size

    if as_json:
        out_json({"found": [_found_document(one) for one in found]})
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
    words = ["GONE"] if one.is_deleted else []
    if one.snapshot.is_safety:
        words.append("safety")
    return Cell(", ".join(words), "red" if one.is_deleted else "cyan") if words else ""


def _size(one: FoundPath) -> int:
    return one.entry.total_bytes if one.entry.is_dir else one.entry.size_bytes


def _found_document(one: FoundPath) -> dict[str, Any]:
    return _FOUND.of(
        one,
        one.entry,
        is_directory=one.entry.is_dir,
        size_bytes=_size(one),
        time_ns=one.snapshot.time_ns,
        deleted=one.is_deleted,
        safety=one.snapshot.is_safety,
    )


@click.command("changed", cls=FrameCommand)
@click.option(
    "--since", metavar="TIME", default="1h", show_default=True, help="A time, or 24h for a day ago."
)
@click.option("--tree", is_flag=True, help="Sum up in every directory what is below it.")
@click.option("--root", type=HOST_PATH, help="Only in this root.")
@click.option(
    "-n",
    "limit",
    type=click.IntRange(min=1),
    metavar="N",
    help="Only N directories of each root, most bytes first.",
)
@json_option
def changed_command(since: str, tree: bool, root: bytes | None, limit: int | None, as_json: bool) -> int:
    """Show what changed since a time, by directory.

    The newest snapshot is compared with the newest one that is not later than the time. What came and went
    between the two does not show; ciuic find --deleted finds it.
    """
    from ciuic.history import changes_since

    session = current()
    since_ns = times.parse_when(since, session.now_ns)
    if since_ns > session.now_ns:
        raise UsageError(
            f"--since {since} lies in the future ({times.clock(since_ns)}): nothing has changed since"
        )
    found = []
    passed_over = PassedOver()
    for repository, timeline in all_timelines(session, root, passed_over):
        try:
            changes = changes_since(repository, timeline, since_ns, rolled_up=tree)
        except Damaged as error:
            # Which of the two snapshots has it is the same for the answer: sums without a part would be wrong.
            passed_over.add(timeline.snapshots[0], timeline.path, error)
            continue
        if changes is None:
            note(f"{shown(timeline.path)} has no two snapshots to compare")
        else:
            found.append(changes._replace(directories=_limited(changes.directories, limit)))
    if as_json:
        out_json(
            {
                "roots": [
                    _CHANGES.of(changes, old_time_ns=changes.old.time_ns, new_time_ns=changes.new.time_ns)
                    for changes in found
                ]
            }
        )
    else:
        for changes in found:
            _show_changes(changes, tree=tree)
    return passed_over.tell()


def _limited(directories: list[DirectoryChanges], limit: int | None) -> list[DirectoryChanges]:
    if limit is None or len(directories) <= limit:
        return directories
    most = sorted(directories, key=lambda one: -sum(total.size_bytes for total in one[1:]))
    return sorted(most[:limit])


def _show_changes(changes: RootChanges, *, tree: bool) -> None:
    between = f"{changes.old.id} ({times.clock(changes.old.time_ns)}) to {changes.new.id}"
    host = f" on {shown_text(changes.host)}" if current().remote_url is not None else ""
    out(f"{shown(changes.root)}{host}", bold=True)
    note(f"from {between}")
    if not changes.directories:
        note("no file changed")
        return
    columns = [
        Column("DIRECTORY", shrink=True),
        Column("ADDED", right=True),
        Column("OVERWRITTEN", right=True),
        Column("DELETED", right=True),
    ]
    depth_of_root = changes.root.rstrip(b"/").count(b"/")
    rows = []
    for one in changes.directories:
        depth = one.path.rstrip(b"/").count(b"/") - depth_of_root
        name = "  " * depth + shown(one.path.rpartition(b"/")[2]) + "/" if tree and depth else shown(one.path)
        rows.append((name, *(_total(total) for total in one[1:])))
    show_table(columns, rows)


def _total(total: Total) -> str:
    from ciuic.units import human_size

    return f"{human_size(total.size_bytes)} in {plural(total.files, 'file')}" if total.files else ""


@click.command("checkpoints", cls=FrameCommand)
@click.argument("snapshot_id", metavar="[ID]", required=False, type=ID)
@click.option("--root", type=HOST_PATH, help="Only in this root.")
@click.option("-n", "limit", type=click.IntRange(min=1), metavar="N", help="Only the N newest.")
@click.option(
    "--pattern",
    "patterns",
    multiple=True,
    metavar="GLOB",
    type=Text(),
    help="What matches, as in gitignore, is one checkpoint each, whatever it is called; may be given several times.",
)
@json_option
def checkpoints_command(
    snapshot_id: str | None, root: bytes | None, limit: int | None, patterns: tuple[str, ...], as_json: bool
) -> int:
    """List the checkpoints in a snapshot, newest first, with a verdict on each: GOOD, TORN or UNKNOWN.

    Without ID: the newest snapshot of each root. The verdict comes from the structure of the files, of which a few
    kilobytes are read, and from what the snapshot knows: open writers, holes, files overwritten in place.
    """
    from ciuic.history import checkpoints
    from ciuic.verdicts.not_finite import NumberBudget
    from ciuic.verdicts.records import VerdictRecords, age_of
    from ciuic.verdicts.verdict import judge_file

    for pattern in patterns:
        try:
            check_pattern(pattern)
        except ValueError as error:
            raise UsageError(str(error)) from None
    session = current()
    wanted = None if snapshot_id is None else session.snapshots.resolve(snapshot_id)
    budget = NumberBudget(_COUNTED_BYTES)
    found: list[StoredCheckpoint] = []
    passed_over = PassedOver()
    for repository, timeline in all_timelines(session, root, passed_over):
        chosen = (
            timeline.snapshots[:1]
            if wanted is None
            else [one for one in timeline.snapshots if one.id == wanted]
        )
        records = VerdictRecords(repository, patterns=session.checkpoint_patterns)
        for snapshot in chosen:
            found += checkpoints(
                repository,
                timeline,
                snapshot,
                on_damage=passed_over.add,
                records=records,
                judge=lambda source: judge_file(source, budget=budget),
                patterns=effective_patterns(
                    os.fsdecode(timeline.path), session.checkpoint_patterns, patterns
                ),
            )
    found.sort(key=lambda one: one.host)
    found.sort(key=age_of, reverse=True)
    found = found[:limit]
    if as_json:
        out_json({"checkpoints": [_checkpoint_document(one) for one in found]})
    elif found:
        _show_checkpoints(found, session.now_ns)
    else:
        note("no checkpoint of a known format")
    return passed_over.tell()


def _show_checkpoints(found: list[StoredCheckpoint], now_ns: int) -> None:
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
            Cell(one.checkpoint.verdict.state, VERDICT_COLOURS[one.checkpoint.verdict.state]),
            human_duration(max(0, now_ns - one.mtime_ns) / times.NS),
            human_size(one.checkpoint.size_bytes),
            str(one.snapshot.id),
            one.checkpoint.verdict.format,
            shown_text(one.checkpoint.verdict.finding),
        )
        for one in found
    ]
    show_table(columns, rows)


def _checkpoint_document(one: StoredCheckpoint) -> dict[str, Any]:
    verdict = one.checkpoint.verdict
    return _CHECKPOINT.of(
        one, one.checkpoint, verdict, verdict=verdict.state, snapshot_time_ns=one.snapshot.time_ns
    )
