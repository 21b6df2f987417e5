"""Skips for missing tools, which are failures in CI, where the test would otherwise never run."""

from __future__ import annotations

import os

import pytest

IN_CI = os.environ.get("CI", "").lower() in ("1", "true", "yes")


def needs(lacking: str) -> None:
    """Skip the test, or fail it in CI, unless ``lacking`` is empty."""
    if lacking and IN_CI:
        pytest.fail(f"{lacking}: in CI this is a failure, not a skip", pytrace=False)
    if lacking:
        pytest.skip(lacking)
