"""``ciuic restore`` and ``ciuic undo``: bring files and directories back, and take back a restore over a protected root.

Guarantees of undo: the paths that the restore was to change become what they were right before it, as its safety snapshot has them;
what the restore made where nothing was is removed. Nothing is removed where its absence from the safety snapshot does not prove that
nothing was there: below another file system, below an excluded directory, or if the snapshot lacks what could not be read. A safety
snapshot is taken first, so that an undo can be undone. Nothing else is touched.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ciuic.cli.shared.contents import as_recorded
from ciuic.cli.shared.lazy_restore import restore_lazily, show_lazy_restores
from ciuic.cli.shared.messages import complain, json_name, plural, shown, shown_text, warn
from ciuic.cli.shared.options import DIRECTORY, ID, SNAPSHOT_PATH, FrameCommand, Text
from ciuic.cli.shared.output import json_option, note, out, out_json
from ciuic.cli.shared.session import Session, current
from ciuic.errors import CiuicError, DestinationExists, NotFound, Partial, UsageError
from ciuic.excludes import check_pattern
from ciuic.types import FLAG_MOUNTPOINT, SAFETY_MESSAGE, TAG_INCOMPLETE, is_safety

if TYPE_CHECKING:
    from ciuic.history import LastGood, Timeline
    from ciuic.repository import Repository
    from ciuic.restore import RestoreItem, RestorePlan, RestoreProgress, Result
    from ciuic.system.open_files import OpenFile
    from ciuic.types import Snapshot


# A screenful; --json has all of them.
_SHOWN_NAMES = 20
_SHOWN_OPEN_FILES = 5


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
@click.option("--dry-run", is_flag=True, help="Say what would be done; change nothing.")
@click.option(
    "--special/--no-special",
    "special",
    default=None,
    help="Restore device nodes, setuid and setgid bits, file capabilities and other attributes of the system, or leave them"
    " out. Default: leave them out, with exit code 8, if others may have written the repository.",
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
    callback=show_lazy_restores,
    help="Show the lazy restores of this machine, and nothing else.",
)
@json_option
def restore_command(
    snapshot: str | None,
    last_good: bool,
    paths: tuple[bytes, ...],
    everything: bool,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    dest: bytes | None,
    overwrite: str | None,
    delete: bool,
    dry_run: bool,
    special: bool | None,
    no_safety: bool,
    lazy: bool,
    foreground: bool,
    as_json: bool,
) -> int:
    """Restore files and directories from a snapshot.

    Directories are merged. Interrupted or killed, it can be run again; no file is ever half there.
    """
    if snapshot is not None and last_good:
        raise UsageError("-s names a snapshot, and --last-good chooses one: give one of them")
    if everything and (paths or last_good):
        raise UsageError("--all means every root of the snapshot of -s: leave out -p and --last-good")
    if not last_good and (snapshot is None or not (paths or everything)):
        raise UsageError(
            "which snapshot, and what? -s names the snapshot, -p the path",
            hint="such as: -s latest -p DIR, or --last-good -p DIR",
        )
    session = current()
    if everything and snapshot is not None:
        store = session.snapshots
        paths = tuple(root.path for root in store.load(store.resolve(snapshot)).roots)
    if lazy and (include or exclude):
        raise UsageError("--lazy restores a whole directory: leave out --include and --exclude")
    if lazy or foreground:
        _require_only_lazy(lazy, paths, overwrite, delete, dry_run)
    chosen = _last_good(session, paths) if last_good else {}
    if lazy:
        named = str(next(iter(chosen.values())).snapshot.id) if snapshot is None else snapshot
        return restore_lazily(
            session, named, paths[0], dest, special=special, foreground=foreground, as_json=as_json
        )
    wanted: dict[str, list[bytes]] = {}
    for path in paths or chosen:
        named = str(chosen[path].snapshot.id) if snapshot is None else snapshot
        wanted.setdefault(named, []).append(path)
    # All before the first: a conflict or a mistake ends the command while nothing has been made or changed.
    plans = [
        _planned(
            session,
            named,
            some,
            dest,
            overwrite,
            delete=delete,
            dry_run=dry_run,
            special=special,
            include=include,
            exclude=exclude,
        )
        for named, some in wanted.items()
    ]
    if not last_good:
        return _carry_out(session, plans[0], dry_run=dry_run, no_safety=no_safety, as_json=as_json)
    documents: list[dict[str, Any]] = []
    codes = [
        _carry_out(
            session, plan, dry_run=dry_run, no_safety=no_safety, as_json=as_json, show=documents.append
        )
        for plan in plans
    ]
    if as_json:
        out_json(
            {
                "last_good": [_choice_document(path, one) for path, one in chosen.items()],
                "restores": documents,
                "code": max(codes),
            }
        )
    return max(codes)


def _last_good(session: Session, paths: Sequence[bytes]) -> dict[bytes, LastGood]:
    """Return the choice for each path, or for each root that has checkpoints, and say what was chosen.

    Raises:
        NotFound: there is none for one of the paths, or for no root.
    """
    from ciuic.cli.shared.timelines import PassedOver, all_timelines, timelines_with
    from ciuic.history import last_good

    damaged = PassedOver()
    chosen: dict[bytes, LastGood] = {}
    for path in dict.fromkeys(paths):
        places = timelines_with(session, path, damaged)
        chosen[path] = last_good(_of_one_host(places.timelines, path), places.path)
    if not paths:
        roots: dict[bytes, list[tuple[Repository, Timeline]]] = {}
        for repository, timeline in all_timelines(session, None, damaged):
            roots.setdefault(timeline.path, []).append((repository, timeline))
        for path, timelines in roots.items():
            try:
                chosen[path] = last_good(_of_one_host(timelines, path), path)
            except NotFound as error:
                note(f"{shown(path)} is left as it is: {shown_text(error.message.splitlines()[0])}")
        if not chosen:
            raise NotFound("no root has a GOOD checkpoint in any snapshot", hint="-s ID -p PATH names both")
    damaged.tell()
    for path, one in chosen.items():
        _show_choice(session, path, one)
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


def _show_choice(session: Session, path: bytes, one: LastGood) -> None:
    from ciuic.units import human_duration

    age = human_duration(max(0, session.now_ns - one.snapshot.time_ns) / 1e9)
    note(f"{shown(path)}: {one.snapshot.id}, {age} old: {shown(one.checkpoint.checkpoint.path)} is GOOD")
    for skipped in one.passed_over[:_SHOWN_NAMES]:
        note(f"  passed over {skipped.snapshot.id}: {shown_text(skipped.reason)}")
    if len(one.passed_over) > _SHOWN_NAMES:
        note(f"  and {len(one.passed_over) - _SHOWN_NAMES} more")
    if one.lost_steps:
        note(f"  this costs {plural(one.lost_steps, 'step')}")
    if one.not_good:
        warn(
            f"{plural(len(one.not_good), 'newer checkpoint')} beside it {'is' if len(one.not_good) == 1 else 'are'} not whole, and restored as well:",
            hint="remove what the training must not load",
        )
        _names([bad.checkpoint.path for bad in one.not_good])
    elif newer := one.newer_good:
        note(
            f"  a newer one is GOOD beside a newest one that is not; alone: "
            f"ciuic restore -s {newer.snapshot.id} -p {shown(newer.checkpoint.path)}"
        )


def _choice_document(path: bytes, one: LastGood) -> dict[str, Any]:
    newer = one.newer_good
    return {
        **json_name("path", path),
        "snapshot": str(one.snapshot.id),
        **json_name("checkpoint", one.checkpoint.checkpoint.path),
        "lost_steps": one.lost_steps,
        "not_good": [json_name("path", bad.checkpoint.path) for bad in one.not_good],
        "newer_good": None
        if newer is None
        else {**json_name("checkpoint", newer.checkpoint.path), "snapshot": str(newer.snapshot.id)},
        "passed_over": [
            {"snapshot": str(skipped.snapshot.id), "reason": skipped.reason} for skipped in one.passed_over
        ],
    }


def _planned(
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
        try:
            check_pattern(pattern)
        except ValueError as error:
            raise UsageError(str(error)) from None
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


def _carry_out(
    session: Session,
    plan: RestorePlan,
    *,
    dry_run: bool,
    no_safety: bool,
    as_json: bool,
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
        also_changed: paths that ``afterwards`` changes.
        afterwards: called after the plan is executed, to add to its result.
        show: takes the document.
    """
    from ciuic.system.open_files import find_open_files, replaced

    # Of what is replaced here, wherever it is restored from.
    local = session.local
    targets = [*(target.path for target in plan.targets), *also_changed]
    safety = None if dry_run or no_safety else _safety(local, str(plan.snapshot.id), targets)
    # Once, before anything is changed: afterwards nothing tells which name an open file had.
    open_before = find_open_files(targets)
    # A name for each path, of which a restore may have millions: collected only where they are printed.
    items: list[RestoreItem] = []
    result = _execute(
        plan, dry_run, items.append if dry_run or session.verbosity > 0 else None, _runtime_dir(session)
    )
    afterwards(result)
    changed = {item.path for item in items if item.action in ("restored", "removed")}
    open_files = [one for one in open_before if one.path in changed] if dry_run else replaced(open_before)
    # Retention compares snapshots of later than this moment, to find out whether the restored paths were
    # changed since: one that was cut during the restore shows half of it.
    if safety is not None:
        _safety_is_over(local, safety)
    if as_json:
        show(
            {
                **_document(plan, result, items, safety, dry_run),
                "open_files": [
                    {**json_name("path", one.path), "pid": one.pid, "program": one.program}
                    for one in open_files
                ],
            }
        )
    else:
        _print(plan, result, items, dry_run)
    if open_files:
        _warn_of_open_files(open_files, dry_run)
    return _exit_code(plan, result)


