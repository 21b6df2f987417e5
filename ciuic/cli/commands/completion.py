"""``ciuic completion``: prints the script that gives a shell completion of commands, options, ids and paths."""

from __future__ import annotations

import click

from ciuic.cli.shared.options import FrameCommand
from ciuic.cli.shared.output import out


@click.command("completion", cls=FrameCommand)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print shell completion code.

    \b
    bash: ciuic completion bash > /etc/bash_completion.d/ciuic
    zsh:  ciuic completion zsh > "${fpath[1]}/_ciuic"
    fish: ciuic completion fish > ~/.config/fish/completions/ciuic.fish
    """  # noqa: D301  click's mark of a paragraph that is not wrapped is the character \b
    from ciuic.cli.shared.completion import SCRIPTS

    out(SCRIPTS[shell], newline=False)
