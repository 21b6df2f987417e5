"""Runner of xfstests on an overlay over ext4, or on that ext4 itself, in a mount namespace of its own.

The suite needs a mount helper in /sbin and users in /etc/passwd: both are laid over the host's directories
inside the namespace alone. The caller names the built sources; nothing is written into them.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Literal

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
