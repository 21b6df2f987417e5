"""``ciuic mount``, ``shell`` and ``bisect``: snapshots as a read-only directory, or in place of the directories that they were taken of.

``bisect`` finds the first bad one of a row of snapshots with as few trials as there can be (`Bisection`). A trial says good, bad, or that
the snapshot cannot be tried. All before the first bad one are taken to be good, and all from it on to be bad. Where none is skipped, ``n``
snapshots take at most ``ceil(log2(n))`` trials.

References:
    git-bisect(1), whose words and exit codes these are
"""

from __future__ import annotations

import os
import pwd
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

import click

from ciuic.cli.shared import times
from ciuic.cli.shared.messages import shown, shown_text, warn
from ciuic.cli.shared.options import ID, SNAPSHOT_PATH, FrameCommand
from ciuic.cli.shared.output import json_option, note, out, out_json
from ciuic.cli.shared.session import Session, current
from ciuic.cli.shared.timelines import PassedOver, all_timelines
from ciuic.errors import CiuicError, NotFound, Partial, UsageError
from ciuic.system.interrupts import SIGNALS

if TYPE_CHECKING:
    from ciuic.types import Snapshot

Trial = Literal["good", "bad", "skip"]
T = TypeVar("T")


class Bisection(Generic[T]):
    """Search for the first bad one.

    Args:
        row: What there is to try, oldest first, after the one that is known to be good; the last is known to be bad.
    """

    def __init__(self, row: Sequence[T]) -> None:
        if not row:
            raise ValueError("a bisection needs one that is bad")
        self._row = row
        self._first = 0
        self._last = len(row) - 1
        self._skipped: set[int] = set()

    @property
    def suspects(self) -> Sequence[T]:
        """Those of which any may be the first bad one, oldest first; the last of them is bad."""
        return self._row[self._first : self._last + 1]

    def next(self) -> T | None:
        """Return which one to try: that nearest to the middle which was not skipped; None if no trial can tell more."""
        at = self._next()
        return None if at is None else self._row[at]

    def _next(self) -> int | None:
        middle = (self._first + self._last - 1) / 2
        left = (at for at in range(self._first, self._last) if at not in self._skipped)
        return min(left, key=lambda at: abs(at - middle), default=None)

    def note(self, trial: Trial) -> None:
        """Take the outcome of the trial of `next`."""
        at = self._next()
        if at is None:
            raise ValueError("there is none to try")
        if trial == "skip":
            self._skipped.add(at)
        elif trial == "bad":
            self._last = at
        else:
            self._first = at + 1


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
    from ciuic.restore.destination import made_directory
    from ciuic.view.mount import MountedView, is_view
    from ciuic.view.tree import ViewTree

    session = current()
    store = session.snapshots
    only = None if snapshot_id is None else store.resolve(snapshot_id)
    tree = ViewTree(store, session.repository_of, only)
    path = os.path.abspath(directory)
    try:
        path = made_directory(path)
    except OSError as error:
        if not is_view(os.path.realpath(path)):
            raise UsageError(f"cannot mount at {shown(path)}: {error.strerror}") from None
        raise CiuicError(
            f"a view is mounted on {shown(path)} whose process has ended", hint=f"umount {shown(path)}"
        ) from None
    # A relative entry of the import path, and the directory itself, may be below the view.
    os.chdir("/")
    view = MountedView(tree, path, _Teller(), for_others=for_others, may_wait=session.remote_url is not None)
    stopped = False

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True

    before = {number: signal.signal(number, stop) for number in SIGNALS}
    try:
        note(f"{shown(path)} shows {'the snapshots' if only is None else only}; Ctrl-C, or umount, ends it")
        while not stopped and not view.wait(_WAIT_SECONDS):
            pass
    finally:
        view.close()
        for number, handler in before.items():
            signal.signal(number, handler)


