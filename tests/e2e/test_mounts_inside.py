"""File systems that others mount inside a served root outlive its overlay."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.live import Live
from support.overlay import Overlay
from support.site import CHECKOUT, Site
from support.until import until

from ciuic.daemon.roots.mount_hooks import detach_dead
from ciuic.protocol.worker_client import WorkerRefused
from ciuic.system import mountinfo

pytestmark = pytest.mark.mount


def mount_tmpfs(place: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "inside", str(place)], check=True, timeout=30)


def unmount(*places: Path) -> None:
    for place in places:
        subprocess.run(["umount", "-l", str(place)], check=True, timeout=30)


def mounted_at(place: Path) -> list[int]:
    return [mount.mount_id for mount in mountinfo.mounts_at(os.fsencode(place), mountinfo.read())]


@pytest.mark.parametrize("end", ["stop", "unprotect"])
def test_they_stay_in_their_places(site: Site, end: str) -> None:
    """A job that works in them notices nothing when the root is stopped or no longer protected: they are the same mounts."""
    root = site.root("a")
    (root / "way").mkdir()
    (root / "way/datasets").mkdir()
    site.start()
    place = root / "way/datasets"
    mount_tmpfs(place)
    (place / "nested").mkdir()
    mount_tmpfs(place / "nested")
    before = mounted_at(place) + mounted_at(place / "nested")
    (place / "precious").write_text("kept")
    here = os.getcwd()
    try:
        os.chdir(place)
        with open(place / "nested/log", "w+b", buffering=0) as log:
            log.write(b"one ")
            if end == "stop":
                site.stop()
            else:
                with site.client() as client:
                    client.remove_root(str(root))
            assert site.overlays(root) == 0
            assert os.getcwd() == str(place)
            log.write(b"two")
            assert (place / "nested/log").read_bytes() == b"one two"
        assert Path("precious").read_text() == "kept"
        assert mounted_at(place) + mounted_at(place / "nested") == before
    finally:
        os.chdir(here)
        unmount(place / "nested", place)


def test_those_of_before_stay_where_they_are(site: Site) -> None:
    """What was mounted below the root before the daemon started is the same mount while it runs and afterwards."""
    root = site.root("a")
    (root / "disk").mkdir()
    mount_tmpfs(root / "disk")
    try:
        (root / "disk/f").write_text("kept")
        before = mounted_at(root / "disk")
        site.start()
        assert (root / "disk/f").read_text() == "kept"
        site.stop()
        assert mounted_at(root / "disk") == before
        assert (root / "disk/f").read_text() == "kept"
    finally:
        unmount(root / "disk")


_WHERE_MOUNTS_ARE_SHARED = """
import os, subprocess, sys
from pathlib import Path
from support.overlay import Overlay
from ciuic.fuse_layer.system import mounts
top = Path(sys.argv[1])
root = top / "root"
(root / "datasets").mkdir(parents=True)
backing = mounts.open_backing(os.fspath(root))
with Overlay(root, top / "w.sock") as overlay:
    subprocess.run(["mount", "-t", "tmpfs", "inside", str(root / "datasets")], check=True)
    (root / "datasets/precious").write_text("kept")
    assert (root / "datasets/precious").read_text() == "kept"
    os.chdir(root / "datasets")
    moved = mounts.MovedMounts(os.fspath(root), backing)
    assert not mounts.mounts_inside(mounts.overlay_at(os.fspath(root)))
    assert (root / "datasets/precious").read_text() == "kept"
    moved.back()
    assert bool(mounts.mounts_inside(mounts.overlay_at(os.fspath(root)))) == (sys.argv[2] != "shared")
    assert (root / "datasets/precious").read_text() == "kept"
    mounts.MovedMounts(os.fspath(root), backing).close()
    assert overlay.stop() == 0
    assert os.getcwd() == str(root / "datasets")
    assert Path("precious").read_text() == "kept"
    assert (root / "datasets/precious").read_text() == "kept"
# The same for an overlay whose worker was killed, with one mount inside another.
place = root / "dead"
place.mkdir()
with Overlay(root, top / "w.sock") as overlay:
    subprocess.run(["mount", "-t", "tmpfs", "inside", str(place)], check=True)
    (place / "nested").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "inside", str(place / "nested")], check=True)
    (place / "nested/precious").write_text("kept")
    overlay.process.kill()
    overlay.process.wait()
    assert mounts.detach_keeping_inside(os.fspath(root)) == []
    assert (place / "nested/precious").read_text() == "kept"
