"""Frameworks, and helpers on top of them, that a test imports when it uses them first.

Every worker of a run collects all test files, and imports what they import.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

import pytest


class _Deferred:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)


def deferred(module: str) -> Any:
    """Return a module that is imported when something of it is used; skip the calling file where its package is missing."""
    package = module.partition(".")[0]
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed", allow_module_level=True)
    return _Deferred(module)
