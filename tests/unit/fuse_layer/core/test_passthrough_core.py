"""A passthrough file system serves its backing directory and makes nothing of its own there."""

from __future__ import annotations

import os
from pathlib import Path

from ciuic.fuse_layer.core.directories import Directories
from ciuic.fuse_layer.core.files import Attributes, Files, KernelTimes, SetAttr
from ciuic.fuse_layer.core.names import Names
from ciuic.fuse_layer.core.passthrough_core import PassthroughCore
from ciuic.fuse_layer.state.node_table import ROOT_ID, NodeTable
from ciuic.fuse_layer.state.passthrough_state import PassthroughState
from ciuic.fuse_layer.system.caller import Credentials
from ciuic.fuse_layer.tracking.hidden_links import HiddenLinks

ROOT = Credentials(0, 0)


def test_changes_are_the_backing_directorys(tmp_path: Path) -> None:
    """Names, content, attributes and links are carried out as asked, and the directory has nothing else."""
    top = tmp_path / "top"
    (top / "root").mkdir(parents=True)
    fd = os.open(top / "root", os.O_PATH | os.O_DIRECTORY)
    state = PassthroughState(NodeTable(fd), HiddenLinks())
    times = KernelTimes(state, active=False)
    files = Files(state, times)
    core = PassthroughCore(
        state,
        names=Names(state),
        files=files,
        attributes=Attributes(state, files, times),
        directories=Directories(state),
    )
    folder = core.names.mkdir(ROOT_ID, b"folder", 0o755, ROOT).node
    attr, handle = core.names.create(folder, b"old", 0o644, os.O_RDWR, ROOT)
    core.files.is_unseen(handle)
    core.files.write(handle, 0, b"content")
    core.files.fallocate(handle, 0, 0, 4096)
    core.files.copy_file_range(handle, 0, handle, 100, 7)
    core.attributes.setattr(attr.node, SetAttr(size=107, mode=0o600), handle)
    core.files.fsync(handle, datasync=False)
    core.files.release(handle)
    core.names.rename(folder, b"old", ROOT_ID, b"new", 0)
    assert core.names.link(attr.node, folder, b"other").nlink == 2
    core.names.unlink(folder, b"other")
    core.names.rmdir(ROOT_ID, b"folder")
    core.syncfs()

    handle = core.directories.opendir(ROOT_ID)
    assert [name for name, _, _ in core.directories.readdir(handle, 0)] == [b"new"]
    core.directories.releasedir(handle)
    assert core.attributes.getattr(attr.node).st.st_mode == 0o100600
    assert (top / "root" / "new").read_bytes() == b"content" + bytes(93) + b"content"
    assert core.statfs().f_blocks == os.statvfs(top).f_blocks
    assert not core.pending
    assert not core.open_files
    core.close()
    os.close(fd)
    assert [str(path.relative_to(top)) for path in sorted(top.rglob("*"))] == ["root", "root/new"]
