"""Tests of every on-disk decoder on mutations of valid input: a value or a refusal, nothing else."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support.fuzz import REGRESSIONS, replay
from support.readers import DEEP, Reader, mutate, readers, refused_or_read

_MUTATIONS = 1500


@pytest.mark.parametrize("reader", readers(), ids=lambda reader: reader.name)
def test_mutations_are_read_or_refused(reader: Reader) -> None:
    """Mutations never lead to a traceback, and the valid bytes are read."""
    assert refused_or_read(reader, reader.valid)
    dice = random.Random(5)
    for _ in range(_MUTATIONS):
        refused_or_read(reader, mutate(reader.valid, dice))


@pytest.mark.parametrize("reader", readers(), ids=lambda reader: reader.name)
def test_values_nested_without_end_are_refused(reader: Reader) -> None:
    """A hundred thousand nested arrays at any place are refused with words, not with RecursionError."""
    # These parsers go through the text in Python, so they are slow.
    step = 60 if "configuration" in reader.name else 1
    for at in range(0, len(reader.valid[:400]) + 1, step):
        refused_or_read(reader, reader.valid[:at] + DEEP + reader.valid[at:])


def test_an_entry_with_an_element_of_a_later_version_may_not_be_bottomless() -> None:
    """Unknown elements behind the known ones are skipped, and refused when nested too deeply."""
    reader = readers()[0]
    one_more = reader.valid.replace(b"\xdc\x00\x12", b"\xdc\x00\x13", 1)
    assert refused_or_read(reader, one_more + b"\x90")
    assert not refused_or_read(reader, one_more + DEEP)


@pytest.mark.parametrize("path", REGRESSIONS, ids=lambda path: path.name)
def test_regression_inputs_are_read_or_refused(path: Path) -> None:
    """Inputs that once ended in something else, and seeds of guided fuzzing, give a value or a refusal."""
    replay(path)


def test_there_are_regressions() -> None:
    """There are stored inputs, so the test before this one runs."""
    assert REGRESSIONS
