"""``restore --lazy``: a process of its own that mounts, fetches and ends by itself, and what is told of it.

Guarantees: the command returns when the mount answers, or with the error for which it never will; the process behind it has no
terminal, and writes to a log file and a status file; the exit code of ``--foreground`` is that of a plain restore.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from ciuic.cli.shared import times
from ciuic.cli.shared.documents import Keys
from ciuic.cli.shared.messages import complain, plural, shown, shown_text
from ciuic.cli.shared.output import out, out_json
from ciuic.cli.shared.session import Session, current
from ciuic.errors import CiuicError
from ciuic.system.disk import APPEND_FILE
from ciuic.system.shell_quoting import word
from ciuic.system.state_home import state_home
from ciuic.units import human_duration, human_size

if TYPE_CHECKING:
    from ciuic.lazy.progress import LazyOutcome, LazyStatus
    from ciuic.lazy.service import LazyRestore
    from ciuic.restore.journal import UnfinishedRestore

_UNFINISHED: Final = Keys(
    "snapshot, destinations (each `path`), began, command (list of words)",
    "each of the `unfinished` of `restore --status`: restores that were cut short",
)
_SHOWN_LOST: Final = 20
_READ_BYTES: Final = 65536


def restore_lazily(
    session: Session,
    snapshot: str,
    path: bytes,
    dest: bytes | None,
    *,
    special: bool | None,
    foreground: bool,
    as_json: bool,
) -> int:
    """Carry out ``restore --lazy``; return the exit code."""
    if foreground:
        return _run(session, snapshot, path, dest, special, _Announcer(None, as_json))
    reader, writer = os.pipe()
    # Before anything is opened: threads of a store's client do not survive a fork.
    child = os.fork()
    if child == 0:
        os.close(reader)
        # The command's own process prints the document, or this one its error.
        return _run(session, snapshot, path, dest, special, _Announcer(writer, as_json))
    os.close(writer)
    return _wait_until_mounted(session, child, reader, as_json)


def _wait_until_mounted(session: Session, child: int, reader: int, as_json: bool) -> int:
    """Wait for the process to have mounted, and say so; return its exit code if it ended before."""
    data = b""
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        while not data.endswith(b"\n") and (more := pipe.read(_READ_BYTES)):
            data += more
    if not data.endswith(b"\n"):
        # It has printed why.
        session.printed_json = True
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    from ciuic.lazy.progress import decode_status

    status = decode_status(data)
    assert status is not None
    if as_json:
        out_json(_document(status))
    else:
        _say_mounted(status)
    return 0


def _say_mounted(status: LazyStatus) -> None:
    out(f"{shown_text(status.destination)} can be used: it is mounted, and complete later")
    out(
        f"{plural(status.files_left, 'file')}, {human_size(status.bytes_left)} to be fetched by process {status.pid}; "
        "`ciuic restore --status` shows it"
    )


class _Announcer:
    """Callback for the moment when the mount answers: tell the waiting command, or the operator."""

    def __init__(self, writer: int | None, as_json: bool) -> None:
        self.writer = writer
        self.as_json = as_json

    def __call__(self, status: LazyStatus) -> None:
        if self.writer is None:
            if not self.as_json:
                _say_mounted(status)
                sys.stdout.flush()
            return
        import msgspec

        # Off the terminal before the command returns: the reader of its output waits for every process that could write.
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        os.close(null)
        os.write(self.writer, msgspec.json.encode(status) + b"\n")
        os.close(self.writer)


def _run(
    session: Session,
    snapshot: str,
    path: bytes,
    dest: bytes | None,
    special: bool | None,
    announce: _Announcer,
) -> int:
    from ciuic.cli.shared.contents import as_recorded
    from ciuic.cli.shared.progress import progress
    from ciuic.lazy import preload

    preload()
    store = session.snapshots
    source = store.load(store.resolve(snapshot))
    repository = session.repository_of(source.id)
    if session.remote_url is not None:
        from ciuic.cli.shared.cold_packs import refuse_archived
        from ciuic.repository.lookup import find

        refuse_archived(repository, str(source.id), [find(repository, source, as_recorded(source, path))])
    from ciuic.lazy.service import LazyRestore

    directory = _directory(session)
    _log_into(directory)
    restore = LazyRestore(
        repository,
        source,
        as_recorded(source, path),
        dest,
        special=True if special is None and session.trusts_repository else special,
        status_directory=directory,
    )
    if announce.writer is not None:
        outcome = restore.run(announce)
    else:
        with progress("restore") as reporter:

            def report(status: LazyStatus) -> None:
                reporter.update(
                    bytes_done=status.bytes_total - status.bytes_left,
                    bytes_total=status.bytes_total,
                    files_done=status.files_total - status.files_left,
                    files_total=status.files_total,
                    path=restore.destination,
                )

            restore.status.listener = report
            outcome = restore.run(announce)
    _print(restore, outcome, announce.as_json)
    return outcome.exit_code


def _print(restore: LazyRestore, outcome: LazyOutcome, as_json: bool) -> None:
    if as_json:
        out_json(_document(restore.status.status))
        return
    out(
        f"{shown(outcome.destination)} is complete: {plural(outcome.files, 'file')}, {human_size(outcome.bytes)} fetched"
    )
    if outcome.left_out_because:
        counted = plural(outcome.left_out, "special file or attribute", "special files or attributes")
        complain(f"{counted} left out, because {outcome.left_out_because}")
    if outcome.lost:
        complain(f"{plural(len(outcome.lost), 'path')} could not be restored as at the snapshot:")
        for lost in outcome.lost[:_SHOWN_LOST]:
            complain(f"    {shown_text(lost.path)}: {shown_text(lost.reason)}")
        if len(outcome.lost) > _SHOWN_LOST:
            complain(f"    and {len(outcome.lost) - _SHOWN_LOST} more; --json lists them")


def _log_into(directory: Path) -> None:
    """Have events of this process written to a file, and not to standard output; nowhere if it cannot be made."""
    import structlog

    try:
        directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        file = open(os.open(directory / "log", APPEND_FILE, 0o600), "a", buffering=1)
    except OSError:
        file = open(os.devnull, "w")
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.WriteLoggerFactory(file=file),
    )


def _directory(session: Session) -> Path:
    try:
        return session.config.runtime_dir / "restores"
    except CiuicError:
        # A machine that has no configuration yet.
        from ciuic.lazy.progress import DEFAULT_DIRECTORY

        return DEFAULT_DIRECTORY


def _document(status: LazyStatus) -> dict[str, Any]:
    import msgspec

    document: dict[str, Any] = msgspec.to_builtins(status)
    return {**document, "seconds_left": status.seconds_left}


def show_lazy_restores(context: click.Context) -> None:
    """Print the lazy restores of this machine and the restores that were cut short, and end the command."""
    from ciuic.lazy.progress import read_statuses
    from ciuic.restore.journal import records_directory, unfinished

    session = current()
    found = read_statuses(_directory(session))
    cut_short = unfinished(records_directory())
    if "--json" in sys.argv:
        out_json(
            {
                "restores": [_document(status) for status in found],
                "unfinished": [
                    _UNFINISHED.of(record, command=[os.fsdecode(word) for word in record.command])
                    for record in cut_short
                ],
            }
        )
    elif not found and not cut_short:
        out("no lazy restore since this machine started")
    else:
        for line in (*map(line_of, found), *map(_unfinished_line, cut_short)):
            out(line)
    context.exit(0)


def incomplete_lines(session: Session) -> list[str]:
    """Return a line for each lazy restore that is not complete, and for each restore that was cut short."""
    lines = []
    # Seldom any; what reads them takes 30 ms to import. The directories stay after the first restore.
    if _has_files(directory := _directory(session)):
        from ciuic.lazy.progress import read_statuses

        lines += [line_of(status) for status in read_statuses(directory) if status.state != "complete"]
    if _has_files(state_home("restores")):
        from ciuic.restore.journal import records_directory, unfinished

        lines += map(_unfinished_line, unfinished(records_directory()))
    return lines


def _has_files(directory: Path) -> bool:
    try:
        return bool(os.listdir(directory))
    except OSError:
        return False


def _unfinished_line(record: UnfinishedRestore) -> str:
    command = " ".join(map(word, record.command))
    places = ", ".join(map(shown, record.destinations))
    begun = f"of {shown_text(record.snapshot)}, begun {times.clock(int(record.began * times.NS))}"
    return f"{places}: cut short, {begun}; it goes on with: {command}"


def line_of(status: LazyStatus) -> str:
    """Return a lazy restore in one line."""
    parts = [f"{shown_text(status.destination)}: {status.state}, of {shown_text(status.snapshot)}"]
    if status.state in ("filling", "interrupted"):
        parts.append(
            f"{plural(status.files_left, 'file')} and {human_size(status.bytes_left)} of {human_size(status.bytes_total)} missing"
        )
    if status.state == "interrupted":
        parts.append(
            f"its process ended: umount -l {shown_text(status.destination)} if it is still mounted, and run the same restore --lazy again"
        )
    if status.state == "filling" and status.seconds_left is not None:
        parts.append(f"{human_size(status.rate)}/s, about {human_duration(status.seconds_left)} left")
    if status.state == "filling" and status.waits:
        parts.append(f"waits: {shown_text(status.waits)}")
    if status.state == "closing" and status.waits:
        parts.append(f"the mount stays until nobody works in it: {shown_text(status.waits)}")
    if status.lost:
        parts.append(f"{plural(len(status.lost), 'path')} lost")
    return "; ".join(parts)
