"""Tests of reading mountinfo, and of mounting in place."""

from __future__ import annotations

import errno
import os

import pytest

from ciuic.fuse_layer.system import mounts

MOUNTINFO = rb"""22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
40 22 0:38 / /srv/run rw,relatime - tmpfs tmpfs rw
41 40 0:39 / /srv/run rw,nosuid - fuse.ciuic ciuic rw,user_id=0,group_id=0,allow_other
42 22 0:40 / /srv/with\040space\011and\134 rw master:1 propagate_from:2 - fuse.ciuic ciuic rw
43 41 0:41 / /srv/run/data rw - tmpfs tmpfs rw
44 22 0:42 / /srv/running rw - tmpfs tmpfs rw
broken line
"""


def test_the_topmost_of_stacked_mounts_counts() -> None:
    """The topmost of several mounts at one path is found, whatever the order of the lines."""
    entries = mounts.parse_mountinfo(MOUNTINFO)
    for order in (entries, entries[::-1]):
        top = mounts.mount_at("/srv/run", order)
        assert top is not None
        assert (top.mount_id, top.fs_type, top.device) == (41, "fuse.ciuic", "0:39")


def test_escaped_paths_are_found() -> None:
    """Space, tab and backslash in a mount point are unescaped (proc(5))."""
    assert mounts.overlay_at(b"/srv/with space\tand\\", mounts.parse_mountinfo(MOUNTINFO)) is not None


def test_other_mounts_are_not_ours() -> None:
    """A foreign file system at the path is a mount but no overlay, and a missing mount is neither."""
    entries = mounts.parse_mountinfo(MOUNTINFO)
    assert mounts.mount_at("/srv/run/data", entries) is not None
    assert mounts.overlay_at("/srv/run/data", entries) is None
    assert mounts.mount_at("/srv/nothing", entries) is None


def test_mounts_inside_an_overlay_are_those_made_on_it() -> None:
    """Mounts whose parent is the overlay are inside it; siblings and what the overlay hides are not."""
    entries = mounts.parse_mountinfo(MOUNTINFO)
    hidden = mounts.parse_mountinfo(b"45 40 0:43 / /srv/run/hidden rw - tmpfs tmpfs rw\n")
    overlay = mounts.overlay_at("/srv/run", entries)
    assert overlay is not None
    inside = mounts.mounts_inside(overlay, entries + hidden)
    assert [entry.mount_point for entry in inside] == [b"/srv/run/data"]


def test_this_process_sees_its_own_mounts() -> None:
    """The real mountinfo parses, and names /proc."""
    proc = mounts.mount_at("/proc")
    assert proc is not None
    assert proc.fs_type == "proc"


def test_a_directory_without_a_mount_is_alive(tmp_path: os.PathLike[str]) -> None:
    """Probing a plain directory answers at once, and a missing one does not count as a dead mount."""
    assert mounts.probe(os.fspath(tmp_path), 10) == "alive"
    assert mounts.probe(os.path.join(tmp_path, "absent"), 10) == "alive"


def test_detaching_a_plain_directory_fails(tmp_path: os.PathLike[str]) -> None:
    """Detaching a plain directory fails with EINVAL (or EPERM without privilege)."""
    with pytest.raises(OSError, match=r"Invalid argument|not permitted") as caught:
        mounts.detach(os.fspath(tmp_path))
    assert caught.value.errno in (errno.EINVAL, errno.EPERM)


@pytest.mark.mount
def test_a_mount_whose_server_is_gone_is_found_dead_and_taken_off(tmp_path: os.PathLike[str]) -> None:
    """A mount whose server closed its descriptor is found dead, and detach removes it."""
    path = os.fspath(tmp_path)
    backing = mounts.open_backing(path)
    try:
        fuse = mounts.mount_fuse(backing)
        try:
            entry = mounts.overlay_at(path)
            assert entry is not None
            assert entry.source == b"ciuic"
            with pytest.raises(mounts.AlreadyMounted):
                mounts.open_backing(path)
        finally:
            os.close(fuse)
            state = mounts.probe(path, 30)
            mounts.detach(path)
        assert state == "dead"
        assert mounts.overlay_at(path) is None
    finally:
        os.close(backing)
