"""Every decoder of what lies on disk, fed with mutations of what is valid: a value or a refusal with words, nothing else."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support.fuzz import REGRESSIONS, replay
from support.readers import DEEP, Reader, mutate, readers, refused_or_read

_MUTATIONS = 1500


@pytest.mark.parametrize("reader", readers(), ids=lambda reader: reader.name)
def test_mutations_are_read_or_refused(reader: Reader) -> None:
    """No traceback, and not everything is refused: the valid bytes are read."""
    assert refused_or_read(reader, reader.valid)
    dice = random.Random(5)
    for _ in range(_MUTATIONS):
        refused_or_read(reader, mutate(reader.valid, dice))


@pytest.mark.parametrize("reader", readers(), ids=lambda reader: reader.name)
def test_values_nested_without_end_are_refused(reader: Reader) -> None:
    """A hundred thousand arrays in each other, put in at any place, end in words and not in RecursionError."""
    step = 60 if "configuration" in reader.name else 1  # their parsers go through the text in Python
    for at in range(0, len(reader.valid[:400]) + 1, step):
        refused_or_read(reader, reader.valid[:at] + DEEP + reader.valid[at:])


def test_an_entry_with_an_element_of_a_later_version_may_not_be_bottomless() -> None:
    """Elements behind those that are known are skipped, but not without end."""
    reader = readers()[0]
    one_more = reader.valid.replace(b"\xdc\x00\x12", b"\xdc\x00\x13", 1)
    assert refused_or_read(reader, one_more + b"\x90")
    assert not refused_or_read(reader, one_more + DEEP)


@pytest.mark.parametrize("path", REGRESSIONS, ids=lambda path: path.name)
def test_what_was_found_once_stays_found(path: Path) -> None:
    """Inputs that once ended in something other than a value or a refusal, and some that guided fuzzing likes to begin with."""
    replay(path)


def test_there_are_regressions() -> None:
    """The test before this one runs."""
    assert REGRESSIONS
