"""Tests that docs/security.md says who may do what on the page of `ciuic web`."""

from __future__ import annotations

from pathlib import Path

from ciuic.cli.reference import rewritten

PAGE = Path(__file__).parents[3] / "docs" / "security.md"


def test_the_table_of_rights_is_up_to_date() -> None:
    """The table is that of the code; `python -m ciuic.cli.reference docs/security.md` updates it."""
    text = PAGE.read_text(encoding="utf-8")
    assert rewritten(text, PAGE.name) == text
