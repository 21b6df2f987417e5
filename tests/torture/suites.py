"""File system test suites of other projects on a mount, compared with the plain file system's own results.

    CIUIC_PJDFSTEST=/built/pjdfstest CIUIC_XFSTESTS=/built/xfstests make torture SECONDS=3600 ARGS=suites

A suite that is not installed is no failure: its figure is 0 and its name says so. A test that fails on the
mount is run again on the plain ext4 behind it, and counts if it passes there and docs/conformance.md does not
name it with its reason. Epochs are cut and committed all the time.

xfstests runs on an overlay over ext4, or on that ext4 itself, in a mount namespace of its own. It needs a mount helper in /sbin and users in /etc/passwd: both are laid over the host's directories
inside the namespace alone. The caller names the built sources; nothing is written into them.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from support.overlay import Overlay, overlay_over
from support.sides import tree
from torture.figure import Figure

Kind = Literal["ciuic", "ext4"]

_SCRIPT = r"""
set -u
mount --make-rprivate /
mkdir -p test scratch results sbin-up sbin-work etc-up etc-work bin
if [ "$KIND" = ciuic ]; then
    printf '#!/bin/sh\nexec "%s" -m support.mount_helper "$@"\n' "$HELPER_PYTHON" > sbin-up/mount.fuse.ciuic
    chmod +x sbin-up/mount.fuse.ciuic
fi
sbin=$(readlink -f /sbin)
mount -t overlay overlay -o "lowerdir=$sbin,upperdir=$PWD/sbin-up,workdir=$PWD/sbin-work" "$sbin" || exit 90
mount -t overlay overlay -o "lowerdir=/etc,upperdir=$PWD/etc-up,workdir=$PWD/etc-work" /etc || exit 90
for user in fsgqa fsgqa2 123456-fsgqa; do
    id "$user" >/dev/null 2>&1 || useradd --badname -M -d / "$user" 2>/dev/null
done
# The suite knows the type "fuse" and asks df for it, which shows the whole name.
printf '#!/bin/sh\n/usr/bin/df "$@" | sed "s/fuse\\.ciuic/fuse      /"\n' > bin/df; chmod +x bin/df
export PATH=$PWD/bin:$PATH
for name in test scratch; do
    [ -e $name.img ] || { truncate -s 4G $name.img; mkfs.ext4 -q -F $name.img; }
done
export TEST_DIR=$PWD/test SCRATCH_MNT=$PWD/scratch RESULT_BASE=$PWD/results
if [ "$KIND" = ciuic ]; then
    mount -o loop test.img test; mount -o loop scratch.img scratch
    export FSTYP=fuse FUSE_SUBTYP=.ciuic TEST_DEV=ciuic-test SCRATCH_DEV=ciuic-scratch
else
    TEST_DEV=$(losetup -f --show test.img) SCRATCH_DEV=$(losetup -f --show scratch.img)
    export FSTYP=ext4 TEST_DEV SCRATCH_DEV
