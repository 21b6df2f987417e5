"""``ciuic verify``: can these snapshots be restored exactly?

Guarantees: damage is named with path, block and every snapshot that shares it; exit 4 exactly when there is any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ciuic.cli.marks import resolve_all
from ciuic.cli.names import json_name, shown, shown_text
from ciuic.cli.options import ID, FrameCommand
from ciuic.cli.output import json_option, out, out_json
from ciuic.cli.session import Session, current
from ciuic.errors import Damaged

if TYPE_CHECKING:
    from ciuic.types import SnapshotId
    from ciuic.verify import Damage, VerifyProgress, VerifyResult


@click.command("verify", cls=FrameCommand)
@click.argument("ids", metavar="ID...", nargs=-1, type=ID)
@click.option("--all", "everything", is_flag=True, help="All snapshots, and the repository's own files.")
@click.option("--checksum", is_flag=True, help="Read every byte and compare it with its checksum.")
@json_option
def command(ids: tuple[str, ...], everything: bool, checksum: bool, as_json: bool) -> int:
    """Verify snapshots: everything there and, with --checksum, every byte right. Exit 4 on damage."""
    if bool(ids) == everything:
        raise click.UsageError("name snapshots, or give --all")
    session = current()
    result = _verify(session, None if everything else resolve_all(session, ids), checksum)
    if as_json:
        out_json(_document(result))
    else:
        _print(result, everything)
    return Damaged.exit_code if result.damaged else 0


def _verify(session: Session, ids: list[SnapshotId] | None, checksum: bool) -> VerifyResult:
    from ciuic.cli.progress import progress
    from ciuic.verify import verify_snapshots

    with progress("verify") as reporter:

        def report(state: VerifyProgress) -> None:
            reporter.update(
                bytes_done=state.bytes_done,
                bytes_total=state.bytes_total,
                files_done=state.files_done,
                path=state.path,
            )

        return verify_snapshots(session.repository, ids, checksum=checksum, progress=report)


def _document(result: VerifyResult) -> dict[str, Any]:
    return {
        "snapshots": [str(snapshot_id) for snapshot_id in result.snapshots],
        "checksum": result.checksum,
        "damaged": result.damaged,
        "files": result.files,
        "chunks": result.chunks,
        "bytes_read": result.bytes_read,
        "damages": [_damage(damage) for damage in result.damages],
    }


def _damage(damage: Damage) -> dict[str, Any]:
    return {
        "kind": damage.kind,
        "reason": damage.reason,
        **(json_name("path", damage.path) if damage.path else {"path": None}),
        **(json_name("root", damage.root) if damage.root else {"root": None}),
        "block": damage.block if damage.block >= 0 else None,
        "offset": damage.offset if damage.offset >= 0 else None,
        "chunk": damage.chunk.hex() if damage.chunk else None,
        "snapshots": [str(snapshot_id) for snapshot_id in damage.snapshots],
        "file": damage.file or None,
    }


def _print(result: VerifyResult, everything: bool) -> None:
    from ciuic.units import human_size

    for damage in result.damages:
        out("damaged ", newline=False, fg="red")
        out(_line(damage))
    number = len(result.snapshots)
    subject = ", ".join(result.snapshots) if number and not everything else f"{number} snapshots"
    looked = f"{result.files} files, {result.chunks} chunks"
    if result.checksum:
        looked += f", {human_size(result.bytes_read)} read"
    if result.damaged:
        verdict = f"{len(result.damages)} damaged"
    else:
        verdict = (
            "every byte is right" if result.checksum else "everything is there (--checksum reads every byte)"
        )
    out(f"{subject}: {verdict}; {looked}", fg="red" if result.damaged else "green")


def _line(damage: Damage) -> str:
    where = shown(damage.path) if damage.path else shown_text(damage.file) or "the repository"
    if damage.block >= 0:
        where += f" block {damage.block} (offset {damage.offset})"
    line = f"{where}: {shown_text(damage.reason)}"
    if damage.snapshots:
        line += f"; in {', '.join(damage.snapshots)}"
    return line
