"""``ciuic stop``: ends the running daemon as SIGTERM does, and says what became of the mounts.

Guarantees: on return the daemon has let go of its roots and of its runtime directory, so that another one can start; a
root that is still mounted is named (exit 8). Works with and without systemd: the daemon is asked over its control
socket, ends with status 0, and systemd (Restart=on-failure) leaves it stopped until it, or the machine, is started.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from ciuic.cli.names import plural, shown_text
from ciuic.cli.options import FrameCommand
from ciuic.cli.output import complain, json_option, note, out, out_json
from ciuic.cli.session import Session, current
from ciuic.errors import NotPermitted, Partial, Unreachable

if TYPE_CHECKING:
    from ciuic.control_types import RootStatus, StatusDocument

_POLL_SECONDS: Final = 0.1
_LOCK_SECONDS: Final = 10.0
"""Between the last answer and the release of the daemon's lock: it gives open connections 3 s to end."""


@click.command("stop", cls=FrameCommand)
@json_option
def command(as_json: bool) -> None:
    """Stop the running daemon, as SIGTERM does, and wait until it has ended.

    Its roots are unmounted: the plain files are there, in the same place, and no snapshots are taken until it runs again.
    Files that a job has open stay open.
    """
    session = current()
    before = session.control.status()
    session.control.stop()
    try:
        _await_end(session, before)
    except KeyboardInterrupt:
        complain(f"the daemon (pid {before.pid}) goes on stopping")
        raise
    left = _still_mounted(before.roots)
    if as_json:
        roots = [
            {"path": root.path, "mounted": root.path in left, "open_files": root.open_files}
            for root in before.roots
        ]
        out_json({"stopped": True, "pid": before.pid, "roots": roots})
    else:
        _print(before, left)
    if left:
        raise Partial(
            f"the daemon has ended, but still mounted: {shown_text(', '.join(left))}",
            hint="start the daemon again, which takes such a mount over; or: umount -l PATH",
        )


def _await_end(session: Session, before: StatusDocument) -> None:
    """Return when the daemon of ``before`` answers no more and has released its lock.

    Without a time limit: it writes back what the kernel caches, and a disk may be slow. ^C ends the wait alone.
    """
    try:
        while True:
            now = session.control.status()
            if (now.pid, now.since) != (before.pid, before.since):
                return  # another one has been started meanwhile, so the lock was free
            time.sleep(_POLL_SECONDS)
    except (Unreachable, NotPermitted):
        pass
    lock = _lock_file(session)
    deadline = time.monotonic() + _LOCK_SECONDS
    while lock.exists() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _lock_file(session: Session) -> Path:
    from ciuic.config import salvage

    return salvage.readable_part(session.config_option).runtime_dir / "daemon.lock"


def _still_mounted(roots: Sequence[RootStatus]) -> list[str]:
    from ciuic import mountinfo
    from ciuic.config import is_ciuic_mount

    mounts = mountinfo.read()
    return [root.path for root in roots if is_ciuic_mount(Path(root.path), mounts)]


def _print(before: StatusDocument, left: Sequence[str]) -> None:
    from ciuic import service_manager

    out(f"the daemon (pid {before.pid}) has ended")
    for root in before.roots:
        if root.path in left:
            continue
        text = f"{shown_text(root.path)}: unmounted; the plain files are in its place"
        if root.open_files:
            text += f"; {plural(root.open_files, 'file that is open stays', 'files that are open stay')} served until closed"
        out(text)
    if before.roots:
        note(f"no snapshots are taken until it runs again; {service_manager.start_hint()}")
