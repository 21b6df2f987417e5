"""``ciuic undo``: takes back a restore over a protected root.

Guarantees: the paths that the restore was to change become what they were right before it, as its safety snapshot has them; what the
restore made where nothing was is removed. Nothing is removed where its absence from the safety snapshot does not prove that nothing
was there: below another file system, below an excluded directory, or if the snapshot lacks what could not be read. A safety snapshot is taken first, so that an undo can be undone. Nothing else is touched.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from ciuic.cli.commands.restore import carry_out, excluded
from ciuic.cli.shared.messages import warn
from ciuic.cli.shared.names import shown_text
from ciuic.cli.shared.options import ID, FrameCommand
from ciuic.cli.shared.output import json_option, note
from ciuic.cli.shared.session import Session, current
from ciuic.errors import NotFound, UsageError
from ciuic.types import FLAG_MOUNTPOINT, SAFETY_MESSAGE, TAG_INCOMPLETE, is_safety

if TYPE_CHECKING:
    from ciuic.repository import Repository
    from ciuic.restore import Result
    from ciuic.types import Snapshot


@click.command("undo", cls=FrameCommand)
@click.argument("snapshot", metavar="[ID]", required=False, type=ID)
@click.option("--dry-run", is_flag=True, help="Say what would be done; change nothing.")
@json_option
def command(snapshot: str | None, dry_run: bool, as_json: bool) -> int:
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
