"""Read what can still be known from an invalid configuration, such as where its daemon listens."""

from __future__ import annotations

from pathlib import Path

from ciuic.config.load import find_file, parse_leniently
from ciuic.config.model import Config
from ciuic.config.owners import refuse_foreign_file
from ciuic.errors import CiuicError


def readable_part(file: Path | None = None) -> Config:
    """Return the configuration with the default for every invalid value.

    A file that others may write is ignored, and so is one that cannot be read.

    Args:
        file: Value of --config.
    """
    path = find_file(file)
    try:
        if path is not None:
            refuse_foreign_file(path)
    # Another user could otherwise send root's command to a socket of that user.
    except CiuicError:
        path = None
    return parse_leniently(path)
