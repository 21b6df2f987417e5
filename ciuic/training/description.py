"""What is noted beside a state: metrics, versions, and the line that `ciuic list` shows."""

from __future__ import annotations

import math
import platform
import socket
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from ciuic.training.reading import Facts


def floats(metrics: Mapping[str, float]) -> dict[str, float]:
    return {key: float(value) for key, value in metrics.items()}


def finite(metrics: dict[str, float]) -> dict[str, float]:
    """JSON has no number for the others."""
    return {key: value for key, value in metrics.items() if math.isfinite(value)}


def summary(facts: Facts) -> str:
    parts = [] if facts.epoch is None else [f"epoch {facts.epoch}"]
    parts.append(f"step {facts.step}")
    parts += [f"{key} {value:.4g}" for key, value in facts.metrics.items()]
    return ", ".join(parts)


def replaced(facts: Facts, **fields: Any) -> Facts:
    return msgspec.structs.replace(facts, **fields)


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "host": socket.gethostname()}
    for name in ("torch", "numpy", "tensorflow", "keras"):
        module = sys.modules.get(name)
        if module is not None:
            found[name] = str(getattr(module, "__version__", ""))
    return found
