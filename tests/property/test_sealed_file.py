"""Tests of the sealed file as bytes: what is written comes back, and unknown formats are refused."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.fuse_layer.sealed_format import SealedHead, read_sealed, write_sealed
from ciuic.fuse_layer.undo_format import SealedChange, UndoDamaged, sealed_name
from ciuic.system.spill import Spill

_numbers = st.integers(0, 2**64 - 1)
_names = st.dictionaries(st.binary(min_size=1), st.integers(-1, 2**64 - 2))
_changes = st.builds(
    SealedChange,
    st.booleans(),
    st.booleans(),
    st.one_of(st.integers(0, 1), st.binary(min_size=1)),
    st.one_of(st.none(), _names),
)


def _head(epoch: int = 3, open_for_write: list[int] | None = None) -> SealedHead:
    return SealedHead(
        session="a" * 32,
        epoch=epoch,
        since=2,
        cut_ns=1,
        complete=True,
        root_ino=2,
        block_size=4096,
        open_for_write=open_for_write or [],
    )


@given(st.dictionaries(_numbers, _changes), st.lists(_numbers), st.integers(1, 5))
def test_a_sealed_file_comes_back(
    tmp_path_factory: pytest.TempPathFactory,
    changes: dict[int, SealedChange],
    open_for_write: list[int],
    max_entries: int,
) -> None:
    """Every inode number, name and bitmap comes back, however much of it fits into memory."""
    place = tmp_path_factory.mktemp("undo")
    head = _head(open_for_write=open_for_write)
    write_sealed(os.fspath(place), head, changes.items())
    spill = Spill(os.fspath(place), max_entries=max_entries)
    sealed = read_sealed(os.fspath(place / sealed_name(3)), spill)
    assert sealed.head == head
    assert dict(sealed.changes.items()) == changes
    for ino, change in changes.items():
        assert sealed.changes.get(ino) == change
        assert list(sealed.changes.names(ino)) == sorted((change.names or {}).items())
        assert all(sealed.changes.is_touched(ino, name) for name in change.names or {})
        assert not sealed.changes.is_touched(ino, b"")
    assert sealed.totals.inodes == len(changes)
    assert sealed.totals.names == sum(len(change.names or {}) for change in changes.values())
    spill.close()
    assert os.listdir(place) == [sealed_name(3)]


@pytest.mark.parametrize("max_entries", [100, 1 << 20])
def test_a_directory_of_many_names_comes_back(tmp_path: Path, max_entries: int) -> None:
    """A directory with more names than fit into a frame comes back in byte order."""
    names = {b"%d" % number: number for number in range(5000)}
    write_sealed(
        os.fspath(tmp_path),
        _head(),
        [(7, SealedChange(False, True, 0, names)), (8, SealedChange(True, True, 1, None))],
    )
    spill = Spill(os.fspath(tmp_path), max_entries=max_entries)
    changes = read_sealed(os.fspath(tmp_path / sealed_name(3)), spill).changes
    assert list(changes.names(7)) == sorted(names.items())
    assert changes.is_touched(7, b"4999")
    assert not changes.is_touched(7, b"5000")
    assert list(changes.names(8)) == []
    assert changes.get(9) is None


def test_memory_does_not_grow_with_the_number_of_changes(tmp_path: Path) -> None:
    """Beyond the changes kept in memory, each further change costs less than a byte."""

    def peak_bytes(count: int, directories: int) -> int:
        def changes() -> Iterator[tuple[int, SealedChange]]:
            for ino in range(1, count):
                yield ino, SealedChange(True, True, 1, None)
            names = dict.fromkeys((b"name %d" % number for number in range(1500)), 0)
            for ino in range(count, count + directories):
                yield ino, SealedChange(False, True, 0, names)

        tracemalloc.start()
        write_sealed(os.fspath(tmp_path), _head(count), changes())
        spill = Spill(os.fspath(tmp_path), max_entries=2000)
        sealed = read_sealed(os.fspath(tmp_path / sealed_name(count)), spill)
        assert sealed.changes.get(count - 1) is not None
        assert sum(1 for _ in sealed.changes.items()) == count + directories - 1
        assert sum(1 for _ in sealed.changes.names(count)) == 1500
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        spill.close()
        return peak

    # The first call allocates what is made once for all.
    peak_bytes(3000, 3)
    assert peak_bytes(50_000, 25) - peak_bytes(10_000, 5) < 40_000


@pytest.mark.parametrize(
    "content", [b"\x81\xa7version\x02", b"garbage", b"", b"\x0a\0\0\0\x81\xa7version\x01"]
)
def test_a_sealed_file_of_another_version_is_refused(tmp_path: Path, content: bytes) -> None:
    """A sealed file of a future format, or of garbage, is refused."""
    path = tmp_path / "sealed"
    path.write_bytes(content)
    with pytest.raises(UndoDamaged):
        read_sealed(os.fspath(path), Spill(os.fspath(tmp_path)))


def test_a_sealed_file_that_was_cut_short_is_refused(tmp_path: Path) -> None:
    """A sealed file cut at any byte is refused as a whole."""
    changes = [(number, SealedChange(False, True, 0, None)) for number in range(300)]
    write_sealed(os.fspath(tmp_path), _head(), changes)
    path = tmp_path / sealed_name(3)
    undamaged = path.read_bytes()
    for length in (*range(60), len(undamaged) // 2, *range(len(undamaged) - 30, len(undamaged))):
        path.write_bytes(undamaged[:length])
        with pytest.raises(UndoDamaged):
            read_sealed(os.fspath(path), Spill(os.fspath(tmp_path)))
