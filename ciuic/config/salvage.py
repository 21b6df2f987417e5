"""What can still be known from a configuration that is not valid, such as where its daemon listens."""

from __future__ import annotations

from pathlib import Path

from ciuic.config.load import find_file, parse_leniently
from ciuic.config.model import Config
from ciuic.config.owners import refuse_foreign_file
from ciuic.errors import CiuicError


def readable_part(file: Path | None = None) -> Config:
    """The configuration with a default for everything that is not valid; ``file`` is the value of --config.

    A file that others may write is not asked, nor is one that cannot be read.
    """
    path = find_file(file)
    try:
        if path is not None:
            refuse_foreign_file(path)
    except CiuicError:
        path = None
    return parse_leniently(path)
