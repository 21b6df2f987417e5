"""Output of a verification: progress, the JSON document, a line for each damage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ciuic.cli.shared.names import json_name, shown, shown_text
from ciuic.cli.shared.output import note, out

if TYPE_CHECKING:
    from ciuic.maintenance.verify import Damage, VerifyProgress, VerifyResult


@contextmanager
def reporting() -> Iterator[Callable[[VerifyProgress], None]]:
    """Show the progress of a verification; yields the function that it reports to."""
    from ciuic.cli.shared.progress import progress

    with progress("verify") as reporter:

        def report(state: VerifyProgress) -> None:
            reporter.update(
                bytes_done=state.bytes_done,
                bytes_total=state.bytes_total,
                files_done=state.files_done,
                path=state.path,
            )

        yield report


def as_document(result: VerifyResult) -> dict[str, Any]:
    """Return the document of ``verify --json`` (docs/cli.md)."""
    return {
        "snapshots": [str(snapshot_id) for snapshot_id in result.snapshots],
        "checksum": result.checksum,
        "damaged": result.damaged,
        "files": result.files,
        "chunks": result.chunks,
        "bytes_read": result.bytes_read,
        "index_missing": result.index_missing,
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


def print_damages(result: VerifyResult) -> None:
    """Print a line for each damage: what it is in, where, and which snapshots share it."""
    if result.index_missing:
        note(
            "the index is missing, which is no damage: the next snapshot or ciuic check --repair makes it again"
        )
    for damage in result.damages:
        out("damaged ", newline=False, fg="red")
        out(_line(damage))


def _line(damage: Damage) -> str:
    where = shown(damage.path) if damage.path else shown_text(damage.file) or "the repository"
    if damage.block >= 0:
        where += f" block {damage.block} (offset {damage.offset})"
    line = f"{where}: {shown_text(damage.reason)}"
    if damage.snapshots:
        line += f"; in {', '.join(damage.snapshots)}"
    return line
