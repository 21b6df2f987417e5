"""``ciuic stats``: the space that each snapshot, root and period takes, and what forgetting it would free.

Guarantees: those of ciuic.maintenance.usage; nothing is changed. What cannot be read is named, and the exit code is 4. A remote is counted as it is stored there.
"""

from __future__ import annotations

import os

import click

from ciuic.cli.shared import times
from ciuic.cli.shared.documents import Keys
from ciuic.cli.shared.messages import plural, shown_text, warn
from ciuic.cli.shared.options import HOST_PATH, FrameCommand
from ciuic.cli.shared.output import Cell, Column, json_option, note, out, out_json, out_prose, show_table
from ciuic.cli.shared.session import current
from ciuic.cli.shared.sets import resolve_all
from ciuic.errors import Damaged
from ciuic.maintenance.usage import PERIODS, GroupUse, SnapshotUse, Usage

_SNAPSHOT = Keys("id, time, time_ns, roots (each `path`), tags, safety, size_bytes, frees_bytes")
_ROOT = Keys("path, snapshots, size_bytes, frees_bytes")
_PERIOD = Keys("begins, snapshots, size_bytes, frees_bytes")
_STATS = Keys(
    "repository, snapshots, together_frees_bytes (of all snapshots that are named; null for one or none), roots, period, periods,"
    " size_bytes, raw_bytes, stored_bytes, garbage_bytes, packs_bytes, deduplication, compression, unread (what cannot be counted)",
    "`stats`",
    snapshots=_SNAPSHOT,
    roots=_ROOT,
    periods=_PERIOD,
)


@click.command("stats", cls=FrameCommand)
@click.argument("ids", metavar="[ID]...", nargs=-1)
@click.option(
    "--root", type=HOST_PATH, help="Only rows of snapshots of this root; what others need still counts."
)
@click.option(
    "--by",
    "period",
    type=click.Choice(PERIODS),
    default="day",
    show_default=True,
    help="Period of the sums by time.",
)
@json_option
def command(ids: tuple[str, ...], root: bytes | None, period: str, as_json: bool) -> int:
    """Show what each snapshot takes, and what forgetting it would free.

    frees: the stored bytes that nothing else needs. Snapshots that share content free more together than the sum: name several IDs to
    see how much. `ciuic forget` deletes them, `ciuic prune` frees the space, of which it may leave up to 5 % for later.
    """
    from ciuic.cli.shared.progress import progress
    from ciuic.maintenance.usage import measure_usage

    session = current()
    chosen = resolve_all(session, ids)
    # Ordered, and each once: a damaged pack is read twice, and a damaged file may be met in several roots.
    unread: dict[str, None] = {}
    with progress("stats") as reporter:
        used = [
            measure_usage(
                repository,
                frozenset(chosen),
                period=period,
                progress=lambda done, total: reporter.step("counting", done, total),
                unread=unread.setdefault,
            )
            for repository in session.repositories
        ]
    for words in unread:
        warn(f"cannot be counted: {shown_text(words)}")
    if unread:
        warn(
            "what only these parts need counts as needed by nothing, and what they share as not shared",
            hint="ciuic verify --all --checksum names the damage",
        )
        session.exit_code = Damaged.exit_code
    usage = used[0] if len(used) == 1 else _sum(used)
    rows = [
        one
        for one in usage.snapshots
        if (not chosen or one.id in chosen) and (root is None or root in one.roots)
    ]
    roots = [one for one in usage.roots if root is None or one.name == os.fsdecode(root)]
    if as_json:
        out_json(
            _STATS.of(
                usage,
                repository=session.place,
                snapshots=[
                    _SNAPSHOT.of(one, safety=one.is_safety, frees_bytes=one.alone_bytes) for one in rows
                ],
                together_frees_bytes=usage.together_bytes if len(chosen) > 1 else None,
                roots=[
                    _ROOT.of(one, path=os.fsencode(one.name), frees_bytes=one.alone_bytes) for one in roots
                ],
                period=period,
                periods=[
                    _PERIOD.of(one, begins=one.name, frees_bytes=one.alone_bytes) for one in usage.periods
                ],
                deduplication=_ratio(usage.size_bytes, usage.raw_bytes),
                compression=_ratio(usage.raw_bytes, usage.stored_bytes),
                unread=list(unread),
            )
        )
        return session.exit_code
    if not usage.snapshots:
        note("no snapshots yet")
        return session.exit_code
    _show_snapshots(rows)
    if len(chosen) > 1:
        out()
        out_prose(f"forgetting all {len(chosen)} of them frees {_size(usage.together_bytes)}", 2)
    if not chosen:
        _show_groups("ROOT", roots)
        if root is None:
            _show_groups(period.upper(), usage.periods)
    _show_totals(usage)
    return session.exit_code


def _sum(parts: list[Usage]) -> Usage:
    """Add up repositories of a remote, which share no chunks."""
    return Usage(
        sorted((one for part in parts for one in part.snapshots), key=lambda one: (-one.time_ns, one.id)),
        _merged([one for part in parts for one in part.roots], newest_first=False),
        _merged([one for part in parts for one in part.periods], newest_first=True),
        *(sum(values) for values in zip(*(part[3:] for part in parts), strict=True)),
    )


def _merged(groups: list[GroupUse], *, newest_first: bool) -> list[GroupUse]:
    found: dict[str, GroupUse] = {}
    for one in groups:
        known = found.get(one.name, GroupUse(one.name, 0, 0, 0))
        found[one.name] = GroupUse(one.name, *(a + b for a, b in zip(known[1:], one[1:], strict=True)))
    return sorted(found.values(), reverse=newest_first)


def _size(size_bytes: int) -> str:
    from ciuic.units import human_size

    return human_size(size_bytes)


def _show_snapshots(rows: list[SnapshotUse]) -> None:
    if not rows:
        note("no snapshots match")
        return
    show_table(
        [
            Column("ID"),
            Column("TIME"),
            Column("SIZE", right=True),
            Column("FREES", right=True),
            Column("ROOTS", shrink=True),
        ],
        [
            (
                Cell(str(one.id), "bold"),
                times.clock(one.time_ns),
                _size(one.size_bytes),
                _size(one.alone_bytes),
                shown_text(", ".join(map(os.fsdecode, one.roots))),
            )
            for one in rows
        ],
    )


def _show_groups(header: str, groups: list[GroupUse]) -> None:
    if not groups:
        return
    out()
    show_table(
        [
            Column(header, shrink=header == "ROOT"),
            Column("SNAPSHOTS", right=True),
            Column("SIZE", right=True),
            Column("FREES", right=True),
        ],
        [
            (
                Cell(shown_text(one.name), "bold"),
                str(one.snapshots),
                _size(one.size_bytes),
                _size(one.alone_bytes),
            )
            for one in groups
        ],
    )


def _ratio(many: int, few: int) -> float | None:
    return round(many / few, 2) if few else None


def _show_totals(usage: Usage) -> None:
    out()
    dedup, compression = (
        _ratio(usage.size_bytes, usage.raw_bytes),
        _ratio(usage.raw_bytes, usage.stored_bytes),
    )
    out_prose(
        f"{plural(len(usage.snapshots), 'snapshot')} show {_size(usage.size_bytes)}, stored in {_size(usage.stored_bytes)}"
        + (f": shared {dedup} times, compressed {compression} times" if dedup and compression else ""),
        2,
    )
    out_prose(f"packs {_size(usage.packs_bytes)}, of which no snapshot needs {_size(usage.garbage_bytes)}", 2)
