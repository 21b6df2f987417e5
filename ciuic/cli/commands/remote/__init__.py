"""The group ``ciuic remote``: make, join, look at, test and serve remotes.

``targets`` finds the remote that an operator means, and its keys. The package may import `ciuic.cli.shared` and, when a command
runs, the library.
"""

from __future__ import annotations

import importlib
from typing import Final

import click

from ciuic.cli.shared.options import FrameGroup
from ciuic.system.privileges import no_core_files

_COMMANDS: Final = {
    "init": "init_join.init",
    "join": "init_join.join",
    "status": "uploads.status",
    "drill": "drill.drill",
    "test": "init_join.measure",
    "keys": "keys.keys",
    "repair-identity": "init_join.repair_identity",
    "upload": "uploads.upload",
    "tier": "cold_data.tier",
    "thaw": "cold_data.thaw",
    "serve": "serve.serve",
}
"""Module and name of each command, in the order of the help."""


class RemoteGroup(FrameGroup):
    """Group that imports a command's module when the command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands in the order of the help."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of a command and return the command."""
        if cmd_name not in _COMMANDS:
            return None
        module, name = _COMMANDS[cmd_name].split(".")
        command: click.Command = getattr(importlib.import_module(f"{__name__}.{module}"), name)
        return command


@click.group("remote", cls=RemoteGroup)
def command() -> None:
    """Copies of the snapshots on an object store or another machine's disk (docs/remote.md)."""
    # What follows has the keys of the remote in memory.
    no_core_files()
