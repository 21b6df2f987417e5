"""``ciuic export`` and ``ciuic import``: the state of a training in a format of others, and theirs as a snapshot.

Guarantees: what is at PATH is whole and durable, or as it was; nothing that is stored or read is executed; an imported snapshot
is durable when its id is printed.
"""

from __future__ import annotations

import os
from pathlib import Path

import click

from ciuic.cli.shared.messages import json_name, shown, shown_text, warn
from ciuic.cli.shared.options import HOST_PATH, ID, FrameCommand, Tag
from ciuic.cli.shared.output import json_option, out, out_json
from ciuic.cli.shared.session import current
from ciuic.errors import UsageError

# `exporting.FORMATS`; written down, because importing it takes as long as the rest of the command line.
_FORMATS = ("torch", "safetensors", "hf", "dcp", "npz")


@click.command("export", cls=FrameCommand)
@click.argument("snapshot", metavar="ID", type=ID)
@click.argument("path", metavar="PATH", type=HOST_PATH)
@click.option(
    "--to",
    required=True,
    type=click.Choice(_FORMATS),
    help="Format: torch, safetensors and npz are files; hf (for from_pretrained) and dcp"
    " (torch.distributed.checkpoint) are folders.",
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
@click.option("--overwrite", is_flag=True, help="Replace what an earlier export has written at PATH.")
@json_option
def export_command(
    snapshot: str, path: bytes, to: str, only: tuple[str, ...], ranks: int, overwrite: bool, as_json: bool
) -> None:
    """Write the state of a training for programs without ciuic.

    The state is one that SnapshotManager, an integration or CiuicStorageWriter has saved, sharded or not. Values
    that are no tensors become plain ones (docs/export.md).
    """
    from ciuic.training.convert.exporting import export

    session = current()
    id_ = session.snapshots.resolve(snapshot)
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
    )
    if as_json:
        out_json(
            {
                "snapshot": done.id,
                **json_name("path", path),
                "format": done.format,
                "size_bytes": done.size_bytes,
                "left_out": list(done.left_out),
            }
        )
        return
    from ciuic.units import human_size

    out(f"{done.id}, {human_size(done.size_bytes)} → {shown(path)}")
    if done.left_out and not only:
        warn(f"{to} does not hold {shown_text(', '.join(done.left_out))}", hint="--to torch holds everything")


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
        out_json(
            {
                "snapshot": done.id,
                **json_name("path", path),
                "objects": list(done.objects),
                "values": list(done.values),
                "left_out": list(done.left_out),
            }
        )
        return
    out(f"{done.id}: {shown_text(', '.join((*done.objects, *done.values)))}")
    if done.left_out:
        warn(f"not imported: {shown_text(', '.join(done.left_out))}")
