"""``ciuic watch``: has the daemon watch a training that does not make itself known (SnapshotManager does).

Guarantees: a command that is run under it runs as it would without, daemon or not, and its exit status is ours; signals that are
sent to us are its own. A process that is named by its pid is that process and no later one with its number.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import click

from ciuic.cli.shared.options import FrameCommand
from ciuic.cli.shared.output import note
from ciuic.cli.shared.session import Session, current
from ciuic.errors import CiuicError, NotFound
from ciuic.printable import shown_name

_ANSWER_SECONDS: Final = 10.0


# Not interspersed: options behind the command's name are the command's own.
@click.command("watch", cls=FrameCommand, context_settings={"allow_interspersed_args": False})
@click.option("--pid", type=click.IntRange(min=2), metavar="N", help="Watch this process, and return.")
@click.option("--name", default="", metavar="TEXT", help="What to call it; otherwise as its program.")
@click.option(
    "--heartbeat-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The command writes to it while it lives.",
)
@click.option("--heartbeat", default="", metavar="TIME", help="How old that file may become, such as 15m.")
@click.option(
    "--forget", default="", metavar="NAME", help="Watch it (name or pid) no more, and let its alert go."
)
@click.argument("words", nargs=-1, metavar="[COMMAND]...", type=click.UNPROCESSED)
def command(
    pid: int | None,
    name: str,
    heartbeat_file: Path | None,
    heartbeat: str,
    forget: str,
    words: tuple[str, ...],
) -> int:
    """Run a command, or take a running process, and have the daemon watch it.

    If it fails, is killed or hangs, the daemon takes a snapshot tagged "emergency", raises an alert and runs the alert
    command. Trainings that use SnapshotManager are watched without this.
    """
    if sum((pid is not None, bool(forget), bool(words))) != 1:
        raise click.UsageError("give one of them: --pid, --forget, or a command to run")
    if bool(heartbeat) != (heartbeat_file is not None) or (heartbeat and not words):
        raise click.UsageError("--heartbeat and --heartbeat-file go together, and with a command")
    if name and not name.isprintable():
        raise click.UsageError("a name has printable characters only")
    session = current()
    if forget:
        session.control.forget_trainer(forget)
        return 0
    if pid is not None:
        _watch_process(session, pid, name)
        return 0
    from ciuic.cli.shared.watch_run import run

    return run(
        [os.fsencode(word) for word in words],
        name=name or os.path.basename(words[0]),
        socket=lambda: watch_socket(session),
        heartbeat_file=heartbeat_file,
        heartbeat_seconds=_seconds(heartbeat),
    )


def _seconds(heartbeat: str) -> float:
    from ciuic.units import parse_duration

    try:
        return float(parse_duration(heartbeat)) if heartbeat else 0.0
    except ValueError as error:
        raise click.UsageError(f"--heartbeat: {error}") from error


def watch_socket(session: Session) -> str:
    """Return the watch socket of the configured daemon; the default where the configuration may not be read."""
    from ciuic.protocol.watch_client import SOCKET_NAME

    try:
        return str(session.config.runtime_dir / SOCKET_NAME)
    except CiuicError:
        return f"/run/ciuic/{SOCKET_NAME}"


def _watch_process(session: Session, pid: int, name: str) -> None:
    from ciuic.cli.shared.watch_run import place_of
    from ciuic.protocol.watch_client import MAX_TEXT_CHARACTERS, Hello, introduce
    from ciuic.system import processes

    try:
        # The pidfd first: the daemon goes by it, whatever process has the number later.
        life = processes.life_of(pid)
    except ProcessLookupError:
        raise NotFound(f"there is no process {pid}") from None
    try:
        hello = Hello(
            name=name[:MAX_TEXT_CHARACTERS] or _program_of(pid),
            where=place_of(pid),
            kind="pid",
            pid=pid,
            start_ticks=processes.start_ticks(pid),
        )
        # Closed at once: after its answer the daemon needs nothing more of the caller.
        introduce(watch_socket(session), hello, [life], seconds=_ANSWER_SECONDS).close()
    finally:
        os.close(life)
    note(f"process {pid} is watched as {shown_name(hello.name)}; `ciuic status` shows it")


def _program_of(pid: int) -> str:
    try:
        text = Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        text = ""
    return text if text and text.isprintable() else f"pid-{pid}"
