"""``ciuic export`` and ``ciuic import``: the state of a training in a format of others, files as an artefact, and theirs as a snapshot.

Guarantees: what is at PATH is whole and durable, or as it was; nothing that is stored or read is executed; an imported snapshot
is durable when its id is printed.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import click

from ciuic.cli.shared import sets
from ciuic.cli.shared.contents import as_recorded
from ciuic.cli.shared.documents import Keys
from ciuic.cli.shared.messages import json_name, plural, shown, shown_text, warn
from ciuic.cli.shared.options import HOST_PATH, ID, SNAPSHOT_PATH, FrameCommand, Tag
from ciuic.cli.shared.output import json_option, out, out_json
from ciuic.cli.shared.session import current
from ciuic.errors import UsageError

_EXPORT = Keys(
    "snapshot, path, format, size_bytes, left_out (names of what the format does not hold)", "`export`"
)
_ARTEFACT = Keys(
    "snapshot, path, format, files, size_bytes, written_bytes (of what has changed), removed, may_be_later (files that were not held at"
    " the cut), left_out (each `path`, `reason`), commit?, branch?, is_new?, lfs_files? (these of git-lfs), file? (of dvc)",
    "`export --as`",
)
_IMPORT = Keys("snapshot, path, objects, values, left_out", "`import`")
# `exporting.FORMATS`; written down, because importing it takes as long as the rest of the command line.
_FORMATS = ("torch", "safetensors", "hf", "dcp", "npz")
_ARTEFACTS = ("git-lfs", "hf", "dvc")
_MAX_NAMED = 10


@click.command("export", cls=FrameCommand)
@click.argument("snapshot", metavar="ID", type=ID)
@click.argument("path", metavar="PATH", type=HOST_PATH)
@click.option(
    "--to",
    type=click.Choice(_FORMATS),
    help="Format of a training's state: torch, safetensors and npz are files; hf (for from_pretrained) and dcp"
    " (torch.distributed.checkpoint) are folders.",
)
@click.option(
    "--as",
    "form",
    type=click.Choice(_ARTEFACTS),
    help="Bring the artefact at PATH up to date with the files at --path: git-lfs is a commit in a Git working tree,"
    " hf a folder as on the Hugging Face hub, dvc objects in the cache of a DVC directory.",
)
@click.option(
    "-p",
    "--path",
    "source",
    type=SNAPSHOT_PATH,
    metavar="PATH",
    help="For --as: file or directory in the snapshot.",
)
@click.option(
    "--only",
    multiple=True,
    metavar="NAME",
    help="Only this object, such as model; may be given several times.",
)
@click.option(
    "--ranks",
    type=click.IntRange(min=1),
    default=1,
    metavar="N",
    show_default=True,
    help="For dcp: cut the tensors as N ranks would have written them.",
)
@click.option(
    "--overwrite",
    is_flag=True,
    help="Replace what is at PATH: of a state what an earlier export has written, of an artefact any file.",
)
@json_option
def export_command(
    snapshot: str,
    path: bytes,
    to: str | None,
    form: str | None,
    source: bytes | None,
    only: tuple[str, ...],
    ranks: int,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write the state of a training, or files of a snapshot as an artefact, for programs without ciuic.

    With --to: a state that SnapshotManager, an integration or CiuicStorageWriter has saved, sharded or not. Values
    that are no tensors become plain ones (docs/export.md). With --as: the files that were at --path.
    """
    if (to is None) == (form is None):
        raise UsageError("export takes either --to (the state of a training) or --as (files of a snapshot)")
    if form is not None:
        if source is None:
            raise UsageError(
                f"--as {form} needs the path of the files", hint=f"ciuic export ID -p PATH --as {form} DEST"
            )
        if only or ranks != 1:
            raise UsageError("--only and --ranks are for the state of a training: --to")
        _export_artefact(snapshot, source, form, path, overwrite=overwrite, as_json=as_json)
        return
    assert to is not None
    if source is not None:
        raise UsageError("--path is for files of a snapshot: --as")
    from ciuic.training.convert.exporting import export

    session = current()
    id_ = sets.state_named(session, snapshot)
    # A remote is opened once: its repository opens itself again for each thread that reads.
    remote = None if session.remote_url is None else session.remote.repository_of([id_])
    done = export(
        session.repository_dir if remote is None else remote.reopen,
        Path(os.fsdecode(path)),
        to,
        snapshot=id_,
        only=only,
        ranks=ranks,
        overwrite=overwrite,
        # Hosts whose repositories have identities of their own have spaces of their own.
        also=() if remote is None else [one.reopen for one in session.remote.repositories],
    )
    if as_json:
        out_json(_EXPORT.of(done, snapshot=done.id, path=path))
        return
    from ciuic.units import human_size

    out(f"{done.id}, {human_size(done.size_bytes)} → {shown(path)}")
    if done.left_out and not only:
        warn(f"{to} does not hold {shown_text(', '.join(done.left_out))}", hint="--to torch holds everything")


