"""Bulk data through a mount whose reads and writes pass through the worker's pipe: what is read is what was written."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.overlay import Overlay, overlay_over

from ciuic.fuse_layer.driver_choice import WITHOUT_PASSTHROUGH

pytestmark = pytest.mark.mount
_MAX_BYTES = 3 << 20
_SMALL_BYTES = 1 << 20

_OFFSETS = st.one_of(st.integers(0, _MAX_BYTES), st.sampled_from((0, 1 << 16, 1 << 19, 1 << 20)))
_LENGTHS = st.one_of(
    st.integers(1, _MAX_BYTES), st.integers((1 << 19) - 2, (1 << 19) + 2), st.integers((1 << 16) - 1, 1 << 16)
)
_STEPS = st.lists(
    st.tuples(st.sampled_from(("write", "direct", "truncate", "read", "cold")), _OFFSETS, _LENGTHS),
    max_size=12,
)


@pytest.fixture
def overlay(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Overlay]:
    monkeypatch.setenv(WITHOUT_PASSTHROUGH, "1")
    root = short_tmp / "root"
    root.mkdir()
    with overlay_over(root, short_tmp / "worker.sock") as made:
        yield made


def _pattern(number: int, length: int) -> bytes:
    return (b"%d " % number * (length // 2 + 1))[:length]


@given(steps=_STEPS)
@settings(deadline=None)
def test_what_is_read_is_what_was_written(overlay: Overlay, steps: list[tuple[str, int, int]]) -> None:
    """Cached, synchronous and truncating writes of any size and offset give the same bytes by the mount and below it."""
    path, model = overlay.root / "x", bytearray()
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    synchronous = os.open(path, os.O_WRONLY | os.O_SYNC)
    try:
        for number, (kind, offset, length) in enumerate(steps):
            if kind in ("write", "direct"):
                data = _pattern(number, length)
                model.extend(bytes(max(offset + length - len(model), 0)))
                model[offset : offset + length] = data
                assert os.pwrite(fd if kind == "write" else synchronous, data, offset) == length
            elif kind == "truncate":
                del model[offset:]
                model.extend(bytes(offset - len(model)))
                os.truncate(path, offset)
            else:
                if kind == "cold":
                    os.fsync(fd)
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                assert os.pread(fd, length, offset) == bytes(model[offset : offset + length])
        os.fsync(fd)
        assert (overlay.backing / "x").read_bytes() == bytes(model)
    finally:
        os.close(synchronous)
        os.close(fd)
        path.unlink()


def test_a_write_that_fails_leaves_nothing_for_the_next(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a full disk in the middle of large writes, others write and read what they should."""
    monkeypatch.setenv(WITHOUT_PASSTHROUGH, "1")
    root = short_tmp / "root"
    root.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={4 * _SMALL_BYTES}", "tmpfs", root], check=True)
    try:
        with overlay_over(root, short_tmp / "worker.sock") as overlay:
            kept = _pattern(1, _SMALL_BYTES)
            (root / "kept").write_bytes(kept)
            fd = os.open(root / "large", os.O_RDWR | os.O_CREAT)
            os.write(fd, _pattern(2, 8 * _SMALL_BYTES))
            with pytest.raises(OSError, match="No space left"):
                os.fsync(fd)
            with contextlib.suppress(OSError):
                os.close(fd)
            (root / "large").unlink()
            after = _pattern(3, _SMALL_BYTES)
            (root / "after").write_bytes(after)
            assert (overlay.backing / "after").read_bytes() == after
            assert (overlay.backing / "kept").read_bytes() == kept
    finally:
        subprocess.run(["umount", root], check=True)
