"""``ciuic remote tier`` and ``ciuic remote thaw``: move old data to colder storage classes by rules, and make it readable again.

Guarantees: names, trees and logs stay readable at once; killed at any moment, the next ``tier`` goes on; uploads go on meanwhile.
Exactly the packs that the selection of ``thaw`` needs are asked for, each once; the job is durable before the store is asked, and
survives kills; another machine that asks for the same changes nothing.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from ciuic.cli.commands.remote import targets
from ciuic.cli.shared import times
from ciuic.cli.shared.contents import as_recorded
from ciuic.cli.shared.documents import Keys
from ciuic.cli.shared.messages import complain, plural, shown, shown_text, warn
from ciuic.cli.shared.options import ID, SNAPSHOT_PATH, FrameCommand, use_remote
from ciuic.cli.shared.output import json_option, note, out, out_json
from ciuic.cli.shared.session import Session, current
from ciuic.errors import CiuicError, UsageError
from ciuic.units import human_size

if TYPE_CHECKING:
    from ciuic.remote.objects.storage_classes import ObjectClasses
    from ciuic.remote.upkeep.cold_packs import PlannedMoves, ThawJob, ThawJobs


_JOB = Keys(
    "id, remote, snapshots, paths, tier, days, created, packs, ready_packs, bytes, ready, ready_by (or null)",
    "`remote thaw`, and each of the `thaws` of `remote thaw --status`",
)
_NEEDED = Keys(
    "snapshots, packs (names), bytes", "`remote thaw` where nothing is archived, or with `--dry-run`"
)
_SPACE = Keys("id, moves (class by pack), bytes, skipped (reason by pack)")
_MOVES = Keys(
    "remote, dry_run, packs, bytes, month_before (price of a month in the warm class), spaces",
    "`remote tier`",
    spaces=_SPACE,
)
_SPEEDS = ("Standard", "Bulk", "Expedited")
# A thaw takes hours, and each look costs a request for each pack.
_POLL_SECONDS = 300.0
_MIN_POLL_NS = 60 * 10**9
_NOT_READY = 1


@click.command("thaw", cls=FrameCommand)
@click.argument("ids", metavar="[ID...]", nargs=-1, type=ID)
@click.option(
    "-p", "--path", "paths", multiple=True, metavar="PATH", type=SNAPSHOT_PATH, help="Only this path."
)
@click.option(
    "--tier",
    "speed",
    type=click.Choice(_SPEEDS, case_sensitive=False),
    default="Standard",
    show_default=True,
    help="Speed, which has its price.",
)
@click.option(
    "--days",
    type=click.IntRange(1, 365),
    default=7,
    show_default=True,
    metavar="N",
    help="Days for which the thawed copies stay.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be asked for; ask for nothing.")
@click.option("--wait", is_flag=True, help="Wait until everything can be read.")
@click.option(
    "--status",
    "status",
    is_flag=True,
    help="Show the thaws of this host. Exit code 1 while one is not ready.",
)
@click.option(
    "--name", default="", metavar="NAME", help="Name of the remote, of several that are configured."
)
@json_option
def thaw(
    ids: tuple[str, ...],
    paths: tuple[bytes, ...],
    speed: str,
    days: int,
    dry_run: bool,
    wait: bool,
    status: bool,
    name: str,
    as_json: bool,
) -> int:
    """Make archived data of snapshots readable, for a restore.

    The store takes minutes to days for it. Interrupted, the command can be given again.
    """
    from ciuic.remote.upkeep.cold_packs import ThawJobs, jobs_directory

    session = current()
    jobs = ThawJobs(jobs_directory())
    if status:
        if ids or paths:
            raise click.UsageError("--status shows all thaws of this host: name no snapshot")
        return _status(session, jobs, wait=wait, as_json=as_json)
    if not ids:
        raise click.UsageError("which snapshots? Name them (such as latest), or give --status")
    use_remote(session, session.remote_url is None, name)
    packs, snapshots = _needed(session, ids, paths)
    if dry_run or not packs:
        return _tell_needed(packs, snapshots, as_json)
    job, classes = _begin(session, jobs, packs, snapshots, paths, speed.lower(), days)
    if wait:
        job = _wait(jobs, classes, job)
    if as_json:
        out_json(_job_document(job))
    else:
        _print_job(job)
    return 0


def _needed(session: Session, ids: Sequence[str], paths: Sequence[bytes]) -> tuple[dict[str, int], list[str]]:
    """Return size by name of the archived packs that the selection needs, and the names of its snapshots."""
    from ciuic.remote.reading.remote_repository import RemoteRepository
    from ciuic.remote.upkeep.cold_packs import cold_needs, prefix_of
    from ciuic.repository.lookup import Located, find

    packs: dict[str, int] = {}
    snapshots = []
    for text in ids:
        snapshot = session.snapshots.load(session.snapshots.resolve(text))
        repository = session.repository_of(snapshot.id)
        assert isinstance(repository, RemoteRepository)
        selected = [
            find(repository, snapshot, as_recorded(snapshot, path)) for path in dict.fromkeys(paths)
        ] or [Located(root, root.path, root.entry) for root in snapshot.roots]
        prefix = prefix_of(session.remote, repository.reader)
        for pack in cold_needs(repository, selected, thorough=True):
            packs[prefix + pack.name] = pack.size_bytes
        snapshots.append(str(snapshot.id))
    return packs, snapshots


def _begin(
    session: Session,
    jobs: ThawJobs,
    packs: dict[str, int],
    snapshots: Sequence[str],
    paths: Sequence[bytes],
    speed: Any,
    days: int,
) -> tuple[ThawJob, ObjectClasses]:
    from ciuic.cli.shared.cold_packs import open_session_classes
    from ciuic.remote.upkeep.cold_packs import begin_thaw

    url = session.remote.remote.objects.url
    classes = open_session_classes(session, url)
    try:
        job = begin_thaw(
            jobs,
            classes,
            url=url,
            snapshots=snapshots,
            paths=[shown(path) for path in paths],
            packs=packs,
            speed=speed,
            days=days,
            now_ns=session.now_ns,
        )
    except OSError as error:
        raise CiuicError(
            f"the thaw cannot be noted in {jobs.path}: {error.strerror}; nothing was asked for"
        ) from None
    return job, classes


def _status(session: Session, jobs: ThawJobs, *, wait: bool, as_json: bool) -> int:
    from ciuic.cli.shared.cold_packs import open_session_classes
    from ciuic.remote.upkeep.cold_packs import continue_thaw

    found = []
    for job in jobs.all():
        if not job.is_ready:
            classes = open_session_classes(session, job.url)
            # Soon after the last look nothing has changed, and each look costs a request for each pack.
            if job.unasked or session.now_ns - job.polled_ns >= _MIN_POLL_NS:
                job = continue_thaw(jobs, classes, job, now_ns=session.now_ns)
            if wait:
                job = _wait(jobs, classes, job)
        elif session.now_ns > job.polled_ns + job.days * 86_400 * 10**9:
            # What was thawed is archived again.
            jobs.remove(job)
            continue
        found.append(job)
    if as_json:
        out_json({"thaws": [_job_document(job) for job in found]})
    elif not found:
        note("no thaw was asked for on this host")
    else:
        for job in found:
            _print_job(job)
    return 0 if all(job.is_ready for job in found) else _NOT_READY


def _wait(jobs: ThawJobs, classes: ObjectClasses, job: ThawJob) -> ThawJob:
    from ciuic.remote.upkeep.cold_packs import wait_until_ready

    try:
        return wait_until_ready(
            jobs, classes, job, now_ns=time.time_ns, sleep=time.sleep, poll_seconds=_POLL_SECONDS
        )
    except KeyboardInterrupt:
        complain("the thaw goes on in the store: ciuic remote thaw --status")
        raise


def _tell_needed(packs: dict[str, int], snapshots: Sequence[str], as_json: bool) -> int:
    if as_json:
        out_json(_NEEDED.of(snapshots=snapshots, packs=sorted(packs), bytes=sum(packs.values())))
    elif packs:
        out(f"{plural(len(packs), 'pack')}, {human_size(sum(packs.values()))}, would be thawed")
    else:
        out("everything can be read: nothing has to be thawed")
    return 0


def _job_document(job: ThawJob) -> dict[str, Any]:
    return _JOB.of(
        job,
        remote=job.url,
        tier=job.speed,
        packs=len(job.packs),
        ready_packs=len(job.packs) - len(job.waiting),
        bytes=job.size_bytes,
        ready=job.is_ready,
    )


def _print_job(job: ThawJob) -> None:
    what = f"{', '.join(job.snapshots)}{''.join(f' {shown_text(path)}' for path in job.paths)}"
    size = f"{plural(len(job.packs), 'pack')}, {human_size(job.size_bytes)}"
    if job.is_ready:
        out(f"{what}: ready, {size}; for about {plural(job.days, 'day')}")
        return
    ready = len(job.packs) - len(job.waiting)
    until = "" if job.ready_by_ns is None else f", by {times.clock(job.ready_by_ns)} as the store promises"
    out(f"{what}: {size}, {ready} ready{until}")


_GB = 10**9
_SHOWN_REASONS = 3


@click.command("tier", cls=FrameCommand)
@targets.place_argument
@click.option("--dry-run", is_flag=True, help="Say what would move; only read.")
@json_option
def tier(place: str, dry_run: bool, as_json: bool) -> None:
    """Move data that only old snapshots need to colder storage classes.

    The rules are [[remote.tier]] of the configuration. Run it from a timer, on one host. Stores charge for each move, and for a
    minimum duration in the colder class.
    """
    from ciuic.cli.shared.cold_packs import open_session_classes
    from ciuic.cli.shared.progress import progress
    from ciuic.remote.upkeep.cold_packs import apply_rules, classes_of_spaces

    session = current()
    config = targets.find_remote(session.config, place)
    if not config.tiers:
        raise UsageError(
            f"the remote {config.name} has no rule",
            hint='[[remote.tier]] with after = "30d" and storage_class = "GLACIER_IR"',
        )
    session.repo_option, session.remote_option = None, config.url
    classes = open_session_classes(session, config.url)
    opened = session.remote
    with progress("tier") as reporter:
        marked = 0

        def between() -> None:
            nonlocal marked
            marked += 1
            reporter.step("mark", marked, 0)

        spaces = apply_rules(
            classes_of_spaces(opened, classes),
            config.tiers,
            session.now_ns,
            host=socket.gethostname(),
            dry_run=dry_run,
            between=between,
        )
    if as_json:
        out_json(_moves_document(config.url, dry_run, spaces, config.price.gb_month))
    else:
        _print_moves(dry_run, spaces, config.price.gb_month)


def _moves_document(
    url: str, dry_run: bool, spaces: Sequence[PlannedMoves], gb_month: float | None
) -> dict[str, Any]:
    moved = sum(space.bytes for space in spaces)
    return _MOVES.of(
        remote=url,
        dry_run=dry_run,
        packs=sum(len(space.moves) for space in spaces),
        bytes=moved,
        month_before=None if gb_month is None else moved / _GB * gb_month,
        spaces=[
            _SPACE.of(
                space,
                id=space.space,
                moves=dict(sorted(space.moves.items())),
                skipped=dict(sorted(space.skipped.items())),
            )
            for space in spaces
        ],
    )


def _print_moves(dry_run: bool, spaces: Sequence[PlannedMoves], gb_month: float | None) -> None:
    packs: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for space in spaces:
        for ref, storage_class in space.moves.items():
            packs[storage_class] += 1
            sizes[storage_class] += space.sizes.get(ref, 0)
    verb = "would move" if dry_run else "moved"
    for storage_class in sorted(packs):
        out(
            f"{plural(packs[storage_class], 'pack')}, {human_size(sizes[storage_class])}, {verb} to {storage_class}"
        )
    if not packs:
        out("nothing moves" if dry_run else "nothing moved")
    elif gb_month is not None:
        out(
            f"until now {sum(sizes.values()) / _GB * gb_month:.2f} a month, at the configured price of the warm class"
        )
    skipped = Counter(reason for space in spaces for reason in space.skipped.values())
    for reason, count in skipped.most_common(_SHOWN_REASONS):
        warn(f"{plural(count, 'pack')} did not move: {reason}")
