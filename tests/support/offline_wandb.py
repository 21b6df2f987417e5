"""Settings with which Weights & Biases writes below a directory alone, and starts no process that outlives the test."""

from __future__ import annotations

from pathlib import Path

import pytest

_SETTINGS = {
    "MODE": "offline",
    "SILENT": "true",
    "CONSOLE": "off",
    # The monitor of processors is a process that ends some time after the run.
    "X_DISABLE_STATS": "true",
    "X_DISABLE_MACHINE_INFO": "true",
}


def set_offline(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """Set the environment until the end of the test."""
    for name, value in {**_SETTINGS, "DIR": str(directory)}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
