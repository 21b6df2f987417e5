"""Small file systems of a chosen kind in a file, for tests that depend on the kind."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.ci import needs
from support.until import until

_PATIENCE_SECONDS = 20.0
# The smallest XFS that mkfs.xfs makes has 300 MiB; the file is sparse.
_BYTES = 320 << 20
_MAKE = {
    "xfs": ["mkfs.xfs", "-q", "-m", "reflink=1"],
    "btrfs": ["mkfs.btrfs", "-q"],
    "ext4": ["mkfs.ext4", "-q", "-F", "-m", "0"],
}


def missing(kind: str) -> str:
    """Return the missing tools for a disk of this kind, or an empty text."""
    if os.geteuid() != 0 or not os.path.exists("/dev/loop-control"):
        return "there are no loop devices"
    if shutil.which(_MAKE[kind][0]) is None:
        return f"{_MAKE[kind][0]} is not installed"
    return "" if f"\t{kind}\n" in Path("/proc/filesystems").read_text() else f"the kernel has no {kind}"


@contextmanager
def small_disk(top: Path, kind: str, size_bytes: int = _BYTES, *options: str) -> Iterator[Path]:
    """Make a file system below ``top`` and return its mount point. ``options``: for its mkfs."""
    image, point = top / f"{kind}.img", top / kind
    point.mkdir()
    with image.open("wb") as file:
        file.truncate(size_bytes)
    _run(*_MAKE[kind], *options, str(image))
    _run("mount", "-o", "loop", str(image), str(point))
    try:
        yield point
    finally:
        # Descriptors held only by a cycle keep the disk busy.
        gc.collect()
        until(f"the unmounting of {point}", lambda: not _umount(point), _PATIENCE_SECONDS)
        image.unlink()


@pytest.fixture(scope="module", params=["xfs", "btrfs"])
def sharing_disk(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Provide a mount point of each kind that shares extents, one file system for all tests of a module."""
    needs(missing(request.param))
    with small_disk(tmp_path_factory.mktemp("disk"), request.param) as point:
        yield point


@pytest.fixture
def place(sharing_disk: Path) -> Iterator[Path]:
    """Provide a directory on a disk that shares extents, for the repository and what is restored."""
    place = sharing_disk / "place"
    place.mkdir()
    yield place
    shutil.rmtree(place)
    # btrfs gives space back with a transaction.
    os.sync()


def _umount(point: Path) -> int:
    return subprocess.run(["umount", str(point)], check=False, timeout=60, capture_output=True).returncode


def _run(*words: str) -> None:
    subprocess.run(words, check=True, timeout=120, capture_output=True)
