"""Tests of operations of several threads that meet between two system calls, forced instead of by luck."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ciuic.fuse_layer.core.names import Names
from ciuic.fuse_layer.core.overlay_core import ROOT_ID, Credentials, OverlayCore, SetAttr
from ciuic.fuse_layer.journal.journal_writer import JournalWriter
from ciuic.fuse_layer.sealed_format import read_sealed
from ciuic.fuse_layer.state.node_table import NodeTable
from ciuic.fuse_layer.system import syscalls
from ciuic.fuse_layer.system.path_handles import PathHandle
from ciuic.fuse_layer.tracking.changes import Tracker
from ciuic.fuse_layer.tracking.gate import HoldExpired
from ciuic.fuse_layer.undo_format import LOG_NAME, LogReader, sealed_name
from ciuic.system.spill import Spill

ROOT = Credentials(0, 0)


@pytest.fixture
def top(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@pytest.fixture
def core(top: Path) -> Iterator[OverlayCore]:
    fd = os.open(top, os.O_PATH | os.O_DIRECTORY)
    made = OverlayCore(fd, session="1" * 32, kernel_keeps_times=True)
    yield made
    made.close()
    os.close(fd)


def created(core: OverlayCore, name: bytes, data: bytes = b"") -> int:
    attr, handle = core.names.create(ROOT_ID, name, 0o644, os.O_RDWR, ROOT)
    core.files.write(handle, 0, data)
    core.files.release(handle)
    return attr.node


def once_after(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, then: Callable[[], object]) -> None:
    """Call ``then`` once, between the end of the next call of a method and its caller's use of the result."""
    real = getattr(owner, name)

    def call(*args: object, **options: object) -> object:
        monkeypatch.setattr(owner, name, real)
        result = real(*args, **options)
        then()
        return result

    monkeypatch.setattr(owner, name, call)


def _open(core: OverlayCore, node: int) -> None:
    handle = core.files.open(node, os.O_RDWR)
    core.files.write(handle, 0, b"to old")
    core.files.release(handle)


@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(_open, id="open and write"),
        pytest.param(lambda core, node: core.attributes.setattr(node, SetAttr(size=3)), id="truncate"),
        pytest.param(lambda core, node: core.attributes.setattr(node, SetAttr(mode=0o600)), id="chmod"),
        pytest.param(lambda core, node: core.attributes.setxattr(node, b"user.of", b"old", 0), id="setxattr"),
        pytest.param(lambda core, node: core.attributes.removexattr(node, b"user.whose"), id="removexattr"),
    ],
)
def test_file_that_took_a_name_meanwhile_is_not_changed(
    core: OverlayCore,
    top: Path,
    monkeypatch: pytest.MonkeyPatch,
    operation: Callable[[OverlayCore, int], object],
) -> None:
    """A file renamed over another after its path was looked up is not changed in the other's place."""
    old = created(core, b"name", b"old content")
    new = created(core, b"other", b"new content")
    for node in (old, new):
        core.attributes.setxattr(node, b"user.whose", b"v", 0)
    core.names.lookup(ROOT_ID, b"name")
    before = (top / "other").stat()
    once_after(
        monkeypatch,
        NodeTable,
        "path_handle",
        lambda: core.names.rename(ROOT_ID, b"other", ROOT_ID, b"name", 0),
    )
    operation(core, old)
    after = (top / "name").stat()
    assert after.st_ino == before.st_ino
    assert (top / "name").read_bytes() == b"new content"
    assert (after.st_mode, after.st_size, after.st_mtime_ns) == (
        before.st_mode,
        before.st_size,
        before.st_mtime_ns,
    )
    assert os.listxattr(top / "name") == ["user.whose"]


