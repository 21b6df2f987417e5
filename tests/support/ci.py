"""What a machine lacks is a skip at somebody's desk and a failure in CI, where a skip would be a test that nobody runs."""

from __future__ import annotations

import os

import pytest

IN_CI = os.environ.get("CI", "").lower() in ("1", "true", "yes")


def needs(lacking: str) -> None:
    """Ends the test here unless ``lacking`` is empty."""
    if lacking and IN_CI:
        pytest.fail(f"{lacking}: in CI this is a failure, not a skip", pytrace=False)
    if lacking:
        pytest.skip(lacking)