"""


@pytest.mark.parametrize("propagation", ["private", "shared", "slave"])
def test_they_move_under_every_propagation(short_tmp: Path, propagation: str) -> None:
    """They go there and back where the mounts of the host are shared, as under systemd, and where they are not."""
    command = [
        "unshare",
        "--mount",
        "--propagation",
        propagation,
        sys.executable,
        "-c",
        _WHERE_MOUNTS_ARE_SHARED,
    ]
    done = subprocess.run(
        [*command, str(short_tmp), propagation],
        env={**os.environ, "PYTHONPATH": f"{CHECKOUT}:{CHECKOUT}/tests"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_they_outlive_a_dead_overlay(short_tmp: Path) -> None:
    """A dead overlay is detached, and what was mounted inside it is in its place over the plain directory."""
    root = short_tmp / "root"
    (root / "way/datasets").mkdir(parents=True)
    place = root / "way/datasets"
    with Overlay(root, short_tmp / "w.sock") as overlay:
        mount_tmpfs(place)
        (place / "nested").mkdir()
        mount_tmpfs(place / "nested")
        (place / "nested/precious").write_text("kept")
        overlay.process.kill()
        overlay.process.wait(60)
        assert detach_dead(str(root)) == 1
    try:
        assert (place / "nested/precious").read_text() == "kept"
        assert len(mounted_at(place)) == len(mounted_at(place / "nested")) == 1
    finally:
        unmount(place / "nested", place)


def test_a_worker_that_is_asked_alone_refuses(short_tmp: Path) -> None:
    """A worker moves no mounts: it refuses to unmount, names what is mounted inside, and serves on."""

    root = short_tmp / "root"
    (root / "datasets").mkdir(parents=True)
    with Overlay(root, short_tmp / "w.sock") as overlay:
        mount_tmpfs(root / "datasets")
        try:
            with pytest.raises(WorkerRefused, match="root/datasets"):
                overlay.client.stop(60)
            (root / "after").write_text("served")
        finally:
            unmount(root / "datasets")
        assert overlay.stop() == 0


def test_what_cannot_be_moved_is_named_and_never_unmounted_lazily(short_tmp: Path) -> None:
    """A mount over another one at the same place is named by `stop`, which ends with 8 and advises nothing that would lose it."""
    root = short_tmp / "root"
    (root / "disk").mkdir(parents=True)
    with Live(short_tmp) as live:
        live.run("protect", str(root))
        live.start(root)
        for name in ("below", "above"):
            mount_tmpfs(root / "disk")
            (root / "disk" / name).write_text("kept")
        before = mounted_at(root / "disk")
        daemon = live.daemon
        assert daemon is not None
        refused = live.run("stop", expect=8).stderr.decode()
        daemon.wait(60)
        assert f"unmount {root}/disk" in refused
        assert "umount -l" not in refused
        refused = live.run("unprotect", str(root), expect=5).stderr.decode()
        assert f"unmount {root}/disk" in refused
        assert "umount -l" not in refused
        assert mounted_at(root / "disk") == before
        assert (root / "disk/above").read_text() == "kept"
        subprocess.run(["umount", str(root / "disk")], check=True, timeout=30)
        assert (root / "disk/below").read_text() == "kept"
        live.run("protect", str(root))
        live.start(root)
        live.run("stop")
        assert (root / "disk/below").read_text() == "kept"
        unmount(root / "disk")


def test_a_stop_names_what_keeps_an_overlay_beside_its_users(short_tmp: Path) -> None:
    """Without a daemon nobody moves what is mounted inside: `stop` names it beside the program that works in the root."""
    root = short_tmp / "root"
    (root / "disk").mkdir(parents=True)
    with Live(short_tmp) as live:
        live.run("protect", str(root))
        live.start(root)
        mount_tmpfs(root / "disk")
        with open(root / "log", "w"):
            said = live.run("stop").stdout.decode()
        assert f"{root}/disk (a mount)" in said
        unmount(root / "disk")
        until("the unmount of the root", lambda: len(mounted_at(root)) == 0)


def test_bind_mounts_of_the_overlay_become_ones_of_the_plain_directory(site: Site) -> None:
    """A directory of the root that was bound inside it while it was served shows the same files after a stop, and to the next overlay."""
    root = site.root("a")
    (root / "source").mkdir()
    (root / "part").mkdir()
    site.start()
    subprocess.run(["mount", "--bind", root / "source", root / "part"], check=True, timeout=30)
    (root / "source/file").write_text("one")
    site.stop()
    assert site.overlays(root) == 0
    assert (root / "part/file").read_text() == "one"
    site.start()
    # In a process of its own: an overlay that led into itself would never answer.
    ways = [root / "source/file", root / "part/file"]
    found = subprocess.run(["cat", *ways], check=True, timeout=30, capture_output=True)
    assert found.stdout == b"oneone"
    (root / "part/file").write_text("two")
    assert (root / "source/file").read_text() == "two"
    site.stop()
    unmount(root / "part")


def test_bind_mounts_of_an_overlay_that_stays(site: Site) -> None:
    """While a program keeps the overlay from being unmounted, a bind mount of it shows the overlay, and nothing lies below it."""
    root = site.root("a")
    (root / "source").mkdir()
    (root / "part").mkdir()
    site.start()
    subprocess.run(["mount", "--bind", root / "source", root / "part"], check=True, timeout=30)
    with open(root / "source/file", "w") as held:
        site.stop()
        assert site.overlays(root) == 1
        assert len(mounted_at(root / "part")) == 1
        held.write("kept")
    assert (root / "part/file").read_text() == "kept"
    unmount(root / "part")
    until("the unmount of the root", lambda: site.overlays(root) == 0)
    assert (root / "source/file").read_text() == "kept"


def test_bind_mounts_of_a_dead_overlay(short_tmp: Path) -> None:
    """A bind mount of an overlay that died shows the plain directory once the dead overlay is detached."""
    root = short_tmp / "root"
    (root / "source").mkdir(parents=True)
    (root / "part").mkdir()
    with Overlay(root, short_tmp / "w.sock") as overlay:
        subprocess.run(["mount", "--bind", root / "source", root / "part"], check=True, timeout=30)
        (root / "source/file").write_text("kept")
        overlay.process.kill()
        overlay.process.wait(60)
        assert detach_dead(str(root)) == 1
    try:
        assert (root / "part/file").read_text() == "kept"
    finally:
        unmount(root / "part")
