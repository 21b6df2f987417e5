"""Find the directory of the daemon's sockets without reading the whole configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from ciuic.system.ownership import find_flaw

_DEFAULT: Final = "/run/ciuic"
_CONFIG: Final = "/etc/ciuic/ciuic.toml"


def runtime_dir(environment: Mapping[str, str]) -> str:
    """Return the runtime directory of the daemon whose configuration is in force; the default if none can be read."""
    # Imported here: processes that import this module need not call the function.
    import tomli

    path = environment.get("CIUIC_CONFIG") or _CONFIG
    try:
        # A file that another user may write: the daemon does not read it either.
        if os.geteuid() == 0 and find_flaw(path) is not None:
            return _DEFAULT
        with open(path, "rb") as file:
            document: Any = tomli.load(file)
        found = document["daemon"]["runtime_dir"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        # KeyError: the flat format has no such key.
        return _DEFAULT
    return found if isinstance(found, str) else _DEFAULT
