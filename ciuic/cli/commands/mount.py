"""``ciuic mount``: snapshots as a read-only directory, served until it is unmounted or the command ends."""

from __future__ import annotations

import os
import signal

import click

from ciuic.cli.shared.messages import shown, warn
from ciuic.cli.shared.options import ID, FrameCommand
from ciuic.cli.shared.output import note
from ciuic.cli.shared.session import current

_WAIT_SECONDS = 0.5
_MAX_TOLD = 100


@click.command("mount", cls=FrameCommand)
@click.argument("directory", metavar="DIR", type=click.Path(path_type=bytes))
@click.argument("snapshot_id", metavar="[ID]", required=False, type=ID)
@click.option(
    "--allow-other",
    "for_others",
    is_flag=True,
    help="Other users may read what owners, modes and ACLs of the snapshot permit them. Not root: needs user_allow_other in /etc/fuse.conf.",
)
def mount_command(directory: bytes, snapshot_id: str | None, *, for_others: bool) -> None:
    """Show snapshots as a read-only directory until Ctrl-C.

    In DIR, made if missing, is a directory for each snapshot, named after its time and id, and latest, a link to the newest; with ID
    the roots of that snapshot alone. Files are at the paths that they had. `umount DIR` ends it, too.
    """
    from ciuic.view.mount import MountedView
    from ciuic.view.tree import ViewTree

    session = current()
    store = session.snapshots
    only = None if snapshot_id is None else store.resolve(snapshot_id)
    tree = ViewTree(store, session.repository_of, only)
    path = os.path.realpath(directory)
    os.makedirs(path, mode=0o755, exist_ok=True)
    told: set[str] = set()

    def tell(problem: str) -> None:
        # Once: the kernel asks again for what it did not get.
        if problem not in told and len(told) < _MAX_TOLD:
            told.add(problem)
            warn(problem)

    view = MountedView(tree, path, tell, for_others=for_others)
    stopped = False

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True

    before = {
        number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        note(f"{shown(path)} shows {'the snapshots' if only is None else only}; Ctrl-C, or umount, ends it")
        while not stopped and not view.wait(_WAIT_SECONDS):
            pass
    finally:
        view.close()
        for number, handler in before.items():
            signal.signal(number, handler)
