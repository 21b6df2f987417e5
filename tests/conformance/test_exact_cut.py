"""Nothing in a snapshot is later than its cut unless it is marked.

Writers that bypass the overlay, on a real mount with the real capture process, on a file system that shares
extents and on one that does not.
"""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.capture_child import Found, captured
from support.overlay import PASSES, Overlay, overlay_over
from support.small_disks import missing, small_disk

from ciuic.fuse_layer.core.passthrough_writers import MAX_COPIED_BYTES
from ciuic.repository import Repository

pytestmark = [
    pytest.mark.mount,
    pytest.mark.skipif(not PASSES, reason="nothing passes that driver by"),
]

PAGE = 4096
LONG = MAX_COPIED_BYTES + PAGE
ON_BOTH = [
    pytest.param(kind, marks=pytest.mark.skipif(bool(missing(kind)), reason=missing(kind)))
    for kind in ("ext4", "xfs")
]
FRESH = os.O_WRONLY | os.O_CREAT | os.O_TRUNC


@pytest.fixture(params=ON_BOTH, scope="module")
def disk(request: pytest.FixtureRequest) -> Iterator[Path]:
    with (
        tempfile.TemporaryDirectory(prefix="ciuic-exact-") as top,
        small_disk(Path(top), request.param) as disk,
    ):
        yield disk


@pytest.fixture
def overlay(disk: Path, short_tmp: Path) -> Iterator[Overlay]:
    root = Path(tempfile.mkdtemp(dir=disk))
    Repository.create(short_tmp / "repository", block_size=PAGE).close()
    with overlay_over(root, short_tmp / "w.sock", block_size=PAGE) as overlay:
        if not overlay.client.status().passthrough:
            pytest.skip("this kernel has no passthrough")
        yield overlay
    shutil.rmtree(root)


class Cuts:
    """Cuts of one overlay; the returned function captures each after the job has gone on."""

    def __init__(self, overlay: Overlay, store: Path) -> None:
        self._overlay, self._store = overlay, store

    def __call__(self) -> Callable[[], dict[bytes, Found]]:
        made = self._overlay.client.cut()
        return lambda: captured(self._overlay, self._store, made.epoch, made.cut_ns)


@pytest.fixture
def cut(overlay: Overlay, short_tmp: Path) -> Cuts:
    return Cuts(overlay, short_tmp / "repository")


@pytest.mark.parametrize("name", ["MANIFEST-000005", "unknown"])
def test_a_manifest_names_only_files_of_its_snapshot(overlay: Overlay, cut: Cuts, name: str) -> None:
    """A manifest in a snapshot names only files that the snapshot has.

    As RocksDB writes: table files are written, synced and closed, then named in a log that stays open.
    """
    manifest = os.open(overlay.root / name, FRESH)
    number = 0

    def table() -> None:
        nonlocal number
        number += 1
        path = overlay.root / f"{number}.sst"
        path.write_bytes(os.urandom(PAGE))
        os.write(manifest, b"%d.sst\n" % number)

    for _ in range(4):
        table()
        capture, named_at_cut = cut(), number
        table()
        files = capture()
        named = files[os.fsencode(name)]
        assert named.held
        assert named.is_open
        assert named.content.split() == [b"%d.sst" % index for index in range(1, named_at_cut + 1)]
        assert set(named.content.split()) <= set(files)
    os.close(manifest)


def test_a_short_file_keeps_its_content_of_the_cut(overlay: Overlay, cut: Cuts) -> None:
    """A short file keeps its content of the cut when changed or removed afterwards."""
    names = ("over", "short", "long", "gone")
    with ExitStack() as stack:
        fds = {}
        for name in names:
            fds[name] = os.open(overlay.root / name, FRESH)
            stack.callback(os.close, fds[name])
            os.write(fds[name], b"first" * PAGE)
        capture = cut()
        os.pwrite(fds["over"], b"later" * PAGE, 0)
        os.ftruncate(fds["short"], 7)
        os.write(fds["long"], b"later")
        os.unlink(overlay.root / "gone")
        files = capture()
    assert files == {os.fsencode(name): Found(b"first" * PAGE, True, None) for name in names}


