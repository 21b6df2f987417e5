"""``ciuic metrics``: the daemon's metrics as text, or as a file for a collector of text files."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import click

from ciuic.cli.shared.options import FrameCommand
from ciuic.cli.shared.output import out
from ciuic.cli.shared.session import current
from ciuic.errors import CiuicError


@click.command("metrics", cls=FrameCommand)
@click.option(
    "--textfile",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Replace FILE with the metrics, for node_exporter's textfile collector.",
)
def command(textfile: Path | None) -> None:
    """Print the daemon's metrics in Prometheus text format."""
    text = current().control.metrics()
    if textfile is None:
        out(text.rstrip("\n"))
        return
    try:
        # In the same directory, so that a collector sees the old file or the new one, and with a suffix that it does not read.
        fd, temporary = tempfile.mkstemp(prefix=f".{textfile.name}.", suffix=".new", dir=textfile.parent)
        with os.fdopen(fd, "w", encoding="utf-8") as stream:
            stream.write(text)
            os.fchmod(stream.fileno(), 0o644)
        os.replace(temporary, textfile)
    except OSError as error:
        raise CiuicError(f"cannot write {textfile}: {error.strerror}") from error