def _export_artefact(
    snapshot_id: str, source: bytes, form: str, destination: bytes, *, overwrite: bool, as_json: bool
) -> None:
    from ciuic.artefacts.snapshot_files import files_of, require_place
    from ciuic.units import human_size

    session = current()
    snapshot = session.snapshots.load(session.snapshots.resolve(snapshot_id))
    repository = session.repository_of(snapshot.id)
    path = as_recorded(snapshot, source)
    found = files_of(repository, snapshot, path)
    where = Path(os.fsdecode(destination))
    # Where there is no such directory, the export says so.
    with suppress(OSError):
        require_place(found, path, where)
    own: object = None
    of_dvc: dict[str, bytes] = {}
    news = complaint = ""
    if form == "git-lfs":
        from ciuic.artefacts.git_lfs import export_git_lfs

        done = export_git_lfs(snapshot, repository.id, path, found, where, overwrite=overwrite)
        updated, left_out, complaint = done.updated, done.left_out, done.complaint
        own = done
        news = f", commit {done.commit[:12]}{'' if done.is_new else ' as before'}"
    elif form == "dvc":
        from ciuic.artefacts.dvc import export_dvc

        updated, left_out, file = export_dvc(snapshot, repository.id, path, found, where, overwrite=overwrite)
        of_dvc["file"] = file
        news = f", {shown(file)}"
    else:
        from ciuic.artefacts.hugging_face import export_hugging_face

        updated, left_out = export_hugging_face(repository, snapshot, path, found, where, overwrite=overwrite)
    if as_json:
        out_json(
            _ARTEFACT.of(
                updated,
                found,
                own,
                snapshot=snapshot,
                path=destination,
                format=form,
                left_out=[{**json_name("path", one.name), "reason": one.reason} for one in left_out],
                **of_dvc,
            )
        )
    else:
        size, new = human_size(updated.size_bytes), human_size(updated.written_bytes)
        out(
            f"{snapshot.id}, {plural(updated.files, 'file')}, {size}, {new} of it new → {shown(destination)}{news}"
        )
    for one in left_out[:_MAX_NAMED]:
        warn(f"not exported: {shown(one.name)}: {one.reason}")
    if len(left_out) > _MAX_NAMED:
        warn(f"not exported: {len(left_out) - _MAX_NAMED} others", hint="--json names all of them")
    if found.may_be_later:
        files = plural(found.may_be_later, "file")
        warn(f"{files} not held at the cut: the content may be later than the snapshot, or torn")
    if complaint:
        warn(
            f"git-lfs is not set up in {shown(destination)}: {shown_text(complaint)}",
            hint="git lfs install; git lfs update --manual",
        )


@click.command("import", cls=FrameCommand)
@click.argument("path", metavar="PATH", type=HOST_PATH)
@click.option(
    "--name",
    default="training",
    show_default=True,
    metavar="NAME",
    help="Name of the run, as of SnapshotManager.",
)
@click.option(
    "--tag", "tags", multiple=True, type=Tag(), metavar="TAG", help="Further tag; may be given several times."
)
@json_option
def import_command(path: bytes, name: str, tags: tuple[str, ...], as_json: bool) -> None:
    """Make a snapshot of a training's state that another program has written.

    PATH is a file of torch.save or safetensors, a directory of torch.distributed.checkpoint, a folder of
    save_pretrained, or a checkpoint of the Trainer or of Lightning. The snapshot goes into the directory that --repo
    names, which is created if it is missing; SnapshotManager.resume() there restores the objects whose names fit.
    """
    from ciuic.repository.trust import require_own
    from ciuic.training.state_import import import_state

    session = current()
    save_dir = session.repository_dir
    if os.path.lexists(save_dir):
        require_own(save_dir, trusted=session.trusts_repository)
    try:
        done = import_state(os.fsdecode(path), save_dir, name=name, tags=tags)
    # What the library says of content that is malformed, or of a value that cannot be stored.
    except (ValueError, TypeError) as error:
        raise UsageError(f"{shown(path)} cannot be imported: {error}") from error
    if as_json:
        out_json(_IMPORT.of(done, snapshot=done.id, path=path))
        return
    out(f"{done.id}: {shown_text(', '.join((*done.objects, *done.values)))}")
    if done.left_out:
        warn(f"not imported: {shown_text(', '.join(done.left_out))}")
