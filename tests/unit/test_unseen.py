"""Writers that pass the overlay by: what tracking, a cut and a capture make of them. Core without a mount; the test writes to
the backing file where the kernel would."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.capture_bench import BLOCK, Bench, bench
from support.small_disks import missing, small_disk

from ciuic.fuse_layer import data as core_data
from ciuic.fuse_layer import swaps, unseen
from ciuic.fuse_layer.core import ROOT_ID, Caller, SetAttr
from ciuic.types import Entry, RootRecord

ROOT = Caller(0, 0)
FRESH = os.O_WRONLY | os.O_TRUNC
KINDS = ["plain", pytest.param("xfs", marks=[pytest.mark.mount, pytest.mark.skipif(bool(missing("xfs")), reason=missing("xfs"))])]  # fmt: skip


@pytest.fixture
def xfs(short_tmp: Path) -> Iterator[Path]:
    with small_disk(short_tmp, "xfs") as point:
        yield point


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def here(kind: str, request: pytest.FixtureRequest) -> Iterator[Bench]:
    with bench(below=request.getfixturevalue("xfs") if kind == "xfs" else None) as made:
        made.core.held_by_kernel = lambda node: True
        yield made
    vars(made).clear()  # pytest still has it when the disk is to be unmounted, and with it descriptors


def made(here: Bench, name: bytes, content: bytes) -> int:
    """A closed file in the root; its node."""
    attr, handle = here.core.create(ROOT_ID, name, 0o644, os.O_RDWR, ROOT)
    here.core.write(handle, 0, content)
    here.core.release(handle)
    return attr.node


def dirty_whole(here: Bench, node: int) -> bool:
    state = here.core._state
    change = state.tracker.current.changes.get(state.nodes.get(node).ino)
    return change is not None and bool(change.whole)


def entry_of(here: Bench, record: RootRecord, name: bytes) -> Entry:
    found = here.repository.trees.entry(record.entry.content, name)
    assert found is not None
    return found


def test_an_unseen_writer_is_wholly_dirty_in_every_epoch_until_it_closes(here: Bench) -> None:
    """From the open on, again after each cut, and not any more in the epoch after the close."""
    node = made(here, b"file", b"old")
    here.core.committed(here.core.cut().epoch)
    assert not dirty_whole(here, node)
    handle = here.core.open(node, FRESH, unseen=True)
    for _ in range(3):
        assert dirty_whole(here, node)
        here.core.committed(here.core.cut().epoch)
    assert dirty_whole(here, node)
    here.core.release(handle)
    assert dirty_whole(here, node)
    here.core.committed(here.core.cut().epoch)
    assert not dirty_whole(here, node)


def test_a_mapping_that_outlives_its_close_is_captured(here: Bench) -> None:
    """A read-write handle is closed, a shared mapping made through it stays: the file counts as being written until it goes."""
    node = made(here, b"file", bytes(BLOCK))
    handle = here.core.open(node, os.O_RDWR, unseen=True)
    kernels = os.open(b"/proc/self/fd/%d" % here.core.descriptor(handle), os.O_RDWR)
    with mmap.mmap(kernels, BLOCK) as mapping:
        os.close(kernels)
        here.core.release(handle)
        for number in range(1, 4):
            mapping[0] = number
            record, _ = here.capture(here.cut(observe=False))
            entry = entry_of(here, record, b"file")
            assert here.repository.content(entry)[0] == number
            assert entry.ino in here.flagged(record)
    here.capture(here.cut(observe=False))
    record, _ = here.capture(here.cut(observe=False))
    assert here.flagged(record) == set()
    assert not dirty_whole(here, node)


@pytest.mark.parametrize("size", [3 * BLOCK + 17, 4 << 20])
def test_what_an_unseen_writer_has_at_the_cut(here: Bench, kind: str, size: int) -> None:
    """With clones exactly what it had written, although it goes on; elsewhere all of that at least. Marked in both cases."""
    node = made(here, b"file", b"old")
    handle = here.core.open(node, FRESH, unseen=True)
    fd = here.core.descriptor(handle)
    first, second = os.urandom(size), os.urandom(size)
    os.pwrite(fd, first, 0)
    epoch = here.cut(observe=False)
    os.pwrite(fd, second, size)
    record, report = here.capture(epoch)
    entry = entry_of(here, record, b"file")
    content = here.repository.content(entry)
    assert report.errors == []
    assert here.core.status()["abandoned"] == []
    assert content[:size] == first
    assert len(content) == entry.size_bytes
    assert entry.ino in here.flagged(record)
    if kind == "xfs":
        assert content == first
    here.core.release(handle)
    record, _ = here.capture(here.cut(observe=False))
    assert here.repository.content(entry_of(here, record, b"file")) == first + second
    assert here.flagged(record) == set()


def test_a_file_opened_past_us_while_an_epoch_waits_is_saved_first(here: Bench) -> None:
    """What is written through a mapping after the open, unseen, is not in the snapshot that was cut before it."""
    content = os.urandom(5 * BLOCK + 9)
    node = made(here, b"file", content)
    epoch = here.cut()
    handle = here.core.open(node, os.O_RDWR, unseen=True)
    os.pwrite(here.core.descriptor(handle), b"\xff" * 3 * BLOCK, BLOCK)
    record, report = here.capture(epoch)
    here.check(record, report)
    here.core.release(handle)


def test_too_large_to_be_saved_gives_the_snapshot_up_and_never_the_open(
    here: Bench, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the limit the sealed epoch is given up where extents cannot be shared; the job's open is served at once."""
    monkeypatch.setattr(core_data, "OPEN_COPY_LIMIT_BYTES", BLOCK)
    node = made(here, b"file", os.urandom(3 * BLOCK))
    here.cut(observe=False)
    here.core.release(here.core.open(node, os.O_RDWR, unseen=True))
    assert bool(here.core.status()["abandoned"]) is (kind != "xfs")
    assert here.core.pending is (kind == "xfs")


