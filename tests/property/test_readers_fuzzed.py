"""Every decoder of what lies on disk, fed with mutations of what is valid: a value or a refusal with words, nothing else."""

from __future__ import annotations

import random

import pytest
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
    for at in range(len(reader.valid[:400]) + 1):
        refused_or_read(reader, reader.valid[:at] + DEEP + reader.valid[at:])


def test_an_entry_with_an_element_of_a_later_version_may_not_be_bottomless() -> None:
    """Elements behind those that are known are skipped, but not without end."""
    reader = readers()[0]
    one_more = reader.valid.replace(b"\xdc\x00\x12", b"\xdc\x00\x13", 1)
    assert refused_or_read(reader, one_more + b"\x90")
    assert not refused_or_read(reader, one_more + DEEP)
