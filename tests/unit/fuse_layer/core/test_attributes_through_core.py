"""Tests of attributes through the core, without a mount."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from ciuic.fuse_layer.core.overlay_core import ROOT_ID, Credentials, OverlayCore, SetAttr

ROOT = Credentials(0, 0)


@pytest.fixture
def core(tmp_path: Path) -> Iterator[OverlayCore]:
    (tmp_path / "root").mkdir()
    fd = os.open(tmp_path / "root", os.O_PATH | os.O_DIRECTORY)
    made = OverlayCore(fd, session="1" * 32)
    yield made
    made.close()
    os.close(fd)


def test_no_change_of_attributes_follows_a_symbolic_link(core: OverlayCore, tmp_path: Path) -> None:
    """Owner and times of a symbolic link are set on the link, and its target outside keeps its mode."""
    outside = tmp_path / "outside"
    outside.touch(mode=0o600)
    os.utime(outside, ns=(5, 5))
    link = core.names.symlink(ROOT_ID, b"link", os.fsencode(outside), ROOT).node
    with pytest.raises(OSError, match=os.strerror(errno.ENOTSUP)):
        core.attributes.setattr(link, SetAttr(mode=0o777))
    core.attributes.setattr(link, SetAttr(uid=7, gid=8, mtime_ns=1234, atime_ns=5678))
    st = os.lstat(tmp_path / "root" / "link")
    assert (st.st_uid, st.st_gid, st.st_mtime_ns) == (7, 8, 1234)
    st = outside.stat()
    assert (st.st_mode & 0o7777, st.st_uid, st.st_mtime_ns) == (0o600, 0, 5)


def test_a_link_in_the_place_of_a_file_is_not_followed(core: OverlayCore, tmp_path: Path) -> None:
    """A name replaced by a link gives ESTALE, and nothing is changed."""
    outside = tmp_path / "outside"
    outside.touch(mode=0o600)
    attr, handle = core.names.create(ROOT_ID, b"file", 0o600, os.O_RDWR, ROOT)
    core.files.release(handle)
    (tmp_path / "root" / "link").symlink_to(outside)
    (tmp_path / "root" / "link").rename(tmp_path / "root" / "file")
    with pytest.raises(OSError, match="no longer where it was"):
        core.attributes.setattr(attr.node, SetAttr(mode=0o4777))
    assert outside.stat().st_mode & 0o7777 == 0o600


@pytest.mark.parametrize("size", [10, 2 << 20])
@pytest.mark.parametrize("how", ["unlink", "rename over it"])
def test_a_file_with_a_name_that_nobody_looked_up_stays_reachable(
    core: OverlayCore, tmp_path: Path, how: str, size: int
) -> None:
    """A file that has lost the one name looked up so far still opens, links and has attributes, as for O_PATH descriptors."""
    root = tmp_path / "root"
    (root / "known").write_bytes(bytes(size))
    os.link(root / "known", root / "unseen")
    node = core.names.lookup(ROOT_ID, b"known").node
    if how == "unlink":
        core.names.unlink(ROOT_ID, b"known")
    else:
        (root / "new").touch()
        core.names.rename(ROOT_ID, b"new", ROOT_ID, b"known", 0)
    attr = core.attributes.getattr(node)
    assert (attr.nlink, attr.st.st_size) == (1, size)
    handle = core.files.open(node, os.O_RDWR)
    assert core.files.read(handle, 0, 4) == bytes(4)
    core.files.release(handle)
    assert core.names.link(node, ROOT_ID, b"again").nlink == 2
    assert core.names.lookup(ROOT_ID, b"unseen").node == node
    assert os.stat(root / "again").st_ino == os.stat(root / "unseen").st_ino
    assert os.stat(root / "again").st_nlink == 2


def test_a_file_found_by_another_name_frees_its_space_with_it(core: OverlayCore, tmp_path: Path) -> None:
    """No descriptor of a large file is left when the name found later is removed, though the kernel remembers the file."""
    root = tmp_path / "root"
    (root / "known").write_bytes(bytes(2 << 20))
    os.link(root / "known", root / "unseen")
    core.names.lookup(ROOT_ID, b"known")
    core.names.unlink(ROOT_ID, b"known")
    core.names.lookup(ROOT_ID, b"unseen")
    core.names.unlink(ROOT_ID, b"unseen")
    opened = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if os.path.lexists(entry)]
    assert not [path for path in opened if path.startswith((str(root / "known"), str(root / "unseen")))]


def test_an_attribute_is_marked_though_the_change_fails_half_way(
    core: OverlayCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file whose ACL was changed is in the change set, though its set-group-id bit could not be dropped."""
    attr, handle = core.names.create(ROOT_ID, b"file", 0o2755, os.O_RDWR, ROOT)
    core.files.release(handle)
    ino = attr.st.st_ino
    core.committed(core.cut().epoch)
    # Until the first change the file is in no change set.
    assert ino not in core._state.tracker.current.changes

    def fail(*_: object) -> NoReturn:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "chmod", fail)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        core.attributes.setxattr(attr.node, b"user.changed", b"1", 0, drops_group_bit=True)
    assert core.attributes.getxattr(attr.node, b"user.changed") == b"1"
    assert core._state.tracker.current.changes[ino].attrs
