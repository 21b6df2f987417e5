"""``ciuic remote``: make, join, look at and test remotes."""

from __future__ import annotations

import click

from ciuic.cli.commands.remote.init import init
from ciuic.cli.commands.remote.join import join
from ciuic.cli.commands.remote.keys import keys
from ciuic.cli.commands.remote.measure import measure
from ciuic.cli.commands.remote.status import status
from ciuic.cli.commands.remote.thaw import thaw
from ciuic.cli.commands.remote.tier import tier
from ciuic.cli.commands.remote.upload import upload
from ciuic.cli.shared.options import FrameGroup


@click.group("remote", cls=FrameGroup)
def command() -> None:
    """Copies of the snapshots on an object store or another machine's disk (docs/remote.md)."""


for _part in (init, join, status, measure, keys, upload, tier, thaw):
    command.add_command(_part)
