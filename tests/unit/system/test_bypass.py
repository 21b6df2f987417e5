"""Tests of finding and naming processes that bypass the overlay."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ciuic.fuse_layer.system import mounts
from ciuic.system import mountinfo
from ciuic.system.bypass import Bypasser, Location, Use, find_bypassing, locate, name_inside
from ciuic.system.mountinfo import Mount


@contextmanager
def process(code: str, *arguments: str, cwd: Path | None = None) -> Iterator[int]:
    """Run Python code that prints a line, and keep it alive until the block ends."""
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


def test_reader_does_not_count_as_a_writer(tmp_path: Path) -> None:
    """A file open for reading is found, but not as a writer."""
    target = tmp_path / "data"
    target.write_bytes(b"x")
    with process("import sys; f = open(sys.argv[1])", str(target)) as pid:
        assert uses_of(find_bypassing(tmp_path), pid) == (Use("open", os.fsencode(target), writes=False),)


def test_a_working_directory_counts(tmp_path: Path) -> None:
    """A process with its working directory below is found, as it can create files by relative names."""
    below = tmp_path / "sub"
    below.mkdir()
    with process("", cwd=below) as pid:
        assert Use("working directory", os.fsencode(below), writes=True) in uses_of(
            find_bypassing(tmp_path), pid
        )


def test_a_mapping_outlives_its_descriptor(tmp_path: Path) -> None:
    """A shared writable mapping without descriptor is found; a private one does not count as a writer."""
    target = tmp_path / "mapped"
    target.write_bytes(bytes(8192))
    code = (
        "import mmap, os, sys\nfd = os.open(sys.argv[1], os.O_RDWR)\n"
        "m = mmap.mmap(fd, 4096, flags=getattr(mmap, sys.argv[2]))\nos.close(fd)\n"
        "os.close(os.dup(0))"
    )
    # mmap.mmap keeps a duplicate of the descriptor: close it too, so that only the mapping is left.
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
    """A process with a path too long for the kernel to print hides neither others nor its other files."""
    code = (
        "import os, sys\nos.chdir(sys.argv[1])\nkeep = open('f', 'w')\n"
        "for _ in range(20):\n    os.mkdir('d' * 250)\n    os.chdir('d' * 250)\n"
        "deep = open('g', 'w')\nos.chdir('/')\n"
    )
    with process(code, str(tmp_path)) as pid:
        assert Use("open", os.fsencode(tmp_path / "f"), writes=True) in uses_of(find_bypassing(tmp_path), pid)


def test_ignored_pids_are_left_out(tmp_path: Path) -> None:
    """Ignored pids, such as the caller's own workers, are left out."""
    with process("", cwd=tmp_path) as pid:
        assert uses_of(find_bypassing(tmp_path, ignore_pids={pid}), pid) == ()


def mount(
    number: int, root: bytes, point: bytes, device: tuple[int, int] = (8, 1), kind: bytes = b"ext4"
) -> Mount:
    return Mount(number, 1, device, root, point, b"rw", kind, b"/dev/x", b"rw")


def test_locate_looks_beneath_our_overlay() -> None:
    """Below the overlay on the root the file system that it covers is found."""
    shown = [
        mount(1, b"/", b"/"),
        mount(2, b"/", b"/opt", (8, 2)),
        mount(3, b"/", b"/opt/run", (0, 50), b"fuse.ciuic"),
    ]
    assert locate(b"/opt/run", shown) == Location((8, 2), b"/run")
    assert locate(b"/srv", shown) == Location((8, 1), b"/srv")


def test_a_location_is_known_under_the_names_of_other_mounts() -> None:
    """A directory is found through bind mounts of itself, its parent and its child, and no others."""
    here = Location((8, 1), b"/opt/run")
    assert name_inside(here, mount(1, b"/opt/run", b"/data")) == b"/data"
    assert name_inside(here, mount(1, b"/opt", b"/mnt")) == b"/mnt/run"
    assert name_inside(here, mount(1, b"/opt/run/ckpt", b"/ckpt")) == b"/ckpt"
    assert name_inside(here, mount(1, b"/opt/run2", b"/x")) is None
    assert name_inside(here, mount(1, b"/opt", b"/mnt", (8, 2))) is None


def test_mountinfo_undoes_escapes() -> None:
    """Spaces and newlines in mount points are unescaped, and optional fields are skipped."""
    line = rb"36 35 98:0 /a\040b /mnt\012x rw,noatime shared:1 master:2 - fuse.ciuic /opt/a\134b rw,user_id=0"
    (parsed,) = mountinfo.parse(line + b"\n")
    assert parsed == Mount(
        36,
        35,
        (98, 0),
        b"/a b",
        b"/mnt\nx",
        b"rw,noatime",
        b"fuse.ciuic",
        b"/opt/a\\b",
        b"rw,user_id=0",
        1,
        2,
    )


def test_no_process_is_found_where_the_mount_is_not_shown(tmp_path: Path) -> None:
    """Below a chroot whose file system is in no mount table no process is found, without an error."""
    (tmp_path / "self").mkdir()
    (tmp_path / "self/mountinfo").write_text("30 1 0:5 / /proc rw - proc proc rw\n")
    assert find_bypassing("/srv/root", proc=tmp_path) == []


