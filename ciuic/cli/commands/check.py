"""``ciuic check``: does the repository agree with itself? With ``--repair``, mend what can be mended; content is never deleted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ciuic.cli.shared.marks import LOCK_WAIT_SECONDS
from ciuic.cli.shared.messages import warn
from ciuic.cli.shared.names import shown_text
from ciuic.cli.shared.options import FrameCommand, remote_options, use_remote
from ciuic.cli.shared.output import json_option, out, out_json, out_prose, wrapped
from ciuic.cli.shared.session import Session, current
from ciuic.errors import Damaged, UsageError

if TYPE_CHECKING:
    from ciuic.maintenance.check import CheckFinding, CheckReport

_COLOURS = {"error": "red", "warning": "yellow", "info": ""}
# The longest label, `repaired`, and a blank.
_LABEL_WIDTH = 9


@click.command("check", cls=FrameCommand)
@click.option(
    "--repair",
    is_flag=True,
    help="Rebuild the index, heal damaged chunks, replace damaged packs; never deletes what a snapshot needs.",
)
@click.option("--read-data", is_flag=True, help="Read every stored byte, too.")
@click.option(
    "--renew-locks",
    default="",
    metavar="DURATION",
    help="Of a remote in a bucket with object lock: have the store keep all that is needed for this time.",
)
@remote_options
@json_option
def command(repair: bool, read_data: bool, renew_locks: str, remote: bool, name: str, as_json: bool) -> int:
    """Check the repository's consistency: configuration, snapshot files, index, structure, packs.

    Exit 4 if damage is left. Of packs, header, size and footer are looked at; what they hold is read with --read-data alone.
    `ciuic verify --all --checksum` names the files that damage touches.

    With --remote the same of a remote; --repair takes what is lost there from its other copies and from this host's repository. With
    --behind-deletions: which objects were deleted, overwritten or forged in a bucket with versions; --repair stores the sound
    versions again.
    """
    # Here and not above: maintenance takes 80 ms to import, and help and completion import this
    # module.
    from ciuic.cli.shared.progress import progress
    from ciuic.maintenance.check import check

    session = current()
    if use_remote(session, remote, name):
        from ciuic.cli.commands.remote.mend import check_behind_deletions, check_remotely

        if renew_locks:
            if repair or read_data:
                raise UsageError("--renew-locks is a run of its own: leave out --repair and --read-data")
            return _renew(session, renew_locks, as_json)
        if session.every_version is not None:
            return _report(check_behind_deletions(session, repair=repair), as_json)
        return _report(check_remotely(session, repair=repair, read_data=read_data), as_json)
    if renew_locks or session.every_version is not None:
        raise UsageError("--renew-locks, --behind-deletions and --stored-before go with a remote")
    with progress("check") as reporter:
        report = check(
            # Another user's repository is read, for rescue, and not written to by root.
            session.own_repository if repair else session.repository,
            repair=repair,
            read_data=read_data,
            wait_seconds=LOCK_WAIT_SECONDS,
            progress=reporter.step,
        )
    return _report(report, as_json)


def _report(report: CheckReport, as_json: bool) -> int:
    from ciuic.maintenance.check import summary

    if as_json:
        out_json(_document(report))
    else:
        for finding in report.findings:
            _print(finding)
        out_prose(summary(report), 2)
    # Returned and not raised: the report is out, and an error would be a second message and a second JSON
    # document.
    return Damaged.exit_code if report.damaged else 0


def _renew(session: Session, duration: str, as_json: bool) -> int:
    """Renew the locks in a bucket, and say how many there are."""
    from ciuic.cli.commands.remote.mend import renew_remote_locks
    from ciuic.units import human_duration, parse_duration, plural

    try:
        seconds = parse_duration(duration)
    except ValueError as error:
        raise UsageError(f"--renew-locks: {error}") from None
    done = renew_remote_locks(session, seconds)
    if as_json:
        out_json({"locked": done.locked, "seconds": seconds, "deleted_or_overwritten": done.astray})
    else:
        out_prose(f"{plural(done.locked, 'object')} locked for {human_duration(seconds)} from now", 0)
    if done.astray:
        warn(
            f"{plural(done.astray, 'of them was', 'of them were')} deleted or overwritten since",
            hint="ciuic check --remote --behind-deletions names them, and with --repair stores them again",
        )
        return Damaged.exit_code
    return 0


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


def _print(finding: CheckFinding) -> None:
    word = "repaired" if finding.repaired else finding.severity
    label = f"{word:<{_LABEL_WIDTH}}"
    # Wrapped before the label is coloured: escape sequences take no columns.
    lines = wrapped(f"{label}{shown_text(finding.message)}", _LABEL_WIDTH)
    out(label, newline=False, fg="green" if finding.repaired else _COLOURS[finding.severity] or None)
    out("\n".join(lines).removeprefix(label))
    if finding.hint:
        out_prose(f"{'':<{_LABEL_WIDTH}}{shown_text(finding.hint)}", _LABEL_WIDTH)
