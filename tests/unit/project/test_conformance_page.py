"""Tests that docs/conformance.md and the torture name the same expected failures of xfstests."""

from __future__ import annotations

import re
from pathlib import Path

from torture.__main__ import CHECKOUT
from torture.xfstests import EXPECTED, Kind, Xfstests, judged


def test_the_page_has_the_expected_failures_of_xfstests() -> None:
    """The page lists each expected failure once, and says of the same ones on which drivers and kernels they fail."""
    page = (CHECKOUT / "docs/conformance.md").read_text()
    rows = re.findall(r"^\| generic/([\d, ]+)(.*?) \|", page, re.MULTILINE)
    shown = [
        (
            tuple(map(int, re.findall(r"\d+", numbers))),
            "pyfuse3" in rest,
            "before Linux 6.9" in rest,
            "without passthrough" in rest,
        )
        for numbers, rest in rows
    ]
    assert shown == [(one.numbers, one.pyfuse3_only, one.handles, one.cached) for one in EXPECTED]


def test_a_failure_is_expected_where_its_reason_applies() -> None:
    """Failures of file handles are expected with pyfuse3 and before Linux 6.9, those of the cache where it answers, and the limit of
    attributes everywhere.
    """
    times, attributes, handles = EXPECTED
    drivers = ("pyfuse3", "kernel-cached", "kernel")
    assert [times.here(driver, (6, 18)) for driver in drivers] == [True, True, False]
    assert attributes.here("kernel", (6, 18))
    assert [
        handles.here(*one) for one in (("kernel", (6, 18)), ("kernel", (6, 8)), ("pyfuse3", (6, 18)))
    ] == [
        False,
        True,
        True,
    ]


class _Suite(Xfstests):
    """A suite in which the named tests fail on ext4 too."""

    def __init__(self, fails_on_ext4: str = "") -> None:
        super().__init__(Path("/nowhere"), Path("/nowhere"))
        self._fails_on_ext4 = fails_on_ext4

    def run(self, kind: Kind, tests: list[str]) -> dict[str, str]:
        assert kind == "ext4"
        return {test: "failed" if test == self._fails_on_ext4 else "passed" for test in tests}


def test_a_run_fails_by_what_was_not_expected() -> None:
    """A test that fails on the mount alone fails the run, and so does an expected failure that passes; other results do not."""
    outcomes = {
        "generic/001": "passed",
        "generic/394": "differed",
        "generic/020": "differed",
        "generic/100": "not run",
    }
    assert not any(figure.failures for figure in judged(_Suite("generic/394"), outcomes))
    assert [figure.failures for figure in judged(_Suite(), outcomes) if figure.failures] == [
        ("generic/394: differed",)
    ]
    passing = judged(_Suite("generic/394"), {**outcomes, "generic/020": "passed"})
    assert sum(len(figure.failures) for figure in passing) == 1
