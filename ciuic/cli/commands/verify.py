"""``ciuic verify`` and ``ciuic check``: can snapshots be restored exactly, and does a repository or remote agree with itself?

Guarantees: damage is named with path, block and every snapshot that shares it; ``verify`` exits with 4 exactly when there is
any in what was to be verified: of single snapshots, in what they need. ``check --repair`` mends what can be mended; content is never
deleted.

With ``--checksum --max-duration`` one run verifies a slice, for a timer. The next run continues where this one stopped, however it
ended. A slice yields to processes that wait for the disk (ciuic.system.io_throttle). Exit 4 exactly when this slice found damage, so
that a timer's unit fails on the day it is found.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from ciuic.cli.shared import sets, times
from ciuic.cli.shared.damage import note as note_damage
from ciuic.cli.shared.messages import json_name, plural, shown, shown_text, warn
from ciuic.cli.shared.options import ID, FrameCommand, remote_options, use_remote
from ciuic.cli.shared.output import json_option, note, out, out_json, out_prose, wrapped
from ciuic.cli.shared.session import LOCK_WAIT_SECONDS, Session, current
from ciuic.errors import CiuicError, Damaged, Partial, UsageError
from ciuic.types import TAG_NOT_HELD
from ciuic.units import human_duration, human_size, parse_duration, parse_share

if TYPE_CHECKING:
    from ciuic.maintenance.check import CheckFinding, CheckReport
    from ciuic.maintenance.verify import Damage, Pass, VerifyProgress, VerifyResult
    from ciuic.protocol.known_damage import DamagedPlace
    from ciuic.remote.reading.versions import SoundObjects
    from ciuic.remote.upkeep.version_repair import LockRenewal
    from ciuic.repository import Repository
    from ciuic.repository.snapshot_sets import SnapshotSet
    from ciuic.types import SnapshotId


@contextmanager
def reporting() -> Iterator[Callable[[VerifyProgress], None]]:
    """Show the progress of a verification; yields the function that it reports to."""
    from ciuic.cli.shared.progress import progress

    with progress("verify") as reporter:

        def report(state: VerifyProgress) -> None:
            reporter.update(
                bytes_done=state.bytes_done,
                bytes_total=state.bytes_total,
                files_done=state.files_done,
                path=state.path,
            )

        yield report


def as_document(result: VerifyResult) -> dict[str, Any]:
    """Return the document of ``verify --json`` (docs/cli.md)."""
    return {
        "snapshots": [str(snapshot_id) for snapshot_id in result.snapshots],
        "checksum": result.checksum,
        "damaged": result.damaged,
        "files": result.files,
        "chunks": result.chunks,
        "bytes_read": result.bytes_read,
        "index_missing": result.index_missing,
        "damages": [_damage(damage) for damage in result.damages],
        "elsewhere": [_damage(damage) for damage in result.elsewhere],
    }


def _damage(damage: Damage) -> dict[str, Any]:
    return {
        "kind": damage.kind,
        "reason": damage.reason,
        **(json_name("path", damage.path) if damage.path else {"path": None}),
        **(json_name("root", damage.root) if damage.root else {"root": None}),
        "block": damage.block if damage.block >= 0 else None,
        "offset": damage.offset if damage.offset >= 0 else None,
        "chunk": damage.chunk.hex() if damage.chunk else None,
        "snapshots": [str(snapshot_id) for snapshot_id in damage.snapshots],
        "file": damage.file or None,
    }


def damaged_places(session: Session, result: VerifyResult, by: str) -> list[DamagedPlace]:
    """Return what was found as the record of known damage has it."""
    from ciuic.protocol.known_damage import DamagedPlace

    return [
        DamagedPlace(
            where=shown(damage.path) if damage.path else shown_text(damage.file) or "the repository",
            reason=f"{f'block {damage.block}: ' if damage.block >= 0 else ''}{shown_text(damage.reason)}",
            snapshots=tuple(map(str, damage.snapshots)),
            by=by,
            found_ns=session.now_ns,
            seen_ns=session.now_ns,
        )
        for damage in (*result.damages, *result.elsewhere)
    ]


def print_damages(result: VerifyResult) -> None:
    """Print a line for each damage: what it is in, where, and which snapshots share it."""
    if result.index_missing:
        note(
            "the index is missing, which is no damage: the next snapshot or ciuic check --repair makes it again"
        )
    for damage in result.damages:
        out("damaged ", newline=False, fg="red")
        out(_line(damage))


def _line(damage: Damage) -> str:
    where = shown(damage.path) if damage.path else shown_text(damage.file) or "the repository"
    if damage.block >= 0:
        where += f" block {damage.block} (offset {damage.offset})"
    line = f"{where}: {shown_text(damage.reason)}"
    if damage.snapshots:
        line += f"; in {', '.join(damage.snapshots)}"
    return line


_NAMED = 3
"""Snapshots that a note names; ``--json`` has all of them."""


def _some(ids: Sequence[str]) -> str:
    """Return the first of these ids in words."""
    return f"{', '.join(ids[:_NAMED])}{', …' if len(ids) > _NAMED else ''}"


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
def verify_command(
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

    set:NAME verifies all members of a set; exit 8 if some of them are missing there.
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

        return _verify_for(session, _seconds(max_duration), restart=restart, as_json=as_json)
    if restart:
        raise click.UsageError("--restart goes with --max-duration")
    if ids and everything:
        raise click.UsageError(
            f"--all verifies every snapshot, and {ids[0]} was named besides: give one or the other"
        )
    if not ids and not everything:
        raise click.UsageError("which snapshots? Name them (such as latest), or give --all")
    # All ids are resolved before the first byte is read: a typing error shows at once, and not after hours.
    chosen, of_sets = ([], []) if everything else sets.expanded(session, ids)
    result = _verify(session, None if everything else chosen, checksum, share)
    whole = set() if result.damaged or not checksum else set(result.snapshots)
    note_damage(
        session,
        damaged_places(session, result, "verify"),
        # A read of everything speaks for all places, that of a snapshot for those that it has.
        lambda known: (
            (everything and checksum and known.seen_ns < session.now_ns)
            or (bool(known.snapshots) and whole.issuperset(known.snapshots))
        ),
    )
    not_held = _not_held(session, result)
    archived = _archived(session)
    if as_json:
        document = {**as_document(result), "sample": share, "not_held": not_held, "archived_packs": archived}
        out_json(
            {
                **document,
                "sets": [{**sets.document(one), "damaged": _damaged_members(one, result)} for one in of_sets],
            }
        )
    else:
        _print_verified(result, everything, share)
        for one in of_sets:
            _print_set(one, result)
        if archived:
            note(
                f"{plural(len(archived), 'pack')} archived in the store: cold, not read; ciuic remote thaw ID"
            )
        if not_held:
            note(
                f"{plural(len(not_held), 'snapshot')} ({_some(not_held)}) with files not held at the cut, whose content may be later; "
                "see: ciuic show ID"
            )
    for one in of_sets:
        sets.warn_of_lacking(session, one)
    if result.damaged:
        return Damaged.exit_code
    return 0 if all(one.is_whole for one in of_sets) else Partial.exit_code


def _damaged_members(found: SnapshotSet, result: VerifyResult) -> list[str]:
    """Return the members of a set whose snapshots damage touches."""
    touched = {id_ for damage in result.damages for id_ in damage.snapshots}
    return [member for member, snapshot in found.found.items() if snapshot.id in touched]


def _print_set(found: SnapshotSet, result: VerifyResult) -> None:
    """Print which members of a set are damaged, and which are not."""
    damaged = _damaged_members(found, result)
    for member, snapshot in found.found.items():
        word = "damaged" if member in damaged else "right" if result.checksum else "there"
        out(f"  {shown_text(member)}  {snapshot.id}  {word}", fg="red" if member in damaged else None)


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
    try:
        return parse_duration(duration)
    except ValueError as error:
        raise click.UsageError(f"--max-duration: {error}") from error


def _share(text: str) -> float:
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
    if session.remote_url is not None:
        if checksum:
            session.remote.read_anew()
        else:
            session.remote.read_manifests_anew()
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
        first.elsewhere += other.elsewhere
        first.files += other.files
        first.chunks += other.chunks
        first.bytes_read += other.bytes_read
        first.index_missing |= other.index_missing
    return first


def _print_verified(result: VerifyResult, everything: bool, share: float | None) -> None:
    print_damages(result)
    number = len(result.snapshots)
    subject = ", ".join(result.snapshots) if number and not everything else plural(number, "snapshot")
    looked = f"{plural(result.files, 'file')}, {plural(result.chunks, 'chunk')}"
    if result.checksum or share is not None:
        looked += f", {human_size(result.bytes_read)} read"
    if result.damaged:
        verdict = plural(len(result.damages), "damaged place")
    elif share is not None:
        verdict = f"everything is there, and {100 * share:.3g} % of the blocks, chosen at random, are right"
    else:
        verdict = (
            "every byte is right" if result.checksum else "everything is there (--checksum reads every byte)"
        )
    out_prose(f"{subject}: {verdict}; {looked}", 2, fg="red" if result.damaged else "green")
    if result.elsewhere:
        touched = list(dict.fromkeys(id_ for damage in result.elsewhere for id_ in damage.snapshots))
        whose = f", in {_some(touched)}" if touched else ""
        places = plural(len(result.elsewhere), "damaged place")
        warn(f"elsewhere in the repository: {places}{whose}", hint="ciuic verify --all --checksum")


def _verify_for(session: Session, seconds: float, *, restart: bool, as_json: bool) -> int:
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
        began_ns = book.state.began_ns or session.now_ns
        result = verify_slice(
            repository,
            book,
            time_is_up=lambda: time.monotonic() >= deadline,
            between=pace.step,
            progress=report,
        )
        state = book.state
        # Before the state: it counts the packs as verified. A pass of several slices reads each pack once, so only a clean one refutes.
        is_clean = not state.began_ns and not state.damages
        note_damage(
            session,
            damaged_places(session, result, "verify"),
            lambda known: is_clean and known.seen_ns < began_ns,
        )
        book.save()
    stored = repository.stored_bytes()
    if as_json:
        out_json({**as_document(result), "scrub": _slice_document(state, stored)})
    else:
        _print_slice(result, state, stored)
    return Damaged.exit_code if result.damaged else 0


def _slice_document(state: Pass, stored_bytes: int) -> dict[str, Any]:
    return {
        "complete": not state.began_ns,
        "bytes_done": state.bytes_read,
        # A prune during the pass may have left fewer bytes than were read.
        "bytes_total": max(stored_bytes, state.bytes_read),
        "damages": state.damages,
    }


def _print_slice(result: VerifyResult, state: Pass, stored_bytes: int) -> None:
    print_damages(result)
    verdict = (
        plural(len(result.damages), "damaged place")
        if result.damaged
        else "every byte that was read is right"
    )
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


_COLOURS = {"error": "red", "warning": "yellow", "info": ""}
# The longest label, `repaired`, and a blank.
_LABEL_WIDTH = 9


@click.command("check", cls=FrameCommand)
@click.option(
    "--repair",
    is_flag=True,
    help="Rebuild the index, heal damaged chunks, replace damaged packs; never deletes what a snapshot needs.",
)
@click.option("--read-data", is_flag=True, help="Read every stored byte, too.")
@click.option(
    "--renew-locks",
    default="",
    metavar="DURATION",
    help="Of a remote in a bucket with object lock: have the store keep all that is needed for this time.",
)
@remote_options
@json_option
def check_command(
    repair: bool, read_data: bool, renew_locks: str, remote: bool, name: str, as_json: bool
) -> int:
    """Check the repository's consistency: configuration, snapshot files, index, structure, packs.

    Exit 4 if damage is left, which is named with its files and snapshots. Of packs, header, size and footer are looked at; what they
    hold is read with --read-data alone.

    With --remote the same of a remote; --repair takes what is lost there from its other copies and from this host's repository. With
    --behind-deletions: which objects were deleted, overwritten or forged in a bucket with versions; --repair stores the sound
    versions again.
    """
    # Here and not above: maintenance takes 80 ms to import, and help and completion import this
    # module.
    from ciuic.cli.shared.progress import progress
    from ciuic.maintenance.check import check
    from ciuic.protocol.known_damage import DamagedPlace

    session = current()
    if use_remote(session, remote, name):
        if renew_locks:
            if repair or read_data:
                raise UsageError("--renew-locks is a run of its own: leave out --repair and --read-data")
            return _renew(session, renew_locks, as_json)
        if session.every_version is not None:
            return _report(_check_behind_deletions(session, repair=repair), as_json)
        found = _check_remotely(session, repair=repair, read_data=read_data)
        _note_damaged(session, found)
        return _report(found, as_json)
    if renew_locks or session.every_version is not None:
        raise UsageError("--renew-locks, --behind-deletions and --stored-before go with a remote")
    with progress("check") as reporter:
        report = check(
            # Another user's repository is read, for rescue, and not written to by root.
            session.own_repository if repair else session.repository,
            repair=repair,
            read_data=read_data,
            wait_seconds=LOCK_WAIT_SECONDS,
            progress=reporter.step,
        )
    note_damage(
        session,
        [
            DamagedPlace(
                where=shown_text(finding.place or finding.message),
                reason=finding.kind,
                snapshots=finding.snapshots,
                by="check",
                found_ns=session.now_ns,
                seen_ns=session.now_ns,
            )
            for finding in report.findings
            if finding.severity == "error" and not finding.repaired
        ],
        lambda known: read_data and not report.damaged and known.seen_ns < session.now_ns,
    )
    return _report(report, as_json)


def _report(report: CheckReport, as_json: bool) -> int:
    from ciuic.maintenance.check import summary

    if as_json:
        out_json(_report_document(report))
    else:
        for finding in report.findings:
            _print_finding(finding)
        out_prose(summary(report), 2)
    # Returned and not raised: the report is out, and an error would be a second message and a second JSON
    # document.
    return Damaged.exit_code if report.damaged else 0


def _renew(session: Session, duration: str, as_json: bool) -> int:
    """Renew the locks in a bucket, and say how many there are."""
    try:
        seconds = parse_duration(duration)
    except ValueError as error:
        raise UsageError(f"--renew-locks: {error}") from None
    done = _renew_remote_locks(session, seconds)
    if as_json:
        out_json({"locked": done.locked, "seconds": seconds, "deleted_or_overwritten": done.astray})
    else:
        out_prose(f"{plural(done.locked, 'object')} locked for {human_duration(seconds)} from now", 0)
    if done.astray:
        warn(
            f"{plural(done.astray, 'of them was', 'of them were')} deleted or overwritten since",
            hint="ciuic check --remote --behind-deletions names them, and with --repair stores them again",
        )
        return Damaged.exit_code
    return 0


def _report_document(report: CheckReport) -> dict[str, object]:
    return {
        "damaged": report.damaged,
        "data_read": report.data_read,
        "snapshots": report.snapshots,
        "packs": report.packs,
        "stored_bytes": report.stored_bytes,
        "orphaned_bytes": report.orphaned_bytes,
        "findings": [
            {
                "severity": finding.severity,
                "kind": finding.kind,
                "message": finding.message,
                "hint": finding.hint,
                "snapshot": finding.snapshots[0] if finding.snapshots else None,
                "chunk": finding.chunk.hex() if finding.chunk else None,
                "repaired": finding.repaired,
            }
            for finding in report.findings
        ],
    }


def _print_finding(finding: CheckFinding) -> None:
    word = "repaired" if finding.repaired else finding.severity
    label = f"{word:<{_LABEL_WIDTH}}"
    # Wrapped before the label is coloured: escape sequences take no columns.
    lines = wrapped(f"{label}{shown_text(finding.message)}", _LABEL_WIDTH)
    out(label, newline=False, fg="green" if finding.repaired else _COLOURS[finding.severity] or None)
    out("\n".join(lines).removeprefix(label))
    if finding.hint:
        out_prose(f"{'':<{_LABEL_WIDTH}}{shown_text(finding.hint)}", _LABEL_WIDTH)


def _check_remotely(session: Session, *, repair: bool, read_data: bool) -> CheckReport:
    """Check the remote that the session reads, and repair it on request."""
    from ciuic.maintenance.check import CheckFinding, CheckReport
    from ciuic.remote.reading.opening import read_remote
    from ciuic.remote.upkeep.check import check_remote, repair_remote

    try:
        # Opened here: the question for a passphrase would stand in the middle of a progress line.
        opened = session.remote
    except Damaged as error:
        # remote.json, or an older state: then it is unknown which snapshots there are, and what else is right.
        finding = CheckFinding(
            "error", "log", error.message, error.hint or "nothing can be repaired without it"
        )
        return CheckReport([finding])
    # The report says what is left.
    session.exit_code = 0
    local = _local(session) if repair else None
    with reporting() as report:
        if not repair:
            return check_remote(opened, read_data=read_data, progress=report)
        return repair_remote(
            lambda: read_remote(opened.remote),
            local,
            host=sets.own_name(),
            read_data=read_data,
            caches=_caches(session),
            progress=report,
        )


def _note_damaged(session: Session, report: CheckReport) -> None:
    """Have prune and status hear which snapshots cannot be read whole on the remote, or can again."""
    from ciuic.protocol.stored_remotely import note_damaged

    if not report.snapshots:
        # It could not be opened, which says nothing of any snapshot.
        return
    for remote in session.config.remotes:
        if remote.url != session.remote_url:
            continue
        try:
            note_damaged(remote, report.damaged_snapshots, data_read=report.data_read)
        except FileNotFoundError:
            # Nothing was ever uploaded from here.
            continue
        except OSError as error:
            warn(f"prune on this host does not hear of it: {error.strerror or error}")


def _check_behind_deletions(session: Session, *, repair: bool) -> CheckReport:
    """Find what was deleted, overwritten or forged in a bucket with versions; put it right on request."""
    from ciuic.cli.shared.progress import progress
    from ciuic.cli.shared.remotes import open_named_objects
    from ciuic.remote.upkeep.version_repair import check_versions

    objects = _sound_objects(session)
    assert session.remote_url is not None
    writer = open_named_objects(session.remote_url, lambda: session.config.remotes) if repair else None
    try:
        with progress("check") as reporter:
            return check_versions(objects, writer, lambda name: reporter.update(path=name.encode()))
    finally:
        if writer is not None:
            writer.close()


def _renew_remote_locks(session: Session, seconds: int) -> LockRenewal:
    """Lock everything that the remote needs for this time from now on."""
    from ciuic.cli.shared.progress import progress
    from ciuic.remote.upkeep.version_repair import renew_locks

    session.behind_deletions = True
    objects = _sound_objects(session)
    until_ns = session.now_ns + seconds * 10**9
    with progress("lock") as reporter:
        return renew_locks(
            objects, objects.versions, until_ns, lambda name: reporter.update(path=name.encode())
        )


def _sound_objects(session: Session) -> SoundObjects:
    from ciuic.remote.reading.versions import SoundObjects

    objects = session.remote.remote.objects
    assert isinstance(objects, SoundObjects)
    return objects


def _caches(session: Session) -> list[str]:
    """Return where uploads of this host have kept what they read of logs."""
    from ciuic.protocol.stored_remotely import upload_state_dir

    return sorted(map(str, upload_state_dir().glob("*/*/logs")))


def _local(session: Session) -> Repository | None:
    """Return the repository of this host; None if there is none."""
    try:
        return session.local.repository
    except CiuicError:
        return None