fi
place=$PWD
leave() {
    cd /
    for point in "$TEST_DIR" "$SCRATCH_MNT"; do
        umount "$point" 2>/dev/null
        # The worker gives up its lock when it has ended; then the file system behind it is free.
        [ "$KIND" = ciuic ] && { for lock in "$TMPDIR"/mount-*/lock; do [ -e "$lock" ] && flock "$lock" true; done
                                 umount "$point" || umount -l "$point"; }
    done
    [ "$KIND" = ciuic ] || losetup -d "$TEST_DEV" "$SCRATCH_DEV"
}
trap leave EXIT
cd "$SOURCE" && ./check "$@"
"""


class Xfstests:
    """Runner on ``source``, the built suite, with ``place``, a directory for images and results."""

    def __init__(self, source: Path, place: Path) -> None:
        self._source, self._place = source, place

    def quick(self, rng: random.Random) -> list[str]:
        """Return the names of the generic tests in the quick group, in a random order."""
        text = (self._source / "tests/generic/group.list").read_text()
        names = [f"generic/{line.split()[0]}" for line in text.splitlines() if " quick" in line]
        rng.shuffle(names)
        return names

    def run(self, kind: Kind, tests: list[str]) -> dict[str, str]:
        """Return each test's outcome: "passed", "not run", or what differed."""
        place = self._place / kind
        temporary = place / "tmp"
        temporary.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            ["unshare", "--mount", "--propagation", "private", "bash", "-c", _SCRIPT, "xfstests", *tests],
            cwd=place,
            env={
                **os.environ,
                "KIND": kind,
                "SOURCE": str(self._source),
                "HELPER_PYTHON": sys.executable,
                "PYTHONPATH": str(Path(__file__).parents[1]),
                "TMPDIR": str(temporary),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        text = done.stdout.decode("utf-8", "replace")
        outcomes = {test: _outcome(test, text) for test in tests}
        if not re.search(r"^(Passed all|Failed) ", text, re.MULTILINE):
            raise RuntimeError(f"xfstests did not run: {text[-3000:]}")
        return outcomes

    def worker_log(self) -> str:
        """Return what the workers of all mounts have logged."""
        logs = sorted((self._place / "ciuic" / "tmp").glob("mount-*/log"))
        return "".join(log.read_text(errors="replace") for log in logs)


def _outcome(test: str, text: str) -> str:
    found = re.search(rf"^{re.escape(test)}\b(.*(?:\n[ \t].*)*)", text, re.MULTILINE)
    if found is None:
        return "not run"
    shown = found[1]
    if "[not run]" in shown or "[expunged]" in shown:
        return "not run"
    failed = re.search(r"^Failures:(.*)$", text, re.MULTILINE)
    if failed is not None and test in failed[1].split():
        return shown.strip()
    return "passed"


_CUT_SECONDS = 0.05
_AT_ONCE = 25
"""Tests of xfstests in one call, which takes seconds to start."""
_LIMIT_SECONDS = 1200

KNOWN = {
    "generic/003": "pyfuse3: access times of what is read from the kernel's cache; change times after it is written back",
    "generic/020": "the suite supposes that a FUSE file system holds a thousand attributes; ext4 behind it does not",
    "generic/426": "pyfuse3 and Linux before 6.9: file handles are not found again; elsewhere none are given out",
    "generic/451": "the kernel leaves stale pages after an asynchronous O_DIRECT write into a file that is read cached",
    "generic/467": "pyfuse3 and Linux before 6.9: file handles are not found again; elsewhere none are given out",
    "generic/477": "pyfuse3 and Linux before 6.9: file handles are not found again; elsewhere none are given out",
    "generic/732": "mounts one file system at two places, and an overlay lies over its own directory",
    "generic/756": "pyfuse3 and Linux before 6.9: file handles are not found again; elsewhere none are given out",
    "generic/777": "pyfuse3 and Linux before 6.9: file handles are not found again; elsewhere none are given out",
}
"""Tests of xfstests that fail on the mount alone, as docs/conformance.md explains."""


def run(seconds: float, seed: int) -> list[Figure]:
    """Return figures of pjdfstest, fsx, fsstress, stress-ng and xfstests, each for a share of the time."""
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
        (0.6, _stress_ng),
        (1.0, _xfstests),
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


def _xfstests(place: Path, rng: random.Random, until: float) -> list[Figure]:
    source = _built("CIUIC_XFSTESTS", "src/locktest")
    if source is None:
        return [Figure("xfstests: CIUIC_XFSTESTS names no built one", 0)]
    suite = Xfstests(source, place)
    tests = suite.quick(rng)
    outcomes: dict[str, str] = {}
    while tests and time.monotonic() < until:
        some, tests = tests[:_AT_ONCE], tests[_AT_ONCE:]
        outcomes.update(suite.run("ciuic", some))
    failed = {test: text for test, text in outcomes.items() if text not in ("passed", "not run")}
    plain = suite.run("ext4", sorted(failed)) if failed else {}
    alone = {test: text for test, text in failed.items() if plain[test] == "passed"}
    failures = [f"{test}: {text}" for test, text in alone.items() if test not in KNOWN]
    failures += [
        f"a worker: {line[:1500]}"
        for line in suite.worker_log().splitlines()
        if "_failed" in line or "Traceback" in line
    ]
    ran = sum(outcome != "not run" for outcome in outcomes.values())
    return [
        Figure("xfstests generic/quick tests that apply", ran, tuple(failures)),
        Figure("  of which fail for a known reason, and not on ext4", len(alone.keys() & KNOWN.keys())),
        Figure("  of which fail on ext4 too", len(failed) - len(alone)),
        Figure("xfstests generic/quick tests that need what a mount has not", len(outcomes) - ran),
    ]
