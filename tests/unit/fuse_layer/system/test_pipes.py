"""Unit tests of the pipe of bulk data."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.fuse_layer.system.pipes import MAX_SPLICED_BYTES, Pipe

_DATA = bytes(range(256)) * 1024


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.close()


def _file(path: Path, data: bytes = b"", flags: int = 0) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | flags, 0o600)
    os.write(fd, data)
    return fd


@given(
    counts=st.lists(st.integers(1, 100_000), min_size=1, max_size=8),
    refused_at=st.none() | st.integers(0, 8),
    offset=st.integers(0, 10_000),
)
def test_a_body_is_written_whole_whatever_the_file_takes_at_a_time(
    tmp_path_factory: pytest.TempPathFactory, counts: list[int], refused_at: int | None, offset: int
) -> None:
    """Short splices, errors and a file that refuses splice(2) from some point on lose and repeat no byte."""
    folder, pipe, real, calls = tmp_path_factory.mktemp("pipe"), Pipe(), os.splice, 0
    source, target = _file(folder / "source", _DATA), _file(folder / "target")

    def splice(src: int, dst: int, count: int, **more: int) -> int:
        nonlocal calls
        calls += 1
        if refused_at is not None and calls > refused_at:
            raise OSError(errno.EINVAL, "refused")
        if calls % 3 == 0:
            raise OSError(errno.ENOSPC, "full")
        return real(src, dst, min(count, counts[calls % len(counts)]), **more)

    try:
        assert pipe.fill(b"head", source, 0, len(_DATA))
        pipe.take(memoryview(bytearray(4)))
        done = 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "splice", splice)
            while len(pipe):
                with contextlib.suppress(OSError):
                    done += pipe.pwrite_to(target, offset + done)
        assert done == len(_DATA)
        assert os.pread(target, len(_DATA) + 1, offset) == _DATA
    finally:
        pipe.close()
        os.close(source)
        os.close(target)


def test_an_append_only_descriptor_is_written_to_by_a_copy(pipe: Pipe, tmp_path: Path) -> None:
    """splice(2) refuses a descriptor with O_APPEND, and the data arrive all the same."""
    source, target = _file(tmp_path / "source", _DATA), _file(tmp_path / "target", b"old", os.O_APPEND)
    try:
        assert pipe.fill(b"", source, 0, 5000)
        assert pipe.pwrite_to(target, 3) == 5000
        assert os.pread(target, 6000, 0) == b"old" + _DATA[:5000]
        assert len(pipe) == 0
    finally:
        os.close(source)
        os.close(target)


@given(offset=st.integers(0, 5000), length=st.integers(1, MAX_SPLICED_BYTES))
def test_a_reply_is_whole_or_refused(
    tmp_path_factory: pytest.TempPathFactory, offset: int, length: int
) -> None:
    """A range is in the pipe behind its head, or the file was too short for it."""
    pipe, source = Pipe(), _file(tmp_path_factory.mktemp("pipe") / "source", _DATA)
    try:
        if pipe.fill(b"head", source, offset, length):
            read = memoryview(bytearray(len(pipe)))
            pipe.take(read)
            assert bytes(read) == b"head" + _DATA[offset : offset + length]
            assert len(read) == 4 + length
        else:
            assert offset + length > len(_DATA)
    finally:
        pipe.close()
        os.close(source)
