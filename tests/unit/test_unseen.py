"""Writers that pass the overlay by: what tracking, a cut and a capture make of them. Core without a mount; the test writes to
the backing file where the kernel would."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.capture_bench import BLOCK, Bench, bench
from support.small_disks import missing, small_disk

from ciuic.fuse_layer import data as core_data
from ciuic.fuse_layer import instant, swaps, unseen
from ciuic.fuse_layer.core import ROOT_ID, Caller, SetAttr
from ciuic.types import Entry, RootRecord, lag_of

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
def test_what_an_unseen_writer_has_at_the_cut(here: Bench, size: int) -> None:
    """Exactly what it had written, although it goes on: copied or cloned. Marked as open, and as held."""
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
    assert content == first
    assert lag_of(entry) is None
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


def test_what_changes_during_the_hold_is_looked_at_again(
    here: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two writers that go on while their files are copied: what is held of both is one instant; one that never pauses is marked."""
    first, second = (
        here.core.open(made(here, name, b"old"), FRESH, unseen=True) for name in (b"first", b"second")
    )
    write = {handle: here.core.descriptor(handle) for handle in (first, second)}
    real, pauses_after = instant._copied, 2
    rounds = 0

    def copied_beside_a_writer(fd: int, size_bytes: int, budget: instant._Budget) -> list[memoryview] | None:
        nonlocal rounds
        copy = real(fd, size_bytes, budget)
        if fd == write[first] and rounds < pauses_after:
            rounds += 1
            os.pwrite(fd, b"%d" % rounds, 0)
        return copy

    monkeypatch.setattr(instant, "_copied", copied_beside_a_writer)
    os.pwrite(write[first], b"0", 0)
    os.pwrite(write[second], b"seen", 0)
    record, _ = here.capture(here.cut(observe=False))
    entry = entry_of(here, record, b"first")
    assert lag_of(entry) is None
    assert here.repository.content(entry) == b"2"
    pauses_after = 1 << 30
    record, _ = here.capture(here.cut(observe=False))
    lag_ms = lag_of(entry_of(here, record, b"first"))
    assert lag_ms is not None
    assert lag_ms < 10_000
    assert lag_of(entry_of(here, record, b"second")) is None
    here.core.release(first)
    here.core.release(second)


def test_a_handle_that_is_released_during_the_hold(here: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release does not wait for a cut: the cut goes on with the file all the same."""
    handle = here.core.open(made(here, b"file", b"old"), FRESH, unseen=True)
    os.pwrite(here.core.descriptor(handle), b"first", 0)
    real = instant._copied

    def copied_while_released(fd: int, size_bytes: int, budget: instant._Budget) -> list[memoryview] | None:
        here.core.release(handle)
        return real(fd, size_bytes, budget)

    monkeypatch.setattr(instant, "_copied", copied_while_released)
    record, report = here.capture(here.cut(observe=False))
    entry = entry_of(here, record, b"file")
    assert report.errors == []
    assert here.repository.content(entry) == b"first"
    assert lag_of(entry) is None


def test_without_room_the_file_is_as_found_and_marked(
    here: Bench, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that cannot be written costs neither the snapshot nor the job anything."""
    handle = here.core.open(made(here, b"file", b"old"), FRESH, unseen=True)
    os.pwrite(here.core.descriptor(handle), b"first", 0)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    undo = here.core._state.undo
    for name, value in (("keep_copy", full), ("limit_bytes", 4096)):
        with monkeypatch.context() as patch:
            if kind == "xfs":
                patch.setattr(undo, "clone_blocks", lambda *_: False)
            patch.setattr(undo, name, value)
            os.pwrite(here.core.descriptor(handle), b"first" * 2000, 0)
            epoch = here.cut(observe=False)
            os.pwrite(here.core.descriptor(handle), b"later", 0)
            record, report = here.capture(epoch)
        assert report.errors == []
        assert here.core.status()["abandoned"] == []
        assert lag_of(entry_of(here, record, b"file")) is not None
    here.core.release(handle)


def test_more_files_than_a_hold_looks_at(here: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those beyond the limit are captured as found, and marked."""
    monkeypatch.setattr(instant, "MAX_FILES", 2)
    handles = [here.core.open(made(here, b"%d" % number, b"old"), FRESH, unseen=True) for number in range(4)]
    for handle in handles:
        os.pwrite(here.core.descriptor(handle), b"content", 0)
    record, _ = here.capture(here.cut(observe=False))
    entries = [entry_of(here, record, b"%d" % number) for number in range(4)]
    assert [lag_of(entry) is None for entry in entries] == [True, True, False, False]
    for handle in handles:
        here.core.release(handle)
    record, _ = here.capture(here.cut(observe=False))
    assert all(lag_of(entry_of(here, record, b"%d" % number)) is None for number in range(4))


def test_coarse_times_prove_nothing_of_what_changed_just_now(
    here: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without multigrain timestamps: a file written within the last tick is marked, one that was left alone longer is held."""
    monkeypatch.setattr(here.core._unseen, "_fine_times", False)
    handle = here.core.open(made(here, b"file", b"old"), FRESH, unseen=True)
    for tick_ns, held in ((1 << 50, False), (-(1 << 50), True)):
        monkeypatch.setattr(instant, "TICK_NS", tick_ns)
        os.pwrite(here.core.descriptor(handle), b"content", 0)
        record, _ = here.capture(here.cut(observe=False))
        assert (lag_of(entry_of(here, record, b"file")) is None) is held
    here.core.release(handle)
