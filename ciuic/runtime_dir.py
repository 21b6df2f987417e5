"""Where the daemon keeps its sockets, for programs that do not read the whole configuration for it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from ciuic.ownership import find_flaw

_USUAL: Final = "/run/ciuic"
_CONFIG: Final = "/etc/ciuic/ciuic.toml"


def runtime_dir(environment: Mapping[str, str]) -> str:
    """Of the daemon whose configuration is in force; the usual one where none can be read."""
    import tomli

    path = environment.get("CIUIC_CONFIG") or _CONFIG
    try:
        if os.geteuid() == 0 and find_flaw(path) is not None:
            return _USUAL  # the daemon does not read it either
        with open(path, "rb") as file:
            document: Any = tomli.load(file)
        found = document["daemon"]["runtime_dir"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return _USUAL  # the flat format has no such key
    return found if isinstance(found, str) else _USUAL
