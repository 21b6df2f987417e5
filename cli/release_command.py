"""``ciuic release``: ends a hold; the retention policy decides again."""

from __future__ import annotations

import click

from ciuic.cli.marks import change_hold
from ciuic.cli.options import ID, FrameCommand
from ciuic.cli.output import json_option


@click.command("release", cls=FrameCommand)
@click.argument("ids", metavar="ID...", nargs=-1, required=True, type=ID)
@json_option
def command(ids: tuple[str, ...], as_json: bool) -> None:
    """Let the retention policy decide about held snapshots again."""
    change_hold(ids, hold=False, reason="", as_json=as_json)
