"""Tests of finding mounts by which a directory is reached without going through its overlay."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import pytest

from ciuic.system.bypass import BypassingMount, find_bypassing_mounts

_ROOT = "21 1 8:1 / / rw shared:1 - ext4 /dev/x rw\n"
_OVERLAY = "90 21 0:50 / /srv/root rw shared:9 - fuse.ciuic /srv/root rw\n"


class Proc(NamedTuple):
    """Directory that looks like /proc: one process stands for each mount namespace."""

    path: Path

    def add(self, pid: int, table: str, *, namespace: str = "host", root: str = "/") -> None:
        """Add a process that sees these lines of mountinfo."""
        names = [str(pid), "self"] if pid == 1 else [str(pid)]
        for name in names:
            (self.path / name / "ns").mkdir(parents=True)
            os.symlink(f"mnt:[{namespace}]", self.path / name / "ns/mnt")
            os.symlink(root, self.path / name / "root")
            (self.path / name / "mountinfo").write_text(table)
            (self.path / name / "comm").write_text(f"command{pid}\n")

    def found(self, **options: object) -> list[BypassingMount]:
        """Return what is found for /srv/root."""
        return find_bypassing_mounts("/srv/root", proc=self.path, **options)  # type: ignore[arg-type]


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    """Provide a /proc without processes."""
    return Proc(tmp_path)


@pytest.mark.parametrize("overlay", ["", _OVERLAY])
def test_the_directory_itself_is_no_other_way(proc: Proc, overlay: str) -> None:
    """The mount that the overlay is over, or will be over, does not count."""
    proc.add(1, _ROOT + overlay)
    assert proc.found() == []


@pytest.mark.parametrize("overlay", ["", _OVERLAY])
@pytest.mark.parametrize(
    ("line", "place", "shows"),
    [
        ("30 21 8:1 /srv/root /mnt rw", b"/mnt", b"/srv/root"),
        ("30 21 8:1 /srv/root/data /mnt rw", b"/mnt", b"/srv/root/data"),
        ("30 21 8:1 /srv /mnt rw", b"/mnt/root", b"/srv/root"),
        ("30 21 8:1 /srv/root/file /mnt rw", b"/mnt", b"/srv/root/file"),
        ("30 21 8:1 /srv/root/source /srv/root/bound rw", b"/srv/root/bound", b"/srv/root/source"),
        ("30 21 8:1 / /srv/root/up rw", b"/srv/root/up/srv/root", b"/srv/root"),
    ],
    ids=["itself", "below", "above", "a file", "inside the root", "above, inside the root"],
)
def test_a_bind_mount_is_named(proc: Proc, overlay: str, line: str, place: bytes, shows: bytes) -> None:
    """A bind mount of the directory, of one above it or below it is named, before and after the overlay is mounted."""
    proc.add(1, _ROOT + line + " - ext4 /dev/x rw\n" + overlay)
    assert proc.found() == [BypassingMount(place, shows, 1, "command1", elsewhere=False)]


@pytest.mark.parametrize(
    "lines",
    [
        "30 21 8:1 /srv/root2 /mnt rw - ext4 /dev/x rw\n",
        "30 21 8:2 /srv/root /mnt rw - ext4 /dev/y rw\n",
        "30 21 8:1 /srv/root /mnt ro - ext4 /dev/x rw\n",
        "30 21 8:1 /srv/root /mnt rw - ext4 /dev/x ro\n",
        "30 21 8:1 /srv/root /mnt rw - ext4 /dev/x rw\n31 30 0:51 / /mnt rw - fuse.ciuic /mnt rw\n",
        "30 21 8:1 /srv /mnt rw - ext4 /dev/x rw\n31 30 0:52 / /mnt/root rw - tmpfs none rw\n",
        "30 21 8:1 /srv/root /a/mnt rw - ext4 /dev/x rw\n31 21 0:52 / /a rw - tmpfs none rw\n",
    ],
    ids=[
        "another directory",
        "another file system",
        "read-only",
        "read-only file system",
        "overlay",
        "covered",
        "hidden",
    ],
)
def test_what_cannot_be_written_past_the_overlay_is_not_named(proc: Proc, lines: str) -> None:
    """What shows nothing of the directory, cannot be written, or is covered or hidden by another mount does not count."""
    proc.add(1, _ROOT + lines + _OVERLAY)
    assert proc.found() == []


def test_a_container_from_before_the_overlay_is_named(proc: Proc) -> None:
    """A mount namespace that the overlay was not propagated to is named by its first process."""
    proc.add(1, _ROOT + _OVERLAY)
    inside = "70 1 0:60 / / rw - overlay overlay rw\n71 70 8:1 /srv/root /data rw - ext4 /dev/x rw\n"
    for pid in (8, 9):
        proc.add(pid, inside, namespace="container")
    assert proc.found() == [BypassingMount(b"/data", b"/srv/root", 8, "command8", elsewhere=True)]
    assert "/srv/root at /data in the mount namespace of process 8 (command8)" in str(proc.found()[0])
    assert [one.pid for one in proc.found(ignore_pids={8})] == [9]
    assert proc.found(ignore_pids={8, 9}) == []


def test_a_copy_of_the_host_counts_where_no_overlay_reaches_it(proc: Proc) -> None:
    """Before the mount it is known which namespaces will receive the overlay: slaves of the mount, and not private copies."""
    proc.add(1, _ROOT)
    proc.add(5, "50 1 8:1 / / rw master:1 - ext4 /dev/x rw\n", namespace="slave")
    proc.add(6, "60 1 8:1 / / rw shared:4 master:1 - ext4 /dev/x rw\n", namespace="slave and shared")
    proc.add(7, "70 1 8:1 / / rw master:4 - ext4 /dev/x rw\n", namespace="slave of the slave")
    proc.add(8, "80 1 8:1 / / rw - ext4 /dev/x rw\n", namespace="private")
    proc.add(9, "91 1 8:1 /srv/root/part / rw master:1 - ext4 /dev/x rw\n", namespace="part")
    assert [(one.pid, one.place) for one in proc.found()] == [(8, b"/srv/root"), (9, b"/")]


def test_a_chrooted_process_stands_for_a_namespace_without_another(proc: Proc) -> None:
    """Of processes with other root directories each view counts, unless a process sees the whole namespace."""
    part = "31 21 8:1 /srv/root /in rw - ext4 /dev/x rw\n"
    proc.add(1, _ROOT + part.replace("/in", "/jail/in") + _OVERLAY)
    proc.add(2, part, root="/jail")
    proc.add(3, part, namespace="other", root="/jail")
    assert [(one.pid, one.place) for one in proc.found()] == [(1, b"/jail/in"), (3, b"/in")]


def test_nothing_is_found_where_the_mount_is_not_shown(proc: Proc) -> None:
    """Below a chroot whose file system is in no mount table nothing is found, without an error."""
    proc.add(1, "30 1 0:5 / /proc rw - proc proc rw\n")
    assert proc.found() == []


@pytest.mark.parametrize("overlay", ["", "91 22 0:50 / /srv/root rw - fuse.ciuic /srv/root rw\n"])
def test_a_root_that_is_a_disk_of_its_own(proc: Proc, overlay: str) -> None:
    """Where a file system is mounted at the root, another mount of it, or of a part of it, is named."""
    disk = "22 21 8:2 / /srv/root rw shared:2 - ext4 /dev/y rw\n"
    proc.add(1, _ROOT + disk + "30 21 8:2 /part /mnt rw - ext4 /dev/y rw\n" + overlay)
    proc.add(5, _ROOT + disk.replace("22 21", "52 21").replace("shared:2 ", ""), namespace="container")
    assert [(one.pid, one.place, one.shows) for one in proc.found()] == [
        (1, b"/mnt", b"/srv/root/part"),
        (5, b"/srv/root", b"/srv/root"),
    ]
