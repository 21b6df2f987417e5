"""``ciuic restore`` and ``ciuic undo``: bring files and directories back, and take back a restore over a protected root.

Guarantees of undo: the paths that the restore was to change become what they were right before it, as its safety snapshot has them;
what the restore made where nothing was is removed. Nothing is removed where its absence from the safety snapshot does not prove that
nothing was there: below another file system, below an excluded directory, or if the snapshot lacks what could not be read. A safety
snapshot is taken first, so that an undo can be undone. Nothing else is touched.
"""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from ciuic.cli.shared import sets
from ciuic.cli.shared.contents import as_recorded, owner_name
from ciuic.cli.shared.documents import Keys
from ciuic.cli.shared.messages import complain, plural, shown, shown_text, warn
from ciuic.cli.shared.options import DIRECTORY, ID, SNAPSHOT_PATH, FrameCommand, Text
from ciuic.cli.shared.output import json_option, note, out, out_json
from ciuic.cli.shared.session import Session, current
from ciuic.errors import CiuicError, Damaged, DestinationExists, NotFound, UsageError
from ciuic.repository.snapshot_sets import parse_set_name
from ciuic.types import FLAG_MOUNTPOINT, SAFETY_MESSAGE, TAG_INCOMPLETE, SnapshotId, is_safety, order_of

if TYPE_CHECKING:
    from ciuic.history import LastGood, Timeline
    from ciuic.repository import Repository
    from ciuic.repository.snapshot_sets import SnapshotSet
    from ciuic.restore import RestoreItem, RestorePlan, RestoreProgress, Result
    from ciuic.system.open_files import OpenFile
    from ciuic.types import Snapshot


# A screenful; --json has all of them.
_TARGET = Keys("path, destination")
_OPEN_FILE = Keys("path, pid, program, user, how (`writing`, `mapped`, `reading` or `cwd`)")
_ROOM = Keys("path, needed_bytes, free_bytes, enough")
_PLAN = Keys(
    "made, replaced (each `files`, `bytes`), removed (`names`, `files`, `bytes`, `counted`), room", room=_ROOM
)
_RESTORE = Keys(
    "snapshot, dry_run, complete, safety_snapshot (or null), targets, restored, restored_bytes, skipped, directories, conflicts,"
    " removed (each `path`), failed, left_out, left_out_because|null, open_for_writing, not_held, far_times (each `path`),"
    " owner_failures, time_failures, stopped|null, items (with `--dry-run` or `-v`), code, open_files, plan (null without `--dry-run`)",
    "`restore`",
    targets=_TARGET,
    failed=Keys("path, reason, damaged, attribute"),
    left_out=Keys("path, what"),
    items=Keys(
        "path, action (`restored`, `attributes`, `linked`, `skipped`, `removed`, `failed`, or in a dry run `conflict`)"
    ),
    open_files=_OPEN_FILE,
    plan=_PLAN,
)
_NEWER = Keys("checkpoint, snapshot")
_CHOICE = Keys(
    "path, snapshot, checkpoint, not_finite (or null), lost_steps (or null), not_good (each `path`), newer_good (or null), passed_over,"
    " staying (each `path`: newer checkpoints that are not good and stay)",
    "each of the `last_good` of `restore --last-good`",
    newer_good=_NEWER,
    passed_over=Keys("snapshot, reason"),
)
_SHOWN_NAMES = 20
_SHOWN_OPEN_FILES = 5
_FIRST_NAMES = 3