@pytest.mark.parametrize("through", ["open", "setattr"])
@pytest.mark.parametrize("large", [False, True])
def test_truncating_what_the_kernel_holds_open(
    here: Bench, kind: str, monkeypatch: pytest.MonkeyPatch, through: str, large: bool
) -> None:
    """A large file open through passthrough is cut short while an epoch waits: cloned, or copied up to a limit, or the epoch is
    given up. The inode stays, because the kernel reads it past us; the job gets no error."""
    monkeypatch.setattr(swaps, "COPY_LIMIT_BYTES", BLOCK)
    monkeypatch.setattr(swaps, "OPEN_COPY_LIMIT_BYTES", 8 * BLOCK)
    node = made(here, b"file", os.urandom((20 if large else 6) * BLOCK))
    reader = here.core.open(node, os.O_RDONLY)
    ino = os.fstat(here.core.descriptor(reader)).st_ino
    epoch = here.cut()
    if through == "open":
        here.core.release(here.core.open(node, FRESH, unseen=True))
    else:
        here.core.setattr(node, SetAttr(size=0), None)
    assert os.fstat(here.core.descriptor(reader)).st_size == 0
    assert os.stat(here.backing / "file").st_ino == ino
    if large and kind != "xfs":
        assert here.core.status()["pending"] == []
        (given_up,) = here.core.status()["abandoned"]
        assert given_up["epoch"] == epoch
    else:
        record, report = here.capture(epoch)
        here.check(record, report)
    here.core.release(reader)


def test_a_writer_that_makes_progress_is_given_a_moment(here: Bench) -> None:
    """prepare ends at once without unseen writers or with one that is idle, and after its time with a busy one."""
    waited: list[float] = []

    def now() -> float:
        return sum(waited)

    node = made(here, b"file", b"")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unseen.time, "sleep", waited.append)
        patch.setattr(unseen.time, "monotonic", now)
        here.core.prepare_cut(2.0)
        assert waited == []
        handle = here.core.open(node, FRESH, unseen=True)
        fd = here.core.descriptor(handle)
        os.utime(fd, ns=(0, 0))
        here.core.prepare_cut(2.0)
        assert waited == []
        os.utime(fd, ns=(0, 1 << 62))
        here.core.prepare_cut(2.0)
        assert 2.0 <= now() < 2.1
    here.core.release(handle)
