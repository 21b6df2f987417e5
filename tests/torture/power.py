"""Power cuts at random moments under load: each clone of the disk's image in use is verified."""

from __future__ import annotations

import random
import subprocess
import tempfile
import time
from pathlib import Path

from support.live import Live, installed, wait_for
from support.power_images import check_clone, power_image
from support.promises import PromisingJob
from torture.figure import Figure


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
            wait_for("the first snapshot", live.list, 60)
            with PromisingJob(root, seed) as job:
                wait_for("a first promise", job.made, 60)
                until = time.monotonic() + seconds
                while images < at_least or time.monotonic() < until:
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
            wait_for("the last worker's end", lambda: not live.processes(), 60)
    if len(committed) < images / 2:
        failures.append(f"{kind}: only {len(committed)} snapshots were committed beside {images} clones")
    return [
        Figure(f"images verified, {kind}", images, tuple(failures)),
        Figure(f"clones made during a capture, {kind}", busy),
        Figure(f"promises looked for in the images, {kind}", kept),
    ]
