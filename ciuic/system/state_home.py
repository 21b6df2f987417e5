"""Directories of this user for what outlives a run and a start of the machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_ROOT_DIRECTORY: Final = Path("/var/lib/ciuic")
"""Directory of root, unless XDG_STATE_HOME says otherwise."""


def state_home(name: str, environ: Mapping[str, str] | None = None) -> Path:
    """Return the directory ``name`` of this user, which may not exist.

    It is ``$XDG_STATE_HOME/ciuic/NAME`` if that is set, else /var/lib/ciuic/NAME for root and ~/.local/state/ciuic/NAME
    for others.
    """
    variables = os.environ if environ is None else environ
    # A relative path is to be ignored (XDG Base Directory Specification).
    if (home := variables.get("XDG_STATE_HOME", "")).startswith("/"):
        return Path(home) / "ciuic" / name
    if os.geteuid() == 0:
        return _ROOT_DIRECTORY / name
    return Path(variables.get("HOME") or os.path.expanduser("~")) / ".local" / "state" / "ciuic" / name
