"""Reading extended attributes: what a refusal means to captures, comparisons and restores."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ciuic.daemon.capture_view import OfflineLog, SealedView
from ciuic.live import LiveNode, Unreadable
from ciuic.restore import attributes
from ciuic.spill import Spill
from ciuic.types import Entry
from ciuic.xattrs import read_xattrs


def _refuse(number: int) -> Callable[..., list[str]]:
    def refused(*_: object, **__: object) -> list[str]:
        raise OSError(number, os.strerror(number))

    return refused


@pytest.mark.parametrize("skip_unreadable", [True, False])
@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EIO])
def test_a_refused_listing_is_no_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, skip_unreadable: bool
) -> None:
    monkeypatch.setattr(os, "listxattr", _refuse(number))
    with pytest.raises(OSError, match=os.strerror(number)):
        read_xattrs(os.fsencode(tmp_path), skip_unreadable=skip_unreadable)


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_attributes_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(os, "listxattr", _refuse(number))
    assert read_xattrs(os.fsencode(tmp_path), skip_unreadable=False) == {}


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM])
def test_a_value_that_may_not_be_read_is_left_out_where_the_caller_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
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
    """The file is captured; a failing disk is not taken for a refusal."""
    (tmp_path / "file").write_bytes(b"x")
    backing_fd = os.open(tmp_path, os.O_PATH)
    try:
        view = SealedView(backing_fd, log=OfflineLog(), spill=Spill(os.fspath(tmp_path)))
        monkeypatch.setattr(os, "listxattr", _refuse(errno.EACCES))
        with view.root() as root:
            thing = view.child(root, b"file")
            assert thing is not None
            with thing:
                assert (thing.stat.size, thing.xattrs) == (1, {})
            monkeypatch.setattr(os, "listxattr", _refuse(errno.EIO))
            with pytest.raises(Exception, match=os.strerror(errno.EIO)):
                view.child(root, b"file")
    finally:
        os.close(backing_fd)


def test_comparisons_and_restores_do_not_take_a_refusal_for_no_attributes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`diff` says that it could not look, and a restore does not call attributes right that it has not seen."""
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
    with LiveNode(os.open(tmp_path, os.O_PATH)) as node, pytest.raises(Unreadable):
        node.child_xattrs(b"file")
