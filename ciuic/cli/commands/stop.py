"""``ciuic stop``: ends the running daemon as SIGTERM does, and says what became of the mounts.

Guarantees: on return the daemon has let go of its roots and of its runtime directory, so that another one can start; a
root that is still mounted is named with who is in it, or, where nobody is, as a failure (exit 8). Works with and without systemd: the daemon is asked over its control
socket, ends with status 0, and systemd (Restart=on-failure) leaves it stopped until it, or the machine, is started.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from ciuic.cli.shared.messages import complain
from ciuic.cli.shared.names import shown_text
from ciuic.cli.shared.options import FrameCommand
from ciuic.cli.shared.output import json_option, note, out, out_json
from ciuic.cli.shared.overlay_fate import in_use, remedy
from ciuic.cli.shared.session import Session, current
from ciuic.errors import NotPermitted, Partial, Unreachable

if TYPE_CHECKING:
    from ciuic.protocol.control_types import StatusDocument

_POLL_SECONDS: Final = 0.1
# Between the last answer and the release of the daemon's lock, which gives open connections 3 s to end
# (GRACEFUL_SECONDS of its server). A lock file that a killed daemon left is there for ever, so that the wait
# needs an end.
_LOCK_SECONDS: Final = 10.0


@click.command("stop", cls=FrameCommand)
@json_option
def command(as_json: bool) -> None:
    """Stop the running daemon, as SIGTERM does, and wait until it has ended.

    Its roots are unmounted: the plain files are there, in the same place, and no snapshots are taken until it runs again.
    A root that a process works in is served until the last one has left; the processes are named.
    """
    session = current()
    # Its roots are named afterwards, when there is nobody left to ask.
    before = session.control.status()
    session.control.stop()
    try:
        _await_end(session, before)
    except KeyboardInterrupt:
        complain(f"the daemon (pid {before.pid}) goes on stopping")
        raise
    fates = {root.path: in_use(root.path) for root in before.roots}
    left = [path for path, users in fates.items() if users == ""]
    if as_json:
        roots = [
            {
                "path": root.path,
                "mounted": fates[root.path] is not None,
                "in_use_by": fates[root.path] or "",
                "open_files": root.open_files,
            }
            for root in before.roots
        ]
        out_json({"stopped": True, "pid": before.pid, "roots": roots})
    else:
        _print(before, fates)
    if left:
        raise Partial(
            f"the daemon has ended, but still mounted: {shown_text(', '.join(left))}",
            hint=remedy(left, "which takes the mount over, and stop it again"),
        )


def _await_end(session: Session, before: StatusDocument) -> None:
    """Return when the daemon of ``before`` answers no more and has released its lock.

    Without a time limit: it writes back what the kernel caches, and a disk may be slow. ^C ends the wait alone.
    """
    try:
        while True:
            now = session.control.status()
            if (now.pid, now.since) != (before.pid, before.since):
                # Another one has been started meanwhile, so the lock was free. The pid alone would not tell:
                # it may have been given out again.
                return
            time.sleep(_POLL_SECONDS)
    except (Unreachable, NotPermitted):
        pass
    lock = _lock_file(session)
    deadline = time.monotonic() + _LOCK_SECONDS
    while lock.exists() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _lock_file(session: Session) -> Path:
    from ciuic.config import load

    # The daemon runs on with the configuration that it read, so that a mistake made in the file since is no
    # reason to fail.
    return load.readable_part(session.config_option).runtime_dir / "daemon.lock"


def _print(before: StatusDocument, fates: Mapping[str, str | None]) -> None:
    from ciuic.system import service_manager

    out(f"the daemon (pid {before.pid}) has ended")
    for root in before.roots:
        users = fates[root.path]
        if users is None:
            out(f"{shown_text(root.path)}: unmounted; the plain files are in its place")
        elif users:
            out(f"{shown_text(root.path)}: served until nobody is in it, then unmounted: {shown_text(users)}")
    if before.roots:
        note(f"no snapshots are taken until it runs again; {service_manager.start_hint()}")