_ROOTS = click.option(
    "-p",
    "--path",
    "paths",
    metavar="ROOT",
    type=SNAPSHOT_PATH,
    multiple=True,
    help="Only these of its roots; may be given several times.",
)
_SCRATCH = click.option(
    "--scratch",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="For what is written: removed at the end. Default: TMPDIR, or /var/tmp.",
)
_USER = click.option(
    "--user",
    metavar="NAME",
    help="Whose rights COMMAND has: a name or uid. Default: those of the owner of the first root.",
)


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
@_ROOTS
@_USER
@_SCRATCH
@click.argument("command", nargs=-1, metavar="[COMMAND...]")
def shell_command(
    snapshot_id: str,
    paths: tuple[bytes, ...],
    user: str | None,
    scratch: Path | None,
    command: tuple[str, ...],
) -> None:
    """Run COMMAND, or a shell, for which the directories are as in the snapshot.

    It sees them at their paths, and may write: what it writes is kept aside and gone with it. Everything else, other programs included, is as
    it is. It begins in the current directory, or in the first root where the snapshot does not have that. Ends with the exit code of COMMAND.
    Needs root, and runs COMMAND with the rights of the first root's owner.
    """
    session = current()
    store = session.snapshots
    snapshot = store.load(store.resolve(snapshot_id))
    roots = _roots_of(snapshot, paths)
    program = command or (os.environ.get("SHELL") or "/bin/sh",)
    if not command:
        note(
            f"{', '.join(map(shown, roots))} as in {snapshot.id}, {times.clock(snapshot.time_ns)}; what is written here is gone at the end"
        )
    session.exit_code = _run_at(session, snapshot, roots, program, user, scratch)


def _roots_of(snapshot: Snapshot, paths: Sequence[bytes]) -> list[bytes]:
    """Return the roots that are named, or all of the snapshot."""
    known = [root.path for root in snapshot.roots]
    for path in paths:
        if path not in known:
            raise NotFound(
                f"{shown(path)} is no root of {snapshot.id}",
                hint=f"its roots are: {', '.join(map(shown, known))}",
            )
    return list(paths) or known


def _run_at(
    session: Session,
    snapshot: Snapshot,
    roots: Sequence[bytes],
    program: Sequence[str],
    user: str | None,
    scratch: Path | None,
    stdout: int | None = None,
) -> int:
    from ciuic.view.mount import run_at
    from ciuic.view.tree import ViewTree

    session.require_trust(snapshot.host)
    tree = ViewTree(session.snapshots, session.repository_of, snapshot.id)
    may_wait = session.remote_url is not None
    return run_at(
        tree, snapshot, roots, program, _here(), _Teller(), scratch,
        user=_user(user), may_wait=may_wait, stdout=stdout,
    )  # fmt: skip


def _user(name: str | None) -> tuple[int, int] | None:
    if name is None:
        return None
    try:
        known = pwd.getpwuid(int(name)) if name.isdecimal() else pwd.getpwnam(name)
    except (KeyError, OverflowError):
        raise UsageError(f"--user: there is no user {shown_text(name)}") from None
    return known.pw_uid, known.pw_gid


def _here() -> bytes:
    try:
        return os.getcwdb()
    except FileNotFoundError:
        # It was removed: perhaps the snapshot has it, but its path is not known.
        return b"/"


# Those of `git bisect run`.
_SKIP = 125
_STDERR = 2
_CANNOT_RUN = (126, 127)


