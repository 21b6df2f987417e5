"""xfstests' generic/quick group on the mount, compared with the plain ext4 behind it.

    make torture SECONDS=7200 ARGS=xfstests
    CIUIC_XFSTESTS=/built/xfstests make torture SECONDS=7200 ARGS=xfstests
    CIUIC_WORKER_KILLS=5 make torture SECONDS=7200 ARGS=xfstests

The suite is the installed one or a built checkout that CIUIC_XFSTESTS names; nothing is written into it. Where there is none, the
figure is 0 and its name says so. A test that fails on the mount is run again on ext4, and counts if it passes there and
`EXPECTED` does not have it; one that `EXPECTED` has and that passes counts too. With CIUIC_WORKER_KILLS each worker is killed after so many
seconds on average, and a successor takes its session over (support/mount_helper.py).

It runs in a mount namespace of its own. It needs a mount helper in /sbin and users in /etc/passwd: both are laid
over the host's directories inside the namespace alone.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal, NamedTuple

from support.overlay import ASKED_FOR
from torture.figure import Figure

Kind = Literal["ciuic", "ext4"]

INSTALLED = ("/usr/lib/xfstests", "/usr/libexec/xfstests", "/var/lib/xfstests", "/usr/xfstests")
"""Places of packages and of ``make install``."""
_AT_ONCE = 25
"""Tests in one call, which takes seconds to start."""


class Expected(NamedTuple):
    """Tests that fail on the mount alone, for one reason."""

    numbers: tuple[int, ...]
    reason: str
    pyfuse3_only: bool = False
    """True if the kernel driver passes them, or gives them nothing to test."""
    cached: bool = False
    """True if they also fail on the kernel driver without passthrough, where reads are answered from the kernel's cache."""
    handles: bool = False
    """True if they also fail where the kernel gives out file handles of a FUSE file system whatever the server says (before Linux 6.9)."""

    def here(self, driver: str, release: tuple[int, int]) -> bool:
        """Return whether they fail with a driver on a kernel of this release."""
        return (
            driver == "pyfuse3"
            or not self.pyfuse3_only
            or (self.handles and release < (6, 9))
            or (self.cached and driver == "kernel-cached")
        )


EXPECTED = (
    Expected(
        (3,),
        "access times of what is read from the kernel's cache; change times after it is written back",
        pyfuse3_only=True,
        cached=True,
    ),
    Expected(
        (20,),
        "the suite supposes that a FUSE file system holds a thousand attributes; ext4 behind it does not",
    ),
    Expected(
        (426, 467, 477, 756, 777),
        "file handles are not found again once the kernel has evicted the inode",
        pyfuse3_only=True,
        handles=True,
    ),
)
"""Expected failures; docs/conformance.md has them too (tests/unit/project/test_docs_pages.py)."""

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
        """Return what the workers of all mounts, and the holders of their sessions, have logged."""
        logs = sorted((self._place / "ciuic" / "tmp").glob("mount-*/*.log"))
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


def installed() -> Path | None:
    """Return the directory of the built suite: the checkout that CIUIC_XFSTESTS names, or else an installed one."""
    named = os.environ.get("CIUIC_XFSTESTS")
    places = [Path(place) for place in ([named] if named else INSTALLED)]
    return next((place for place in places if (place / "src/locktest").exists()), None)


def expected_here() -> dict[str, str]:
    """Return the reasons of the expected failures of this driver and kernel, by test."""
    major, minor = map(int, os.uname().release.split(".")[:2])
    return {
        f"generic/{number:03}": expected.reason
        for expected in EXPECTED
        if expected.here(ASKED_FOR, (major, minor))
        for number in expected.numbers
    }


def run(seconds: float, seed: int) -> list[Figure]:
    """Run the quick group in a random order until the time is over."""
    source = installed()
    if source is None:
        return [Figure("xfstests: none is installed, and CIUIC_XFSTESTS names no built one", 0)]
    place = Path(tempfile.mkdtemp(prefix="xfstests-"))
    # The suite works as other users too, by absolute paths.
    if place.parent.stat().st_mode & 0o777 == 0o700:
        place.parent.chmod(0o711)
    place.chmod(0o755)
    suite, end = Xfstests(source, place), time.monotonic() + seconds
    tests = suite.quick(random.Random(seed))
    outcomes: dict[str, str] = {}
    while tests and (not outcomes or time.monotonic() < end):
        some, tests = tests[:_AT_ONCE], tests[_AT_ONCE:]
        outcomes.update(suite.run("ciuic", some))
    return judged(suite, outcomes)


def judged(suite: Xfstests, outcomes: dict[str, str]) -> list[Figure]:
    """Return the figures of the tests that ran; those that failed are run on ext4."""
    failed = {test: text for test, text in outcomes.items() if text not in ("passed", "not run")}
    plain = suite.run("ext4", sorted(failed)) if failed else {}
    expected = expected_here()
    alone = {test: text for test, text in failed.items() if plain[test] == "passed"}
    unexpected = [f"{test}: {text}" for test, text in alone.items() if test not in expected]
    passed = [f"{test} passes: {expected[test]}" for test in expected if outcomes.get(test) == "passed"]
    log = suite.worker_log()
    ran = sum(outcome != "not run" for outcome in outcomes.values())
    workers = [
        f"a worker: {line[:1500]}" for line in log.splitlines() if "_failed" in line or "Traceback" in line
    ]
    return [
        Figure("xfstests generic/quick tests that apply", ran, (*unexpected, *workers)),
        Figure("  of which fail for a known reason, and not on ext4", len(alone.keys() & expected.keys())),
        Figure("  of which were expected to fail, and pass", len(passed), tuple(passed)),
        Figure("  of which fail on ext4 too", len(failed) - len(alone)),
        Figure("xfstests generic/quick tests that need what a mount has not", len(outcomes) - ran),
        Figure("successors of killed workers", log.count("succeeded\n")),
    ]
