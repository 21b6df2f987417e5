"""``ciuic restore``: brings files and directories back.

Guarantees: asks nothing; a conflict stops it before anything is changed, with all conflicts listed; over a protected root a
safety snapshot is taken first; what could not be restored is listed, and files that were open for writing at the snapshot
are named, because they may be torn.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ciuic.cli.contents import as_recorded
from ciuic.cli.names import json_name, plural, shown, shown_text
from ciuic.cli.options import DIRECTORY, ID, SNAPSHOT_PATH, FrameCommand
from ciuic.cli.output import complain, json_option, note, out, out_json, warn
from ciuic.cli.session import Session, current
from ciuic.errors import CiuicError, DestinationExists, Partial
from ciuic.types import SAFETY_MESSAGE

if TYPE_CHECKING:
    from ciuic.restore import Item, Plan, Progress, Result

_SHOWN_NAMES = 20


@click.command("restore", cls=FrameCommand)
@click.option("-s", "--snapshot", "snapshot", required=True, metavar="ID", type=ID, help="Which snapshot.")
@click.option(
    "-p",
    "--path",
    "paths",
    required=True,
    multiple=True,
    metavar="PATH",
    type=SNAPSHOT_PATH,
    help="What: the absolute path as it was at the snapshot; may be given several times.",
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
@json_option
def command(
    snapshot: str,
    paths: tuple[bytes, ...],
    dest: bytes | None,
    overwrite: str | None,
    delete: bool,
    dry_run: bool,
    special: bool | None,
    no_safety: bool,
    as_json: bool,
) -> int:
    """Restore files and directories from a snapshot.

    Directories are merged. Interrupted or killed, it can be run again; no file is ever half there.
    """
    from ciuic.restore import Overwrite, plan_restore

    session = current()
    store = session.repository.snapshots
    source = store.load(store.resolve(snapshot))
    plan = plan_restore(
        session.repository,
        source,
        list(dict.fromkeys(as_recorded(source, path) for path in paths)),
        dest,
        overwrite=None if overwrite is None else Overwrite(overwrite),
        delete=delete,
        check=not dry_run,
        keep=_excluded(session) if delete else None,
        special=True if special is None and session.trusts_repository else special,
    )
    safety = None if dry_run or no_safety else _safety(session, plan)
    items: list[Item] = []
    result = _execute(
        plan, dry_run, items.append if dry_run or session.verbosity > 0 else None, _runtime_dir(session)
    )
    if safety is not None:
        _safety_is_over(session, safety)
    if as_json:
        out_json(_document(plan, result, items, safety, dry_run))
    else:
        _print(plan, result, items, dry_run)
    return _exit_code(plan, result)


def _excluded(session: Session) -> Callable[[bytes, bool], bool] | None:
    """What --delete spares: excluded paths are in no snapshot, so their absence there means nothing."""
    try:
        config = session.config
    except CiuicError as error:
        warn(
            f"the configuration cannot be read: {error.message}",
            hint="--delete does not know what is excluded",
        )
        return None
    matchers = [(os.fsencode(root.path), config.exclude_matcher(root)) for root in config.roots]

    def keep(path: bytes, is_dir: bool) -> bool:
        return any(
            path.startswith(top + b"/") and matcher.match(path[len(top) + 1 :], is_dir)
            for top, matcher in matchers
        )

    return keep


def _safety(session: Session, plan: Plan) -> str | None:
    from ciuic.cli import safety

    targets = [target.path for target in plan.targets]
    roots = safety.covering(safety.protected_roots(session), targets)
    if not roots:
        return None
    return safety.take(session, roots, f"{SAFETY_MESSAGE}{plan.snapshot.id}", targets)


def _safety_is_over(session: Session, taken: str) -> None:
    from ciuic.cli import safety

    safety.is_over(session, taken)


def _runtime_dir(session: Session) -> Path | None:
    """Where overlay workers would be found; a configuration that cannot be read stops no restore."""
    try:
        return session.config.runtime_dir
    except CiuicError:
        return None


def _execute(
    plan: Plan, dry_run: bool, on_item: Callable[[Item], None] | None, runtime_dir: Path | None
) -> Result:
    from ciuic.cli.progress import progress
    from ciuic.restore import execute

    with progress("restore") as reporter:

        def report(state: Progress) -> None:
            reporter.update(
                bytes_done=state.bytes_done,
                bytes_total=state.bytes_total,
                files_done=state.files_done,
                files_total=state.files_total,
                path=state.path,
            )

        return execute(plan, progress=report, dry_run=dry_run, report=on_item, runtime_dir=runtime_dir)


def _document(
    plan: Plan, result: Result, items: Sequence[Item], safety: str | None, dry_run: bool
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
        "owner_failures": result.owner_failures,
        "stopped": result.stopped or None,
        "items": [{**json_name("path", item.path), "action": item.action} for item in items],
        "code": _exit_code(plan, result),
    }


def _exit_code(plan: Plan, result: Result) -> int:
    if plan.conflicts:  # only a dry run gets this far
        return DestinationExists.exit_code
    return 0 if result.complete else Partial.exit_code


def _print(plan: Plan, result: Result, items: Sequence[Item], dry_run: bool) -> None:
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
