"""Power cuts while snapshots are taken: each clone of the disk's image holds what was promised before."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from support.ci import needs
from torture.power import lose_power

pytestmark = [pytest.mark.mount, pytest.mark.full]


def _missing() -> str:
    """Return what the stage lacks here, or None."""
    if shutil.which("mkfs.xfs") is None:
        return "mkfs.xfs is not installed"
    if not os.path.exists("/dev/loop-control"):
        return "there are no loop devices"
    return "" if "\txfs\n" in Path("/proc/filesystems").read_text() else "the kernel has no XFS"


@pytest.mark.slow
def test_images_cloned_under_load_hold_every_promise(short_tmp: Path) -> None:
    """A clone of the image holds every file that was synced and every snapshot that was committed before it.

    The repository verifies, and the next snapshot can be taken.
    """
    needs(_missing())
    figures = lose_power(short_tmp, "xfs", 0, 5)
    assert [text for figure in figures for text in figure.failures] == []
    images, _, promises = (figure.count for figure in figures)
    assert images >= 2
    assert promises > 0, "nothing had been promised: the test has proved nothing"
