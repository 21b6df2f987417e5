"""Attributes through the core, without a mount."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ciuic.fuse_layer.core import ROOT_ID, Caller, OverlayCore, SetAttr

ROOT = Caller(0, 0)


@pytest.fixture
def core(tmp_path: Path) -> Iterator[OverlayCore]:
    (tmp_path / "root").mkdir()
    fd = os.open(tmp_path / "root", os.O_PATH | os.O_DIRECTORY)
    made = OverlayCore(fd, session="1" * 32)
    yield made
    made.close()
    os.close(fd)


def test_no_change_of_attributes_follows_a_symbolic_link(core: OverlayCore, tmp_path: Path) -> None:
    """A link that points out of the root takes owner and times itself, and its target keeps its mode."""
    outside = tmp_path / "outside"
    outside.touch(mode=0o600)
    os.utime(outside, ns=(5, 5))
    link = core.symlink(ROOT_ID, b"link", os.fsencode(outside), ROOT).node
    with pytest.raises(OSError, match=os.strerror(errno.ENOTSUP)):
        core.setattr(link, SetAttr(mode=0o777))
    core.setattr(link, SetAttr(uid=7, gid=8, mtime_ns=1234, atime_ns=5678))
    st = os.lstat(tmp_path / "root" / "link")
    assert (st.st_uid, st.st_gid, st.st_mtime_ns) == (7, 8, 1234)
    st = outside.stat()
    assert (st.st_mode & 0o7777, st.st_uid, st.st_mtime_ns) == (0o600, 0, 5)


def test_a_link_in_the_place_of_a_file_is_not_followed(core: OverlayCore, tmp_path: Path) -> None:
    """Where a name leads elsewhere than the node that the kernel means, nothing is changed: ESTALE."""
    outside = tmp_path / "outside"
    outside.touch(mode=0o600)
    attr, handle = core.create(ROOT_ID, b"file", 0o600, os.O_RDWR, ROOT)
    core.release(handle)
    (tmp_path / "root" / "link").symlink_to(outside)
    (tmp_path / "root" / "link").rename(tmp_path / "root" / "file")
    with pytest.raises(OSError, match="no longer where it was"):
        core.setattr(attr.node, SetAttr(mode=0o4777))
    assert outside.stat().st_mode & 0o7777 == 0o600
