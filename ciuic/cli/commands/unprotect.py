"""``ciuic unprotect``: ends the protection of directories. Files and snapshots stay as they are.

Guarantees: nothing is changed when one of the paths is no root; the configuration is written before the daemon unmounts,
so that a crash in between does not mount the root again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import click

from ciuic.cli.shared.names import shown_text
from ciuic.cli.shared.options import DIRECTORY, FrameCommand
from ciuic.cli.shared.output import json_option, out, out_json
from ciuic.cli.shared.overlay_fate import overlay_fate, remedy
from ciuic.cli.shared.session import Session, current
from ciuic.errors import CiuicError, NotFound, Unreachable


@click.command("unprotect", cls=FrameCommand)
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=DIRECTORY)
@json_option
def command(paths: tuple[bytes, ...], as_json: bool) -> None:
    """Stop protecting directories.

    A running daemon unmounts them, at once or when the last process that is in one has left. The files stay where they are, and so do their snapshots. What ciuic keeps
    beside a directory (.ciuic-state) is removed then.
    """
    from ciuic.config import canonical_root, remove_roots, writable_file

    session = current()
    asked = list(dict.fromkeys(canonical_root(os.fsdecode(path)) for path in paths))
    configured = [root.path for root in session.config.roots]
    for path in asked:
        if path not in configured:
            known = ", ".join(map(str, configured)) or "none"
            raise NotFound(
                f"{shown_text(str(path))} is not a protected root", hint=f"the roots are: {shown_text(known)}"
            )
    # Before the daemon unmounts: one that is killed in between does not mount the root again when it starts.
    remove_roots(writable_file(session.config_option), asked)
    unmounted = _tell_daemon(session, asked)
    if as_json:
        out_json({"roots": [{"path": str(path), "removed": True} for path in asked], "daemon": unmounted})
    else:
        for path in asked:
            fate = f"; {overlay_fate(str(path))}" if unmounted else ""
            out(f"{shown_text(str(path))} is no longer protected{fate}")


def _tell_daemon(session: Session, paths: Sequence[Path]) -> bool:
    """Tell the daemon; return True if one runs and unmounts the roots."""
    from ciuic.config import is_ciuic_mount
    from ciuic.system import mountinfo

    try:
        for path in paths:
            session.control.remove_root(str(path))
    except Unreachable:
        mounts = mountinfo.read()
        left = [str(path) for path in paths if is_ciuic_mount(path, mounts)]
        if left:
            # An overlay worker outlives its daemon by design; only a daemon ends it in good order.
            raise Unreachable(
                f"taken out of the configuration, but {shown_text(', '.join(left))} "
                f"{'is' if len(left) == 1 else 'are'} still mounted and no daemon answers that could unmount",
                hint=remedy(left, "which lets go of it"),
            ) from None
        for path in paths:
            _remove_state(session, path)
        return False
    return True


def _remove_state(session: Session, path: Path) -> None:
    """Remove the saved tracking of a root that no daemon serves; what cannot be removed stays, and harms nothing."""
    from ciuic.protocol.state_directory import remove_state
    from ciuic.protocol.worker_frames import worker_socket

    if worker_socket(session.config.runtime_dir, str(path)).exists():
        # A worker goes on serving files that a job has open, and needs its state for them.
        return
    # Suppressed: the directory is gone, or may not be read.
    with suppress(OSError, CiuicError):
        # By descriptor: the name may lead elsewhere a moment later.
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            remove_state(fd)
        finally:
            os.close(fd)
