"""``ciuic verify``: can these snapshots be restored exactly?

Guarantees: damage is named with path, block and every snapshot that shares it; exit 4 exactly when there is any.

With ``--checksum --max-duration`` one run verifies a slice, for a timer. The next run continues where this one stopped, however it
ended. A slice yields to processes that wait for the disk (ciuic.system.io_throttle). Exit 4 exactly when this slice found damage, so
that a timer's unit fails on the day it is found.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from ciuic.cli.shared import times
from ciuic.cli.shared.marks import resolve_all
from ciuic.cli.shared.names import plural
from ciuic.cli.shared.options import ID, FrameCommand, remote_options, use_remote
from ciuic.cli.shared.output import json_option, note, out, out_json, out_prose
from ciuic.cli.shared.session import Session, current
from ciuic.cli.shared.verify_result import as_document, print_damages, reporting
from ciuic.errors import Damaged
from ciuic.types import TAG_NOT_HELD
from ciuic.units import human_size

if TYPE_CHECKING:
    from ciuic.maintenance.verify import Pass, VerifyResult
    from ciuic.types import SnapshotId


_NAMED = 3
"""Snapshots that a note names; ``--json`` has all of them."""


@click.command("verify", cls=FrameCommand)
@click.argument("ids", metavar="ID...", nargs=-1, type=ID)
@click.option("--all", "everything", is_flag=True, help="All snapshots, and the repository's own files.")
@click.option("--checksum", is_flag=True, help="Read every byte and compare it with its checksum.")
@click.option(
    "--max-duration",
    metavar="DURATION",
    help="Stop after so long (30m); the next run goes on there. With --checksum, and for all snapshots.",
)
@click.option("--restart", is_flag=True, help="With --max-duration: from the beginning.")
@click.option(
    "--sample", metavar="PERCENT", help="Read a random part of the blocks (5%), instead of every byte."
)
@remote_options
@json_option
def command(
    ids: tuple[str, ...],
    everything: bool,
    checksum: bool,
    max_duration: str | None,
    restart: bool,
    sample: str | None,
    remote: bool,
    name: str,
    as_json: bool,
) -> int:
    """Verify snapshots: everything there and, with --checksum, every byte right. Exit 4 on damage.

    With --remote those of a remote; all of them if none is named. Without --checksum it reads logs, manifests and trees there.
    """
    session = current()
    if use_remote(session, remote, name):
        everything = everything or not ids
    share = None if sample is None else _share(sample)
    if share is not None and (checksum or max_duration is not None):
        raise click.UsageError("--sample reads a part, and --checksum everything: give one or the other")
    if max_duration is not None:
        # A slice goes on in the packs where the last one stopped, which knows nothing of single snapshots.
        if ids or not checksum:
            raise click.UsageError("--max-duration goes with --checksum, for all snapshots: name none")

        return verify_for(session, _seconds(max_duration), restart=restart, as_json=as_json)
    if restart:
        raise click.UsageError("--restart goes with --max-duration")
    if ids and everything:
        raise click.UsageError(
            f"--all verifies every snapshot, and {ids[0]} was named besides: give one or the other"
        )
    if not ids and not everything:
        raise click.UsageError("which snapshots? Name them (such as latest), or give --all")
    # All ids are resolved before the first byte is read: a typing error shows at once, and not after hours.
    result = _verify(session, None if everything else resolve_all(session, ids), checksum, share)
    not_held = _not_held(session, result)
    archived = _archived(session)
    if as_json:
        document = {**as_document(result), "sample": share, "not_held": not_held, "archived_packs": archived}
        out_json(document)
    else:
        _print(result, everything, share)
        if archived:
            note(
                f"{plural(len(archived), 'pack')} archived in the store: cold, not read; ciuic remote thaw ID"
            )
        if not_held:
            named = f" ({', '.join(not_held[:_NAMED])}{', …' if len(not_held) > _NAMED else ''})"
            note(
                f"{plural(len(not_held), 'snapshot')}{named} with files not held at the cut, whose content may be later; "
                "see: ciuic show ID"
            )
    return Damaged.exit_code if result.damaged else 0


def _archived(session: Session) -> list[str]:
    """The packs of the remote that could not be read because they are archived."""
    if session.remote_url is None:
        return []
    return sorted(name for reader in session.remote.readers for name in reader.archived)


def _not_held(session: Session, result: VerifyResult) -> list[str]:
    """The verified snapshots that have files whose content may be later than the cut."""
    verified = set(result.snapshots)
    # By the tag, from the catalogue: the files themselves would take another walk through the trees.
    infos = session.snapshots.list(tag=TAG_NOT_HELD)
    return [str(info.id) for info in infos if info.id in verified]


def _seconds(duration: str) -> int:
    from ciuic.units import parse_duration

    try:
        return parse_duration(duration)
    except ValueError as error:
        raise click.UsageError(f"--max-duration: {error}") from error


def _share(text: str) -> float:
    from ciuic.units import parse_share

    try:
        share = parse_share(text)
    except ValueError as error:
        raise click.UsageError(f"--sample: {error}") from error
    if not share:
        raise click.UsageError("--sample: 0% reads nothing; leave it out")
    return share


def _verify(
    session: Session, ids: list[SnapshotId] | None, checksum: bool, share: float | None
) -> VerifyResult:
    from ciuic.maintenance.verify import verify_sample, verify_snapshots

    # Opened here: the question for a passphrase would stand in the middle of a progress bar.
    asked = [(repository, ids) for repository in session.repositories]
    if ids is not None and len(asked) > 1:
        asked = [
            (repository, part)
            for repository, _ in asked
            if (part := [id_ for id_ in ids if id_ in repository.snapshots.names()])
        ]
    if checksum and session.remote_url is not None:
        session.remote.read_anew()
    with reporting() as report:
        return _united(
            [
                verify_snapshots(repository, part, checksum=checksum, progress=report)
                if share is None
                else verify_sample(repository, part, share, progress=report)
                for repository, part in asked
            ]
        )


def _united(results: list[VerifyResult]) -> VerifyResult:
    """Return one result for all repositories of a remote."""
    first, *others = results
    for other in others:
        first.snapshots += other.snapshots
        first.damages += other.damages
        first.files += other.files
        first.chunks += other.chunks
        first.bytes_read += other.bytes_read
        first.index_missing |= other.index_missing
    return first


def _print(result: VerifyResult, everything: bool, share: float | None) -> None:
    print_damages(result)
    number = len(result.snapshots)
    subject = ", ".join(result.snapshots) if number and not everything else plural(number, "snapshot")
    looked = f"{plural(result.files, 'file')}, {plural(result.chunks, 'chunk')}"
    if result.checksum or share is not None:
        looked += f", {human_size(result.bytes_read)} read"
    if result.damaged:
        verdict = f"{len(result.damages)} damaged"
    elif share is not None:
        verdict = f"everything is there, and {100 * share:.3g} % of the blocks, chosen at random, are right"
    else:
        verdict = (
            "every byte is right" if result.checksum else "everything is there (--checksum reads every byte)"
        )
    out_prose(f"{subject}: {verdict}; {looked}", 2, fg="red" if result.damaged else "green")


def verify_for(session: Session, seconds: float, *, restart: bool, as_json: bool) -> int:
    """Verify one slice and return the exit code."""
    from ciuic.maintenance.verify import ScrubBook, verify_slice
    from ciuic.system.io_throttle import Pace, gauges, processor_waits, waits_files

    deadline = time.monotonic() + seconds
    # Where it stopped is noted there.
    repository = session.own_repository
    pace = Pace(
        gauges(waits_files(str(session.config.runtime_dir))),
        min_share=session.config.capture.min_share,
        processor_waits=processor_waits(),
    )
    with ScrubBook(session.repository_dir, repository.id) as book, reporting() as report:
        if restart:
            # 0: no pass has begun, so that this slice begins one.
            book.state.began_ns = 0
        result = verify_slice(
            repository,
            book,
            time_is_up=lambda: time.monotonic() >= deadline,
            between=pace.step,
            progress=report,
        )
        state = book.state
        book.save()
    stored = repository.stored_bytes()
    if as_json:
        out_json({**as_document(result), "scrub": _document(state, stored)})
    else:
        _print_slice(result, state, stored)
    return Damaged.exit_code if result.damaged else 0


def _document(state: Pass, stored_bytes: int) -> dict[str, Any]:
    return {
        "complete": not state.began_ns,
        "bytes_done": state.bytes_read,
        # A prune during the pass may have left fewer bytes than were read.
        "bytes_total": max(stored_bytes, state.bytes_read),
        "damages": state.damages,
    }


def _print_slice(result: VerifyResult, state: Pass, stored_bytes: int) -> None:
    print_damages(result)
    verdict = f"{len(result.damages)} damaged" if result.damaged else "every byte that was read is right"
    colour = "red" if result.damaged else "green"
    if not state.began_ns:
        out(f"{verdict}; that completes a pass over {human_size(state.bytes_read)}", fg=colour)
        return
    share = state.bytes_read / max(stored_bytes, state.bytes_read, 1)
    out(
        f"{verdict}; {share:.0%} of {human_size(stored_bytes)} since {times.clock(state.began_ns)}, "
        "the next run goes on there",
        fg=colour,
    )
