"""Tests of tables that outgrow memory: they answer as dictionaries, in an unlinked file."""

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

from ciuic.system.spill import Spill


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.binary(max_size=3))), st.integers(1, 4))
def test_numbers_are_found_as_in_a_dictionary(puts: list[tuple[int, bytes]], max_entries: int) -> None:
    """The last value put for a number counts, also when spilled, and several tables are independent."""
    spill = Spill("/tmp", max_entries=max_entries)
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
def test_names_come_in_byte_order(puts: list[tuple[bytes, int]], max_entries: int) -> None:
    """Names come in byte order, each once, and without cleared ones."""
    spill = Spill("/tmp", max_entries=max_entries)
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


def test_spill_file_has_no_name(tmp_path: Path) -> None:
    """The spill file has no name, so a killed process leaves nothing in the directory."""
    spill = Spill(os.fspath(tmp_path), max_entries=1000)
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
    """A full disk raises the error of a full repository, so the capture fails with a reason."""
    spill = Spill(os.fspath(tmp_path), max_entries=1000)
    with _files_of_at_most(1 << 20), pytest.raises(OSError, match="temporary tables") as caught:
        _large(spill)
    assert caught.value.errno in (errno.ENOSPC, errno.EIO)
    spill.close()
