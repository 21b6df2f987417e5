"""Opens of one file in every combination, on a real mount: none fails, and all see one content."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.overlay import Overlay, overlay_over

pytestmark = pytest.mark.mount

FLAGS = [
    os.O_RDONLY,
    os.O_WRONLY,
    os.O_WRONLY | os.O_APPEND,
    os.O_WRONLY | os.O_TRUNC,
    os.O_RDWR,
    os.O_RDWR | os.O_TRUNC,
    os.O_RDWR | os.O_APPEND,
]
BLOCK = 4096
_IO_SETUP, _IO_DESTROY, _IO_GETEVENTS, _IO_SUBMIT = 206, 207, 208, 209
_IOCB_CMD_PWRITE = 1
_SECONDS = 10.0


@pytest.fixture
def overlay(short_tmp: Path) -> Iterator[Overlay]:
    (short_tmp / "root").mkdir()
    with overlay_over(short_tmp / "root", short_tmp / "w.sock") as overlay:
        yield overlay


def test_every_pair_of_opens_works(overlay: Overlay) -> None:
    """A second open never fails, whatever was opened first, is still open, or was mapped through it."""
    for number, first in enumerate(FLAGS):
        for second in FLAGS:
            path = overlay.root / f"file{number}-{FLAGS.index(second)}"
            path.write_bytes(bytes(BLOCK))
            one = os.open(path, first)
            two = os.open(path, second)
            three = os.open(path, os.O_RDONLY)
            if second & os.O_ACCMODE != os.O_RDONLY:
                os.write(two, b"by two")
                wanted = b"by two"
                seen = os.pread(three, BLOCK * 2, 0)
                assert wanted in seen
            for fd in (two, one, three):
                os.close(fd)


def test_random_opens_of_few_files(overlay: Overlay) -> None:
    """Hundreds of random opens, closes, writes and mappings of three files give one content and no error."""
    rng = random.Random(4)
    paths = [overlay.root / name for name in "abc"]
    contents = {}
    for path in paths:
        path.write_bytes(bytes(BLOCK))
        contents[path] = bytearray(BLOCK)
    opened: list[tuple[Path, int, int]] = []
    for step in range(600):
        path = rng.choice(paths)
        if rng.random() < 0.45 and opened:
            os.close(opened.pop(rng.randrange(len(opened)))[1])
        elif rng.random() < 0.5:
            flags = rng.choice(FLAGS)
            opened.append((path, os.open(path, flags), flags))
            if flags & os.O_TRUNC:
                os.truncate(path, BLOCK)
                contents[path][:] = bytes(BLOCK)
        elif opened:
            path, fd, flags = rng.choice(opened)
            _use(path, fd, flags, contents[path], step % 256, rng.randrange(BLOCK))
    for _, fd, _ in opened:
        os.close(fd)
    for path in paths:
        assert path.read_bytes() == contents[path]
        assert (overlay.backing / path.name).read_bytes() == contents[path]


def _use(path: Path, fd: int, flags: int, content: bytearray, byte: int, at: int) -> None:
    access = flags & os.O_ACCMODE
    if access == os.O_RDONLY:
        assert os.pread(fd, BLOCK, 0) == content
    elif access == os.O_RDWR and byte % 2:
        with mmap.mmap(fd, BLOCK) as mapping:
            mapping[at] = byte
            mapping.flush()
        content[at] = byte
    elif not flags & os.O_APPEND:
        os.pwrite(fd, bytes([byte]), at)
        content[at] = byte
    assert path.read_bytes() == content


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY | os.O_TRUNC])
def test_stores_of_a_mapping_that_joins_a_passthrough_open_are_captured(overlay: Overlay, flags: int) -> None:
    """Stores through a mapping that joined a passthrough open are in the epoch after the cut."""
    path = overlay.root / "file"
    path.write_bytes(bytes(BLOCK))
    before = os.open(path, flags)
    os.truncate(path, BLOCK)
    fd = os.open(path, os.O_RDWR)
    with mmap.mmap(fd, BLOCK) as mapping:
        os.close(fd)
        overlay.client.committed(overlay.client.cut().epoch)
        mapping[5] = 7
        if not overlay.client.status().passthrough:
            # The kernel writes our cached pages back at some time, and always before a cut.
            mapping.flush()
        assert overlay.client.status().dirty_bytes >= BLOCK
        mapping.flush()
    os.close(before)
    assert path.read_bytes()[5] == 7
    assert (overlay.backing / "file").read_bytes()[5] == 7


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="its system calls are called by number")
def test_an_open_after_an_asynchronous_direct_write_reads_it(overlay: Overlay) -> None:
    """A program that opens a file after an asynchronous O_DIRECT write reads what that wrote, whatever others read meanwhile."""
    path = overlay.root / "file"
    path.write_bytes(bytes(BLOCK))
    reader = os.open(path, os.O_RDWR)
    writer = os.open(path, os.O_RDWR | os.O_DIRECT)
    buffer = mmap.mmap(-1, BLOCK)
    buffer[:] = b"n" * BLOCK
    with _asynchronous_io() as (submit, wait):
        # The kernel has dropped its pages of the block when it has taken the write, which the hold lets nobody carry out.
        overlay.client.hold(_SECONDS)
        submit(writer, buffer)
        assert os.pread(reader, BLOCK, 0) == bytes(BLOCK)
        overlay.client.release()
        wait()
    assert path.read_bytes() == bytes(buffer)
    for fd in (reader, writer):
        os.close(fd)


@contextlib.contextmanager
def _asynchronous_io() -> Iterator[tuple[Callable[[int, mmap.mmap], None], Callable[[], None]]]:
    """Provide functions that begin a write of a buffer at the start of a file, and wait for its end (io_submit(2))."""
    libc = ctypes.CDLL(None, use_errno=True)
    context = ctypes.c_ulong()

    def call(number: int, *arguments: object) -> None:
        if libc.syscall(number, *arguments) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def submit(fd: int, buffer: mmap.mmap) -> None:
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        fields = struct.pack(
            "QIiHhIQQqQII", 0, 0, 0, _IOCB_CMD_PWRITE, 0, fd, address, len(buffer), 0, 0, 0, 0
        )
        block = ctypes.create_string_buffer(fields, len(fields))
        call(_IO_SUBMIT, context, ctypes.c_long(1), ctypes.byref(ctypes.c_void_p(ctypes.addressof(block))))

    def wait() -> None:
        event = ctypes.create_string_buffer(32)
        call(_IO_GETEVENTS, context, ctypes.c_long(1), ctypes.c_long(1), event, None)
        assert struct.unpack_from("q", event, 16)[0] == BLOCK

    call(_IO_SETUP, 1, ctypes.byref(context))
    try:
        yield submit, wait
    finally:
        call(_IO_DESTROY, context)
