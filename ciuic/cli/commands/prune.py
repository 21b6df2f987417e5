"""``ciuic prune``: applies the retention policy, says for each snapshot why it stays, and frees the space of the rest.

Guarantees: what cannot be read is never a reason to delete (ciuic.maintenance.prune refuses); interrupted anywhere, the repository is
whole and the next run frees the rest; it works on a full disk.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from ciuic.cli.shared import times
from ciuic.cli.shared.marks import LOCK_WAIT_SECONDS
from ciuic.cli.shared.names import plural
from ciuic.cli.shared.options import FrameCommand
from ciuic.cli.shared.output import json_option, note, out, out_json
from ciuic.cli.shared.session import Session, current

if TYPE_CHECKING:
    from ciuic.maintenance.prune import PruneResult


@click.command("prune", cls=FrameCommand)
@click.option("--dry-run", is_flag=True, help="Say what would be removed; remove nothing.")
@json_option
def command(dry_run: bool, as_json: bool) -> None:
    """Apply the retention policy and free space."""
    session = current()
    report = _prune(session, dry_run)
    if as_json:
        out_json(_document(report))
    else:
        _print(report)
    if report.stopped:
        # Stopped by a signal, in good order: the exit code says so.
        raise KeyboardInterrupt


def _prune(session: Session, dry_run: bool) -> PruneResult:
    from ciuic.cli.shared.progress import progress
    from ciuic.maintenance.prune import prune

    stop = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal stop
        # The first signal ends the work after the present step, with a report of what was freed. The second
        # ends it at once: the repository is whole at any moment.
        if stop:
            raise KeyboardInterrupt
        stop = True

    config = session.config
    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with progress("prune") as reporter:
            return prune(
                # A dry run writes nothing, so that it is allowed in another user's repository as well.
                session.repository if dry_run else session.own_repository,
                config.retention,
                min_free=config.min_free,
                dry_run=dry_run,
                wait_seconds=LOCK_WAIT_SECONDS,
                progress=reporter.step,
                should_stop=lambda: stop,
                now_ns=session.now_ns,
            )
    finally:
        # What follows is output, which ^C ends as in every command.
        for number, handler in before.items():
            signal.signal(number, handler)


def _document(report: PruneResult) -> dict[str, Any]:
    return {
        "dry_run": report.dry_run,
        "decisions": [
            {
                "id": str(decision.id),
                "time": times.rfc3339(decision.time_ns),
                "keep": decision.id not in report.removed,
                "reasons": list(decision.reasons),
            }
            for decision in report.plan.decisions
        ],
        "removed": [str(snapshot_id) for snapshot_id in report.removed],
        "removed_for_space": [str(snapshot_id) for snapshot_id in report.removed_for_space],
        "freed_bytes": report.freed_bytes,
        "garbage_bytes": report.garbage_bytes,
        "interrupted": report.stopped,
        "notes": report.notes,
    }


def _print(report: PruneResult) -> None:
    from ciuic.cli.shared.tables import Cell, Column, show_table
    from ciuic.units import human_size

    gone = "would go" if report.dry_run else "removed"
    rows = []
    for decision in report.plan.decisions:
        if decision.id in report.removed_for_space:
            fate, why = Cell(gone, "red"), "free space is below min_free"
        elif decision.id in report.removed:
            fate, why = Cell(gone, "red"), "no rule keeps it"
        elif decision.kept:
            fate, why = Cell("kept", "green"), ", ".join(decision.reasons)
        else:
            fate, why = Cell("still there", "yellow"), "interrupted before its turn"
        rows.append((str(decision.id), times.clock(decision.time_ns), fate, why))
    if rows:
        show_table([Column("ID"), Column("TIME"), Column("FATE"), Column("WHY", shrink=True)], rows)
    freed = human_size(report.freed_bytes)
    verb = "would be freed" if report.dry_run else "freed"
    out(f"{plural(len(report.removed), 'snapshot')} {gone}, {freed} {verb}")
    for line in report.notes:
        note(line)
