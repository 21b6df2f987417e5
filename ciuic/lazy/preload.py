"""Imports of a lazy restore, done while the store is waited for."""

from __future__ import annotations

import importlib
import threading


def preload() -> None:
    """Begin to import what a lazy restore needs, in a thread: 0.2 s that a remote's first answers take as well."""
    threading.Thread(target=importlib.import_module, args=("ciuic.lazy.service",), daemon=True).start()
