"""``ciuic completion``: prints the script that gives a shell completion of commands, options, ids and paths."""

from __future__ import annotations

import click

from ciuic.cli.options import FrameCommand
from ciuic.cli.output import out


@click.command("completion", cls=FrameCommand)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print shell completion code.

    \b
    bash: ciuic completion bash > /etc/bash_completion.d/ciuic
    zsh:  ciuic completion zsh > "${fpath[1]}/_ciuic"
    fish: ciuic completion fish > ~/.config/fish/completions/ciuic.fish
    """
    from ciuic.cli.shells import SCRIPTS

    out(SCRIPTS[shell], newline=False)
