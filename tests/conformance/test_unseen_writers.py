"""Snapshots of programs that write past the overlay by passthrough.

On a real mount with the real capture process, on a file system that shares extents and on one that does not.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.capture_child import captured
from support.overlay import PASSES, Overlay, overlay_over
from support.small_disks import missing, small_disk
from support.until import until

from ciuic.repository import Repository

pytestmark = [
    pytest.mark.mount,
    pytest.mark.skipif(not PASSES, reason="nothing passes that driver by"),
]

PAGE = 4096
MIB = 1 << 20
SECONDS = 60
ON_BOTH = [
    "plain",
    pytest.param("xfs", marks=pytest.mark.skipif(bool(missing("xfs")), reason=missing("xfs"))),
]


@pytest.fixture(params=ON_BOTH)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def overlay(kind: str, short_tmp: Path, request: pytest.FixtureRequest) -> Iterator[Overlay]:
    disk = request.getfixturevalue("xfs") if kind == "xfs" else short_tmp
    (disk / "root").mkdir()
    Repository.create(short_tmp / "repository", block_size=PAGE).close()
    with overlay_over(disk / "root", short_tmp / "w.sock", block_size=PAGE) as overlay:
        if not overlay.client.status().passthrough:
            pytest.skip("this kernel has no passthrough")
        yield overlay


@pytest.fixture
def xfs(short_tmp: Path) -> Iterator[Path]:
    with small_disk(short_tmp, "xfs") as point:
        yield point


class Saver(threading.Thread):
    """Saver of a checkpoint: page n consists of the number n."""

    def __init__(self, path: Path, already: int) -> None:
        super().__init__(daemon=True)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        self.begun = self.returned = 0
        self.over = False
        while self.begun < already:
            self._page()
        os.fsync(self._fd)

    def _page(self) -> None:
        self.begun += 1
        os.write(self._fd, page(self.returned))
        self.returned += 1

    def run(self) -> None:
        while not self.over and self.begun < 40_000:
            self._page()
        os.close(self._fd)

    def finish(self) -> None:
        self.over = True
        self.join(SECONDS)


def page(number: int) -> bytes:
    return number.to_bytes(8, "little") * (PAGE // 8)


def test_a_checkpoint_that_is_being_saved(overlay: Overlay, short_tmp: Path) -> None:
    """A checkpoint being saved is in the snapshot with all writes before the cut, in order, and a mark.

    Nothing later is in it, although the program goes on while capture runs. Once saved, the checkpoint is
    whole and unmarked.
    """
    saver = Saver(overlay.root / "checkpoint", 600)
    overlay.client.prepare(0.05)
    saver.start()
    low = saver.returned
    cut = overlay.client.cut()
    high = saver.begun
    content, marked, _ = captured(overlay, short_tmp / "repository", cut.epoch, cut.cut_ns)[b"checkpoint"]
    saver.finish()
    pages = len(content) // PAGE
    assert content == b"".join(page(number) for number in range(pages))
    assert marked
    assert pages >= low
    # Its length is noted before the cut is answered.
    assert pages <= high
    cut = overlay.client.cut()
    found = captured(overlay, short_tmp / "repository", cut.epoch, cut.cut_ns)[b"checkpoint"]
    assert found.content == b"".join(page(number) for number in range(saver.returned))
    assert not found.is_open
    assert found.held


def test_a_mapping_that_outlives_its_close(overlay: Overlay, short_tmp: Path) -> None:
    """Stores through a mapping, opened beside a reader and closed since, are in the next snapshot."""
    path = overlay.root / "mapped"
    path.write_bytes(bytes(PAGE))
    with open(path, "rb"):
        fd = os.open(path, os.O_RDWR)
        with mmap.mmap(fd, PAGE) as mapping:
            os.close(fd)
            for number in (1, 2, 3):
                mapping[7] = number
                cut = overlay.client.cut()
                content, marked, _ = captured(overlay, short_tmp / "repository", cut.epoch, cut.cut_ns)[
                    b"mapped"
                ]
                assert content[7] == number
                assert marked

    def is_marked_no_more() -> bool:
        cut = overlay.client.cut()
        found = captured(overlay, short_tmp / "repository", cut.epoch, cut.cut_ns)[b"mapped"]
        assert found.content == content
        return found == (content, False, None)

    # The kernel releases the mapping's file some time after munmap: until then a cut must assume a writer.
    until("the end of the mark", is_marked_no_more, SECONDS)


@pytest.mark.parametrize(("size", "how"), [(20 * MIB, "open"), (20 * MIB, "truncate"), (70 * MIB, "open")])
def test_truncating_a_large_file_that_is_open_through_passthrough(
    overlay: Overlay, kind: str, short_tmp: Path, size: int, how: str
) -> None:
    """Truncating a large file that a reader holds through passthrough gives the job no error.

    The reader sees the file truncated, and the snapshot has the old content, or is abandoned if 64 MiB would
    have to be copied.
    """
    path = overlay.root / "large"
    with open(path, "wb") as file:
        for number in range(size // PAGE):
            file.write(page(number))
    with open(path, "rb") as reader:
        assert reader.read(PAGE) == page(0)
        cut = overlay.client.cut()
        if how == "open":
            path.write_bytes(b"new")
        else:
            os.truncate(path, 3)
        assert os.fstat(reader.fileno()).st_size == 3
        status = overlay.client.status()
        if size > 64 * MIB and kind == "plain":
            assert status.pending == ()
            assert [entry.epoch for entry in status.abandoned] == [cut.epoch]
        else:
            content = captured(overlay, short_tmp / "repository", cut.epoch, cut.cut_ns)[b"large"].content
            assert content == b"".join(page(number) for number in range(size // PAGE))
    assert path.stat().st_size == 3
