"""Tests of passthrough writers in tracking, cuts and captures.

The core has no mount; the test writes to the backing file where the kernel would.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.capture_bench import BLOCK, Bench, bench
from support.small_disks import missing, small_disk

from ciuic.fuse_layer.core import overlay_hooks, passthrough_writers
from ciuic.fuse_layer.core.overlay_core import ROOT_ID, Credentials, SetAttr
from ciuic.types import lag_of

ROOT = Credentials(0, 0)
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
def rig(kind: str, request: pytest.FixtureRequest) -> Iterator[Bench]:
    with bench(below=request.getfixturevalue("xfs") if kind == "xfs" else None) as made:
        made.core.files.swaps.held_by_kernel = lambda node: True
        yield made
    # pytest still has it when the disk is to be unmounted, and with it descriptors.
    vars(made).clear()


def made(rig: Bench, name: bytes, content: bytes) -> int:
    """Make a closed file in the root; return its node."""
    attr, handle = rig.core.names.create(ROOT_ID, name, 0o644, os.O_RDWR, ROOT)
    rig.core.files.write(handle, 0, content)
    rig.core.files.release(handle)
    return attr.node


def is_dirty_as_a_whole(rig: Bench, node: int) -> bool:
    state = rig.core._state
    change = state.tracker.current.changes.get(state.nodes.get(node).ino)
    return change is not None and bool(change.whole)


def test_an_unseen_writer_is_wholly_dirty_in_every_epoch_until_it_closes(rig: Bench) -> None:
    """A file with a passthrough writer is wholly dirty in every epoch from the open until its close."""
    node = made(rig, b"file", b"old")
    rig.core.committed(rig.core.cut().epoch)
    assert not is_dirty_as_a_whole(rig, node)
    handle = rig.core.files.open(node, FRESH, unseen=True)
    for _ in range(3):
        assert is_dirty_as_a_whole(rig, node)
        rig.core.committed(rig.core.cut().epoch)
    assert is_dirty_as_a_whole(rig, node)
    rig.core.files.release(handle)
    assert is_dirty_as_a_whole(rig, node)
    rig.core.committed(rig.core.cut().epoch)
    assert not is_dirty_as_a_whole(rig, node)


def test_a_mapping_that_outlives_its_close_is_captured(rig: Bench) -> None:
    """A shared mapping that outlives its read-write handle makes the file count as written until it goes."""
    node = made(rig, b"file", bytes(BLOCK))
    handle = rig.core.files.open(node, os.O_RDWR, unseen=True)
    kernels = os.open(b"/proc/self/fd/%d" % rig.core.files.descriptor(handle), os.O_RDWR)
    with mmap.mmap(kernels, BLOCK) as mapping:
        os.close(kernels)
        rig.core.files.release(handle)
        for number in range(1, 4):
            mapping[0] = number
            record, _ = rig.capture(rig.cut(observe=False))
            entry = rig.entry_of(record, b"file")
            assert rig.repository.content(entry)[0] == number
            assert entry.ino in rig.flagged(record)
    rig.capture(rig.cut(observe=False))
    record, _ = rig.capture(rig.cut(observe=False))
    assert rig.flagged(record) == set()
    assert not is_dirty_as_a_whole(rig, node)


@pytest.mark.parametrize("size", [3 * BLOCK + 17, 4 << 20])
def test_content_of_a_passthrough_writer_is_that_at_the_cut(rig: Bench, size: int) -> None:
    """The snapshot has exactly what a passthrough writer had written at the cut, marked as open and held.

    The file is copied or cloned.
    """
    node = made(rig, b"file", b"old")
    handle = rig.core.files.open(node, FRESH, unseen=True)
    fd = rig.core.files.descriptor(handle)
    first, second = os.urandom(size), os.urandom(size)
    os.pwrite(fd, first, 0)
    epoch = rig.cut(observe=False)
    os.pwrite(fd, second, size)
    record, report = rig.capture(epoch)
    entry = rig.entry_of(record, b"file")
    content = rig.repository.content(entry)
    assert report.errors == []
    assert rig.core.status()["abandoned"] == []
    assert content[:size] == first
    assert len(content) == entry.size_bytes
    assert entry.ino in rig.flagged(record)
    assert content == first
    assert lag_of(entry) is None
    rig.core.files.release(handle)
    record, _ = rig.capture(rig.cut(observe=False))
    assert rig.repository.content(rig.entry_of(record, b"file")) == first + second
    assert rig.flagged(record) == set()


def test_a_file_opened_past_us_while_an_epoch_waits_is_saved_first(rig: Bench) -> None:
    """A file opened for passthrough while an epoch waits is saved first, as later writes are unseen."""
    content = os.urandom(5 * BLOCK + 9)
    node = made(rig, b"file", content)
    epoch = rig.cut()
    handle = rig.core.files.open(node, os.O_RDWR, unseen=True)
    os.pwrite(rig.core.files.descriptor(handle), b"\xff" * 3 * BLOCK, BLOCK)
    record, report = rig.capture(epoch)
    rig.check(record, report)
    rig.core.files.release(handle)


def test_too_large_to_be_saved_gives_the_snapshot_up_and_never_the_open(
    rig: Bench, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file beyond the save limit gives up the epoch without shared extents, and the open succeeds."""
    monkeypatch.setattr(overlay_hooks, "OPEN_COPY_LIMIT_BYTES", BLOCK)
    node = made(rig, b"file", os.urandom(3 * BLOCK))
    rig.cut(observe=False)
    rig.core.files.release(rig.core.files.open(node, os.O_RDWR, unseen=True))
    assert bool(rig.core.status()["abandoned"]) is (kind != "xfs")
    assert rig.core.pending is (kind == "xfs")


