"""The story of `make rescue` plays to its end, and cleans up when it is interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.leftovers import mounts_below

pytestmark = [pytest.mark.mount, pytest.mark.slow]

STORY = Path(__file__).parent / "rescue/story.py"


def _start(place: Path) -> subprocess.Popen[str]:
    env = {**os.environ, "CIUIC_RESCUE_DIR": str(place)}
    return subprocess.Popen(
        [sys.executable, str(STORY)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_the_story_ends_bit_for_bit(short_tmp: Path) -> None:
    """The resumed run reaches the state of the undisturbed one, and nothing is left of the stage."""
    story = _start(short_tmp)
    output, _ = story.communicate(timeout=240)
    assert story.returncode == 0, output
    assert "bit for bit" in output
    assert list(short_tmp.iterdir()) == []


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_story_cleans_up(short_tmp: Path, sig: signal.Signals) -> None:
    """The story, interrupted in training, stops the daemon, unmounts, and removes its directory."""
    story = _start(short_tmp)
    assert story.stdout is not None
    for line in story.stdout:
        if "the training job runs" in line:
            break
    story.send_signal(sig)
    output, _ = story.communicate(timeout=120)
    assert story.returncode == 130, output
    assert mounts_below((short_tmp,)) == {}
    assert list(short_tmp.iterdir()) == []
