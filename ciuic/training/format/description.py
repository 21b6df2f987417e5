"""Facts that are stored beside a state: metrics, versions, and the line that `ciuic list` shows."""

from __future__ import annotations

import platform
import socket
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from ciuic.training.format.reading import Facts


def floats(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics as plain floats."""
    return {key: float(value) for key, value in metrics.items()}


def summary(facts: Facts) -> str:
    """Return epoch, step and metrics as one line."""
    parts = [] if facts.epoch is None else [f"epoch {facts.epoch}"]
    parts.append(f"step {facts.step}")
    parts += [f"{key} {value:.4g}" for key, value in facts.metrics.items()]
    return ", ".join(parts)


def replaced(facts: Facts, **fields: Any) -> Facts:
    """Return facts with some fields replaced."""
    return msgspec.structs.replace(facts, **fields)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the imported frameworks, and the name of the host."""
    found = {"python": platform.python_version(), "host": socket.gethostname()}
    # Looked up, not imported: ciuic imports no framework for a program that does not use it.
    for name in ("torch", "numpy", "tensorflow", "keras"):
        module = sys.modules.get(name)
        if module is not None:
            found[name] = str(getattr(module, "__version__", ""))
    return found
