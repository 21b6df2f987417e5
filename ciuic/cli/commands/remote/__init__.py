"""The group ``ciuic remote``: make, join, look at, test and serve remotes.

``targets`` finds the remote that an operator means, and its keys. The package may import `ciuic.cli.shared` and, when a command
runs, the library.
"""

from __future__ import annotations

import click

from ciuic.cli.commands.remote.cold_data import thaw, tier
from ciuic.cli.commands.remote.drill import drill
from ciuic.cli.commands.remote.init_join import init, join, measure, repair_identity
from ciuic.cli.commands.remote.keys import keys
from ciuic.cli.commands.remote.serve import serve
from ciuic.cli.commands.remote.uploads import status, upload
from ciuic.cli.shared.options import FrameGroup


@click.group("remote", cls=FrameGroup)
def command() -> None:
    """Copies of the snapshots on an object store or another machine's disk (docs/remote.md)."""


for _part in (init, join, status, drill, measure, keys, repair_identity, upload, tier, thaw, serve):
    command.add_command(_part)
