"""``ciuic prune``: applies the retention policy, says for each snapshot why it stays, and frees the space of the rest.

Guarantees: what cannot be read is never a reason to delete (ciuic.maintenance.prune refuses); interrupted anywhere, the repository is
whole and the next run frees the rest; it works on a full disk.

With ``--remote``: frees the space of a remote that no snapshot needs. Uploaders of all hosts may run meanwhile; interrupted
anywhere, the next run of any host goes on.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from contextlib import ExitStack
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from ciuic.cli.shared import times
from ciuic.cli.shared.documents import Keys
from ciuic.cli.shared.messages import plural, shown_text, warn
from ciuic.cli.shared.options import FrameCommand, remote_options, use_remote
from ciuic.cli.shared.output import Cell, Column, json_option, note, out, out_json, out_prose, show_table
from ciuic.cli.shared.session import LOCK_WAIT_SECONDS, Session, current
from ciuic.errors import Damaged, NotFound, Partial

if TYPE_CHECKING:
    from ciuic.maintenance.prune import PruneResult
    from ciuic.remote.upkeep.collect import CollectedSpace

_DECISION = Keys("id, time, keep, reasons")
_PRUNE = Keys(
    "dry_run, decisions, removed, removed_for_space, removed_unstored, freed_bytes, garbage_bytes, interrupted, notes",
    "`prune`",
    decisions=_DECISION,
    removed_unstored=Keys("id, remotes"),
)
_SPACE = Keys(
    "id, packs, manifests, freed_bytes, repacked_bytes, rescued, cold_packs, unreadable_packs, decayed_packs, checked_bytes, held,"
    " unfinished_round",
    held=Keys("repository, hosts, snapshots"),
)
_REMOTE = Keys("remote, dry_run, freed_bytes, spaces", "`prune --remote`", spaces=_SPACE)


@click.command("prune", cls=FrameCommand)
@click.option("--dry-run", is_flag=True, help="Say what would be removed; remove nothing.")
@click.option(
    "--spare-cold",
    metavar="DURATION",
    help="With --remote: spare packs that became cold within this time (180d), for which the store charges in any case.",
)
@click.option(
    "--approve",
    multiple=True,
    metavar="ID|HOST",
    help="With --remote: let go what a repository, or all of a host, gave up at once and collections hold; may be repeated.",
)
@remote_options
@json_option
def command(
    dry_run: bool,
    spare_cold: str | None,
    approve: tuple[str, ...],
    remote: bool,
    name: str,
    as_json: bool,
) -> None:
    """Apply the retention policy and free space.

    With --remote the space of a remote that no snapshot of any host needs; each host's uploader applies the remote's retention.
    """
    session = current()
    if use_remote(session, remote, name):
        _prune_remote(
            session, dry_run=dry_run, spare_cold=_seconds(spare_cold), approve=approve, as_json=as_json
        )
        return
    for option, given in (("--spare-cold", spare_cold is not None), ("--approve", bool(approve))):
        if given:
            raise click.UsageError(f"{option} goes with --remote")
    report = _prune(session, dry_run)
    if as_json:
        decisions = [
            _DECISION.of(decision, keep=decision.id not in report.removed)
            for decision in report.plan.decisions
        ]
        out_json(_PRUNE.of(report, decisions=decisions, interrupted=report.stopped))
    else:
        _print(report)
    if report.stopped:
        # Stopped by a signal, in good order: the exit code says so.
        raise KeyboardInterrupt


def _seconds(duration: str | None) -> int:
    from ciuic.units import parse_duration

    try:
        return 0 if duration is None else parse_duration(duration)
    except ValueError as error:
        raise click.UsageError(f"--spare-cold: {error}") from error


def _prune(session: Session, dry_run: bool) -> PruneResult:
    from ciuic.cli.shared.progress import progress
    from ciuic.maintenance.prune import prune
    from ciuic.protocol.stored_remotely import remotes_done
    from ciuic.system.disk_space import reserve_of, total_bytes

    stop = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal stop
        # The first signal ends the work after the present step, with a report of what was freed. The second
        # ends it at once: the repository is whole at any moment.
        if stop:
            raise KeyboardInterrupt
        stop = True

    config = session.config
    found: dict[str, str] = {}
    # A dry run writes nothing, so that it is allowed in another user's repository as well.
    repository = session.repository if dry_run else session.own_repository
    if config.remotes:
        # Only here: the module imports the store's client.
        from ciuic.cli.shared.remotes import waiting_aloud
        from ciuic.remote.remote_look import looks

        found = looks(config.remotes, repository, waiting=waiting_aloud(session.verbosity))
    remotes = remotes_done(
        config.remotes,
        repository.id,
        now_ns=session.now_ns,
        is_theirs=config.names_repository,
        looks=found,
    )
    reserve = reserve_of(config.repository.reserve, total_bytes(repository.path))
    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with progress("prune") as reporter:
            report = prune(
                repository,
                config.retention,
                min_free=config.min_free,
                remotes=remotes.done,
                reserve_bytes=reserve.size_bytes,
                dry_run=dry_run,
                wait_seconds=LOCK_WAIT_SECONDS,
                progress=reporter.step,
                should_stop=lambda: stop,
                now_ns=session.now_ns,
            )
    finally:
        # What follows is output, which ^C ends as in every command.
        for number, handler in before.items():
            signal.signal(number, handler)
    report.notes += remotes.flaws
    return report


def _print(report: PruneResult) -> None:
    from ciuic.units import human_size

    gone = "would go" if report.dry_run else "removed"
    unstored = {decision.id: ", ".join(decision.remotes) for decision in report.removed_unstored}
    rows = []
    for decision in report.plan.decisions:
        if decision.id in unstored:
            fate, why = Cell(gone, "red"), f"space is short; remote {unstored[decision.id]} does not have it"
        elif decision.id in report.removed_for_space:
            fate, why = Cell(gone, "red"), "free space is below min_free"
        elif decision.id in report.removed:
            fate, why = Cell(gone, "red"), "no rule keeps it"
        elif decision.kept:
            fate, why = Cell("kept", "green"), ", ".join(decision.reasons)
        else:
            fate, why = Cell("still there", "yellow"), "interrupted before its turn"
        rows.append((str(decision.id), times.clock(decision.time_ns), fate, why))
    if rows:
        show_table([Column("ID"), Column("TIME"), Column("FATE"), Column("WHY", shrink=True)], rows)
    freed = human_size(report.freed_bytes)
    verb = "would be freed" if report.dry_run else "freed"
    out(f"{plural(len(report.removed), 'snapshot')} {gone}, {freed} {verb}")
    if unstored:
        warn(
            f"{plural(len(unstored), 'snapshot')} {gone} before every remote had stored "
            f"{'it' if len(unstored) == 1 else 'them'}: {', '.join(map(str, unstored))}",
            hint="see why the remote is behind: ciuic remote status",
        )
    for line in report.notes:
        note(line)


def _prune_remote(
    session: Session, *, dry_run: bool, spare_cold: int, approve: Sequence[str], as_json: bool
) -> None:
    """Collect the remote that the session reads, and print the result.

    Args:
        session: The session.
        dry_run: Only say what would be done.
        spare_cold: Seconds since when packs that became cold are spared.
        approve: Repositories and hosts of which everything that was given up may go.
        as_json: Print a document.
    """
    from ciuic.cli.shared.progress import progress
    from ciuic.cli.shared.remotes import waiting_aloud
    from ciuic.cli.shared.sets import own_name
    from ciuic.remote.upkeep.collect import collect_remote, preview_collection
    from ciuic.remote.upkeep.collection_round import DEFAULT_POLICY

    # Opened here: the question for a passphrase would stand in the middle of a progress line.
    opened = session.remote
    policy = DEFAULT_POLICY._replace(spare_cold_ns=spare_cold * 10**9)
    spaces: list[CollectedSpace] = []
    refused: Damaged | None = None
    with progress("prune") as reporter, ExitStack() as waiting:
        # The first collection reads the table of each pack before anything is marked, and progress can be shown.
        waiting.enter_context(waiting_aloud(session.verbosity)(opened.remote.objects.url))
        marked = 0

        def between() -> None:
            nonlocal marked
            waiting.close()
            marked += 1
            reporter.step("mark", marked, 0)

        try:
            if dry_run:
                preview_collection(
                    opened,
                    now_ns=session.now_ns,
                    policy=policy,
                    approved=approve,
                    between=between,
                    collected=spaces.append,
                )
            else:
                collect_remote(
                    opened,
                    host=own_name(),
                    policy=policy,
                    approved=approve,
                    between=between,
                    collected=spaces.append,
                )
        except Damaged as error:
            refused = error
    if refused is not None and not spaces:
        raise refused
    if as_json:
        out_json(_remote_document(opened.remote.objects.url, dry_run, spaces))
    else:
        _print_remote(dry_run, spaces)
    if refused is not None:
        # After what was done elsewhere.
        raise refused
    if unknown := set(approve).difference(*(space.approved for space in spaces)):
        raise NotFound(f"no given-up snapshot is of {', '.join(map(shown_text, sorted(unknown)))}")
    if held := [one for space in spaces for one in space.held]:
        found = "; ".join(
            f"{plural(one.snapshots, 'snapshot')} of {', '.join(one.hosts)} (repository {one.repository})"
            for one in held
        )
        message = f"given up at once, as no retention does, and held until a person approves: {found}"
        approval = " ".join(f"--approve {one.repository}" for one in held)
        hint = (
            f"`ciuic list --all-claims` shows them; if it was meant: ciuic prune --remote {approval}; "
            "if not, somebody has the key of a host"
        )
        if dry_run:
            warn(message, hint=hint)
        else:
            # A timer that ends well is looked at by nobody.
            raise Partial(message, hint=hint)


def _remote_document(url: str, dry_run: bool, spaces: list[CollectedSpace]) -> dict[str, Any]:
    return _REMOTE.of(
        remote=url,
        dry_run=dry_run,
        freed_bytes=sum(space.freed_bytes for space in spaces),
        spaces=[
            _SPACE.of(
                space,
                cold_packs=space.cold,
                unreadable_packs=space.unreadable,
                decayed_packs=space.decayed,
                unfinished_round=space.unfinished,
            )
            for space in spaces
        ],
    )


def _print_remote(dry_run: bool, spaces: list[CollectedSpace]) -> None:
    from ciuic.units import human_size

    packs = sum(len(space.packs) for space in spaces)
    manifests = sum(len(space.manifests) for space in spaces)
    copied = sum(space.repacked_bytes for space in spaces)
    gone, freed = ("would be deleted", "would be freed") if dry_run else ("deleted", "freed")
    line = f"{plural(packs, 'pack')} and {plural(manifests, 'manifest')} {gone}"
    line += f", {human_size(sum(space.freed_bytes for space in spaces))} {freed}"
    if copied:
        line += f"; {human_size(copied)} {'would be' if dry_run else 'were'} copied from mostly dead packs"
    out_prose(line, 2)
    if any(space.unfinished for space in spaces):
        note("a collection is under way or was interrupted: ciuic prune --remote ends it first")
    cold = sum(len(space.cold) for space in spaces)
    if cold:
        verb = "would be" if dry_run else "were"
        note(
            f"{cold} of these packs {verb} cold: stores charge for the rest of the class's minimum duration; "
            "--spare-cold 180d leaves younger ones"
        )
    decayed = sum(len(space.decayed) for space in spaces)
    if decayed:
        warn(
            f"{plural(decayed, 'pack')} cannot be read in part; other copies of what is needed stay",
            hint="ciuic check --remote --repair --read-data",
        )
    unreadable = sum(len(space.unreadable) for space in spaces)
    if unreadable:
        warn(
            f"{plural(unreadable, 'pack')} cannot be read, and stay{'s' if unreadable == 1 else ''}",
            hint="ciuic check --remote says why",
        )
