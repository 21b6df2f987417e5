"""Processes that go round the overlay are found and named."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ciuic import mountinfo
from ciuic.bypass import Bypasser, Location, Use, find_bypassing, locate, name_inside
from ciuic.mountinfo import Mount


@contextmanager
def process(code: str, *arguments: str, cwd: Path | None = None) -> Iterator[int]:
    """Runs Python code that ends with a line on stdout, and keeps it alive until the block ends."""
    script = code + "\nimport sys\nprint('ready', flush=True)\nsys.stdin.read()\n"
    child = subprocess.Popen(
        [sys.executable, "-c", script, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=cwd
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == b"ready\n"
        yield child.pid
    finally:
        child.stdin.close()
        child.wait()
        child.stdout.close()


def uses_of(found: list[Bypasser], pid: int) -> tuple[Use, ...]:
    return next((one.uses for one in found if one.pid == pid), ())


def test_a_file_open_for_writing_is_named(tmp_path: Path) -> None:
    """A process that holds a file open for writing below the directory is found, with the file's path."""
    target = tmp_path / "a b\nc"
    with process("import sys; f = open(sys.argv[1], 'w')", str(target)) as pid:
        found = find_bypassing(tmp_path)
    assert uses_of(found, pid) == (Use("open", os.fsencode(target), writes=True),)
    assert next(one for one in found if one.pid == pid).writes


def test_a_reader_is_told_from_a_writer(tmp_path: Path) -> None:
    """A file open for reading is found, but not as a writer."""
    target = tmp_path / "data"
    target.write_bytes(b"x")
    with process("import sys; f = open(sys.argv[1])", str(target)) as pid:
        assert uses_of(find_bypassing(tmp_path), pid) == (Use("open", os.fsencode(target), writes=False),)


def test_a_working_directory_counts(tmp_path: Path) -> None:
    """A process whose working directory is below can create files there by relative names."""
    below = tmp_path / "sub"
    below.mkdir()
    with process("", cwd=below) as pid:
        assert Use("working directory", os.fsencode(below), writes=True) in uses_of(
            find_bypassing(tmp_path), pid
        )


def test_a_mapping_outlives_its_descriptor(tmp_path: Path) -> None:
    """A shared writable mapping is found after its descriptor was closed; a private one is no way to write."""
    target = tmp_path / "mapped"
    target.write_bytes(bytes(8192))
    code = (
        "import mmap, os, sys\nfd = os.open(sys.argv[1], os.O_RDWR)\n"
        "m = mmap.mmap(fd, 4096, flags=getattr(mmap, sys.argv[2]))\nos.close(fd)\n"
        "os.close(os.dup(0))"
    )
    # mmap.mmap keeps a duplicate of the descriptor: close it too, so that only the mapping is left
    closing = (
        code
        + "\nfor n in os.listdir('/proc/self/fd'):\n    n = int(n)\n    n > 2 and os.closerange(n, n + 1)\n"
    )
    with (
        process(closing, str(target), "MAP_SHARED") as shared,
        process(closing, str(target), "MAP_PRIVATE") as private,
    ):
        found = find_bypassing(tmp_path)
    assert uses_of(found, shared) == (Use("mapping", os.fsencode(target), writes=True),)
    assert uses_of(found, private) == ()


def test_a_neighbour_with_a_longer_name_is_not_below(tmp_path: Path) -> None:
    """/data2 is not below /data."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data2").mkdir()
    with process("", cwd=tmp_path / "data2") as pid:
        assert uses_of(find_bypassing(tmp_path / "data"), pid) == ()


def test_a_name_longer_than_a_page_stops_nothing(tmp_path: Path) -> None:
    """A process with a file open whose path the kernel cannot print does not hide the others, or its own others."""
    code = (
        "import os, sys\nos.chdir(sys.argv[1])\nkeep = open('f', 'w')\n"
        "for _ in range(20):\n    os.mkdir('d' * 250)\n    os.chdir('d' * 250)\n"
        "deep = open('g', 'w')\nos.chdir('/')\n"
    )
    with process(code, str(tmp_path)) as pid:
        assert Use("open", os.fsencode(tmp_path / "f"), writes=True) in uses_of(find_bypassing(tmp_path), pid)


def test_ignored_pids_are_left_out(tmp_path: Path) -> None:
    """The caller's own workers are not accused."""
    with process("", cwd=tmp_path) as pid:
        assert uses_of(find_bypassing(tmp_path, ignore_pids={pid}), pid) == ()


def mount(
    number: int, root: bytes, point: bytes, device: tuple[int, int] = (8, 1), kind: bytes = b"ext4"
) -> Mount:
    return Mount(number, 1, device, root, point, b"rw", kind, b"/dev/x", b"rw")


def test_locate_looks_beneath_our_overlay() -> None:
    """The overlay on the root itself is looked through; what it covers is the answer."""
    mounts = [
        mount(1, b"/", b"/"),
        mount(2, b"/", b"/opt", (8, 2)),
        mount(3, b"/", b"/opt/run", (0, 50), b"fuse.ciuic"),
    ]
    assert locate(b"/opt/run", mounts) == Location((8, 2), b"/run")
    assert locate(b"/srv", mounts) == Location((8, 1), b"/srv")


def test_a_location_is_known_under_the_names_of_other_mounts() -> None:
    """A bind mount of the directory, of its parent and of its child all reach it; other devices and siblings do not."""
    here = Location((8, 1), b"/opt/run")
    assert name_inside(here, mount(1, b"/opt/run", b"/data")) == b"/data"
    assert name_inside(here, mount(1, b"/opt", b"/mnt")) == b"/mnt/run"
    assert name_inside(here, mount(1, b"/opt/run/ckpt", b"/ckpt")) == b"/ckpt"
    assert name_inside(here, mount(1, b"/opt/run2", b"/x")) is None
    assert name_inside(here, mount(1, b"/opt", b"/mnt", (8, 2))) is None


def test_mountinfo_undoes_escapes() -> None:
    """Spaces and newlines in mount points come back, and optional fields are skipped."""
    line = rb"36 35 98:0 /a\040b /mnt\012x rw,noatime shared:1 master:2 - fuse.ciuic /opt/a\134b rw,user_id=0"
    (parsed,) = mountinfo.parse(line + b"\n")
    assert parsed == Mount(
        36, 35, (98, 0), b"/a b", b"/mnt\nx", b"rw,noatime", b"fuse.ciuic", b"/opt/a\\b", b"rw,user_id=0"
    )


def test_where_the_mount_is_not_shown_nobody_is_found(tmp_path: Path) -> None:
    """Below a chroot the file system that holds the directory is in no mount table: that is no error."""
    (tmp_path / "self").mkdir()
    (tmp_path / "self/mountinfo").write_text("30 1 0:5 / /proc rw - proc proc rw\n")
    assert find_bypassing("/srv/root", proc=tmp_path) == []


def test_a_folder_deeper_than_path_max_is_found(tmp_path: Path) -> None:
    """The kernel says no name longer than PATH_MAX; such a working directory is found all the same."""
    code = "import os\nfor _ in range(20):\n    os.mkdir('x' * 250)\n    os.chdir('x' * 250)\n"
    with process(code, cwd=tmp_path) as pid:
        assert "working directory" in {use.kind for use in uses_of(find_bypassing(tmp_path), pid)}