def _warn_of_open_files(files: Sequence[OpenFile], dry_run: bool) -> None:
    would = "would be" if dry_run else "were"
    counted = plural(len(files), "open file", "open files")
    warn(
        f"{counted} {would} replaced; the programs go on with the old content, and what they write is in no snapshot:",
        hint="stop them before the restore" if dry_run else "restart them",
    )
    for one in files[:_SHOWN_OPEN_FILES]:
        complain(f"    {shown(one.path)} ({shown_text(one.program)}, {one.pid})")
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


def _safety(session: Session, source: str, targets: Sequence[bytes]) -> str | None:
    from ciuic.cli.shared import safety_snapshot as safety

    roots = safety.covering(safety.protected_roots(session), targets)
    if not roots:
        return None
    return safety.take(session, roots, f"{SAFETY_MESSAGE}{source}", targets)


def _safety_is_over(session: Session, taken: str) -> None:
    from ciuic.cli.shared import safety_snapshot as safety

    safety.is_over(session, taken)


def _runtime_dir(session: Session) -> Path | None:
    """Return the runtime directory of overlay workers; None if the configuration cannot be read: a restore goes on without."""
    try:
        return session.config.runtime_dir
    except CiuicError:
        return None


def _execute(
    plan: RestorePlan, dry_run: bool, on_item: Callable[[RestoreItem], None] | None, runtime_dir: Path | None
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

        return execute(plan, progress=report, dry_run=dry_run, report=on_item, runtime_dir=runtime_dir)


def _document(
    plan: RestorePlan, result: Result, items: Sequence[RestoreItem], safety: str | None, dry_run: bool
) -> dict[str, Any]:
    return {
        "snapshot": str(plan.snapshot.id),
        "dry_run": dry_run,
        "complete": result.complete and not plan.conflicts,
        "safety_snapshot": safety,
        "targets": [
            {**json_name("path", target.source.path), **json_name("destination", target.path)}
            for target in plan.targets
        ],
        "restored": result.restored,
        "restored_bytes": result.restored_bytes,
        "skipped": result.skipped,
        "directories": result.directories,
        "conflicts": [json_name("path", path) for path in plan.conflicts],
        "removed": [json_name("path", path) for path in result.removed],
        "failed": [
            {
                **json_name("path", failure.path),
                "reason": failure.reason,
                "damaged": failure.damaged,
                "attribute": failure.attribute,
            }
            for failure in result.failed
        ],
        "left_out": [{**json_name("path", left.path), "what": left.what} for left in result.left_out],
        "left_out_because": result.left_out_because or None,
        "open_for_writing": [json_name("path", path) for path in result.open_for_writing],
        "not_held": [json_name("path", path) for path in result.not_held],
        "far_times": [json_name("path", path) for path in result.far_times],
        "owner_failures": result.owner_failures,
        "time_failures": result.time_failures,
        "stopped": result.stopped or None,
        "items": [{**json_name("path", item.path), "action": item.action} for item in items],
        "code": _exit_code(plan, result),
    }


def _exit_code(plan: RestorePlan, result: Result) -> int:
    # Only a dry run gets this far: a restore raises. It ends with the code of the restore that it stands for.
    if plan.conflicts:
        return DestinationExists.exit_code
    return 0 if result.complete else Partial.exit_code


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
    return _carry_out(
        session,
        plan,
        dry_run=dry_run,
        no_safety=False,
        as_json=as_json,
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
    store = repository.snapshots
    if wanted is not None:
        found = store.load(store.resolve(wanted))
        if not is_safety(found.tags, found.message):
            raise UsageError(
                f"{found.id} is no safety snapshot: no restore was made right after it",
                hint=f"ciuic restore -s {found.id} brings back what it has",
            )
        return found
    safeties = [info for info in store.infos() if is_safety(info.tags, info.message)]
    if not safeties:
        raise NotFound(
            "there is no restore to undo: no restore over a protected root has left a safety snapshot",
            hint="ciuic list shows the snapshots",
        )
    return store.load(max(safeties, key=lambda info: info.order_ns).id)


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
    from ciuic.restore.destination import Remover, open_below, stat_at
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
            top = os.open(root.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
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
        result.failed.extend(Failure(*failure) for failure in remover.failures)
    syncer.flush()
