"""The table of incomplete files: names of links, what is fetched next, and what waiting readers are told."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.lazy.changes import ChangeJournals
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
