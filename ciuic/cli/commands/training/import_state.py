"""``ciuic import``: a state that another program has written becomes a snapshot.

Guarantees: nothing that is read is executed; the snapshot is durable when its id is printed.
"""

from __future__ import annotations

import os

import click

from ciuic.cli.shared.messages import warn
from ciuic.cli.shared.names import json_name, shown, shown_text
from ciuic.cli.shared.options import HOST_PATH, FrameCommand, Tag
from ciuic.cli.shared.output import json_option, out, out_json
from ciuic.cli.shared.session import current
from ciuic.errors import UsageError


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
def command(path: bytes, name: str, tags: tuple[str, ...], as_json: bool) -> None:
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
