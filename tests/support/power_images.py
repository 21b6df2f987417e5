"""Power cuts by cloning: root and repository on a loop image that is cloned while they are in use.

The image lies on a reflink file system (XFS on a loop device of its own), where a clone is one instant of the
image: what a disk would hold if the power failed then. Each clone is mounted, which replays its journal, and
compared with the promises made before it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from support.live import Live, wait_for
from support.promises import PromisingJob, broken

_BASE_BYTES, _DISK_BYTES = 4 << 30, 1 << 30  # sparse
_MAKE = {"xfs": ["mkfs.xfs", "-q"], "ext4": ["mkfs.ext4", "-q", "-F"]}
_MOUNT = {"xfs": "loop,nouuid", "ext4": "loop"}
_TOOL_SECONDS = 120


class PowerImage:
    """File system of ``kind`` mounted at ``disk``, whose image can be cloned."""

    def __init__(self, top: Path, kind: str) -> None:
        self.kind, self.disk, self.base = kind, top / "disk", top / "base"
        self._top = top
        self._image = self.base / "disk.img"

    def clone(self) -> Path:
        """Clone the image as it is at this instant."""
        target = self.base / "clone.img"
        _tool("cp", "--reflink=always", str(self._image), str(target))
        return target

    @contextmanager
    def mounted(self, image: Path) -> Iterator[Path]:
        """Mount the clone as after a power cut for the block; unmount and delete it afterwards."""
        there = self._top / "clone"
        there.mkdir(exist_ok=True)
        try:
            with _mounted(image, there, _MOUNT[self.kind]):
                yield there
        finally:
            image.unlink()


@contextmanager
def power_image(top: Path, kind: str) -> Iterator[PowerImage]:
    """Provide a power image below ``top``; unmount it at the end."""
    image = PowerImage(top, kind)
    for path in (image.disk, image.base):
        path.mkdir()
    _sparse(top / "base.img", _BASE_BYTES, _MAKE["xfs"])
    with _mounted(top / "base.img", image.base, "loop"):
        _sparse(image.base / "disk.img", _DISK_BYTES, _MAKE[kind])
        with _mounted(image.base / "disk.img", image.disk, "loop"):
            yield image


def check_clone(image: PowerImage, live: Live, job: PromisingJob, committed: set[str]) -> list[str]:
    """Clone the image now, mount the clone, and return which earlier promises it breaks."""
    promises, reported = job.made(), set(committed)
    with image.mounted(image.clone()) as there:
        failures = broken(promises, there / "root")
        repository = str(there / "repository")
        done = live.run("--repo", repository, "list", "--machine-readable", expect=None)
        listed = {line.split("|")[0] for line in done.stdout.decode().splitlines()}
        failures += [f"{id_} had been committed and is not listed" for id_ in sorted(reported - listed)]
        failures += _verified(live, repository)
        capture = [sys.executable, "-m", "ciuic.daemon.capture.process", "--offline"]
        went_on = subprocess.run(
            [*capture, "--repo", repository, "--root", str(there / "root")],
            env=live.env, capture_output=True, check=False, timeout=300,
        )  # fmt: skip
        if went_on.returncode:
            failures.append(f"no snapshot could be taken after the power cut: {went_on.stderr[-500:]!r}")
        return failures + _verified(live, repository)


def _verified(live: Live, repository: str) -> list[str]:
    done = live.run("--repo", repository, "verify", "--all", "--checksum", expect=None, timeout_seconds=300)
    return [f"verify ended with {done.returncode}: {done.stdout[-500:]!r}"] if done.returncode else []


def _sparse(path: Path, size_bytes: int, make: list[str]) -> None:
    with open(path, "xb") as file:
        os.ftruncate(file.fileno(), size_bytes)
    _tool(*make, str(path))


@contextmanager
def _mounted(image: Path, point: Path, options: str) -> Iterator[None]:
    _tool("mount", "-o", options, str(image), str(point))
    try:
        yield
    finally:
        _tool("umount", str(point))
        # Programs that watch block devices may hold the loop device for a moment longer.
        wait_for(f"the release of {image}", lambda: not _has_loop_device(image), _TOOL_SECONDS)


def _has_loop_device(image: Path) -> bool:
    for state in Path("/sys/block").glob("loop*/loop/backing_file"):
        # Released during the listing.
        with suppress(OSError):
            if state.read_text().strip().removesuffix(" (deleted)") == str(image):
                return True
    return False


def _tool(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, check=False, timeout=_TOOL_SECONDS)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr!r}")
