"""``ciuic hold``: a held snapshot is never pruned, whatever the retention policy says."""

from __future__ import annotations

import click

from ciuic.cli.marks import change_hold
from ciuic.cli.options import ID, FrameCommand
from ciuic.cli.output import json_option


@click.command("hold", cls=FrameCommand)
@click.argument("ids", metavar="ID...", nargs=-1, required=True, type=ID)
@click.option("-m", "--message", "reason", default="", metavar="TEXT", help="Why: shown by list and prune.")
@json_option
def command(ids: tuple[str, ...], reason: str, as_json: bool) -> None:
    """Keep snapshots for ever, until they are released."""
    change_hold(ids, hold=True, reason=reason, as_json=as_json)
