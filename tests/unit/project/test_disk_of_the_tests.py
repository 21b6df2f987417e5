"""Tests that the suite runs on a disk of its own at /tmp, or without one where there can be none."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

WITH_TEST_DISK = Path(__file__).parents[3] / ".ci/with-test-disk"


def with_test_disk(
    script: str, place: Path, *, path: str = os.environ["PATH"]
) -> subprocess.CompletedProcess[str]:
    """Run a shell script from a checkout at ``place``, in whose directory ``images`` the disk has its file."""
    (place / "images").mkdir()
    return subprocess.run(
        [WITH_TEST_DISK, "/bin/sh", "-c", script],
        cwd=place,
        env={"PATH": path, "TMPDIR": str(place / "images")},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )


@pytest.mark.mount
def test_a_program_has_a_disk_of_its_own_at_tmp(short_tmp: Path) -> None:
    """A program finds an empty ext4 at /tmp, its current directory as it was, and leaves neither mount, device nor file."""
    inside = """
        stat --file-system --format %T /tmp
        ls /tmp --ignore $(basename $PYTEST_DEBUG_TEMPROOT)
        touch /tmp/within kept
        ls images
        echo ${TMPDIR-none}
    """
    ran = with_test_disk(inside, short_tmp)
    assert ran.stderr == ""
    assert ran.stdout.split() == ["ext2/ext3", short_tmp.relative_to("/tmp").parts[0], "lost+found", "none"]
    assert not Path("/tmp/within").exists()
    assert sorted(path.name for path in short_tmp.iterdir()) == ["images", "kept"]


@pytest.mark.mount
@pytest.mark.parametrize("lacking", ["unshare", "mkfs.ext4", "losetup", "mount"])
def test_a_program_runs_where_no_disk_can_be_had(short_tmp: Path, lacking: str) -> None:
    """A program runs without a disk, after a sentence, where a step of making one fails; nothing is left."""
    fails = short_tmp / "bin" / lacking
    fails.parent.mkdir()
    fails.write_text("#!/bin/sh\necho not here; exit 1\n")
    fails.chmod(0o755)
    ran = with_test_disk("echo ran", short_tmp, path=f"{fails.parent}:{os.environ['PATH']}")
    assert ran.stdout == "ran\n"
    assert ran.stderr.startswith("ciuic: tests wait for this machine's disk and take longer: no ")
    assert list((short_tmp / "images").iterdir()) == []
