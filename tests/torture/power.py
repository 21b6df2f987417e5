"""Power cuts at random moments under load: each clone of the disk's image in use is verified.

Root and repository lie on a loop image that is cloned while they are in use. The image lies on a reflink file system (XFS on a loop device of its own), where a clone is one instant of the
image: what a disk would hold if the power failed then. Each clone is mounted, which replays its journal, and
compared with the promises made before it.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from support.live import Live, installed
from support.promises import PromisingJob, broken
from support.until import until
from torture.figure import Figure

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
        until(f"the release of {image}", lambda: not _has_loop_device(image), _TOOL_SECONDS)


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


def run(seconds: float, seed: int) -> list[Figure]:
    """Lose power for half of the time on ext4 and half on XFS."""
    figures = []
    for kind in ("ext4", "xfs"):
        top = Path(tempfile.mkdtemp())
        figures += lose_power(top, kind, seconds / 2, seed)
    return figures


def lose_power(top: Path, kind: str, seconds: float, seed: int, *, at_least: int = 2) -> list[Figure]:
    """Clone under load until the time is over, each time at a random moment of a snapshot being taken."""
    rng = random.Random(seed)
    failures: list[str] = []
    images = kept = busy = 0
    committed: set[str] = set()
    with power_image(top, kind) as image:
        root = image.disk / "root"
        root.mkdir()
        # A Live unmounts everything below the directory it is given.
        (top / "c").mkdir()
        with Live(top / "c", repository=image.disk / "repository") as live:
            live.run("protect", str(root))
            live.start(root)
            until("the first snapshot", live.list)
            with PromisingJob(root, seed) as job:
                until("a first promise", job.made)
                end = time.monotonic() + seconds
                while images < at_least or time.monotonic() < end:
                    taker = subprocess.Popen(
                        [str(installed()), "snapshot", "--wait"], env=live.env,
                        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                    )  # fmt: skip
                    time.sleep(rng.random() * 1.5)
                    before, taking = len(job.made()), taker.poll() is None
                    committed |= {row.id for row in live.list()} if rng.random() < 0.5 else set()
                    failures += [f"{kind}: {text}" for text in check_clone(image, live, job, committed)]
                    images, kept, busy = images + 1, kept + before, busy + taking
                    id_ = taker.communicate(timeout=120)[0].decode().strip()
                    committed |= {id_} if taker.returncode == 0 else set()
                if job.errors:
                    failures.append(f"{kind}: the job got {job.errors} errors")
            live.stop()
            until("the last worker's end", lambda: not live.processes())
    if len(committed) < images / 2:
        failures.append(f"{kind}: only {len(committed)} snapshots were committed beside {images} clones")
    return [
        Figure(f"images verified, {kind}", images, tuple(failures)),
        Figure(f"clones made during a capture, {kind}", busy),
        Figure(f"promises looked for in the images, {kind}", kept),
    ]
