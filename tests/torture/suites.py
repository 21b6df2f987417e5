"""File system test suites of other projects on a mount, compared with the plain file system's own results.

    CIUIC_PJDFSTEST=/built/pjdfstest CIUIC_XFSTESTS=/built/xfstests make torture SECONDS=3600 ARGS=suites

fsx and fsstress are those of xfstests, whose own tests are a torture by themselves (xfstests.py).

A suite that is not installed is no failure: its figure is 0 and its name says so. What fails on the mount is run
again on the plain directory beside it, and counts if it passes there. Epochs are cut and committed all the time. The
caller names the built sources; nothing is written into them.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.overlay import Overlay, overlay_over
from support.sides import tree
from torture.figure import Figure

_CUT_SECONDS = 0.05
_LIMIT_SECONDS = 1200


def run(seconds: float, seed: int) -> list[Figure]:
    """Return figures of pjdfstest, fsx, fsstress and stress-ng, each for a share of the time."""
    rng = random.Random(seed)
    place = Path(tempfile.mkdtemp(prefix="suites-"))
    # The runner's directory: the suites work as other users too, by absolute paths.
    if place.parent.stat().st_mode & 0o777 == 0o700:
        place.parent.chmod(0o711)
    place.chmod(0o755)
    started = time.monotonic()
    figures: list[Figure] = []
    for share, suite in (
        (0.25, _pjdfstest),
        (0.4, _fsx),
        (0.5, _fsstress),
        (1.0, _stress_ng),
    ):
        figures += suite(place, rng, started + share * seconds)
    return figures


@contextmanager
def _mounted(place: Path, name: str) -> Iterator[tuple[Path, Overlay]]:
    """Provide a mount with cuts going on, and a plain directory beside it."""
    root, plain = place / name, place / f"{name}-plain"
    root.mkdir()
    plain.mkdir()
    end = threading.Event()
    with overlay_over(root, place / f"{name}.sock") as overlay:

        def cut() -> None:
            while not end.wait(_CUT_SECONDS):
                overlay.client.committed(overlay.client.cut().epoch)

        cutter = threading.Thread(target=cut)
        cutter.start()
        try:
            yield plain, overlay
        finally:
            end.set()
            cutter.join()
    shutil.rmtree(root)
    shutil.rmtree(plain)


def _built(variable: str, program: str) -> Path | None:
    """Return the directory that an environment variable names, if the suite in it is built."""
    folder = os.environ.get(variable)
    return Path(folder) if folder and (Path(folder) / program).exists() else None


def _run(command: list[str], folder: Path) -> tuple[int, str]:
    done = subprocess.run(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=_LIMIT_SECONDS,
        check=False,
    )
    return done.returncode, done.stdout.decode("utf-8", "replace")


def _pjdfstest(place: Path, rng: random.Random, until: float) -> list[Figure]:
    suite = _built("CIUIC_PJDFSTEST", "pjdfstest")
    if suite is None:
        return [Figure("pjdfstest: CIUIC_PJDFSTEST names no built one", 0)]
    files = sorted((suite / "tests").rglob("*.t"))
    rng.shuffle(files)
    assertions, failures, ran = 0, [], 0
    with _mounted(place, "pjd") as (plain, overlay):
        for file in files:
            if time.monotonic() > until:
                break
            ran += 1
            count, wrong = _assertions(file, overlay.root)
            assertions += count
            if wrong:
                _, also = _assertions(file, plain)
                failures += [
                    f"{file.parent.name}/{file.name}: {wrong[n]}" for n in wrong.keys() - also.keys()
                ]
    return [Figure(f"pjdfstest assertions ({ran} of {len(files)} files)", assertions, tuple(failures))]


def _assertions(file: Path, folder: Path) -> tuple[int, dict[int, str]]:
    """Return how many assertions one file has made, and those that failed, by number."""
    _, text = _run(["bash", str(file)], folder)
    wrong = {
        int(found[1]): found[0] for found in re.finditer(r"^not ok (\d+)(?!.*# TODO).*$", text, re.MULTILINE)
    }
    return len(re.findall(r"^(?:not )?ok \d+", text, re.MULTILINE)), wrong


_FSX_WAYS = ([], ["-Z", "-r", "4096", "-w", "4096"], ["-A"], ["-p", "1000", "-l", "3000000"], ["-W"])


def _fsx(place: Path, rng: random.Random, until: float) -> list[Figure]:
    suite = _built("CIUIC_XFSTESTS", "ltp/fsx")
    if suite is None:
        return [Figure("fsx: CIUIC_XFSTESTS names no built one", 0)]
    operations, failures, round_ = 0, [], 0
    with _mounted(place, "fsx") as (plain, overlay):
        while round_ < len(_FSX_WAYS) or time.monotonic() < until:
            arguments = [
                *_FSX_WAYS[round_ % len(_FSX_WAYS)],
                "-q",
                "-N",
                "8000",
                "-S",
                str(rng.randrange(1, 1 << 31)),
            ]
            code, text = _run([str(suite / "ltp/fsx"), *arguments, "file"], overlay.root)
            if code and not _run([str(suite / "ltp/fsx"), *arguments, "file"], plain)[0]:
                failures.append(f"fsx {' '.join(arguments)}: {text[-1500:]}")
            operations, round_ = operations + 8000, round_ + 1
    return [Figure("fsx operations", operations, tuple(failures))]


def _fsstress(place: Path, rng: random.Random, until: float) -> list[Figure]:
    suite = _built("CIUIC_XFSTESTS", "ltp/fsstress")
    if suite is None:
        return [Figure("fsstress: CIUIC_XFSTESTS names no built one", 0)]
    operations, failures = 0, []
    with _mounted(place, "stress") as (_, overlay):
        while not operations or time.monotonic() < until:
            folder = f"round-{operations}"
            arguments = ["-d", folder, "-n", "1500", "-p", "4", "-s", str(rng.randrange(1, 1 << 31))]
            code, text = _run([str(suite / "ltp/fsstress"), *arguments], overlay.root)
            if code:
                failures.append(f"fsstress {' '.join(arguments)}: {text[-1500:]}")
            if tree(str(overlay.root / folder)) != tree(str(overlay.backing / folder)):
                failures.append(
                    f"fsstress {' '.join(arguments)}: the mount and the directory behind it differ"
                )
            operations += 6000
            shutil.rmtree(overlay.root / folder)
    return [Figure("fsstress operations", operations, tuple(failures))]


_STRESSORS = (
    *("access", "chdir", "chmod", "chown", "copy-file", "dentry", "dir", "dirdeep", "dup", "fcntl", "fiemap"),
    *("file-ioctl", "filename", "flock", "fpunch", "fstat", "getdent", "hdd", "io", "iomix", "lease", "link"),
    *("locka", "lockf", "lockofd", "mknod", "mmap", "msync", "open", "pread", "readahead", "rename", "seek"),
    *("sendfile", "splice", "symlink", "sync-file", "touch", "utime", "verity", "xattr"),
)
_NO_RESOURCE, _NOT_IMPLEMENTED = 3, 4


def _stress_ng(place: Path, rng: random.Random, until: float) -> list[Figure]:
    if shutil.which("stress-ng") is None:
        return [Figure("stress-ng: not installed", 0)]
    names, failures, ran = list(_STRESSORS), [], 0
    rng.shuffle(names)
    with _mounted(place, "ng") as (plain, overlay):
        for name in names:
            if time.monotonic() > until:
                break
            arguments = ["stress-ng", f"--{name}", "2", "--timeout", "3", "--verify", "--temp-path"]
            code, text = _run([*arguments, str(overlay.root)], overlay.root)
            if code in (_NO_RESOURCE, _NOT_IMPLEMENTED):
                continue
            ran += 1
            if code and not _run([*arguments, str(plain)], plain)[0]:
                failures.append(f"{' '.join(arguments[:3])}: exit status {code}: {text[-1500:]}")
    return [Figure("stress-ng stressors", ran, tuple(failures))]
