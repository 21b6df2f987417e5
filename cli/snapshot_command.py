"""``ciuic snapshot``: asks the daemon for a snapshot now.

Guarantees: the id, alone on stdout, is printed once the instant is fixed; with ``--wait`` once the snapshot is durable, and
exit code 8 says that it lacks roots.
Interrupting the wait interrupts nothing else: the capture goes on in the daemon.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import click

from ciuic.cli import times
from ciuic.cli.names import plural, shown_text
from ciuic.cli.options import FrameCommand
from ciuic.cli.output import complain, json_option, note, out, out_json, warn
from ciuic.cli.session import Session, current
from ciuic.errors import BY_EXIT_CODE, CiuicError, Partial

if TYPE_CHECKING:
    from ciuic.cli.progress import Reporter
    from ciuic.control_types import SnapshotState

_POLL_SECONDS: Final = 0.2


@click.command("snapshot", cls=FrameCommand)
@click.option("-m", "--message", default="", metavar="TEXT", help="What this snapshot is for.")
@click.option("--tag", "tags", multiple=True, metavar="TAG", help="A tag; may be given several times.")
@click.option("--hold", is_flag=True, help="Never prune it (see `ciuic release`).")
@click.option("--wait", is_flag=True, help="Return when it is committed, not already when it is cut.")
@json_option
def command(message: str, tags: tuple[str, ...], hold: bool, wait: bool, as_json: bool) -> None:
    """Take a snapshot now and print its id.

    Everything whose write() had returned when this command began is in it. Commands that wait for the same are answered by one
    snapshot.
    """
    for tag in tags:
        check_tag(tag)
    session = current()
    state = session.control.take_snapshot(message=message, tags=tags, hold=hold)
    if wait:
        state = await_commit(session, state.id)
    if as_json:
        import msgspec

        state.is_incomplete = bool(state.incomplete)  # also by a daemon that does not know the field
        out_json(msgspec.to_builtins(state))
    else:
        out(state.id)
        if not wait:
            note(f"{state.id} is cut and being captured; `ciuic status` shows how far it is")
    tell_if_retaken(state.id, state.time, state.retaken)
    tell_what_is_missing(state.id, state.incomplete, state.left_out, waited=wait)


def tell_if_retaken(snapshot_id: str, time: str, reason: str) -> None:
    """Warn where the snapshot is of a later instant than the one at which its id was given out."""
    if reason:
        warn(f"{snapshot_id} was cut again, at {times.clock_of(time)}: {shown_text(reason)}")


def tell_what_is_missing(
    snapshot_id: str, incomplete: Sequence[str], left_out: Mapping[str, str], *, waited: bool
) -> None:
    """Names what is not in the snapshot. Partial where roots are not, and the caller has waited for the snapshot."""
    if incomplete:
        warn_incomplete(snapshot_id, incomplete)
    if not left_out:
        return
    roots = "; ".join(f"{shown_text(root)}: {shown_text(reason)}" for root, reason in left_out.items())
    if waited:
        raise Partial(
            f"{snapshot_id} is committed and partial, without {roots}",
            hint="the last snapshot that has them is kept; ciuic status says what the daemon does about it",
        )
    warn(f"{snapshot_id} is partial, without {roots}")


def warn_incomplete(snapshot_id: str, lines: Sequence[str]) -> None:
    """Names what could not be read, and so is not in the snapshot."""
    warn(f"{snapshot_id} is incomplete: {plural(len(lines), 'file')} could not be read")
    for line in lines[:20]:
        complain(f"  {line}")


def check_tag(tag: str) -> None:
    """UsageError for a tag that lists and filters could not carry."""
    if not tag or not tag.isprintable() or any(character in tag for character in " ,|"):
        raise click.UsageError(f"not a tag: {tag!r} (no blanks, commas or |)")


def await_commit(session: Session, snapshot_id: str) -> SnapshotState:
    """Shows the capture's progress until it is committed; raises what it failed with."""
    from ciuic.cli.progress import progress

    try:
        with progress(f"capture {snapshot_id}") as reporter:
            while True:
                # Where nobody looks at the progress, the answer comes with the commit, not with the next poll after it.
                ask = session.control.snapshot_state if reporter.shows else session.control.wait_snapshot
                state = ask(snapshot_id)
                if state.state == "failed":
                    raise failure_of(state)
                if state.state == "committed":
                    return state
                _report(reporter, state)
                time.sleep(_POLL_SECONDS)
    except KeyboardInterrupt:
        complain(f"{snapshot_id} is cut, and the daemon goes on capturing it")
        raise


def failure_of(state: SnapshotState) -> CiuicError:
    """The error that a failed snapshot carries."""
    kind = BY_EXIT_CODE.get(state.code, CiuicError)
    return kind(f"{state.id} was not committed: {state.error}", hint=state.hint)


def _report(reporter: Reporter, state: SnapshotState) -> None:
    done = state.progress
    if done is None and state.seconds_left is not None:  # it waits for its turn
        reporter.update(seconds_left=state.seconds_left)
    elif done is not None:
        reporter.update(
            bytes_done=done.bytes_done,
            bytes_total=done.bytes_total,
            files_done=done.files_done,
            files_total=done.files_total,
            seconds_left=state.seconds_left,
            path=done.path.encode("utf-8", "surrogateescape"),
        )