def _show_lazy_restores(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        from ciuic.cli.shared.lazy_restore import show_lazy_restores

        show_lazy_restores(context)


@click.command("restore", cls=FrameCommand)
@click.option(
    "-s",
    "--snapshot",
    "snapshot",
    metavar="ID",
    type=ID,
    help="Which snapshot; needed, but for --last-good and --status.",
)
@click.option(
    "--last-good",
    is_flag=True,
    help="In place of -s: for each PATH, or each root that has checkpoints, the newest snapshot whose newest checkpoint"
    " there is whole. Says what was chosen, what was passed over and why.",
)
@click.option(
    "--finite",
    is_flag=True,
    help="With --last-good: pass over checkpoints with numbers that are not finite, and read all numbers of the one that is chosen.",
)
@click.option(
    "-p",
    "--path",
    "paths",
    multiple=True,
    metavar="PATH",
    type=SNAPSHOT_PATH,
    help="What: the absolute path as it was at the snapshot; may be given several times. Needed, but for --all, --last-good and --status.",
)
@click.option("--all", "everything", is_flag=True, help="In place of -p: every root of the snapshot.")
@click.option(
    "--include",
    "include",
    multiple=True,
    metavar="PATTERN",
    type=Text(),
    help="Below PATH only names that match, as in gitignore, with all below them; may be given several times.",
)
@click.option(
    "--exclude",
    "exclude",
    multiple=True,
    metavar="PATTERN",
    type=Text(),
    help="Below PATH leave alone names that match, with all below them, also with --delete; may be given several times.",
)
@click.option(
    "-d",
    "--dest",
    metavar="DEST",
    type=DIRECTORY,
    help="Into this directory, made if missing, as DEST/basename(PATH). Default: where it was.",
)
@click.option(
    "--overwrite",
    type=click.Choice(["always", "if-changed", "if-newer", "never"]),
    is_flag=False,
    flag_value="always",
    default=None,
    help="What to do with files that exist; alone it means always. Without it they stop the restore (exit 6).",
)
@click.option("--delete", is_flag=True, help="Also remove what the snapshot does not have, only below PATH.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask before --delete removes a newer checkpoint.")
@click.option(
    "--dry-run",
    "--plan",
    "dry_run",
    is_flag=True,
    help="Say what would be done: names and sizes, room on the disk, and the programs that have such files open. Change nothing.",
)
@click.option(
    "--special/--no-special",
    "special",
    default=None,
    help="Restore device nodes, setuid and setgid bits, file capabilities and other attributes of the system, or leave them"
    " out. Default: leave them out, with exit code 8, if others may have written the repository.",
)
@click.option(
    "--member",
    metavar="HOST",
    help="Of a set (-s set:NAME) the snapshot of this host, into -d. Default: of this one, where it was.",
)
@click.option("--all-members", is_flag=True, help="Of a set all snapshots, each into DEST/MEMBER.")
@click.option(
    "--incomplete",
    is_flag=True,
    help="Restore from a set although members of it are missing: not one instant of all.",
)
@click.option("--no-safety", is_flag=True, help="Take no safety snapshot before changing a protected root.")
@click.option(
    "--lazy",
    is_flag=True,
    help="Mount the directory at once and fetch what is read first; the command returns, and the rest follows behind it.",
)
@click.option("--foreground", is_flag=True, help="With --lazy: return when everything is there.")
@click.option(
    "--status",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_lazy_restores,
    help="Show the lazy restores of this machine and the restores that were cut short, and nothing else.",
)
@json_option
def restore_command(
    snapshot: str | None,
    last_good: bool,
    finite: bool,
    paths: tuple[bytes, ...],
    everything: bool,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    dest: bytes | None,
    overwrite: str | None,
    delete: bool,
    yes: bool,
    dry_run: bool,
    special: bool | None,
    member: str | None,
    all_members: bool,
    incomplete: bool,
    no_safety: bool,
    lazy: bool,
    foreground: bool,
    as_json: bool,
) -> int:
    """Restore files and directories from a snapshot.

    Directories are merged. Interrupted or killed, it can be run again; no file is ever half there. A set of which members are missing is
    refused.
    """
    if snapshot is not None and last_good:
        raise UsageError("-s names a snapshot, and --last-good chooses one: give one of them")
    if finite and not last_good:
        raise UsageError("--finite goes with --last-good")
    if everything and (paths or last_good):
        raise UsageError("--all means every root of the snapshot of -s: leave out -p and --last-good")
    if not last_good and (snapshot is None or not (paths or everything)):
        raise UsageError(
            "which snapshot, and what? -s names the snapshot, -p the path",
            hint="such as: -s latest -p DIR, or --last-good -p DIR",
        )
    session = current()
    found = None if snapshot is None else sets.for_restore(session, snapshot, incomplete=incomplete)
    if found is None and (member is not None or all_members or incomplete):
        raise UsageError(
            "--member, --all-members and --incomplete go with a set",
            hint="-s set:NAME; see: ciuic list --sets",
        )
    if lazy and (include or exclude):
        raise UsageError("--lazy restores a whole directory: leave out --include and --exclude")
    options = [
        *(() if overwrite is None else (f"--overwrite={overwrite}",)),
        *(("--delete",) if delete else ()),
        *(("--yes",) if yes else ()),
        *(word for pattern in include for word in ("--include", pattern)),
        *(word for pattern in exclude for word in ("--exclude", pattern)),
        *(() if special is None else ("--special" if special else "--no-special",)),
        *(("--no-safety",) if no_safety else ()),
    ]
    planned_so = partial(
        planned,
        session,
        overwrite=overwrite,
        delete=delete,
        dry_run=dry_run,
        special=special,
        include=include,
        exclude=exclude,
    )
    carry_out_so = partial(
        carry_out,
        session,
        dry_run=dry_run,
        no_safety=no_safety,
        as_json=as_json,
    )
    if found is not None:
        assert snapshot is not None
        if not found.is_whole:
            sets.warn_of_lacking(session, found)
        if all_members:
            if lazy or member is not None or dest is None:
                raise UsageError(
                    "--all-members restores each member of a set into a directory of its own",
                    hint="with -d DEST, and without --member and --lazy",
                )
            return _restore_members(found, paths, dest, options, planned_so, carry_out_so, as_json=as_json)
        snapshot = str(_member_to_restore(session, found, snapshot, member, dest).id)
    if everything and snapshot is not None:
        store = session.snapshots
        paths = tuple(root.path for root in store.load(store.resolve(snapshot)).roots)
    if lazy or foreground:
        _require_only_lazy(lazy, paths, overwrite, delete, dry_run)
    chosen = _last_good(session, paths, finite=finite) if last_good else {}
    if lazy:
        from ciuic.cli.shared.lazy_restore import restore_lazily

        named = str(next(iter(chosen.values())).snapshot.id) if snapshot is None else snapshot
        return restore_lazily(
            session, named, paths[0], dest, special=special, foreground=foreground, as_json=as_json
        )
    wanted: dict[str, list[bytes]] = {}
    for path in paths or chosen:
        named = str(chosen[path].snapshot.id) if snapshot is None else snapshot
        wanted.setdefault(named, []).append(path)
    # All before the first: a conflict or a mistake ends the command while nothing has been made or changed.
    plans = [planned_so(named, some, dest) for named, some in wanted.items()]
    if delete:
        _ask_for_checkpoints(session, plans, dry_run=dry_run, yes=yes)
    if not last_good:
        return carry_out_so(plans[0], again=words_again(plans[0], dest, options))
    stay = {} if delete else {path: _staying(path, one, dest) for path, one in chosen.items()}
    documents: list[dict[str, Any]] = []
    codes = [
        carry_out_so(plan, again=words_again(plan, dest, options), show=documents.append) for plan in plans
    ]
    _tell_staying([place for places in stay.values() for place in places], dry_run=dry_run, finite=finite)
    if as_json:
        out_json(
            {
                "last_good": [
                    _choice_document(path, one, stay.get(path, ())) for path, one in chosen.items()
                ],
                "restores": documents,
                "code": max(codes),
            }
        )
    return max(codes)


def _member_to_restore(
    session: Session, found: SnapshotSet, text: str, member: str | None, dest: bytes | None
) -> Snapshot:
    """Return the snapshot of a set that is to be restored: that of ``--member`` or ``MEMBER/set:NAME``, else this host's own.

    Raises:
        UsageError: it would take the place of this host's files, and is another's.
        NotFound: there is none.
    """
    named = parse_set_name(text)
    wanted = member or (named.member if named is not None else "")
    if not wanted:
        try:
            return sets.own_member(session, found)
        except NotFound as error:
            raise NotFound(
                error.message,
                hint="--member HOST -d DEST restores the snapshot of another host, --all-members -d DEST all",
            ) from None
    snapshot = found.member_snapshot(wanted)
    if dest is None and not sets.is_of_this_host(session, found, wanted):
        raise UsageError(
            f"{wanted} is another host, whose files would take the places of those of this one",
            hint=f"-d DEST restores into a directory; -s {snapshot.id} is restored wherever it is asked for",
        )
    return snapshot


def _restore_members(
    found: SnapshotSet,
    paths: Sequence[bytes],
    dest: bytes,
    options: Sequence[str],
    planned_so: Callable[[str, Sequence[bytes], bytes], RestorePlan],
    carry_out_so: Callable[..., int],
    *,
    as_json: bool,
) -> int:
    """Restore all members of a set that are found, each into a directory of its name; return the worst exit code.

    Args:
        found: The set.
        paths: What is restored of each; empty: every root.
        dest: Directory of these directories.
        options: Words of the command that go on with a restore that is cut short.
        planned_so: Returns the plan of one restore.
        carry_out_so: Carries it out.
        as_json: Print one document.
    """
    plans = []
    for member, snapshot in sets.directory_names(found).items():
        place = os.path.join(dest, os.fsencode(member))
        wanted = paths or [root.path for root in snapshot.roots]
        try:
            plans.append((member, place, planned_so(str(snapshot.id), wanted, place)))
        except NotFound as error:
            raise NotFound(f"{member}: {error.message}", hint=error.hint) from None
    documents: list[dict[str, Any]] = []
    codes = []
    for member, place, plan in plans:
        if not as_json:
            note(f"{shown_text(member)}:")
        codes.append(carry_out_so(plan, again=words_again(plan, place, options), show=documents.append))
    if as_json:
        restores = [
            {"member": member, **document} for (member, _, _), document in zip(plans, documents, strict=True)
        ]
        out_json({"set": sets.document(found), "restores": restores, "code": max(codes)})
    return max(codes)


def _last_good(session: Session, paths: Sequence[bytes], *, finite: bool) -> dict[bytes, LastGood]:
    """Return the choice for each path, or for each root that has checkpoints, and say what was chosen.

    Raises:
        NotFound: there is none for one of the paths, or for no root.
    """
    from ciuic.cli.shared.timelines import PassedOver, all_timelines, timelines_with
    from ciuic.history import last_good

    choose = partial(last_good, patterns=session.checkpoint_patterns, finite=finite)

    damaged = PassedOver()
    chosen: dict[bytes, LastGood] = {}
    for path in dict.fromkeys(paths):
        places = timelines_with(session, path, damaged)
        chosen[path] = choose(_of_one_host(places.timelines, path), places.path)
    if not paths:
        roots: dict[bytes, list[tuple[Repository, Timeline]]] = {}
        for repository, timeline in all_timelines(session, None, damaged):
            roots.setdefault(timeline.path, []).append((repository, timeline))
        for path, timelines in roots.items():
            try:
                chosen[path] = choose(_of_one_host(timelines, path), path)
            except NotFound as error:
                note(f"{shown(path)} is left as it is: {shown_text(error.message.splitlines()[0])}")
        if not chosen:
            raise NotFound("no root has a GOOD checkpoint in any snapshot", hint="-s ID -p PATH names both")
    damaged.tell()
    for path, one in chosen.items():
        _show_choice(session, path, one, finite=finite)
    return chosen


def _of_one_host(
    timelines: list[tuple[Repository, Timeline]], path: bytes
) -> list[tuple[Repository, Timeline]]:
    hosts = sorted({timeline.host for _, timeline in timelines})
    if len(hosts) > 1:
        raise UsageError(
            f"{shown(path)} is in snapshots of several hosts: {', '.join(map(shown_text, hosts))}",
            hint="--as-host names one",
        )
    return timelines


def _show_choice(session: Session, path: bytes, one: LastGood, *, finite: bool) -> None:
    from ciuic.units import human_duration

    age = human_duration(max(0, session.now_ns - one.snapshot.time_ns) / 1e9)
    note(f"{shown(path)}: {one.snapshot.id}, {age} old: {shown(one.checkpoint.checkpoint.path)} is GOOD")
    if numbers := one.checkpoint.checkpoint.verdict.of_numbers:
        warn(f"{numbers} in it", hint="--finite passes over such checkpoints")
    elif finite and one.checkpoint.checkpoint.verdict.not_finite is None:
        note("  not all of its numbers could be looked at")
    for skipped in one.passed_over[:_SHOWN_NAMES]:
        note(f"  passed over {skipped.snapshot.id}: {shown_text(skipped.reason)}")
    if len(one.passed_over) > _SHOWN_NAMES:
        note(f"  and {len(one.passed_over) - _SHOWN_NAMES} more")
    if one.lost_steps:
        note(f"  this costs {plural(one.lost_steps, 'step')}")
    if one.not_good:
        warn(
            f"{plural(len(one.not_good), 'newer checkpoint')} beside it {'is' if len(one.not_good) == 1 else 'are'} not whole{' or not finite' if finite else ''}, and restored as well:",
            hint="remove what the training must not load",
        )
        _names([bad.checkpoint.path for bad in one.not_good])
    elif newer := one.newer_good:
        note(
            f"  a newer one is GOOD beside a newest one that is not; alone: "
            f"ciuic restore -s {newer.snapshot.id} -p {shown(newer.checkpoint.path)}"
        )


def _staying(path: bytes, one: LastGood, dest: bytes | None) -> list[bytes]:
    """Return where newer checkpoints that were passed over are now, which the chosen snapshot does not have: a restore leaves them there."""
    from ciuic.repository.lookup import find

    above = os.path.dirname(path) if dest is None else os.path.abspath(dest)
    found: list[bytes] = []
    newer = (
        bad for skipped in one.passed_over for bad in skipped.unfit if bad.mtime_ns > one.checkpoint.mtime_ns
    )
    for bad in newer:
        place = os.path.join(above, os.path.relpath(bad.checkpoint.path, os.path.dirname(path)))
        try:
            find(one.repository, one.snapshot, bad.checkpoint.path)
        except NotFound:
            if os.path.lexists(place) and place not in found:
                found.append(place)
        except Damaged:
            # It is restored, or told as damaged.
            continue
    return found


def _tell_staying(places: Sequence[bytes], *, dry_run: bool, finite: bool) -> None:
    if places:
        verb, stays = ("is", "stays") if len(places) == 1 else ("are", "stay")
        warn(
            f"{plural(len(places), 'newer checkpoint')} that {verb} not whole{' or not finite' if finite else ''} {'would stay' if dry_run else stays} beside what was restored:",
            hint="a training that looks for its newest one would take it: --delete removes what the snapshot does not have, or remove it by hand",
        )
        _names(places)


def _ask_for_checkpoints(session: Session, plans: Sequence[RestorePlan], *, dry_run: bool, yes: bool) -> None:
    """Name the checkpoints that ``--delete`` would remove although they may be whole and are newer than those restored, and ask.

    Raises:
        UsageError: there is nobody to ask.
        CiuicError: the answer was no.
    """
    places = [place for plan in plans for place in _checkpoints_to_go(session, plan)]
    if not places:
        return
    stays = "would be" if dry_run else "is to be" if len(places) == 1 else "are to be"
    warn(
        f"{plural(len(places), 'checkpoint')} that may be whole, newer than what is restored, {stays} removed by --delete:"
    )
    _names(places)
    if dry_run or yes:
        return
    # A script would answer with whatever comes next in its input.
    if not sys.stdin.isatty():
        raise UsageError("not a terminal: use -y to confirm; nothing was changed")
    if not click.confirm(f"Remove {plural(len(places), 'checkpoint')}?", err=True):
        raise CiuicError("nothing was changed")


def _checkpoints_to_go(session: Session, plan: RestorePlan) -> Iterator[bytes]:
    """Yield where checkpoints are that the newest snapshot has, not TORN, and later than those of the snapshot that is restored."""
    from ciuic.cli.shared.timelines import PassedOver, timelines_with
    from ciuic.history import checkpoints
    from ciuic.repository.lookup import is_within
    from ciuic.verdicts.records import VerdictRecords

    for target in plan.targets:
        top = target.source.path
        if not target.source.entry.is_dir:
            continue
        for repository, timeline in timelines_with(session, top, PassedOver()).timelines:
            newest = next((one for one in timeline.snapshots if not one.is_safety), None)
            if (
                timeline.host != plan.snapshot.host
                or newest is None
                or newest.time_ns <= plan.snapshot.time_ns
            ):
                continue
            try:
                now = list(
                    checkpoints(
                        repository,
                        timeline,
                        newest,
                        path=top,
                        on_damage=lambda *_: None,
                        records=VerdictRecords(repository, patterns=session.checkpoint_patterns),
                        patterns=session.checkpoint_patterns,
                    )
                )
            except NotFound:
                continue
            except Damaged as error:
                # Damage of another snapshot refuses no restore of a whole one.
                warn(f"newer checkpoints are not named: {newest.id}: {shown_text(error.message)}")
                continue
            for one in now:
                path, verdict = one.checkpoint.path, one.checkpoint.verdict
                place = os.path.join(target.path, os.path.relpath(path, top))
                if (
                    is_within(path, top)
                    and verdict.state != "TORN"
                    and not verdict.is_foreign
                    and one.mtime_ns > plan.snapshot.time_ns
                    # One of TensorFlow is the beginning of its files' names.
                    and (os.path.lexists(place) or os.path.lexists(place + b".index"))
                    and not _is_in(plan, path)
                    and not (plan.kept.rule and plan.kept.rule(path, os.path.isdir(place)))
                ):
                    yield place


def _is_in(plan: RestorePlan, path: bytes) -> bool:
    from ciuic.repository.lookup import find

    try:
        find(plan.repository, plan.snapshot, path)
    except NotFound:
        return False
    except Damaged:
        # It is told as damaged, and what is below it stays.
        pass
    return True


def _choice_document(path: bytes, one: LastGood, staying: Sequence[bytes]) -> dict[str, Any]:
    newer = one.newer_good
    return _CHOICE.of(
        one,
        path=path,
        checkpoint=one.checkpoint.checkpoint.path,
        not_finite=one.checkpoint.checkpoint.verdict.not_finite,
        not_good=[bad.checkpoint.path for bad in one.not_good],
        newer_good=newer and _NEWER.of(newer, checkpoint=newer.checkpoint.path),
        staying=list(staying),
    )


def planned(
    session: Session,
    snapshot: str,
    paths: Sequence[bytes],
    dest: bytes | None,
    overwrite: str | None,
    *,
    delete: bool,
    dry_run: bool,
    special: bool | None,
    include: Sequence[str],
    exclude: Sequence[str],
) -> RestorePlan:
    """Return the plan of a restore from one snapshot; its options are those of the command."""
    from ciuic.restore import Overwrite, plan_restore

    store = session.snapshots
    source = store.load(store.resolve(snapshot))
    for pattern in (*include, *exclude):
        # Imported here, as in Selection: most restores choose nothing by patterns.
        from ciuic.excludes import check_pattern

        try:
            check_pattern(pattern)
        except ValueError as error:
            raise UsageError(str(error)) from None
    for pattern in include:
        if pattern.startswith("!"):
            raise UsageError(
                f"--include {pattern!r} takes nothing in: a pattern with ! takes back what others named",
                hint=f"--exclude {pattern[1:]!r} leaves it out; \\! is a name that begins with !",
            )
    plan = plan_restore(
        session.repository_of(source.id),
        source,
        list(dict.fromkeys(as_recorded(source, path) for path in paths)),
        dest,
        overwrite=None if overwrite is None else Overwrite(overwrite),
        delete=delete,
        check=not dry_run,
        # Only --delete needs to know what is excluded; a configuration with mistakes does not stop other
        # restores.
        keep=excluded(session) if delete else None,
        # None leaves the decision to the owners of the repository, which the operator may have overridden.
        special=True if special is None and session.trusts_repository else special,
        include=include,
        exclude=exclude,
    )
    _refuse_incomplete(plan)
    if delete and TAG_INCOMPLETE in source.tags:
        warn(
            f"{source.id} lacks something that could not be read when it was taken, and --delete removes what it lacks",
            hint=f"ciuic show {source.id} names it; the safety snapshot of a protected root has it if it can be read now",
        )
    if session.remote_url is not None:
        from ciuic.cli.shared.cold_packs import refuse_archived

        refuse_archived(plan.repository, str(source.id), [target.source for target in plan.targets])
    return plan


def carry_out(
    session: Session,
    plan: RestorePlan,
    *,
    dry_run: bool,
    no_safety: bool,
    as_json: bool,
    again: Sequence[str | bytes],
    also_changed: Sequence[bytes] = (),
    afterwards: Callable[[Result], None] = lambda result: None,
    show: Callable[[dict[str, Any]], None] = out_json,
) -> int:
    """Take the safety snapshot, execute the plan and print what became of it; return the exit code.

    Args:
        session: the command's session.
        plan: what to restore.
        dry_run: change nothing.
        no_safety: take no safety snapshot.
        as_json: print one document.
        again: words of the command, without the program's name, that goes on if this one is cut short.
        also_changed: paths that ``afterwards`` changes.
        afterwards: called after the plan is executed, to add to its result.
        show: takes the document.
    """
    from ciuic.system.open_files import find_open_files, replaced

    # Of what is replaced here, wherever it is restored from.
    local = session.local
    targets = [*(target.path for target in plan.targets), *also_changed]
    safety = None if dry_run or no_safety else _safety(local, plan, targets)
    # Once, before anything is changed: afterwards nothing tells which name an open file had.
    open_before = find_open_files(targets)
    # A name for each path, of which a restore may have millions: collected only where they are printed.
    items: list[RestoreItem] = []
    on_item = items.append if dry_run or session.verbosity > 0 else None
    with _undoable(safety), _recorded(session, plan, again, dry_run):
        # Only what is written is shared by way of a worker: a dry run reads no configuration for it (7 ms).
        result = _execute(plan, dry_run, on_item, None if dry_run else _runtime_dir(session))
        afterwards(result)
    if not dry_run:
        _note_damage(session, plan, result)
    open_files = _cut_off(open_before, items, result.removed) if dry_run else replaced(open_before)
    forecast = _forecast(plan, items, result.removed) if dry_run else None
    # Retention compares snapshots of later than this moment, to find out whether the restored paths were
    # changed since: one that was cut during the restore shows half of it.
    if safety is not None:
        from ciuic.cli.shared.safety_snapshot import is_over

        is_over(local, safety, changed=_may_have_changed(local, plan, result, safety, also_changed))
    if as_json:
        show(_document(plan, result, items, safety, dry_run, open_files, forecast))
    else:
        _print(plan, result, items, dry_run)
        if forecast is not None:
            forecast.print()
    if open_files:
        _warn_of_open_files(open_files, dry_run)
    return _exit_code(plan, result)


@contextmanager
def _recorded(
    session: Session, plan: RestorePlan, again: Sequence[str | bytes], dry_run: bool
) -> Iterator[None]:
    """Have ``ciuic status`` tell of the restore if it is cut short."""
    from ciuic.restore.journal import recorded, records_directory

    # A single file is there or not, and leaves nothing to go on with.
    destinations = _directories(plan)
    if dry_run or not destinations:
        yield
        return
    words: list[str | bytes] = ["ciuic"]
    if session.names_repository:
        words += ["--repo", session.place]
    command = list(map(os.fsencode, (*words, *again)))
    with recorded(str(plan.snapshot.id), destinations, command, records_directory()):
        yield


def _directories(plan: RestorePlan) -> list[bytes]:
    return [target.path for target in plan.targets if target.source.entry.is_dir]


def words_again(plan: RestorePlan, dest: bytes | None, options: Sequence[str]) -> list[str | bytes]:
    """Return the words of a restore that goes on with this one: of the same snapshot, whatever is the latest by then."""
    words: list[str | bytes] = ["restore", "-s", str(plan.snapshot.id)]
    for target in plan.targets:
        words += ["-p", target.source.path]
    return [*words, *(() if dest is None else ("-d", dest)), *options]


def _cut_off(
    files: Sequence[OpenFile], items: Sequence[RestoreItem], removed: Sequence[bytes]
) -> list[OpenFile]:
    """Return the files in use that would be replaced, or removed with the tree that they are in."""
    gone = set(removed)
    changed = {item.path for item in items if item.action == "restored"}

    def is_gone(path: bytes) -> bool:
        while gone and path not in gone and path != os.path.dirname(path):
            path = os.path.dirname(path)
        return path in gone

    return [one for one in files if one.path in changed or is_gone(one.path)]


# Time to count what a restore would remove.
_COUNT_SECONDS: Final = 5.0


class _Room(msgspec.Struct, frozen=True):
    """Free space of a file system that is restored to."""

    place: bytes
    needed_bytes: int
    """At most: without what holes and shared extents save, and what is replaced gives back."""
    free_bytes: int


class _Below(msgspec.Struct, frozen=True):
    """Files that are removed with names."""

    files: int
    """Anything but directories."""
    size_bytes: int
    is_complete: bool
    """False where there were too many to count, or some could not be looked at."""


def _all_below(paths: Sequence[bytes]) -> _Below:
    """Count what lies at and below paths, without following links."""
    waiting, files, size_bytes, is_complete = list(paths), 0, 0, True
    end = time.monotonic() + _COUNT_SECONDS
    while waiting and time.monotonic() < end:
        path = waiting.pop()
        try:
            st = os.lstat(path)
            if stat.S_ISDIR(st.st_mode):
                waiting += [os.path.join(path, name) for name in os.listdir(path)]
            else:
                files, size_bytes = files + 1, size_bytes + st.st_size
        except OSError:
            is_complete = False
    return _Below(files, size_bytes, is_complete and not waiting)


class _Forecast(msgspec.Struct, frozen=True):
    """Changes that a restore would make, and the room that it needs."""

    made: list[RestoreItem]
    replaced: list[RestoreItem]
    removed: Sequence[bytes]
    below: _Below
    rooms: list[_Room]

    def document(self) -> dict[str, Any]:
        """Return it in JSON."""
        return _PLAN.of(
            **{
                name: {"files": len(items), "bytes": sum(item.size_bytes for item in items)}
                for name, items in (("made", self.made), ("replaced", self.replaced))
            },
            removed={
                "names": len(self.removed),
                "files": self.below.files,
                "bytes": self.below.size_bytes,
                "counted": self.below.is_complete,
            },
            room=[
                _ROOM.of(room, path=room.place, enough=room.needed_bytes <= room.free_bytes)
                for room in self.rooms
            ],
        )

    def print(self) -> None:
        """Print it, one line for each kind of change and for each file system."""
        from ciuic.units import human_size

        for verb, items in (("made", self.made), ("replaced", self.replaced)):
            if items:
                size = human_size(sum(item.size_bytes for item in items))
                names = _first_names([item.path for item in items])
                note(f"  {verb}: {plural(len(items), 'file')}, {size}: {names}")
        if self.removed:
            size = f"{plural(self.below.files, 'file')}, {human_size(self.below.size_bytes)}"
            least = "" if self.below.is_complete else "at least "
            note(
                f"  removed, with all below: {plural(len(self.removed), 'name')}, {least}{size}: {_first_names(self.removed)}"
            )
        for room in self.rooms:
            words = f"{human_size(room.needed_bytes)} at most, {human_size(room.free_bytes)} free at {shown(room.place)}"
            if room.needed_bytes <= room.free_bytes:
                note(f"  room: {words}")
            else:
                warn(f"the room may not suffice: {words}", hint="free some, or -d another disk")


def _first_names(paths: Sequence[bytes]) -> str:
    names = ", ".join(map(shown, paths[:_FIRST_NAMES]))
    return f"{names} …" if len(paths) > _FIRST_NAMES else names


def _forecast(plan: RestorePlan, items: Sequence[RestoreItem], removed: Sequence[bytes]) -> _Forecast:
    from ciuic.repository.lookup import is_within
    from ciuic.system.disk_space import measurable, writable_bytes

    made = [item for item in items if item.action in ("restored", "linked") and not item.replaces]
    replaced = [item for item in items if item.action in ("restored", "linked") and item.replaces]
    places: dict[int, _Room] = {}
    for target in plan.targets:
        place = measurable(os.fsdecode(target.path))
        needed_bytes = sum(item.size_bytes for item in items if is_within(item.path, target.path))
        device = os.stat(place).st_dev
        known = places.get(device)
        places[device] = _Room(
            os.fsencode(place) if known is None else known.place,
            needed_bytes + (0 if known is None else known.needed_bytes),
            writable_bytes(place),
        )
    return _Forecast(made, replaced, removed, _all_below(removed), [*places.values()])


_USES: Final = {
    "writing": "open for writing",
    "reading": "open",
    "mapped": "mapped",
    "cwd": "its working directory",
}


def _warn_of_open_files(files: Sequence[OpenFile], dry_run: bool) -> None:
    would = "would be" if dry_run else "were"
    directories = [one for one in files if one.how == "cwd"]
    others = [one for one in files if one.how != "cwd"]
    if others:
        warn(
            f"{plural(len(others), 'open file', 'open files')} {would} replaced; the programs go on with the old content, and what they write is in no snapshot:",
            hint="stop them before the restore" if dry_run else "restart them",
        )
        _users(others)
    if directories:
        warn(
            f"{plural(len(directories), 'working directory', 'working directories')} {would} removed; the programs there find no file by a relative name:",
            hint="stop them before the restore" if dry_run else "restart them",
        )
        _users(directories)


def _users(files: Sequence[OpenFile]) -> None:
    for one in files[:_SHOWN_OPEN_FILES]:
        user = shown_text(owner_name("pwd", one.uid))
        complain(f"    {shown(one.path)}: {_USES[one.how]} ({user}: {shown_text(one.program)}, {one.pid})")
    if len(files) > _SHOWN_OPEN_FILES:
        complain(f"    and {len(files) - _SHOWN_OPEN_FILES} more; --json lists them all")


def _require_only_lazy(
    lazy: bool, paths: Sequence[bytes], overwrite: str | None, delete: bool, dry_run: bool
) -> None:
    if not lazy:
        raise UsageError("--foreground goes with --lazy")
    if overwrite is not None or delete or dry_run:
        raise UsageError(
            "--lazy restores into a new or empty directory: --overwrite, --delete and --dry-run do not go with it",
            hint="restore without --lazy",
        )
    if len(paths) != 1:
        raise UsageError("--lazy restores one directory at a time", hint="run it once for each")


def _refuse_incomplete(plan: RestorePlan) -> None:
    """Raise UsageError for a destination in a directory that an interrupted lazy restore has not completed.

    Its files are below a state directory until all are there, and could not take the places of what is restored beside them.
    """
    from ciuic import STATE_DIR_NAME
    from ciuic.system.mountinfo import LAZY_RESTORE

    for target in plan.targets:
        place = target.path
        while place != b"/":
            if os.path.lexists(os.path.join(place, STATE_DIR_NAME, LAZY_RESTORE)):
                raise UsageError(
                    f"a lazy restore of {shown(place)} was interrupted and is not complete",
                    hint="run the same ciuic restore --lazy again, or remove the directory",
                )
            place = os.path.dirname(place)


def excluded(session: Session) -> Callable[[bytes, bool], bool] | None:
    """Return the exclude patterns that --delete spares: excluded paths are in no snapshot."""
    try:
        config = session.config
    except CiuicError as error:
        # No refusal: restores are for the day on which much is broken.
        warn(
            f"the configuration cannot be read: {error.message}",
            hint="--delete does not know what is excluded",
        )
        return None
    # Excluded paths are in no snapshot, so that --delete would take each for one that was added since.
    matchers = [(os.fsencode(root.path), config.exclude_matcher(root)) for root in config.roots]

    def keep(path: bytes, is_dir: bool) -> bool:
        return any(
            path.startswith(top + b"/") and matcher.match(path[len(top) + 1 :], is_dir)
            for top, matcher in matchers
        )

    return keep


def _safety(session: Session, plan: RestorePlan, targets: Sequence[bytes]) -> str | None:
    from ciuic.cli.shared import safety_snapshot as safety

    roots = safety.covering(safety.protected_roots(session), targets)
    if not roots:
        return None
    message = f"{SAFETY_MESSAGE}{plan.snapshot.id}"
    return safety.take(session, roots, message, targets, _first_safety(session, plan, message))


def _first_safety(session: Session, plan: RestorePlan, message: str) -> str:
    """Return the safety snapshot from before the first run of a restore that was cut short and goes on now; empty if there is none."""
    from ciuic.compare.restore_records import first_of, was_cut_short
    from ciuic.restore.journal import records_directory, unfinished

    here = set(_directories(plan))
    snapshot = str(plan.snapshot.id)
    if not any(
        one.snapshot == snapshot and set(one.destinations) == here for one in unfinished(records_directory())
    ):
        return ""
    try:
        infos = session.repository.snapshots.infos()
        safeties = [info for info in infos if is_safety(info.tags, info.message)]
        if not safeties:
            return ""
        newest = max(safeties, key=order_of)
        # Of another restore since, or of one that ended: what it left is what an undo is to bring back.
        if newest.message != message or not was_cut_short(session.repository_dir, str(newest.id)):
            return ""
        return first_of(session.repository_dir, str(newest.id))
    except (CiuicError, OSError):
        # A restore goes on without.
        return ""


def _may_have_changed(
    session: Session, plan: RestorePlan, result: Result, safety: str, also_changed: Sequence[bytes]
) -> bool:
    """Return False if everything was as the snapshot has it already, attributes and directories included."""
    from ciuic.compare.diff import diff_snapshots

    if result.restored or result.removed or not result.complete or also_changed:
        return True
    repository = session.repository
    if not os.path.samefile(repository.path, plan.repository.path):
        return True
    try:
        before = repository.snapshots.load(SnapshotId(safety))
        return any(
            target.path != target.source.path
            or next(diff_snapshots(repository, before, plan.snapshot, target.path), None) is not None
            for target in plan.targets
        )
    except (CiuicError, OSError):
        return True


@contextmanager
def _undoable(taken: str | None) -> Iterator[None]:
    """Tell how to undo a restore that does not come to its end."""
    try:
        yield
    except BaseException:
        if taken is not None:
            from ciuic.cli.shared.safety_snapshot import tell_undo

            tell_undo(taken)
        raise


def _runtime_dir(session: Session) -> Path | None:
    """Return the runtime directory of overlay workers; None if the configuration cannot be read: a restore goes on without."""
    try:
        return session.config.runtime_dir
    except CiuicError:
        return None


def _execute(
    plan: RestorePlan,
    dry_run: bool,
    on_item: Callable[[RestoreItem], None] | None,
    runtime_dir: Path | None,
) -> Result:
    from ciuic.cli.shared.progress import progress
    from ciuic.restore import execute

    with progress("restore") as reporter:

        def report(state: RestoreProgress) -> None:
            reporter.update(
                bytes_done=state.bytes_done,
                bytes_total=state.bytes_total,
                files_done=state.files_done,
                files_total=state.files_total,
                path=state.path,
            )

        return execute(
            plan,
            # Told of every file only where somebody sees it.
            progress=report if reporter.shows else None,
            dry_run=dry_run,
            report=on_item,
            runtime_dir=runtime_dir,
        )


def _document(
    plan: RestorePlan,
    result: Result,
    items: Sequence[RestoreItem],
    safety: str | None,
    dry_run: bool,
    open_files: Sequence[OpenFile],
    forecast: _Forecast | None,
) -> dict[str, Any]:
    return _RESTORE.of(
        result,
        plan,
        dry_run=dry_run,
        complete=result.complete and not plan.conflicts,
        safety_snapshot=safety,
        targets=[_TARGET.of(path=target.source.path, destination=target.path) for target in plan.targets],
        items=items,
        code=_exit_code(plan, result),
        open_files=[_OPEN_FILE.of(one, user=owner_name("pwd", one.uid)) for one in open_files],
        plan=None if forecast is None else forecast.document(),
    )


def _note_damage(session: Session, plan: RestorePlan, result: Result) -> None:
    """Keep which files the snapshot does not have whole."""
    damaged = [failure for failure in result.failed if failure.damaged]
    if not damaged:
        return
    from ciuic.cli.shared.damage import note as note_damage
    from ciuic.protocol.known_damage import DamagedPlace

    note_damage(
        session,
        [
            DamagedPlace(
                where=shown(failure.path),
                reason=shown_text(failure.reason),
                snapshots=(str(plan.snapshot.id),),
                by="restore",
                found_ns=session.now_ns,
                seen_ns=session.now_ns,
            )
            for failure in damaged
        ],
    )


def _exit_code(plan: RestorePlan, result: Result) -> int:
    # Only a dry run gets this far: a restore raises. It ends with the code of the restore that it stands for.
    if plan.conflicts:
        return DestinationExists.exit_code
    error = result.error()
    return 0 if error is None else error.exit_code


def _print(plan: RestorePlan, result: Result, items: Sequence[RestoreItem], dry_run: bool) -> None:
    from ciuic.units import human_size

    for item in items:
        out(f"{item.action:<10} {shown(item.path)}")
    for target in plan.targets:
        if target.path != target.source.path:
            note(f"{shown(target.source.path)} → {shown(target.path)}")
    if result.restored_bytes or result.restored or not dry_run:
        verb = "would be restored" if dry_run else "restored"
        parts = [
            f"{plural(result.restored, 'file')}, {human_size(result.restored_bytes)} {verb} from {plan.snapshot.id}"
        ]
        if result.skipped:
            parts.append(plural(result.skipped, "left as it is", "left as they are"))
        if result.removed:
            parts.append(f"{len(result.removed)} {'would be removed' if dry_run else 'removed'}")
        out("; ".join(parts))
    if plan.conflicts:
        warn(
            f"{plural(len(plan.conflicts), 'file exists', 'files exist')} and would stop the restore:",
            hint="give --overwrite",
        )
        _names(plan.conflicts)
    if result.left_out:
        _print_left_out(result, dry_run)
    if result.not_held:
        warn(
            f"{plural(len(result.not_held), 'file')} not held at the cut: the content may be later than the snapshot, or torn:",
            hint="an older snapshot may have the last whole version",
        )
        _names(result.not_held)
    if result.far_times:
        warn(
            f"{plural(len(result.far_times), 'file')} had a modification time before 1677 or after 2262:",
            hint="a snapshot holds the nearest time in between",
        )
        _names(result.far_times)
    # Printed and not raised: the summary is out, and with --json the document, which has the same in full.
    error = result.error()
    if error is not None:
        complain("\n".join(map(shown_text, error.message.split("\n"))))
        complain(f"  {error.hint}")


def _print_left_out(result: Result, dry_run: bool) -> None:
    many = "would be" if dry_run else "were"
    one = "would be" if dry_run else "was"
    counted = plural(
        len(result.left_out),
        f"special file or attribute {one} left out:",
        f"special files or attributes {many} left out:",
    )
    warn(counted, hint="--special restores them")
    for left in result.left_out[:_SHOWN_NAMES]:
        complain(f"    {shown(left.path)}: {shown_text(left.what)}")
    _more(len(result.left_out))


def _names(paths: Sequence[bytes]) -> None:
    for path in paths[:_SHOWN_NAMES]:
        complain(f"    {shown(path)}")
    _more(len(paths))


def _more(count: int) -> None:
    if count > _SHOWN_NAMES:
        complain(f"    and {count - _SHOWN_NAMES} more; --json lists them all")


@click.command("undo", cls=FrameCommand)
@click.argument("snapshot", metavar="[ID]", required=False, type=ID)
@click.option("--dry-run", is_flag=True, help="Say what would be done; change nothing.")
@json_option
def undo_command(snapshot: str | None, dry_run: bool, as_json: bool) -> int:
    """Take back the last restore over a protected root, or the one before which the safety snapshot ID was taken.

    What the restore changed becomes what it was right before it, changes made since then included. `ciuic list --all` shows the safety
    snapshots. An undo takes one as well: a second `ciuic undo` does the restore again.
    """
    from ciuic.compare.restore_records import restored_paths
    from ciuic.repository.lookup import find
    from ciuic.restore import Overwrite, plan_restore
    from ciuic.restore.plan import plan_nothing

    session = current()
    repository = session.own_repository
    safety = _safety_snapshot(session, repository, snapshot)
    present, made = [], []
    for path in restored_paths(repository, safety):
        try:
            find(repository, safety, path)
        except NotFound:
            made.append(path)
        else:
            present.append(path)
    keep = excluded(session)
    doubt = _doubt(safety, keep)
    if doubt:
        warn(f"nothing is removed: {doubt}", hint="remove what the restore has added yourself")
    if present:
        plan = plan_restore(
            repository, safety, present, overwrite=Overwrite.ALWAYS, delete=not doubt, keep=keep,
            special=True if session.trusts_repository else None,
        )  # fmt: skip
    else:
        plan = plan_nothing(repository, safety)
    note(f"taking back the restore from {shown_text(safety.message.removeprefix(SAFETY_MESSAGE))}")
    return carry_out(
        session,
        plan,
        dry_run=dry_run,
        no_safety=False,
        as_json=as_json,
        again=["undo", str(safety.id)],
        also_changed=made,
        afterwards=lambda result: _remove(repository, safety, made, keep, doubt, result, dry_run=dry_run),
    )


def _doubt(safety: Snapshot, keep: Callable[[bytes, bool], bool] | None) -> str:
    """Return why a name that the safety snapshot lacks may have existed all the same; empty if it cannot."""
    if TAG_INCOMPLETE in safety.tags:
        return f"{safety.id} lacks something that could not be read when it was taken"
    if keep is None:
        return "the configuration cannot be read, which says what is excluded from snapshots"
    return ""


def _was_unseen(
    repository: Repository,
    safety: Snapshot,
    root: bytes,
    path: bytes,
    keep: Callable[[bytes, bool], bool] | None,
) -> str:
    """Return why a path was not looked at by the safety snapshot; empty if it was."""
    from ciuic.repository.lookup import find
    from ciuic.system.mountinfo import LEFT_ALONE, first_border

    if first_border(root, path) is not None:
        return LEFT_ALONE
    above = path
    while (above := os.path.dirname(above)) != root and above.startswith(root):
        if keep is not None and keep(above, True):
            return "it is excluded from snapshots"
        with suppress(NotFound):
            if find(repository, safety, above).entry.flags & FLAG_MOUNTPOINT:
                return "another file system was mounted above it"
    return ""


def _safety_snapshot(session: Session, repository: Repository, wanted: str | None) -> Snapshot:
    from ciuic.compare.restore_records import first_of, has_changed

    store = repository.snapshots
    if wanted is not None:
        found = store.load(store.resolve(wanted))
        if not is_safety(found.tags, found.message):
            raise UsageError(
                f"{found.id} is no safety snapshot: no restore was made right after it",
                hint=f"ciuic restore -s {found.id} brings back what it has",
            )
        return found
    safeties = [
        info
        for info in store.infos()
        if is_safety(info.tags, info.message) and has_changed(repository.path, str(info.id))
    ]
    if not safeties:
        raise NotFound(
            "there is no restore to undo: no restore over a protected root has left a safety snapshot",
            hint="ciuic list shows the snapshots",
        )
    newest = max(safeties, key=order_of)
    first = first_of(repository.path, str(newest.id))
    try:
        return store.load(SnapshotId(first))
    except NotFound:
        warn(
            f"the restore went on with one that was cut short, and the safety snapshot from before that, {first}, is gone",
            hint="what is brought back is the state between the two",
        )
        return store.load(newest.id)


def _remove(
    repository: Repository,
    safety: Snapshot,
    made: Sequence[bytes],
    keep: Callable[[bytes, bool], bool] | None,
    doubt: str,
    result: Result,
    *,
    dry_run: bool,
) -> None:
    """Remove what the restore has made where nothing was, except for excluded paths, and add it to the result."""
    from ciuic.repository.lookup import root_of
    from ciuic.restore import Failure
    from ciuic.restore.destination import Remover, open_below, open_way, stat_at
    from ciuic.restore.destination_directories import Syncer

    own = os.stat(repository.path)
    syncer = Syncer(lambda path, error: result.failed.append(Failure(path, error.strerror or str(error))))
    for path in made:
        root = root_of(safety, path)
        if root is None:
            continue
        try:
            reason = doubt or _was_unseen(repository, safety, root.path, path, keep)
        except FileNotFoundError:
            # The directory that it was in is gone, and it as well.
            continue
        except OSError as error:
            reason = error.strerror or str(error)
        if reason:
            result.failed.append(Failure(path, f"it was not removed: {reason}"))
            continue
        *way, name = path[len(root.path) :].strip(b"/").split(b"/")
        remover = Remover(frozenset({(own.st_dev, own.st_ino)}), keep, dry_run)
        try:
            # As the restore came here: the owner of a directory above the root may have put a link there since.
            top = open_way(root.path)
            try:
                folder = open_below(top, way)
            finally:
                os.close(top)
            # Syncs it and closes it at the end.
            syncer.add(folder, path)
            if stat_at(folder, name) is not None and remover.remove(folder, name, path, path):
                result.removed.append(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            result.failed.append(Failure(path, error.strerror or str(error)))
        except CiuicError as error:
            result.failed.append(Failure(path, f"it was not removed: {error.message}"))
        result.failed.extend(Failure(*failure) for failure in remover.failures)
    syncer.flush()
