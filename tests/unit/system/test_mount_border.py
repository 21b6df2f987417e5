"""Tests of the borders of mounts, as statx(2) tells them and as older kernels do."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

import pytest
from support.restoring import take

from ciuic.compare.diff import diff_restored
from ciuic.config import RootConfig
from ciuic.config.places import check_root
from ciuic.daemon.capture.process import RootUnreadable
from ciuic.daemon.roots.mount_hooks import _open_root
from ciuic.errors import UsageError
from ciuic.repository import Repository
from ciuic.repository.lookup import find, join
from ciuic.restore import Overwrite, execute, plan_restore
from ciuic.system import mountinfo
from ciuic.system.mountinfo import MountBorders, border_names, first_border, mount_id
from ciuic.types import TAG_INCOMPLETE

pytestmark = pytest.mark.mount


@pytest.mark.parametrize("statx", [True, False], ids=["statx", "fdinfo"])
def test_every_mount_is_a_border(short_tmp: Path, monkeypatch: pytest.MonkeyPatch, statx: bool) -> None:
    """A tmpfs, a bind mount of the same file system and one over a file are borders; plain names, links and missing ones are none."""
    if not statx:
        monkeypatch.setattr(mountinfo, "_statx_call", lambda: (None, bytes))
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


@pytest.mark.parametrize("layers", ["lower", "upper", "both"])
def test_files_of_layers_on_other_file_systems_are_no_border(short_tmp: Path, layers: str) -> None:
    """Overlayfs gives a file the device of its layer: it is restored there and compared like any other. No root can be there."""
    apart = short_tmp / "apart"
    merged = short_tmp / "merged"
    for path in (apart, merged, short_tmp / "here"):
        path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", apart], check=True, timeout=30)
    places = {
        "lower": (apart, short_tmp / "here"),
        "upper": (short_tmp / "here", apart),
        "both": (apart, apart),
    }
    below, above = places[layers]
    for path in (below / "lower" / "dir", above / "upper", above / "work"):
        path.mkdir(parents=True)
    plain = short_tmp / "plain"
    for name in ("a", "dir/b"):
        (below / "lower" / name).write_text("of the layer below")
        (plain / name).parent.mkdir(parents=True, exist_ok=True)
        (plain / name).write_text(name)
    options = f"lowerdir={below}/lower,upperdir={above}/upper,workdir={above}/work"
    try:
        subprocess.run(["mount", "-t", "overlay", "-o", options, "none", merged], check=True, timeout=30)
        problems = check_root(RootConfig(merged), mountinfo.read())
        assert ["layers on different" in one.message for one in problems] == [True] * (layers != "both")
        # The daemon refuses the same directories.
        with pytest.raises(UsageError) if problems else contextlib.nullcontext():
            os.close(_open_root(str(merged)))
        with Repository.create(short_tmp / "repository") as repository:
            snapshot = take(repository, plain)
            source = find(repository, snapshot, os.fsencode(plain))
            merged_plain = os.fsencode(merged / "plain")
            plan = plan_restore(repository, snapshot, [source.path], os.fsencode(merged))
            assert execute(plan).complete
            assert list(diff_restored(repository, source, merged_plain)) == []
            for name in ("a", "dir"):
                plan = plan_restore(
                    repository,
                    snapshot,
                    [join(source.path, name.encode())],
                    os.fsencode(merged),
                    overwrite=Overwrite.ALWAYS,
                )
                assert execute(plan).complete
                found = find(repository, snapshot, join(source.path, name.encode()))
                assert list(diff_restored(repository, found, os.fsencode(merged / name))) == []
        assert [(merged / name).read_text() for name in ("a", "dir/b")] == ["a", "dir/b"]
        (merged / "dir" / "c").write_text("of the layer above")
        with Repository.open(short_tmp / "repository") as repository:
            if layers != "both":
                # Where no file can be read there is no snapshot.
                with pytest.raises(RootUnreadable, match="another file system than the root"):
                    take(repository, merged)
                return
            snapshot = take(repository, merged)
            entries = repository.trees.entries(snapshot.roots[0].entry.content)
            assert b"a" in {entry.name for entry in entries if entry.is_file}
        assert TAG_INCOMPLETE not in snapshot.tags
    finally:
        subprocess.run(["umount", merged], check=False, timeout=30)
        subprocess.run(["umount", apart], check=True, timeout=30)
