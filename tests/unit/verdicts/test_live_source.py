"""Files as they are now, as the source of verdicts."""

from __future__ import annotations

import os
import random
from pathlib import Path

from support.checkpoint_files import FORMATS
from support.live_source import LiveDirectory, open_live_file

from ciuic.verdicts.verdict import checkpoints_in

WHOLE = FORMATS["safetensors"].make(random.Random(1))


def test_a_file_that_is_open_for_writing_is_not_good(tmp_path: Path) -> None:
    """A whole file is GOOD once its writer has closed it."""
    path = tmp_path / "a.safetensors"
    with path.open("wb", buffering=0) as file:
        file.write(WHOLE)
        (found,) = checkpoints_in(LiveDirectory(os.fsencode(tmp_path)))
        assert found.verdict.state == "UNKNOWN"
    (found,) = checkpoints_in(LiveDirectory(os.fsencode(tmp_path)))
    assert found.verdict.is_good, found.verdict


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    """A fifo is not waited for, and a symbolic link is not followed."""
    os.mkfifo(tmp_path / "a.pt")
    (tmp_path / "b.pt").symlink_to("/etc/passwd")
    assert checkpoints_in(LiveDirectory(os.fsencode(tmp_path))) == []


def test_holes_are_those_of_the_file_system(tmp_path: Path) -> None:
    """A range that was never written is a hole, and one that was is not."""
    path = tmp_path / "a"
    with path.open("wb") as file:
        file.write(b"x" * 65536)
        file.truncate(262144)
    source = open_live_file(os.fsencode(path))
    assert source is not None
    assert list(source.holes(0, 262144)) == [(65536, 262144)]
    source.close()
