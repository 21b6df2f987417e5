"""``ciuic restore``: brings files and directories back.

Guarantees: asks nothing; a conflict stops it before anything is changed, with all conflicts listed; over a protected root a
safety snapshot is taken first; what could not be restored is listed, and files that were open for writing at the snapshot
are named, because they may be torn.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from ciuic.cli.names import json_name, shown
from ciuic.cli.options import DIRECTORY, ID, SNAPSHOT_PATH, FrameCommand
from ciuic.cli.output import complain, json_option, out, out_json, warn
from ciuic.cli.session import Session, current

if TYPE_CHECKING:
    from ciuic.restore import Plan, Result

_SHOWN = 50


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
    help="What to do with files that exist. Without it they stop the restore (exit 6).",
)
@click.option("--delete", is_flag=True, help="Also remove what the snapshot does not have, only below PATH.")
@click.option("--dry-run", is_flag=True, help="Say what would be done; change nothing.")
@click.option("--no-safety", is_flag=True, help="Take no safety snapshot before changing a protected root.")
@json_option
def command(
    snapshot: str,
    paths: tuple[bytes, ...],
    dest: bytes | None,
    overwrite: str | None,
    delete: bool,
    dry_run: bool,
    no_safety: bool,
    as_json: bool,
) -> int:
    """Restore files and directories from a snapshot.

    Directories are merged. Interrupted or killed, it can be run again; no file is ever half there.
    """
    raise NotImplementedError
