"""Tests of I/O priority: how it is written, and that the kernel gets it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ciuic.system.precedence import IoPriority


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("idle", (3, 0)),
        ("none", (0, 0)),
        ("best-effort", (2, 4)),
        ("best-effort:0", (2, 0)),
        (" Best-Effort:7 ", (2, 7)),
    ],
)
def test_each_form_of_the_configuration(text: str, expected: tuple[int, int]) -> None:
    """Each documented form of class and level is parsed."""
    assert IoPriority.parse(text) == expected


@pytest.mark.parametrize(
    "text", ["", "idle:3", "none:1", "best-effort:", "best-effort:8", "realtime", "best-effort:11"]
)
def test_invalid_priorities_are_refused(text: str) -> None:
    """Any other text is refused, so that a typing error does not mean full speed."""
    with pytest.raises(ValueError, match="I/O priority"):
        IoPriority.parse(text)


@pytest.mark.parametrize(("text", "shown"), [("idle", "idle"), ("best-effort:6", "best-effort: prio 6")])
def test_the_kernel_has_it_afterwards(text: str, shown: str) -> None:
    """A process has the I/O priority afterwards, as ionice(1) reads it."""
    program = (
        "import os, subprocess\n"
        "from ciuic.system.precedence import IoPriority, set_io_priority\n"
        f"set_io_priority(IoPriority.parse({text!r}))\n"
        "subprocess.run(['ionice', '-p', str(os.getpid())], check=True)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30
    )
    assert found.stdout.strip() == shown
