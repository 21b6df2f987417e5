"""Counts in messages: one helper, so that nothing says "1 files"."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ciuic.check import CheckReport, summary
from ciuic.restore.model import LeftOut, Result
from ciuic.units import plural

PACKAGE = Path(__file__).parents[2]
NOUNS = "snapshots|files|errors|packs|chunks|problems|warnings|roots|alerts|processes|others|exist"
COUNT = re.compile(rf"(?<!/)\{{(?:len\([^{{}}]*\)|[a-z_][a-z_.]*)\}} (?:{NOUNS}|were open|were left)\b")
"""A bare number before a plural noun in an f-string; ``3/7 files`` is a share and no count."""


def test_one_is_singular() -> None:
    """1 takes the noun as it is, everything else an s, or the form that is given."""
    assert [plural(number, "file") for number in (0, 1, 2)] == ["0 files", "1 file", "2 files"]
    assert plural(1, "was open", "were open") == "1 was open"
    assert plural(2, "was open", "were open") == "2 were open"


def test_sums_of_one() -> None:
    """The sentences that ended in "1 errors" and "1 special files" do not."""
    assert summary(CheckReport(snapshots=1, packs=1)).startswith("1 snapshot, 1 pack, ")
    partial = Result(left_out=[LeftOut(b"/x", "setuid bit")], left_out_because="others may write there")
    assert "1 special file or attribute was left out" in str(partial.error())


@pytest.mark.parametrize("folder", ["cli", "daemon", "ciuic", "ciuic/restore", "ciuic/repository"])
def test_counts_go_through_the_helper(folder: str) -> None:
    """No message of these packages puts a number before a plural noun by itself."""
    found = [
        f"{path.name}: {match.group()}"
        for path in sorted((PACKAGE / folder).glob("*.py"))
        for match in COUNT.finditer(path.read_text(encoding="utf-8"))
    ]
    assert found == []
