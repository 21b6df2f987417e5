"""Incomplete files: the table of links and what is fetched next, sets of changed ranges, and journals that were cut short."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.lazy.changes import END, ByteRanges, Change, ChangeJournals, Kind, decode, durable_part, replay
from ciuic.lazy.incomplete_files import Load, PendingFile, PendingFiles, PendingName, PendingPiece
from ciuic.types import ChunkId

BLOCK = 4096
IDS = st.binary(min_size=16, max_size=16)


@pytest.fixture
def pending(tmp_path: Path) -> Iterator[PendingFiles]:
    directory = os.open(tmp_path, os.O_RDONLY)
    yield PendingFiles(directory, BLOCK, ChangeJournals(directory))
    os.close(directory)


def add(pending: PendingFiles, number: int, size_bytes: int, mtime_ns: int = 0) -> PendingFile:
    height = 0 if size_bytes <= BLOCK else 1
    shape = PendingName(number, bytes([number]) * 16, height, size_bytes, mtime_ns)
    pending.add(shape, number, is_new=True)
    found = pending.by_ino.get(number)
    assert found is not None
    return found


def load(pending: PendingFiles, file: PendingFile, blocks: int) -> None:
    pending.loaded(file, 0, {block: ChunkId(bytes([block]) * 16) for block in range(blocks)}, blocks)


@given(
    st.builds(
        PendingName,
        number=st.integers(0, 10**10 - 1),
        content=IDS,
        map_height=st.integers(0, 6),
        size_bytes=st.integers(1, 2**62),
        mtime_ns=st.integers(-(2**63), 2**63),
    )
)
def test_names_of_hidden_links_decode_to_what_was_encoded(name: PendingName) -> None:
    """A name is what was encoded."""
    assert PendingName.decode(name.encode()) == name


@given(st.binary(max_size=80))
def test_other_names_are_refused(name: bytes) -> None:
    """A name that was not made by encoding is none."""
    found = PendingName.decode(name)
    assert found is None or found.number <= 10**10


def test_small_files_come_first_then_the_newest(pending: PendingFiles) -> None:
    """Files of one block are fetched together, in the order of the tree; longer ones by their age."""
    old, new = add(pending, 1, 9 * BLOCK, mtime_ns=1), add(pending, 2, 9 * BLOCK, mtime_ns=2)
    small = [add(pending, number, 100) for number in (3, 4)]
    pending.put_in_order()
    first = pending.take(urgent_only=False)
    assert isinstance(first, list)
    assert [piece.file for piece in first] == small
    assert pending.take(urgent_only=False) == Load(new, 0)
    assert pending.take(urgent_only=False) == Load(old, 0)


def test_nothing_is_fetched_twice_and_failures_come_again(pending: PendingFiles) -> None:
    """A block that a thread fetches is given to no other; after a failure it is given out again."""
    file = add(pending, 1, 3 * BLOCK)
    pending.put_in_order()
    assert pending.take(urgent_only=False) == Load(file, 0)
    load(pending, file, 3)
    work = pending.take(urgent_only=False)
    assert isinstance(work, list)
    assert [piece.block for piece in work] == [0, 1, 2]
    pending.done(work[1])
    pending.failed([work[0], work[2]], errno.EIO)
    again = pending.take(urgent_only=False)
    assert isinstance(again, list)
    assert [piece.block for piece in again] == [0, 2]
    for piece in again:
        pending.done(piece)
    assert file.filled
    assert pending.bytes_left == 0


def test_a_reader_goes_first_and_is_told(pending: PendingFiles) -> None:
    """What a reader waits for is urgent work; it returns when that is there, and raises what went wrong."""
    file = add(pending, 1, 6 * BLOCK)
    load(pending, file, 6)
    add(pending, 2, 10)
    pending.put_in_order()
    told: list[int] = []

    def read() -> None:
        for _ in range(3):
            try:
                pending.wait(file, 4 * BLOCK, 10, lambda: False)
                told.append(0)
            except OSError as error:
                told.append(error.errno or 0)

    reader = threading.Thread(target=read)
    reader.start()
    for fails in (True, False):
        work = pending.take(urgent_only=True)
        assert isinstance(work, list)
        assert [(piece.file, piece.block) for piece in work] == [(file, 4)]
        if fails:
            pending.failed(work, errno.ENOSPC)
        else:
            pending.done(work[0])
    reader.join(30)
    assert told == [errno.ENOSPC, 0, 0]
    assert pending.has(file, 4 * BLOCK, BLOCK)
    assert not pending.has(file, 3 * BLOCK, BLOCK + 1)


def test_damage_concerns_its_readers_alone(pending: PendingFiles) -> None:
    """A damaged block gives EIO, other blocks of the file do not; the file is never filled, and does not keep the end away."""
    file = add(pending, 1, 2 * BLOCK)
    load(pending, file, 2)
    pending.is_damaged(file, (1,), "its bytes do not match their id")
    pending.done(PendingPiece(file, 0, ChunkId(bytes(16))))
    pending.wait(file, 0, BLOCK, lambda: False)
    with pytest.raises(OSError, match="Input/output"):
        pending.wait(file, BLOCK, 1, lambda: False)
    with pytest.raises(OSError, match="Input/output"):
        pending.wait_until_filled(file, lambda: False)
    assert not file.filled
    assert pending.is_over


def test_an_interrupted_reader_returns(pending: PendingFiles) -> None:
    """A reader whose caller was interrupted gets EINTR, and the block is fetched all the same."""
    file = add(pending, 1, BLOCK)
    with pytest.raises(InterruptedError):
        pending.wait(file, 0, 1, lambda: True)
    pending.put_in_order()
    assert pending.take(urgent_only=False) is not None


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
