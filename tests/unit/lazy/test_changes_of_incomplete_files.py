"""What a job has changed of an incomplete file: sets of ranges, and journals that were cut short."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from ciuic.lazy.changes import END, ByteRanges, Change, ChangeJournals, Kind, decode, durable_part, replay

RANGES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda it: (it[0], it[0] + it[1])))
WRITES = st.builds(lambda at, n: Change(Kind.WRITE, at, at + n, n), st.integers(0, 40), st.integers(0, 12))
SIZES = st.builds(lambda size: Change(Kind.SIZE, size, 1 << 40, 1), st.integers(0, 50))


@given(RANGES, st.integers(0, 50), st.integers(0, 50))
def test_ranges_are_a_set_of_offsets(added: list[tuple[int, int]], start: int, end: int) -> None:
    """Adding, covering and gaps agree with a plain set, and neighbours become one range."""
    ranges, model = ByteRanges(), set[int]()
    for one in added:
        ranges = ranges.add(*one)
        model |= set(range(*one))
    found = list(ranges)
    assert {at for one in found for at in range(*one)} == model
    assert all(before[1] < after[0] for before, after in itertools.pairwise(found))
    if start < end:
        wanted = set(range(start, end))
        assert ranges.covers(start, end) == (wanted <= model)
        assert {at for gap in ranges.gaps(start, end) for at in range(*gap)} == wanted - model


@given(st.randoms(use_true_random=False), st.integers(300, 2000))
def test_many_ranges_are_a_set_of_offsets(random: Random, count: int) -> None:
    """Sets of more ranges than one run has agree with a plain one, and a set is what it was after others were made from it."""
    ranges, model = ByteRanges(), set[int]()
    for number in range(count):
        start = 3 * random.randrange(count)
        end = start + (random.randrange(600) if not number % 97 else 2)
        before, listed = ranges, list(ranges) if not number % 97 else []
        ranges = ranges.add(start, end)
        model |= set(range(start, end))
        assert not listed or list(before) == listed
    found = list(ranges)
    assert {at for one in found for at in range(*one)} == model
    assert all(before[1] < after[0] for before, after in itertools.pairwise(found))
    for start in range(0, 3 * count, 50):
        wanted = set(range(start, start + 70))
        assert ranges.covers(start, start + 70) == (wanted <= model)
        assert {at for gap in ranges.gaps(start, start + 70) for at in range(*gap)} == wanted - model
    assert list(ranges.add(1, END)) == ([(0, END)] if 0 in model else [(1, END)])


@given(st.lists(WRITES | SIZES, max_size=12), st.integers(1, 40))
def test_the_journal_says_what_is_the_jobs(changes: list[Change], size: int) -> None:
    """Each offset of the snapshot's file is the job's exactly if a change has given it its content, and the size is the last one."""
    content = dict.fromkeys(range(size), "old")
    for change in changes:
        if change.kind is Kind.SIZE:
            content = {at: content.get(at, "job") for at in range(change.start)}
        elif change.end > change.start:
            content = {at: content.get(at, "job") for at in range(max(len(content), change.end))}
            content |= dict.fromkeys(range(change.start, change.end), "job")
    state = replay([change for change in changes if change.end > change.start], size, 0)
    assert state.size_bytes == len(content)
    for at, of in content.items():
        # Nothing is fetched beyond the end that the file had.
        assert at >= size or state.ranges.covers(at, at + 1) == (of == "job"), at


def test_a_journal_ends_at_a_record_that_is_not_whole(tmp_path: Path) -> None:
    """A torn record, and what follows, count for nothing; a mark makes the records before it count in another start of the machine."""
    directory = os.open(tmp_path, os.O_RDONLY)
    try:
        journals = ChangeJournals(directory)
        first, second = Change(Kind.WRITE, 0, 5, 1), Change(Kind.WRITE, 5, 9, 2)
        size = Change(Kind.SIZE, 3, 1 << 40, 2)
        assert journals.append(b"a", first) == 0
        length = journals.append(b"a", second)
        mark = Change(Kind.MARK, length, length, 2)
        journals.append(b"a", mark, durable=True)
        journals.append(b"a", size)
        assert journals.read(b"a") == [first, second, mark, size]
        assert durable_part([first, second, mark, size]) == [first, size]
        data = (tmp_path / "a").read_bytes()
        assert decode(data[:-1]) == [first, second, mark]
        torn = bytearray(data)
        torn[length + 3] ^= 1
        assert decode(bytes(torn)) == [first]
        journals.keep_only(set())
        assert journals.read(b"a") is None
    finally:
        os.close(directory)
