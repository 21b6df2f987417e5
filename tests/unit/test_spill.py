"""Tables that outgrow memory: they answer as dictionaries do, in a file that nobody sees, and what goes wrong has words."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.spill import Spill


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.binary(max_size=3))), st.integers(1, 4))
def test_numbers_are_found_as_in_a_dictionary(puts: list[tuple[int, bytes]], most_entries: int) -> None:
    """The last value that was put counts, also of what had been written out; several tables do not meet."""
    spill = Spill("/tmp", most_entries=most_entries)
    table, other = spill.numbers(), spill.numbers()
    for number, value in puts:
        table.put(number, value)
        other.put(number, b"other")
        assert table.get(number) == value
    expected = dict(puts)
    assert dict(table.items()) == expected
    assert bool(table) == bool(expected)
    assert all(number in table for number in expected)
    assert 12345 in table or table.get(12345) is None
    spill.close()


@given(st.lists(st.tuples(st.binary(), st.integers(-1, 2**64 - 2))), st.integers(1, 4))
def test_names_come_in_byte_order(puts: list[tuple[bytes, int]], most_entries: int) -> None:
    """Each once, and none of what was cleared."""
    spill = Spill("/tmp", most_entries=most_entries)
    table, other = spill.names(), spill.names()
    other.put(b"other")
    for name, value in puts:
        table.put(name, value)
    assert list(table.items()) == sorted(dict(puts).items())
    assert all(name in table for name, _ in puts)
    assert b"never put" not in table
    table.clear()
    assert list(table.items()) == []
    table.put(b"again")
    assert list(table.items()) == [(b"again", 0)]
    assert list(other.items()) == [(b"other", 0)]
    spill.close()


def _large(spill: Spill) -> None:
    table = spill.numbers()
    for number in range(40_000):
        table.put(number, bytes(1000))


def test_what_does_not_fit_lies_in_the_directory_without_a_name(tmp_path: Path) -> None:
    """A process that is killed leaves nothing there."""
    spill = Spill(os.fspath(tmp_path), most_entries=1000)
    _large(spill)
    open_files = [
        os.readlink(f"/proc/self/fd/{fd.name}") for fd in os.scandir("/proc/self/fd") if fd.is_symlink()
    ]
    assert [
        path for path in open_files if path.startswith(os.fspath(tmp_path)) and path.endswith("(deleted)")
    ]
    assert os.listdir(tmp_path) == []
    spill.close()


@contextmanager
def _files_of_at_most(size_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_an_error_with_words(tmp_path: Path) -> None:
    """Of the kind that a full repository raises: the capture fails, and says why."""
    spill = Spill(os.fspath(tmp_path), most_entries=1000)
    with _files_of_at_most(1 << 20), pytest.raises(OSError, match="temporary tables") as caught:
        _large(spill)
    assert caught.value.errno in (errno.ENOSPC, errno.EIO)
    spill.close()