@pytest.mark.parametrize("through", ["open", "setattr"])
@pytest.mark.parametrize("large", [False, True])
def test_truncating_a_file_open_through_passthrough(
    rig: Bench, kind: str, monkeypatch: pytest.MonkeyPatch, through: str, large: bool
) -> None:
    """A large file open through passthrough is truncated in place while an epoch waits.

    It is cloned, or copied up to a limit, or the epoch is given up. The inode stays, because the kernel reads
    it past the overlay; the job gets no error.
    """
    monkeypatch.setattr(overlay_hooks, "COPY_LIMIT_BYTES", BLOCK)
    monkeypatch.setattr(overlay_hooks, "OPEN_COPY_LIMIT_BYTES", 8 * BLOCK)
    node = made(rig, b"file", os.urandom((20 if large else 6) * BLOCK))
    reader = rig.core.files.open(node, os.O_RDONLY)
    ino = os.fstat(rig.core.files.descriptor(reader)).st_ino
    epoch = rig.cut()
    if through == "open":
        rig.core.files.release(rig.core.files.open(node, FRESH, unseen=True))
    else:
        rig.core.attributes.setattr(node, SetAttr(size=0), None)
    assert os.fstat(rig.core.files.descriptor(reader)).st_size == 0
    assert os.stat(rig.backing / "file").st_ino == ino
    if large and kind != "xfs":
        assert rig.core.status()["pending"] == []
        (given_up,) = rig.core.status()["abandoned"]
        assert given_up["epoch"] == epoch
    else:
        record, report = rig.capture(epoch)
        rig.check(record, report)
    rig.core.files.release(reader)


def test_a_writer_that_makes_progress_is_given_a_moment(rig: Bench) -> None:
    """`prepare` ends at once without active passthrough writers, and after its time with a busy one."""
    waited: list[float] = []

    def now() -> float:
        return sum(waited)

    node = made(rig, b"file", b"")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passthrough_writers.time, "sleep", waited.append)
        patch.setattr(passthrough_writers.time, "monotonic", now)
        rig.core.prepare_cut(2.0)
        assert waited == []
        handle = rig.core.files.open(node, FRESH, unseen=True)
        fd = rig.core.files.descriptor(handle)
        os.utime(fd, ns=(0, 0))
        rig.core.prepare_cut(2.0)
        assert waited == []
        os.utime(fd, ns=(0, 1 << 62))
        rig.core.prepare_cut(2.0)
        assert 2.0 <= now() < 2.1
    rig.core.files.release(handle)


