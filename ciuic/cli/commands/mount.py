"""``ciuic mount`` and ``ciuic shell``: snapshots as a read-only directory, or in place of the directories that they were taken of."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import click

from ciuic.cli.shared import times
from ciuic.cli.shared.messages import shown, warn
from ciuic.cli.shared.options import ID, SNAPSHOT_PATH, FrameCommand
from ciuic.cli.shared.output import note
from ciuic.cli.shared.session import current

_WAIT_SECONDS = 0.5
_MAX_TOLD = 100


class _Teller:
    """Says what of a snapshot cannot be read, each once: the kernel asks again for what it did not get."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def __call__(self, problem: str) -> None:
        if problem not in self._told and len(self._told) < _MAX_TOLD:
            self._told.add(problem)
            warn(problem)


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
    # A relative entry of the import path, and the directory itself, may be below the view.
    os.chdir("/")
    view = MountedView(tree, path, _Teller(), for_others=for_others, may_wait=session.remote_url is not None)
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


@click.command(
    "shell",
    cls=FrameCommand,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option(
    "-s",
    "--snapshot",
    "--at",
    "snapshot_id",
    metavar="ID",
    type=ID,
    default="latest",
    show_default=True,
    help="Which snapshot; a time will do, such as 14:05 or 2h.",
)
@click.option(
    "-p",
    "--path",
    "paths",
    metavar="ROOT",
    type=SNAPSHOT_PATH,
    multiple=True,
    help="Only these of its roots; may be given several times.",
)
@click.option(
    "--scratch",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="For what is written: removed at the end. Default: TMPDIR, or /var/tmp.",
)
@click.argument("command", nargs=-1, metavar="[COMMAND...]")
def shell_command(
    snapshot_id: str, paths: tuple[bytes, ...], scratch: Path | None, command: tuple[str, ...]
) -> None:
    """Run COMMAND, or a shell, for which the directories are as in the snapshot.

    It sees them at their paths, and may write: what it writes is kept aside and gone with it. Everything else, other programs included, is as
    it is. It begins in the current directory, or in the first root where the snapshot does not have that. Ends with the exit code of COMMAND. Needs root.
    """
    from ciuic.errors import NotFound
    from ciuic.view.namespace import run_at
    from ciuic.view.tree import ViewTree

    session = current()
    store = session.snapshots
    snapshot = store.load(store.resolve(snapshot_id))
    known = [root.path for root in snapshot.roots]
    for path in paths:
        if path not in known:
            raise NotFound(
                f"{shown(path)} is no root of {snapshot.id}",
                hint=f"its roots are: {', '.join(map(shown, known))}",
            )
    roots = list(paths) or known
    program = command or (os.environ.get("SHELL") or "/bin/sh",)
    if not command:
        note(
            f"{', '.join(map(shown, roots))} as in {snapshot.id}, {times.clock(snapshot.time_ns)}; what is written here is gone at the end"
        )
    tree = ViewTree(store, session.repository_of, snapshot.id)
    session.exit_code = run_at(
        tree, snapshot, roots, program, _here(), _Teller(), scratch, may_wait=session.remote_url is not None
    )


def _here() -> bytes:
    try:
        return os.getcwdb()
    except FileNotFoundError:
        # It was removed: perhaps the snapshot has it, but its path is not known.
        return b"/"