@pytest.mark.parametrize("then", ["nothing", "append", "over"])
def test_a_long_file_is_held_where_it_stays_and_marked_where_it_does_not(
    overlay: Overlay, cut: Cuts, then: str
) -> None:
    """A file too long to copy is proved unchanged by size and times, or truncated and marked."""
    fd = os.open(overlay.root / "checkpoint", FRESH)
    first = b"first..\n" * (LONG // 8)
    os.write(fd, first)
    capture = cut()
    if then == "append":
        os.write(fd, b"later..\n" * PAGE)
    elif then == "over":
        os.pwrite(fd, b"later..\n" * PAGE, 0)
    found = capture()[b"checkpoint"]
    os.close(fd)
    assert found.is_open
    assert len(found.content) == LONG
    # A clone, made before anything changed.
    if then == "nothing" or found.held:
        assert found.content == first
        assert found.held
    else:
        assert found.lag_ms is not None
        assert found.lag_ms < 60_000
        assert then == "over" or found.content == first
    assert cut()()[b"checkpoint"].held


def test_a_mapping_of_a_file_that_is_also_read(overlay: Overlay, cut: Cuts) -> None:
    """A mapped, synced file and a file written after it are of one instant in the snapshot, or marked."""
    for name in ("a", "b"):
        (overlay.root / name).write_bytes(bytes(PAGE))
    with (
        open(overlay.root / "a", "rb"),
        open(overlay.root / "a", "r+b") as file,
        mmap.mmap(file.fileno(), PAGE) as mapping,
        open(overlay.root / "b", "r+b", buffering=0) as other,
    ):
        for number in range(1, 4):
            mapping[0] = number
            mapping.flush()
            os.pwrite(other.fileno(), bytes([number]), 0)
            capture = cut()
            mapping[0] = number + 100
            mapping.flush()
            files = capture()
            assert files[b"b"].content[0] == number
            assert files[b"a"].content[0] == number
            assert files[b"a"].held
            # Not written back: nothing reports the next store.
            mapping[1] = number
            assert not cut()()[b"a"].held


def test_a_long_log_is_held_because_every_write_is_seen(overlay: Overlay, cut: Cuts) -> None:
    """A log that matches the rules is exact at the cut whatever its length and its writer's next calls."""
    fd = os.open(overlay.root / "000004.log", FRESH)
    first = b"first..\n" * (LONG // 8)
    for at in range(0, len(first), 1 << 20):
        os.write(fd, first[at : at + (1 << 20)])
    capture = cut()
    os.write(fd, b"later")
    os.pwrite(fd, b"later", 0)
    assert capture()[b"000004.log"] == Found(first, True, None)
    os.close(fd)


@pytest.mark.parametrize("name", ["data.mdb", "learned"])
def test_a_mapping_of_a_file_that_a_reader_opened_first(overlay: Overlay, cut: Cuts, name: str) -> None:
    """A mapped file under the rules, or a detected one, has in a cut exactly what was synced before."""
    path = overlay.root / name
    path.write_bytes(bytes(2 * PAGE))
    if name == "learned":
        with open(path, "rb"), open(path, "r+b"):
            pass
    with (
        open(path, "rb") as reader,
        open(path, "r+b") as file,
        mmap.mmap(file.fileno(), 2 * PAGE) as mapping,
    ):
        for number in range(1, 4):
            mapping[0] = number
            mapping.flush()
            mapping[0] = number + 100
            capture = cut()
            mapping.flush()
            found = capture()[os.fsencode(name)]
            assert found.held
            assert found.content[0] == number
            assert os.pread(reader.fileno(), 1, 0) == bytes([number + 100])


_WRITER = """
import os, sys
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
for line in sys.stdin:
    os.write(fd, line.encode())
    print("written", flush=True)
"""


def test_a_successor_protects_files_open_under_its_predecessor(overlay: Overlay, cut: Cuts) -> None:
    """The next cut after a kill of the worker under a bypassing writer is as exact as the last."""
    overlay.keep_session()
    with subprocess.Popen(
        [sys.executable, "-c", _WRITER, os.fspath(overlay.root / "unknown")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None

        def write(line: str) -> None:
            assert writer.stdin is not None
            assert writer.stdout is not None
            writer.stdin.write(line)
            writer.stdin.flush()
            assert writer.stdout.readline() == "written\n"

        write("first\n")
        overlay.process.kill()
        overlay.succeed()
        write("second\n")
        capture = cut()
        write("later\n")
        assert capture()[b"unknown"] == Found(b"first\nsecond\n", True, None)
