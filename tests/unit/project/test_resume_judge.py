"""Tests that the judge of the resumes torture finds what differs, and names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.resumes.child import digest
from support.resumes.judge import Comparison, compare, compare_lives

LINES = [("step 1", {"loss": 1.5}), ("step 2", {"loss": 1.25, "rate": 0.1}), ("epoch 0", {"loss": 1.375})]
RESULT = {"state": {"model": "a", "average": "b"}, "values": {"history": [1.5, 1.25], "seconds": 3.0}}


def _run(where: Path, lines: list[tuple[str, dict[str, Any]]], result: dict[str, Any]) -> Path:
    where.mkdir()
    (where / "log-0").write_text(
        "".join(json.dumps({"key": key, "values": values}) + "\n" for key, values in lines)
    )
    (where / "result-0").write_text(json.dumps(result))
    return where


@pytest.mark.parametrize(
    ("lines", "result", "expected"),
    [
        ([LINES[0], *LINES], RESULT, Comparison((), (), ())),
        (LINES[1:], RESULT, Comparison((), ("step: a line is missing",), ())),
        (
            [*LINES, ("step 3", {})],
            RESULT,
            Comparison((), ("step: a line that the undisturbed run has not",), ()),
        ),
        # One wrong line is found, even if the same step was reported rightly in another life.
        ([*LINES, ("step 1", {"loss": 1.4})], RESULT, Comparison((), ("step: loss",), ())),
        ([*LINES, ("step 2", {"loss": 1.25})], RESULT, Comparison((), ("step: rate",), ())),
        (LINES, {**RESULT, "state": {"model": "a", "average": "c"}}, Comparison(("average",), (), ())),
        (
            LINES,
            {**RESULT, "values": {"history": [1.25], "seconds": 2.0}},
            Comparison((), ("at the end: history",), ("at the end: seconds",)),
        ),
    ],
)
def test_each_difference_is_named(
    lines: list[tuple[str, dict[str, Any]]], result: dict[str, Any], expected: Comparison, tmp_path: Path
) -> None:
    """A part of the state, a value at the end, and a value of any line that was ever reported."""
    undisturbed, killed = _run(tmp_path / "a", LINES, RESULT), _run(tmp_path / "b", lines, result)
    assert compare(undisturbed, killed, 1, {"at the end: seconds": "a time"}) == expected


def test_a_state_is_compared_with_the_one_that_was_saved(tmp_path: Path) -> None:
    """A resume from a state that differs, or that no life has saved, is named; so is a run without any resume."""
    saved = ("state a 4", {"model": 1, "rate": 2})
    for number, (lines, expected) in enumerate(
        [
            ([saved, ("resumed a 4", {"model": 1, "rate": 2})], Comparison((), (), ())),
            ([saved, ("resumed a 4", {"model": 1, "rate": 3})], Comparison(("rate",), (), ())),
            ([saved, ("resumed b 4", {"model": 1})], Comparison(("model",), (), ())),
            ([saved], Comparison((), ("no life has resumed",), ())),
        ]
    ):
        assert compare_lives(_run(tmp_path / str(number), lines, RESULT)) == expected


def test_a_digest_depends_on_every_value_and_type() -> None:
    """Values that compare equal have different digests if their types differ."""
    different = [{"a": 1}, {"a": 1.0}, {"a": True}, {"a": [1]}, {"a": [1, []]}, {"b": 1}, {"a": None}, {}]
    assert len({digest(value) for value in different}) == len(different)
