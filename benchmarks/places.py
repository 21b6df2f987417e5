"""Places of measurements: a tmpfs, the disk itself, or a file system of a chosen kind in a file on it.

A file system in a file is reached past the page cache of the one below it (the loop device does direct I/O),
so that nothing is cached twice and "cold" means cold. Its space is taken from the disk at once: what others
write there meanwhile must not become an I/O error in the middle of a session.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TMPFS, DISK, EXT4, XFS = "tmpfs", "disk", "ext4", "xfs"
IN_A_FILE = (EXT4, XFS)
_IMAGE_BYTES, _LEAST_IMAGE_BYTES = 52 << 30, 2 << 30
"""Image size: the first grows with the scale, the second is added at any scale."""
# Inodes for a million files of each contender; tables that the kernel would else fill in the background are
# left alone.
_MAKE = {
    EXT4: [
        "mkfs.ext4",
        "-q",
        "-F",
        "-m",
        "0",
        "-i",
        "8192",
        "-E",
        "nodiscard,lazy_itable_init=1,lazy_journal_init=1",
    ],
    XFS: ["mkfs.xfs", "-q", "-K", "-m", "reflink=1"],
}
_MOUNT = {EXT4: "noatime,noinit_itable", XFS: "noatime"}


@contextmanager
def directory(name: str, own: Path, disk: Path, scale: float = 1.0) -> Iterator[Path]:
    """Yield a directory at this place, and remove it afterwards; OSError if the disk has no room."""
    top = Path(tempfile.mkdtemp(prefix="place-", dir=own if name == TMPFS else disk))
    try:
        if name == TMPFS:
            # The default limits (half of memory, one inode per page) are too low for a tree of a million
            # files per contender.
            mount_options = "size=90%,nr_inodes=0,mode=755"
            _run("mount", "-t", "tmpfs", "-o", mount_options, "ciuic-bench", str(top))
        if name in IN_A_FILE:
            with _in_a_file(name, top, _LEAST_IMAGE_BYTES + round(_IMAGE_BYTES * scale)) as point:
                yield point
        else:
            yield top
    finally:
        if name == TMPFS:
            subprocess.run(["umount", "-l", top], check=False, timeout=30)
        shutil.rmtree(top, ignore_errors=True)


@contextmanager
def _in_a_file(kind: str, top: Path, size_bytes: int) -> Iterator[Path]:
    image, point = top / "image", top / "place"
    point.mkdir()
    with image.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size_bytes)
    _run(*_MAKE[kind], str(image))
    device = _run("losetup", "--find", "--show", "--direct-io=on", str(image)).strip()
    try:
        _run("mount", "-o", _MOUNT[kind], device, str(point))
        try:
            yield point
        finally:
            # Lazily: a process that still uses the mount is ended by its owner, and must not stop the
            # cleanup.
            subprocess.run(["umount", "-l", point], check=False, timeout=600)
    finally:
        subprocess.run(["losetup", "-d", device], check=False, timeout=60)


def _run(*words: str) -> str:
    return subprocess.run(words, check=True, timeout=600, stdout=subprocess.PIPE, text=True).stdout
