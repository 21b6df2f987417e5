"""``ciuic diff``: what was added, changed, removed or retyped between two snapshots, or a snapshot and now.

With ``--tensors``: how the tensors of two training states differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from ciuic.cli.shared import sets
from ciuic.cli.shared.contents import as_recorded
from ciuic.cli.shared.documents import Keys
from ciuic.cli.shared.messages import shown, shown_text, warn
from ciuic.cli.shared.options import ID, SNAPSHOT_PATH, FrameCommand
from ciuic.cli.shared.output import Column, json_option, note, out, out_json, out_prose, show_table
from ciuic.cli.shared.session import Session, current

if TYPE_CHECKING:
    from ciuic.compare.diff import PathChange
    from ciuic.repository.snapshot_sets import SnapshotSet
    from ciuic.training.state_diff import StateDiff, TensorChange

_ENTRY = Keys("mode, uid, gid, size_bytes, mtime, mtime_ns")
_CHANGE = Keys(
    "kind (`added`, `removed`, `changed`, `retyped`), path, details, old (null where there was none), new (null where there is none)",
    "each of the `changes` of `diff`",
    old=_ENTRY,
    new=_ENTRY,
)
_MEMBER = Keys(
    "member, old, new (ids, or null), changes (as of `diff`; null where a set lacks the member)",
    "each of the `members` of `diff` of two sets",
)
_TENSOR = Keys(
    "name, kind (`changed`, `retyped`, `reshaped`, `added`, `removed`), old_dtype, new_dtype, old_shape, new_shape (null where there"
    " is none), elements?, changed_elements?, change_norm?, old_norm?, relative_change?, largest_change?, cosine?, old_nan?, new_nan?,"
    " old_inf?, new_inf?, new_norm? (figures only of `changed` and `retyped`; null: not known, or not finite)"
)
_TENSORS = Keys(
    "old, new (ids), identical (number of tensors), read_bytes, size_bytes (of both states), tensors",
    "`diff --tensors`",
    tensors=_TENSOR,
)

_SIGNS = {"added": "+", "removed": "-", "changed": "M", "retyped": "T"}
_COLOURS = {"added": "green", "removed": "red", "changed": "yellow", "retyped": "magenta"}


@click.command("diff", cls=FrameCommand)
@click.argument("snapshot_id", metavar="ID", type=ID)
@click.argument("other", metavar="[ID2]", required=False, type=ID)
@click.option("-p", "--path", type=SNAPSHOT_PATH, metavar="PATH", help="Only at and below this path.")
@click.option(
    "--tensors",
    is_flag=True,
    help="Compare the numbers in two states that SnapshotManager saved, tensor by tensor.",
)
@click.option(
    "--skip-identical",
    is_flag=True,
    help="With --tensors: never read blocks that are the same in both. Tensors with such blocks then have "
    "neither a relative change nor a cosine.",
)
@click.option(
    "--machine-readable",
    is_flag=True,
    help="With --tensors, one line a tensor: kind|relative change|largest change|cosine|NaN|Inf|name.",
)
@json_option
def command(
    snapshot_id: str,
    other: str | None,
    path: bytes | None,
    tensors: bool,
    skip_identical: bool,
    machine_readable: bool,
    as_json: bool,
) -> None:
    """Compare two snapshots, or a snapshot with the files as they are now.

    + added, - removed, M changed (in brackets what: content, size, mode, owner, mtime, xattrs …), T another type.
    Two sets, set:A and set:B, are compared member by member.

    With --tensors: the norm of the change by the norm before, the largest change of a number, the cosine of the
    angle between old and new, and how many numbers are now NaN or infinite. Largest changes first.
    """
    session = current()
    if machine_readable and as_json:
        raise click.UsageError("--machine-readable and --json exclude one another")
    if tensors:
        if other is None:
            raise click.UsageError("--tensors compares two snapshots: name a second one")
        diff = _tensors(session, snapshot_id, other, path, whole=not skip_identical)
        _print_tensors(diff, as_json=as_json, machine_readable=machine_readable)
        return
    if skip_identical or machine_readable:
        raise click.UsageError("--skip-identical and --machine-readable need --tensors")
    old_set = sets.set_named(session, snapshot_id)
    new_set = None if other is None else sets.set_named(session, other)
    if old_set is not None and new_set is not None:
        _show_sets(session, old_set, new_set, path, as_json=as_json)
        return
    changes = _changes(session, snapshot_id, other, path)
    if as_json:
        out_json({"changes": _CHANGE.all(changes)})
        return
    if not _print_changes(session, changes) and not session.stdout_gone:
        note("no difference")


def _print_changes(session: Session, changes: Iterator[PathChange]) -> int:
    """Print a line for each change, and return how many there are."""
    # Printed as they are found: a comparison of large trees has results from the start, and holds no list of
    # them.
    count = 0
    for change in changes:
        count += 1
        out(f"{_SIGNS[change.kind]} ", newline=False, fg=_COLOURS[change.kind])
        details = f"  [{', '.join(change.details)}]" if change.details else ""
        out(shown(change.path) + details)
        if session.stdout_gone:
            # `| head`: nobody reads the rest, and it may be long.
            break
    return count


def _show_sets(
    session: Session, old: SnapshotSet, new: SnapshotSet, path: bytes | None, *, as_json: bool
) -> None:
    """Print the changes of each member that both sets have, and the members that one of them has."""
    for one in (old, new):
        sets.warn_of_lacking(session, one)
    documents = []
    for member in dict.fromkeys((*old.members, *new.members)):
        before, after = old.found.get(member), new.found.get(member)
        if as_json:
            documents.append(
                _MEMBER.of(
                    member=member,
                    old=before,
                    new=after,
                    changes=_CHANGE.all(_changes(session, before.id, after.id, path))
                    if before is not None and after is not None
                    else None,
                )
            )
            continue
        ids = [None if one is None else str(one.id) for one in (before, after)]
        out(f"{shown_text(member)}: {ids[0] or 'missing'} → {ids[1] or 'missing'}", bold=True)
        if before is None or after is None:
            continue
        if not _print_changes(session, _changes(session, before.id, after.id, path)):
            note(f"{shown_text(member)}: no difference")
        if session.stdout_gone:
            return
    if as_json:
        out_json({"members": documents})


def _changes(
    session: Session, snapshot_id: str, other: str | None, path: bytes | None
) -> Iterator[PathChange]:
    from ciuic.compare.diff import diff_live, diff_snapshots

    store = session.snapshots
    old = store.load(store.resolve(snapshot_id))
    path = path if path is None else as_recorded(old, path)
    if other is None:
        return diff_live(session.repository_of(old.id), old, path)
    new = store.load(store.resolve(other))
    # With a path below such a root the comparison itself refuses.
    for snapshot in (old, new) if path is None else ():
        for root in snapshot.left_out:
            warn(f"{shown(root.path)} is not compared: {snapshot.id} was made without it")
    return diff_snapshots(session.repository_of(old.id, new.id), old, new, path)


def _tensors(session: Session, snapshot_id: str, other: str, path: bytes | None, *, whole: bool) -> StateDiff:
    # Imported here: the library of trainings takes longer than all of a comparison of files.
    from ciuic.training.state_diff import diff_states

    store = session.snapshots
    old, new = (sets.state_named(session, text) for text in (snapshot_id, other))
    below = b"" if path is None else as_recorded(store.load(old), path)
    return diff_states(session.repository_of(old, new), old, new, below=below, whole=whole)


def _print_tensors(diff: StateDiff, *, as_json: bool, machine_readable: bool) -> None:
    from ciuic.training.state_diff import HEADERS, row

    if as_json:
        out_json(_TENSORS.of(diff, tensors=[_TENSOR.of(change, change.figures) for change in diff]))
        return
    if machine_readable:
        # The name last: it may contain the separator.
        out("".join(f"{'|'.join(_fields(change))}\n" for change in diff), newline=False)
        return
    if diff:
        columns = [
            Column(header.upper(), right=header != HEADERS[0], shrink=header == HEADERS[0])
            for header in HEADERS
        ]
        show_table(columns, [list(map(shown_text, row(change))) for change in diff])
    for change in diff:
        name = shown_text(change.name)
        if change.kind == "reshaped":
            out_prose(f"{name}: shape {_shape(change.new_shape)}, was {_shape(change.old_shape)}", 2)
        elif change.kind == "retyped":
            out_prose(shown_text(f"{name}: dtype {change.new_dtype}, was {change.old_dtype}"), 2)
    note(diff.summary())


def _shape(shape: tuple[int, ...] | None) -> str:
    return "x".join(map(str, shape or ())) or "scalar"


def _fields(change: TensorChange) -> list[str]:
    figures = change.figures
    name = shown_text(change.name)
    if figures is None:
        return [change.kind, "", "", "", "", "", name]
    numbers = (figures.relative_change, figures.largest_change, figures.cosine)
    return [
        change.kind,
        *("" if number is None else f"{number:.6g}" for number in numbers),
        str(figures.new_nan),
        str(figures.new_inf),
        name,
    ]
