"""Tests of reading extended attributes: what a refusal means to captures, comparisons and restores."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.ci import needs
from support.small_disks import missing, small_disk

from ciuic.compare.diff import LiveNode, UnreadableFile
from ciuic.daemon.capture.view import OfflineLog, SealedView
from ciuic.restore import attributes
from ciuic.system.disk import read_xattrs
from ciuic.system.spill import Spill
from ciuic.types import Entry


def _refuse(number: int) -> Callable[..., list[str]]:
    def refused(*_: object, **__: object) -> list[str]:
        raise OSError(number, os.strerror(number))

    return refused


@pytest.mark.parametrize("skip_unreadable", [True, False])
@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EIO])
def test_a_refused_listing_is_no_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, skip_unreadable: bool
) -> None:
    """A refused listing of attributes is an error, not an empty listing."""
    monkeypatch.setattr(os, "listxattr", _refuse(number))
    with pytest.raises(OSError, match=os.strerror(number)):
        read_xattrs(os.fsencode(tmp_path), skip_unreadable=skip_unreadable)


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_attributes_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A file system without extended attributes gives an empty listing."""
    monkeypatch.setattr(os, "listxattr", _refuse(number))
    assert read_xattrs(os.fsencode(tmp_path), skip_unreadable=False) == {}


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM])
def test_an_unreadable_value_is_left_out_if_the_caller_permits_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A value that may not be read is left out, or is an error where the caller asks for that."""

    def get(_: bytes, name: bytes, **__: object) -> bytes:
        if name == b"user.secret":
            raise OSError(number, os.strerror(number))
        return b"1"

    monkeypatch.setattr(os, "listxattr", lambda *_, **__: ["user.secret", "user.open"])
    monkeypatch.setattr(os, "getxattr", get)
    assert read_xattrs(os.fsencode(tmp_path)) == {b"user.open": b"1"}
    with pytest.raises(PermissionError):
        read_xattrs(os.fsencode(tmp_path), skip_unreadable=False)


def test_a_capture_goes_on_without_attributes_that_may_not_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture continues past attributes that may not be listed, but not past a failing disk."""
    (tmp_path / "file").write_bytes(b"x")
    backing_fd = os.open(tmp_path, os.O_PATH)
    try:
        view = SealedView(backing_fd, log=OfflineLog(), spill=Spill(os.fspath(tmp_path)))
        monkeypatch.setattr(os, "listxattr", _refuse(errno.EACCES))
        with view.root() as root:
            captured_file = view.child(root, b"file")
            assert captured_file is not None
            with captured_file:
                assert (captured_file.stat.size, captured_file.xattrs) == (1, {})
            monkeypatch.setattr(os, "listxattr", _refuse(errno.EIO))
            with pytest.raises(Exception, match=os.strerror(errno.EIO)):
                view.child(root, b"file")
    finally:
        os.close(backing_fd)


def test_comparisons_and_restores_do_not_take_a_refusal_for_no_attributes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`diff` reports attributes it could not read, and a restore does not count them as right."""
    path = tmp_path / "file"
    path.write_bytes(b"x")
    now = path.stat()
    entry = Entry(
        name=b"file", mode=now.st_mode, uid=now.st_uid, gid=now.st_gid, mtime_ns=now.st_mtime_ns, size_bytes=1
    )
    at = os.fsencode(path)
    assert not attributes.differ(at, now, entry, ())
    monkeypatch.setattr(os, "listxattr", _refuse(errno.EACCES))
    with pytest.raises(PermissionError):
        attributes.differ(at, now, entry, ())
    with LiveNode(os.open(tmp_path, os.O_PATH)) as node, pytest.raises(UnreadableFile):
        node.child_xattrs(b"file")


def test_attributes_that_fit_in_one_order_alone_are_all_restored(tmp_path: Path) -> None:
    """ext4 fills the room that a file has for attributes in the order of setting; every set that a file had is set again."""
    needs(missing("ext4"))
    with small_disk(tmp_path, "ext4", 64 << 20, "-I", "256", "-b", "4096") as disk:
        names = (b"user.a", 10), (b"user.b", 42), (b"user.c", 3984)
        job, restored = disk / "job", disk / "restored"
        for path in (job, restored):
            path.write_bytes(b"")
        for name, size in reversed(names):
            os.setxattr(job, name, b"x" * size)
        wanted = tuple(sorted(read_xattrs(os.fsencode(job)).items()))
        # By name, as they are recorded, they do not fit.
        *first, (last, value) = wanted
        for name, shorter in first:
            os.setxattr(restored, name, shorter)
        with pytest.raises(OSError, match="No space left"):
            os.setxattr(restored, last, value)
        st = restored.stat()
        entry = Entry(
            name=b"restored", mode=st.st_mode, uid=st.st_uid, gid=st.st_gid, mtime_ns=st.st_mtime_ns
        )
        assert attributes.apply(os.fsencode(restored), st, entry, wanted) == []
        assert read_xattrs(os.fsencode(restored)) == dict(wanted)
        too_large = (*wanted, (b"user.d", b"x" * 3000))
        (problem,) = attributes.apply(os.fsencode(restored), st, entry, too_large)
        assert "No space left" in problem
        assert len(read_xattrs(os.fsencode(restored))) == 3