def test_a_folder_deeper_than_path_max_is_found(tmp_path: Path) -> None:
    """A working directory deeper than PATH_MAX, which the kernel does not name, is found."""
    code = "import os\nfor _ in range(20):\n    os.mkdir('x' * 250)\n    os.chdir('x' * 250)\n"
    with process(code, cwd=tmp_path) as pid:
        assert "working directory" in {use.kind for use in uses_of(find_bypassing(tmp_path), pid)}


_ODD_NAMES = st.binary(min_size=1, max_size=20).map(lambda name: b"/" + name.replace(b"\0", b"").strip(b"/"))


def _escaped(name: bytes) -> bytes:
    """Return a path as the kernel writes it to mountinfo: it escapes these four characters and no others."""
    return b"".join(rb"\%03o" % byte if byte in b" \t\n\\" else bytes([byte]) for byte in name)


@given(st.lists(_ODD_NAMES, max_size=5))
@example([b"/a\rb", b"/a\x0b\x0c\x1c\x1d\x1e\x85b", "/a\u2028b".encode(), b"/a\\040 b", b"/\r"])
def test_mounts_are_read_under_any_name(names: list[bytes]) -> None:
    """Each line is one mount, whatever characters the kernel leaves unescaped in mount point and source."""
    lines = [
        b"%d 1 8:1 / %b rw shared:1 - fuse.\xff\r %b rw,user_id=7" % (number, _escaped(name), _escaped(name))
        for number, name in enumerate(names)
    ]
    text = b"".join(line + b"\n" for line in lines)
    expected = list(enumerate(names))
    assert [(mount.mount_id, mount.mount_point) for mount in mountinfo.parse(text)] == expected
    assert [(entry.mount_id, entry.mount_point) for entry in mounts.parse_mountinfo(text)] == expected
    assert all(os.fsencode(entry.fs_type) == b"fuse.\xff\r" for entry in mounts.parse_mountinfo(text))


def test_a_line_that_is_no_mount_hides_no_others() -> None:
    """Lines that do not parse are left out, and the mounts of the others are returned."""
    good = b"30 1 0:5 / /proc rw - proc proc rw"
    for bad in (b"x", b"a 1 0:5 / /p rw - proc proc rw", b"30 1 05 / /p rw - proc", b"30 1 0:5 / /p rw proc"):
        (kept,) = mountinfo.parse(bad + b"\n" + good + b"\n")
        assert kept.mount_point == b"/proc"


_MOUNTS_BELOW = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
assert libc.unshare(0x20000) == 0
assert libc.mount(None, b"/", None, ctypes.c_ulong(0x44000), None) == 0
root, odd = os.fsencode(sys.argv[1]), os.fsencode(sys.argv[2])
assert libc.mount(root, odd, None, ctypes.c_ulong(0x1000), None) == 0
kept = open(odd + b"/kept", "w")
"""


@pytest.mark.mount
def test_a_mount_with_a_carriage_return_hides_no_writer(tmp_path: Path) -> None:
    """A writer is found through a mount of another namespace whose name has control characters."""
    root, odd = tmp_path / "root", tmp_path / "a\r\x0b\x0cb"
    root.mkdir()
    odd.mkdir()
    with process(_MOUNTS_BELOW, str(root), str(odd)) as pid:
        assert uses_of(find_bypassing(root), pid) == (Use("open", os.fsencode(odd / "kept"), writes=True),)


def test_a_mapping_is_found_below_any_name(tmp_path: Path) -> None:
    """A mapping counts below names with control characters, newlines and what looks like an escape."""
    for number, name in enumerate(("a\rb", "a\nb", "a\x0b\x1cb", "a\\012b", "a\\134b")):
        root = tmp_path / name
        root.mkdir()
        target = root / "mapped"
        target.write_bytes(bytes(4096))
        code = (
            "import ctypes, os, sys\nfd = os.open(sys.argv[1], os.O_RDWR)\n"
            "libc = ctypes.CDLL(None); libc.mmap.restype = ctypes.c_void_p\n"
            "assert libc.mmap(None, ctypes.c_size_t(4096), 3, 1, fd, ctypes.c_long(0)) != 2**64 - 1\n"
            "os.close(fd)"
        )
        with process(code, str(target)) as pid:
            kinds = {use.kind for use in uses_of(find_bypassing(root, only_pids=[pid]), pid)}
        assert kinds == {"mapping"}, (number, name)


def test_a_process_name_that_is_no_text_ends_no_search(tmp_path: Path) -> None:
    """A process without arguments whose name is no UTF-8 is found like any other."""
    code = (
        "import ctypes, os, sys\nkeep = open(sys.argv[1], 'w')\nlibc = ctypes.CDLL(None)\n"
        "libc.prctl(15, b'\\xff\\rx', 0, 0, 0)\n"
        # The arguments of the process are overwritten with zeros, so that the name is all there is.
        "start, end = map(int, open('/proc/self/stat', 'rb').read().rpartition(b')')[2].split()[45:47])\n"
        "ctypes.memset(start, 0, end - start)"
    )
    with process(code, str(tmp_path / "f")) as pid:
        (found,) = [one for one in find_bypassing(tmp_path) if one.pid == pid]
    assert found.command == "\\udcff\rx"