@click.command(
    "bisect",
    cls=FrameCommand,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option(
    "--good", required=True, metavar="ID", type=ID, help="A snapshot, or time, at which all was well."
)
@click.option(
    "--bad", default="latest", show_default=True, metavar="ID", type=ID, help="A later one, which is bad."
)
@_ROOTS
@_USER
@_SCRATCH
@json_option
@click.argument("command", nargs=-1, required=True, metavar="COMMAND...")
def bisect_command(
    good: str,
    bad: str,
    paths: tuple[bytes, ...],
    user: str | None,
    scratch: Path | None,
    as_json: bool,
    command: tuple[str, ...],
) -> None:
    """Find the first bad snapshot: run COMMAND as `ciuic shell` does, in few of those between.

    COMMAND ends with 0 where all is well, with 125 where that cannot be told, and with another code below 126 where it is bad. Any
    other code ends the search, as in `git bisect run`. Its output goes to stderr. Needs root.
    """
    session = current()
    store = session.snapshots
    last_good, first_bad = (store.load(store.resolve(text)) for text in (good, bad))
    roots = _roots_of(first_bad, paths)
    row = _between(session, last_good, first_bad, roots)
    search = Bisection(row)
    trials: list[tuple[Snapshot, Trial]] = []

    def tried(snapshot: Snapshot, why: str) -> Trial:
        note(f"{snapshot.id}, {times.clock(snapshot.time_ns)}: trying this {why}")
        trial = _trial(_run_at(session, snapshot, roots, command, user, scratch, _STDERR), snapshot, command)
        note(f"{snapshot.id}, {times.clock(snapshot.time_ns)}: {_WORDS[trial]}")
        trials.append((snapshot, trial))
        return trial

    while (snapshot := search.next()) is not None:
        search.note(tried(snapshot, f"of {len(search.suspects)} that may be the first bad one"))
    # A command that says one thing of everything, as one that is not there, has told nothing.
    outcomes = {trial for _, trial in trials} - {"skip"}
    for end, expected in ((last_good, "good"), (first_bad, "bad")):
        if outcomes and expected not in outcomes and tried(end, f", which is {expected}") != expected:
            raise UsageError(
                f"the command does not tell {expected} from {'bad' if expected == 'good' else 'good'}: {end.id} is {expected}, and it says otherwise",
                hint=f"try it: ciuic shell --at {end.id} COMMAND",
            )
    suspects = search.suspects
    found = suspects[-1] if len(suspects) == 1 else None
    before = ([last_good, *row])[row.index(suspects[0])]
    if as_json:
        out_json(
            {
                "first_bad": found and str(found.id),
                "last_good": str(before.id),
                "suspects": [str(one.id) for one in suspects],
                "trials": [{"id": str(one.id), "result": trial} for one, trial in trials],
            }
        )
    elif found is not None:
        out(
            f"{found.id}  {times.clock(found.time_ns)}  is the first bad one; the one before it is {before.id}"
        )
    if found is None:
        raise Partial(
            f"the first bad one is one of {len(suspects)}, of which all but the last could not be tried: "
            f"{', '.join(str(one.id) for one in suspects)}"
        )


_WORDS = {"good": "good", "bad": "bad", "skip": "cannot be told, passed over"}


def _trial(status: int, snapshot: Snapshot, command: Sequence[str]) -> Trial:
    if status in _CANNOT_RUN or status > max(_CANNOT_RUN):
        reason = "could not be run" if status in _CANNOT_RUN else "was ended by a signal"
        raise CiuicError(
            f"{shown_text(command[0])} {reason} (exit code {status}) in {snapshot.id}: that says nothing of the snapshot",
            hint="a command that may crash: sh -c 'COMMAND || exit 1'",
        )
    return "good" if status == 0 else "skip" if status == _SKIP else "bad"


def _between(session: Session, good: Snapshot, bad: Snapshot, roots: Sequence[bytes]) -> list[Snapshot]:
    """Return the snapshots after the good one up to the bad one that have these roots, oldest first."""
    passed_over = PassedOver()
    rows = [
        {snapshot.id: snapshot for snapshot in timeline.snapshots}
        for root in roots
        for _, timeline in all_timelines(session, root, passed_over)
        if timeline.host == bad.host
    ]
    session.exit_code = passed_over.tell()
    common = set(rows[0]).intersection(*rows[1:])
    if good.id not in common:
        raise UsageError(
            f"{good.id} is no snapshot of {', '.join(map(shown, roots))} on the host of {bad.id}",
            hint="-p ROOT takes some of the roots alone",
        )
    newest_first = [
        snapshot
        for snapshot in rows[0].values()
        if snapshot.id in common and (not snapshot.is_safety or snapshot.id in (good.id, bad.id))
    ]
    ids = [snapshot.id for snapshot in newest_first]
    begin, end = ids.index(bad.id), ids.index(good.id)
    if begin >= end:
        raise UsageError(f"the good one {good.id} is not older than the bad one {bad.id}")
    return newest_first[begin:end][::-1]
