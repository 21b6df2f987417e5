"""Tests that docs/cli.md says what the program does, and docs/security.md who may do what on the page of `ciuic web`."""

from __future__ import annotations

from pathlib import Path

import pytest

from ciuic.cli.app import COMMANDS
from ciuic.cli.reference import rewritten
from ciuic.errors import BY_EXIT_CODE

DOCS = Path(__file__).parents[3] / "docs"
PAGE = DOCS / "cli.md"


@pytest.mark.parametrize("name", ["cli.md", "security.md"])
def test_generated_parts_are_up_to_date(name: str) -> None:
    """Exit codes and options, and who may do what on the page of `ciuic web`, are those of the code.

    `python -m ciuic.cli.reference docs/NAME` updates the page.
    """
    text = (DOCS / name).read_text(encoding="utf-8")
    assert rewritten(text, name) == text


def test_every_exit_code_and_command_is_there() -> None:
    """The page lists every exit code and every command."""
    text = PAGE.read_text(encoding="utf-8")
    for code in (0, 130, *BY_EXIT_CODE):
        assert f"\n| {code} | " in text
    for name in COMMANDS:
        assert f"`ciuic {name} " in text


def test_exit_codes_are_never_renumbered() -> None:
    """The exit codes that scripts rely on are never renumbered."""
    assert {code: kind.__name__ for code, kind in BY_EXIT_CODE.items()} == {
        1: "CiuicError",
        2: "UsageError",
        3: "NotFound",
        4: "Damaged",
        5: "Unreachable",
        6: "DestinationExists",
        7: "NotPermitted",
        8: "Partial",
        75: "Busy",
    }
