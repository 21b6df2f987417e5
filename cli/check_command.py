"""``ciuic check``: does the repository agree with itself? With ``--repair``, mend what can be mended; content is never deleted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ciuic.cli.marks import LOCK_WAIT_SECONDS
from ciuic.cli.names import shown_text
from ciuic.cli.options import FrameCommand
from ciuic.cli.output import json_option, out, out_json
from ciuic.cli.session import current
from ciuic.errors import Damaged

if TYPE_CHECKING:
    from ciuic.check import CheckReport, Finding

_COLOURS = {"error": "red", "warning": "yellow", "info": ""}


@click.command("check", cls=FrameCommand)
@click.option(
    "--repair",
    is_flag=True,
    help="Rebuild the index, heal damaged chunks, replace damaged packs; never deletes what a snapshot needs.",
)
@click.option("--read-data", is_flag=True, help="Read every stored byte, too.")
@json_option
def command(repair: bool, read_data: bool, as_json: bool) -> int:
    """Check the repository's consistency: configuration, snapshot files, index, structure, packs.

    Exit 4 if damage is left. Of packs, header, size and footer are looked at; what they hold is read with --read-data alone.
    `ciuic verify --all --checksum` names the files that damage touches.
    """
    from ciuic.check import check, summary
    from ciuic.cli.progress import progress

    session = current()
    with progress("check") as reporter:
        report = check(
            session.own_repository if repair else session.repository,
            repair=repair,
            read_data=read_data,
            wait_seconds=LOCK_WAIT_SECONDS,
            progress=reporter.step,
        )
    if as_json:
        out_json(_document(report))
    else:
        for finding in report.findings:
            _print(finding)
        out(summary(report))
    return Damaged.exit_code if report.damaged else 0


def _document(report: CheckReport) -> dict[str, object]:
    return {
        "damaged": report.damaged,
        "data_read": report.data_read,
        "snapshots": report.snapshots,
        "packs": report.packs,
        "stored_bytes": report.stored_bytes,
        "orphaned_bytes": report.orphaned_bytes,
        "findings": [
            {
                "severity": finding.severity,
                "kind": finding.kind,
                "message": finding.message,
                "hint": finding.hint,
                "snapshot": finding.snapshot or None,
                "chunk": finding.chunk.hex() if finding.chunk else None,
                "repaired": finding.repaired,
            }
            for finding in report.findings
        ],
    }


def _print(finding: Finding) -> None:
    word = "repaired" if finding.repaired else finding.severity
    out(f"{word:<9}", newline=False, fg="green" if finding.repaired else _COLOURS[finding.severity] or None)
    out(shown_text(finding.message))
    if finding.hint:
        out(f"         {shown_text(finding.hint)}")
