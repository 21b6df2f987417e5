"""Names of a package that are imported from its modules when they are first used, and old names that still work.

`import ciuic.restore` then costs nothing of what verification does not need. The packages' ``__init__`` use it as their
``__getattr__`` (PEP 562). The module imports nothing of ciuic.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping


def lazy_attributes(
    package: str, homes: Mapping[str, str], renamed: Mapping[str, str] | None = None
) -> Callable[[str], object]:
    """Return a ``__getattr__`` for a package.

    Args:
        package: the package's name.
        homes: module below the package → names that it has, with blanks between.
        renamed: old name → name in ``homes``. An old name works for one version, with a DeprecationWarning.
    """

    def find(name: str) -> object:
        known = (renamed or {}).get(name, name)
        home = next((module for module, names in homes.items() if known in names.split()), None)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value: object = getattr(importlib.import_module(f"{package}.{home}"), known)
        if known != name:
            # Not kept in the package: every use of the old name warns.
            warnings.warn(f"{package}.{name} is called {known}", DeprecationWarning, stacklevel=2)
        else:
            # Python asks __getattr__ only for names that the module lacks: from now on this one is found
            # directly.
            vars(sys.modules[package])[name] = value
        return value

    return find
