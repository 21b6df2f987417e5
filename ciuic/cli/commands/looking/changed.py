"""``ciuic changed``: bytes that were added, overwritten and deleted since a time, by directory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ciuic.cli.commands.looking.read_model import PassedOver, all_timelines
from ciuic.cli.shared import times
from ciuic.cli.shared.names import json_name, plural, shown, shown_text
from ciuic.cli.shared.options import HOST_PATH, FrameCommand
from ciuic.cli.shared.output import json_option, note, out, out_json
from ciuic.cli.shared.session import current
from ciuic.errors import Damaged, UsageError

if TYPE_CHECKING:
    from ciuic.history import DirectoryChanges, RootChanges, Total


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
def command(since: str, tree: bool, root: bytes | None, limit: int | None, as_json: bool) -> int:
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
        out_json({"roots": [_document(changes) for changes in found]})
    else:
        for changes in found:
            _show(changes, tree=tree)
    return passed_over.tell()


def _limited(directories: list[DirectoryChanges], limit: int | None) -> list[DirectoryChanges]:
    if limit is None or len(directories) <= limit:
        return directories
    most = sorted(directories, key=lambda one: -sum(total.size_bytes for total in one[1:]))
    return sorted(most[:limit])


def _show(changes: RootChanges, *, tree: bool) -> None:
    from ciuic.cli.shared.output import Column, show_table

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


def _document(changes: RootChanges) -> dict[str, Any]:
    return {
        **json_name("root", changes.root),
        "host": changes.host,
        "old": str(changes.old.id),
        "old_time": times.rfc3339(changes.old.time_ns),
        "new": str(changes.new.id),
        "new_time": times.rfc3339(changes.new.time_ns),
        "directories": [
            {
                **json_name("path", one.path),
                "added": one.added._asdict(),
                "overwritten": one.overwritten._asdict(),
                "deleted": one.deleted._asdict(),
            }
            for one in changes.directories
        ],
    }
