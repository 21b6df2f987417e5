"""``ciuic cat``: the content of a file as a snapshot has it, on standard output."""

from __future__ import annotations

import sys

import click

from ciuic.cli.shared.contents import as_recorded
from ciuic.cli.shared.names import shown
from ciuic.cli.shared.options import ID, SNAPSHOT_PATH, FrameCommand
from ciuic.cli.shared.output import abandon_stdout
from ciuic.cli.shared.session import Session, current
from ciuic.errors import CiuicError, UsageError

_PIECE_BYTES = 1 << 20


@click.command("cat", cls=FrameCommand)
@click.argument("snapshot_id", metavar="ID", type=ID)
@click.argument("path", type=SNAPSHOT_PATH)
def command(snapshot_id: str, path: bytes) -> None:
    """Print the content of a file as it was in a snapshot.

    Nothing is printed to a terminal if the file is not text: redirect it.
    """
    from ciuic.repository.lookup import find
    from ciuic.verdicts.sources import SnapshotFile

    session = current()
    snapshot = session.snapshots.load(session.snapshots.resolve(snapshot_id))
    repository = session.repository_of(snapshot.id)
    at = find(repository, snapshot, as_recorded(snapshot, path))
    if not at.entry.is_file:
        kind = (
            "a directory"
            if at.entry.is_dir
            else "a symbolic link"
            if at.entry.is_symlink
            else "a special file"
        )
        raise UsageError(
            f"{shown(at.path)} was {kind} in {snapshot.id}", hint=f"ciuic show {snapshot.id} {shown(at.path)}"
        )
    source = SnapshotFile(repository, snapshot, at, lambda time_ns: None)
    for offset in range(0, source.size_bytes, _PIECE_BYTES):
        data = source.read(offset, _PIECE_BYTES)
        if not offset:
            _refuse_binary(data)
        if not _write(session, data):
            return


def _refuse_binary(data: bytes) -> None:
    # Bytes that control a terminal could make it run or hide something.
    if sys.stdout.isatty() and any(byte < 32 and byte not in b"\t\n\r" for byte in data[:4096]):
        raise UsageError("the file is not text", hint="redirect it: ciuic cat ID PATH > FILE")


def _write(session: Session, data: bytes) -> bool:
    """Write a part of the file; return False if its reader is gone."""
    try:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        abandon_stdout(session)
        return False
    except OSError as error:
        abandon_stdout(session)
        raise CiuicError(f"the output could not be written: {error.strerror}") from error
    return True
