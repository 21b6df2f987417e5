"""Tests of what messages are made of: counts, so that no message says "1 files", and text for one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ciuic.maintenance.check import CheckReport, summary
from ciuic.printable import one_line
from ciuic.restore.model import OmittedSpecial, Result
from ciuic.units import plural

PACKAGE = Path(__file__).parents[2] / "ciuic"
NOUNS = "snapshots|files|errors|packs|chunks|problems|warnings|roots|alerts|processes|others|exist|tensors|members|storages|objects|paths"
COUNT = re.compile(rf"(?<!/)\{{(?:len\([^{{}}]*\)|[a-z_][a-z_.]*)\}} (?:{NOUNS}|were open|were left)\b")
"""Pattern of a bare number before a plural noun in an f-string; ``3/7 files`` is a share and no count."""


def test_one_is_singular() -> None:
    """The noun stays as it is for 1, and gets an s, or is the given plural, for other numbers."""
    assert [plural(number, "file") for number in (0, 1, 2)] == ["0 files", "1 file", "2 files"]
    assert plural(1, "was open", "were open") == "1 was open"
    assert plural(2, "was open", "were open") == "2 were open"


def test_sums_of_one() -> None:
    """The messages that ended in "1 errors" and "1 special files" no longer do."""
    assert summary(CheckReport(snapshots=1, packs=1)).startswith("1 snapshot, 1 pack, ")
    partial = Result(
        left_out=[OmittedSpecial(b"/x", "setuid bit")], left_out_because="others may write there"
    )
    assert "1 special file or attribute was left out" in str(partial.error())


@pytest.mark.parametrize(
    "folder",
    [
        "cli",
        "daemon",
        "maintenance",
        "protocol",
        "repository",
        "restore",
        "system",
        "verdicts",
        "history",
        "compare",
        "lazy",
    ],
)
def test_counts_go_through_the_helper(folder: str) -> None:
    """Messages of these packages put no number before a plural noun by themselves."""
    found = [
        f"{path.name}: {match.group()}"
        for path in sorted((PACKAGE / folder).rglob("*.py"))
        for match in COUNT.finditer(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_any_name_fits_in_a_message() -> None:
    """Bytes that are not text, and control characters, are escaped on one line of a message; the rest stays."""
    assert one_line(b"/plain \xc3\xa9") == "/plain é"
    assert one_line(b"/\xc3\xa9\xff\n\x1b") == r"/é\xff\n\x1b"
    assert one_line("\udcff\u202e") == r"\udcff\u202e"