def test_files_changed_during_the_hold_are_copied_again(rig: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of two writers changed while they are copied are held at one instant.

    The file of a writer that never pauses is marked.
    """
    first, second = (
        rig.core.files.open(made(rig, name, b"old"), FRESH, unseen=True) for name in (b"first", b"second")
    )
    write = {handle: rig.core.files.descriptor(handle) for handle in (first, second)}
    real, pauses_after = passthrough_writers._copied, 2
    rounds = 0

    def copy_then_write(
        fd: int, size_bytes: int, budget: passthrough_writers._Budget
    ) -> list[memoryview] | None:
        nonlocal rounds
        copy = real(fd, size_bytes, budget)
        if fd == write[first] and rounds < pauses_after:
            rounds += 1
            os.pwrite(fd, b"%d" % rounds, 0)
        return copy

    monkeypatch.setattr(passthrough_writers, "_copied", copy_then_write)
    os.pwrite(write[first], b"0", 0)
    os.pwrite(write[second], b"seen", 0)
    record, _ = rig.capture(rig.cut(observe=False))
    entry = rig.entry_of(record, b"first")
    assert lag_of(entry) is None
    assert rig.repository.content(entry) == b"2"
    pauses_after = 1 << 30
    record, _ = rig.capture(rig.cut(observe=False))
    lag_ms = lag_of(rig.entry_of(record, b"first"))
    assert lag_ms is not None
    assert lag_ms < 10_000
    assert lag_of(rig.entry_of(record, b"second")) is None
    rig.core.files.release(first)
    rig.core.files.release(second)


def test_a_handle_that_is_released_during_the_hold(rig: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handle released during the hold does not wait for the cut, which still holds its file."""
    handle = rig.core.files.open(made(rig, b"file", b"old"), FRESH, unseen=True)
    os.pwrite(rig.core.files.descriptor(handle), b"first", 0)
    real = passthrough_writers._copied

    def copied_while_released(
        fd: int, size_bytes: int, budget: passthrough_writers._Budget
    ) -> list[memoryview] | None:
        rig.core.files.release(handle)
        return real(fd, size_bytes, budget)

    monkeypatch.setattr(passthrough_writers, "_copied", copied_while_released)
    record, report = rig.capture(rig.cut(observe=False))
    entry = rig.entry_of(record, b"file")
    assert report.errors == []
    assert rig.repository.content(entry) == b"first"
    assert lag_of(entry) is None


def test_without_room_the_file_is_as_found_and_marked(
    rig: Bench, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy without room leaves the file marked and as found, and neither snapshot nor job fails."""
    handle = rig.core.files.open(made(rig, b"file", b"old"), FRESH, unseen=True)
    os.pwrite(rig.core.files.descriptor(handle), b"first", 0)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    undo = rig.core._state.undo
    for target, name, value in ((undo, "keep_copy", full), (undo.space, "limit_bytes", 4096)):
        with monkeypatch.context() as patch:
            if kind == "xfs":
                patch.setattr(undo, "clone_blocks", lambda *_: False)
            patch.setattr(target, name, value)
            os.pwrite(rig.core.files.descriptor(handle), b"first" * 2000, 0)
            epoch = rig.cut(observe=False)
            os.pwrite(rig.core.files.descriptor(handle), b"later", 0)
            record, report = rig.capture(epoch)
        assert report.errors == []
        assert rig.core.status()["abandoned"] == []
        assert lag_of(rig.entry_of(record, b"file")) is not None
    rig.core.files.release(handle)


def test_more_files_than_a_hold_looks_at(rig: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files beyond the limit of a hold are captured as found, and marked."""
    monkeypatch.setattr(passthrough_writers, "MAX_FILES", 2)
    handles = [
        rig.core.files.open(made(rig, b"%d" % number, b"old"), FRESH, unseen=True) for number in range(4)
    ]
    for handle in handles:
        os.pwrite(rig.core.files.descriptor(handle), b"content", 0)
    record, _ = rig.capture(rig.cut(observe=False))
    entries = [rig.entry_of(record, b"%d" % number) for number in range(4)]
    assert [lag_of(entry) is None for entry in entries] == [True, True, False, False]
    for handle in handles:
        rig.core.files.release(handle)
    record, _ = rig.capture(rig.cut(observe=False))
    assert all(lag_of(rig.entry_of(record, b"%d" % number)) is None for number in range(4))


def test_coarse_times_do_not_vouch_for_files_of_the_last_tick(
    rig: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file written within the last tick is marked without multigrain timestamps, an older one held."""
    monkeypatch.setattr(rig.core._unseen, "_fine_times", False)
    handle = rig.core.files.open(made(rig, b"file", b"old"), FRESH, unseen=True)
    for tick_ns, held in ((1 << 50, False), (-(1 << 50), True)):
        monkeypatch.setattr(passthrough_writers, "TICK_NS", tick_ns)
        os.pwrite(rig.core.files.descriptor(handle), b"content", 0)
        record, _ = rig.capture(rig.cut(observe=False))
        assert (lag_of(rig.entry_of(record, b"file")) is None) is held
    rig.core.files.release(handle)