def test_file_that_took_a_name_meanwhile_is_not_read(
    core: OverlayCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attributes, extended attributes and link targets are those of the requested node after a rename."""
    old, new = created(core, b"name", b"1234"), created(core, b"other", b"12")
    core.attributes.setxattr(old, b"user.whose", b"old", 0)
    core.attributes.setxattr(new, b"user.whose", b"new", 0)
    old_link = core.names.symlink(ROOT_ID, b"link", b"old target", ROOT).node
    core.names.symlink(ROOT_ID, b"other link", b"new target", ROOT)

    def meanwhile(source: bytes, target: bytes) -> None:
        once_after(
            monkeypatch,
            NodeTable,
            "path_handle",
            lambda: core.names.rename(ROOT_ID, source, ROOT_ID, target, 0),
        )

    meanwhile(b"other link", b"link")
    assert core.names.readlink(old_link) == b"old target"
    core.names.rename(ROOT_ID, b"name", ROOT_ID, b"first", 0)
    core.names.rename(ROOT_ID, b"other", ROOT_ID, b"second", 0)
    meanwhile(b"first", b"moved")
    assert core.attributes.getattr(old).st.st_size == 4
    meanwhile(b"second", b"moved")
    assert core.attributes.getxattr(old, b"user.whose") == b"old"


def test_operation_waits_for_the_node_table_of_a_rename(
    core: OverlayCore, top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operation waits for the node table of a rename under way, so no ESTALE reaches the program."""
    node = created(core, b"name", b"content")
    looks = 0
    real = PathHandle.open

    def looked(handle: PathHandle, flags: int) -> int:
        nonlocal looks
        looks += 1
        if looks == 3:
            (top / "moved").rename(top / "name")
        return real(handle, flags)

    monkeypatch.setattr(PathHandle, "open", looked)
    (top / "name").rename(top / "moved")
    handle = core.files.open(node, os.O_RDONLY)
    assert core.files.read(handle, 0, 100) == b"content"
    core.files.release(handle)
    assert looks == 3


KERNEL_NS = 1_700_000_000_123_456_789


def test_time_set_while_a_write_begins_is_kept(
    core: OverlayCore, top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A time set by the kernel while a write begins is kept, and is what a flush restores."""
    node = created(core, b"name", b"old")
    core.attributes.setattr(node, SetAttr(mtime_ns=1))
    core.nodes.forget(node, 1)
    node = core.names.lookup(ROOT_ID, b"name").node
    handle = core.files.open(node, os.O_RDWR)
    once_after(monkeypatch, os, "fstat", lambda: core.attributes.setattr(node, SetAttr(mtime_ns=KERNEL_NS)))
    core.files.write(handle, 0, b"new")
    core.files.flush(handle)
    assert (top / "name").stat().st_mtime_ns == KERNEL_NS
    core.files.release(handle)


def test_time_set_in_the_middle_of_a_write_survives(
    core: OverlayCore, top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A time set by the kernel in the middle of a write survives the rest, and the flush restores it."""
    node = created(core, b"name", b"old")
    handle = core.files.open(node, os.O_RDWR)
    real = os.pwrite

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        core.attributes.setattr(node, SetAttr(mtime_ns=KERNEL_NS))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    core.files.write(handle, 0, b"new")
    assert (top / "name").stat().st_mtime_ns != KERNEL_NS
    core.files.flush(handle)
    assert (top / "name").stat().st_mtime_ns == KERNEL_NS
    core.files.release(handle)


def test_a_flush_does_not_put_an_old_time_over_one_that_is_set_meanwhile(
    core: OverlayCore, top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flush does not overwrite a time set by utimensat(2) meanwhile."""
    node = created(core, b"name", b"old")
    core.attributes.setattr(node, SetAttr(mtime_ns=1))
    handle = core.files.open(node, os.O_RDWR)
    core.files.write(handle, 0, b"new")
    setting = threading.Thread(target=core.attributes.setattr, args=(node, SetAttr(mtime_ns=KERNEL_NS)))
    real = syscalls.utimensat

    def utimensat(*args: object, **options: object) -> None:
        monkeypatch.setattr(syscalls, "utimensat", real)
        setting.start()
        # The other thread waits for this one, or is done.
        setting.join(0.1)
        real(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(syscalls, "utimensat", utimensat)
    core.files.flush(handle)
    setting.join()
    assert (top / "name").stat().st_mtime_ns == KERNEL_NS
    core.files.release(handle)


def test_write_within_a_tick_keeps_its_time_in_spite_of_a_close(
    core: OverlayCore, top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A close by another program in the middle of a write does not make the write's time void.

    The kernel sends no time for a write within its tick.
    """
    node = created(core, b"name", b"old")
    core.attributes.setattr(node, SetAttr(mtime_ns=KERNEL_NS))
    handle, other = core.files.open(node, os.O_RDWR), core.files.open(node, os.O_RDWR)
    real = os.pwrite

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        core.files.flush(other)
        return real(fd, data, offset)

    core.files.write(handle, 0, b"new")
    monkeypatch.setattr(os, "pwrite", pwrite)
    core.files.write(handle, 0, b"newer")
    core.files.flush(handle)
    assert (top / "name").stat().st_mtime_ns == KERNEL_NS
    core.files.release(handle)
    core.files.release(other)


def test_a_cut_that_outlives_its_hold_is_not_made(
    core: OverlayCore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cut whose thread runs again only after the hold ended is not made, and no change is lost."""
    created(core, b"name", b"content")

    def change_after_the_hold() -> None:
        core.release_hold(token)
        created(core, b"meanwhile")

    once_after(monkeypatch, Tracker, "seal", change_after_the_hold)
    token = core.hold(5)
    with pytest.raises(HoldExpired):
        core.cut_held(token)
    assert core.status()["pending"] == []
    monkeypatch.undo()
    cut = core.cut()
    spill = Spill(os.fspath(tmp_path))
    sealed = read_sealed(f"/proc/self/fd/{core.undo_fd}/{sealed_name(cut.epoch)}", spill)
    assert set(dict(sealed.changes.names(sealed.head.root_ino))) >= {b"name", b"meanwhile"}
    spill.close()


def test_a_status_during_a_commit_keeps_the_log_of_the_next_epoch(
    core: OverlayCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A status request that meets a half done commit leaves the log of the epoch cut meanwhile alone."""
    created(core, b"name", b"content")
    first = core.cut()
    core.attributes.setattr(core.names.lookup(ROOT_ID, b"name").node, SetAttr(mode=0o600))
    status_asked, listed = threading.Event(), os.listdir

    def ask_and_stop(path: int) -> list[str]:
        if threading.current_thread() is asker:
            status_asked.set()
            go_on.wait(10)
        elif asker.ident is None:
            asker.start()
            # The status request may have to wait, or have nothing to do.
            status_asked.wait(0.5)
        return listed(path)

    go_on = threading.Event()
    asker = threading.Thread(target=core.status)
    monkeypatch.setattr(os, "listdir", ask_and_stop)
    core.committed(first.epoch)
    status_asked.wait(0.5)
    second = core.cut()
    core.attributes.setattr(core.names.lookup(ROOT_ID, b"name").node, SetAttr(mode=0o640))
    go_on.set()
    asker.join()
    reader = LogReader(f"/proc/self/fd/{core.undo_fd}/{LOG_NAME}", second.epoch)
    reader.poll()
    reader.close()
    assert (
        reader.inode(core.attributes.getattr(core.names.lookup(ROOT_ID, b"name").node).st.st_ino) is not None
    )


def test_a_cut_between_making_a_file_and_writing_past_the_overlay(core: OverlayCore, top: Path) -> None:
    """A file made before the cut and written past the overlay after it is empty in the snapshot."""
    attr, handle = core.names.create(ROOT_ID, b"name", 0o644, os.O_WRONLY, ROOT)
    cut = core.cut()
    core.files.is_unseen(handle)
    (top / "name").write_bytes(b"after the cut")
    reader = LogReader(f"/proc/self/fd/{core.undo_fd}/{LOG_NAME}", cut.epoch)
    reader.poll()
    reader.close()
    record = reader.inode(attr.st.st_ino)
    assert record is not None
    assert record.stat.size == 0
    core.files.release(handle)


@pytest.mark.parametrize("size", [4, 2 << 20], ids=["small", "freed at once"])
@pytest.mark.parametrize("replaces", [False, True], ids=["unlink", "rename"])
def test_an_open_beside_the_removal_of_its_name_outlives_the_worker(
    top: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, replaces: bool
) -> None:
    """A handle that is opened while its file loses the last name is kept for a successor, or refused with ESTALE.

    The kernel walks the path anew after ESTALE. A file whose space is freed at once cannot be opened any more.
    """
    fd = os.open(top, os.O_PATH | os.O_DIRECTORY)
    core = OverlayCore(fd, session="1" * 32, journal=JournalWriter(tmp_path / "journal"))
    node, _ = created(core, b"name", b"x" * size), created(core, b"new")
    waits = threading.Event()
    core.files.before_waiting = waits.set
    opened: list[int | OSError] = []

    def open_() -> None:
        try:
            opened.append(core.files.open(node, os.O_RDONLY))
        except OSError as error:
            opened.append(error)

    other = threading.Thread(target=open_)

    def meanwhile() -> None:
        other.start()
        assert waits.wait(60)

    once_after(monkeypatch, Names, "_keep_removed", meanwhile)
    if replaces:
        core.names.rename(ROOT_ID, b"new", ROOT_ID, b"name", 0)
    else:
        core.names.unlink(ROOT_ID, b"name")
    other.join()
    (found,) = opened
    if size > 4:
        assert isinstance(found, OSError)
        assert found.errno == errno.ESTALE
        assert core.open_files == 0
    else:
        assert isinstance(found, int)
        assert core.files.read(found, 0, 10) == b"xxxx"
        attr = core.attributes.getattr(node)
        assert (attr.nlink, attr.st.st_size) == (0, 4)
        ino = os.fstat(core.files.descriptor(found)).st_ino
        assert core._state.hidden.has_orphan(ino)
        core.files.release(found)
        assert not core._state.hidden.has_orphan(ino)
    core.close()
    os.close(fd)
