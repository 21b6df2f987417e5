"""``ciuic hold`` and ``ciuic release``: exempt snapshots from pruning, and end the exemption."""

from __future__ import annotations

import click

from ciuic.cli.shared.marks import change_hold
from ciuic.cli.shared.options import ID, FrameCommand, Text
from ciuic.cli.shared.output import json_option


@click.command("hold", cls=FrameCommand)
@click.argument("ids", metavar="ID...", nargs=-1, required=True, type=ID)
@click.option(
    "-m", "--message", "reason", default="", type=Text(), metavar="TEXT", help="Why: shown by list and prune."
)
@json_option
def hold(ids: tuple[str, ...], reason: str, as_json: bool) -> None:
    """Keep snapshots for ever, until they are released."""
    change_hold(ids, hold=True, reason=reason, as_json=as_json)


@click.command("release", cls=FrameCommand)
@click.argument("ids", metavar="ID...", nargs=-1, required=True, type=ID)
@json_option
def release(ids: tuple[str, ...], as_json: bool) -> None:
    """Let the retention policy decide about held snapshots again."""
    change_hold(ids, hold=False, reason="", as_json=as_json)
