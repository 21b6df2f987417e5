"""Tests of the borders of mounts, as statx(2) tells them and as older kernels do."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from ciuic.system import mountinfo
from ciuic.system.mountinfo import MountBorders, border_names, first_border, mount_id

pytestmark = pytest.mark.mount


@pytest.mark.parametrize("statx", [True, False], ids=["statx", "fdinfo"])
def test_every_mount_is_a_border(short_tmp: Path, monkeypatch: pytest.MonkeyPatch, statx: bool) -> None:
    """A tmpfs, a bind mount of the same file system and one over a file are borders; plain names, links and missing ones are none."""
    if not statx:
        monkeypatch.setattr(mountinfo, "_statx_call", None)
    top = short_tmp / "top"
    for name in ("plain", "tmpfs", "bound", "source"):
        (top / name).mkdir(parents=True)
    for name in ("file", "covered"):
        (top / name).touch()
    (top / "link").symlink_to("tmpfs")
    for words in (
        ["-t", "tmpfs", "none", "tmpfs"],
        ["--bind", "source", "bound"],
        ["--bind", "file", "covered"],
    ):
        subprocess.run(["mount", *words], cwd=top, check=True, timeout=30)
    fd = os.open(top, os.O_RDONLY)
    try:
        borders = MountBorders(fd)
        found = {name for name in map(os.fsencode, [*os.listdir(top), "missing"]) if borders.at(name)}
        assert found == {b"tmpfs", b"bound", b"covered"}
        assert border_names(fd, mountinfo.read()) == sorted(found)
        assert mount_id(fd) in {mount.mount_id for mount in mountinfo.read()}
        inside = os.fsencode(top / "tmpfs" / "deeper")
        os.mkdir(inside)
        assert first_border(os.fsencode(top), inside) == os.fsencode(top / "tmpfs")
        assert first_border(os.fsencode(top), os.fsencode(top / "plain")) is None
    finally:
        os.close(fd)
        for name in ("tmpfs", "bound", "covered"):
            subprocess.run(["umount", top / name], check=True, timeout=30)
