"""Tests of readers of one file that share descriptors within one user."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.core_driver import open_backing

from ciuic.fuse_layer.core.overlay_core import ROOT_ID, Credentials, OverlayCore
from ciuic.fuse_layer.core.overlay_hooks import COPY_LIMIT_BYTES
from ciuic.fuse_layer.journal.inherited_session import InheritedSession
from ciuic.fuse_layer.journal.records import (
    OpenedDirectory,
    OpenedFile,
    directory_opened_record,
    opened_record,
)
from ciuic.fuse_layer.state import passthrough_state
from ciuic.fuse_layer.state.passthrough_state import OWN_DESCRIPTORS

MANY = 3 * OWN_DESCRIPTORS


@pytest.fixture
def core(tmp_path: Path) -> Iterator[OverlayCore]:
    (tmp_path / "file").write_bytes(b"x" * (2 * COPY_LIMIT_BYTES))
    backing_fd = open_backing(tmp_path)
    made = OverlayCore(backing_fd, session="5" * 32)
    yield made
    made.close()
    os.close(backing_fd)


def fds(core: OverlayCore, handles: list[int]) -> list[int]:
    return [core.files.descriptor(handle) for handle in handles]


def count_until_refused(take: Callable[[int], object]) -> int:
    """Return how often the operation succeeds before EMFILE."""
    for number in range(1000):
        try:
            take(number)
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            return number
    raise AssertionError("never refused")


def test_readers_share_within_one_user(core: OverlayCore) -> None:
    """Readers of a file beyond the first ones share one read-only descriptor per user.

    No reader has a descriptor of another user, whose limit pays for it, or one that can write.
    """
    node = core.names.lookup(ROOT_ID, b"file").node
    writer = core.files.open(node, os.O_RDWR, uid=1)
    one = [core.files.open(node, os.O_RDONLY, uid=1) for _ in range(MANY)]
    two = [core.files.open(node, os.O_RDONLY, uid=2) for _ in range(MANY)]
    writers = [core.files.open(node, os.O_RDWR, uid=1) for _ in range(3)]
    ones, twos = set(fds(core, one)), set(fds(core, two))
    assert len(ones) == OWN_DESCRIPTORS
    assert len(twos) == 1
    assert not ones & twos
    assert len(set(fds(core, [writer, *writers]))) == 4
    assert not set(fds(core, [writer, *writers])) & (ones | twos)
    for handle in (*one, *two):
        assert core.files.read(handle, 0, 3) == b"xxx"
    quota = core._state.allowances.descriptors
    assert (quota.held(1), quota.held(2)) == (OWN_DESCRIPTORS + 4, 1)
    for handle in (writer, *writers, *one, *two):
        core.files.release(handle)
    assert (quota.held(1), quota.held(2)) == (0, 0)
    assert core._state.allowances.sharing.held(2) == 0
    for fd in ones | twos:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_shared_descriptors_follow_a_file_that_gets_another_inode(core: OverlayCore) -> None:
    """Every handle has the new inode after a truncation during a capture, shared and later ones too."""
    node = core.names.lookup(ROOT_ID, b"file").node
    readers = [core.files.open(node, os.O_RDONLY, uid=7) for _ in range(MANY)]
    old = os.fstat(core.files.descriptor(readers[-1])).st_ino
    core.cut()
    writer = core.files.open(node, os.O_WRONLY | os.O_TRUNC, uid=7)
    core.files.write(writer, 0, b"new")
    later = core.files.open(node, os.O_RDONLY, uid=7)
    assert core.files.descriptor(later) == core.files.descriptor(readers[-1])
    assert os.fstat(core.files.descriptor(later)).st_ino != old
    assert {core.files.read(handle, 0, 10) for handle in (*readers, later)} == {b"new"}


def test_a_refused_create_makes_nothing(
    core: OverlayCore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A create refused with EMFILE for too many descriptors changes nothing."""
    quota = core._state.allowances.descriptors
    monkeypatch.setattr(quota, "_for_all", quota._sum + 3)
    monkeypatch.setattr(quota, "total", quota._sum + 4)
    held = count_until_refused(
        lambda number: core.names.create(ROOT_ID, b"n%d" % number, 0o644, os.O_RDWR, Credentials(9, 9))
    )
    assert not (tmp_path / f"n{held}").exists()
    with pytest.raises(OSError, match="Too many open files"):
        core.names.tmpfile(ROOT_ID, 0o600, os.O_RDWR, Credentials(9, 9))
    with pytest.raises(OSError, match="Too many open files"):
        core.directories.opendir(ROOT_ID, uid=9)
    core.directories.opendir(ROOT_ID, uid=0)


def test_one_large_listing_is_never_refused(core: OverlayCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory larger than the bound can be listed, but not twice at a time by one user."""
    monkeypatch.setattr(core._state.allowances.names, "_for_all", 0)
    for number in range(5):
        core.names.mkdir(ROOT_ID, b"d%d" % number, 0o755, Credentials(0, 0))
        for name in range(2):
            core.names.mkdir(
                core.names.lookup(ROOT_ID, b"d%d" % number).node, b"%d" % name, 0o755, Credentials(0, 0)
            )
    first, second = (
        core.directories.opendir(core.names.lookup(ROOT_ID, name).node, uid=9) for name in (b"d1", b"d2")
    )
    monkeypatch.setattr(core._state.allowances.names, "total", 0)
    assert len(list(core.directories.readdir(first, 0))) == 2
    with pytest.raises(OSError, match="Too many open files"):
        list(core.directories.readdir(second, 0))
    core.directories.releasedir(first)
    assert len(list(core.directories.readdir(second, 0))) == 2


def test_journal_has_the_users_of_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A successor charges the same users for handles; older records without user count for root."""
    file, directory = OpenedFile(1, 2, 3, 4, 5, 6, 54321), OpenedDirectory(7, 8, 9, 54321)
    records = opened_record(file) + directory_opened_record(directory)
    found = InheritedSession()
    list(found.apply(records))
    assert (found.files[1], found.directories[7]) == (file, directory)
    older = b""
    for record in (opened_record(file), directory_opened_record(directory)):
        older += (len(record) - 4 - 4).to_bytes(4, "little") + record[4:-4]
    found = InheritedSession()
    list(found.apply(older))
    assert (found.files[1].uid, found.directories[7].uid) == (0, 0)


def test_handles_on_shared_descriptors_have_a_bound(
    core: OverlayCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Handles on shared descriptors have a bound of their own, as they cost memory."""
    node = core.names.lookup(ROOT_ID, b"file").node
    for _ in range(OWN_DESCRIPTORS):
        core.files.open(node, os.O_RDONLY, uid=9)
    monkeypatch.setattr(core._state.allowances, "sharing", passthrough_state.Quota(100, owner=lambda: 1))
    held = count_until_refused(lambda _: core.files.open(node, os.O_RDONLY, uid=9))
    assert 40 < held < 90
