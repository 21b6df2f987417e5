"""A flipped byte in the repository is found, and told with path and snapshots."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest
from support.live import Live

pytestmark = pytest.mark.mount

DAMAGED = 4


def _files(repository: Path) -> list[Path]:
    return sorted(path for path in repository.rglob("*") if path.is_file() and path.stat().st_size)


def _flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x41]))


def test_a_flipped_byte_of_content_is_found_with_path_and_snapshots(protected: Live, root: Path) -> None:
    """Exit 4; the damaged file and every snapshot that shares it are named, sound files are not."""
    marker = os.urandom(300_000)
    (root / "hurt").write_bytes(marker)
    (root / "sound").write_bytes(os.urandom(300_000))
    first = protected.snapshot()
    (root / "more").write_text("x")
    second = protected.snapshot()
    needle = marker[100_000:100_064]
    place = next(path for path in _files(protected.repository) if needle in path.read_bytes())
    _flip(place, place.read_bytes().index(needle))
    protected.run("verify", "--all", expect=0)  # structure is sound: only --checksum reads content
    done = protected.run("verify", second, "--checksum", expect=DAMAGED)
    said = (done.stdout + done.stderr).decode()
    assert str(root / "hurt") in said
    assert str(root / "sound") not in said
    assert first in said
    assert second in said


def test_no_flipped_byte_anywhere_is_missed(protected: Live, root: Path) -> None:
    """Whichever file of the repository has a flipped byte, verify --all --checksum ends with 4 (or a clear refusal),
    or what is read back is still right because the byte was in something that can be rebuilt."""
    for number in range(5):
        (root / f"file{number}").write_bytes(os.urandom(150_000))
    protected.snapshot()
    (root / "file1").write_bytes(os.urandom(1000))
    snapshot = protected.snapshot()
    protected.stop()
    rng = random.Random(7)
    for path in _files(protected.repository):
        if path.name == "lock":
            continue
        for offset in sorted({0, path.stat().st_size - 1, rng.randrange(path.stat().st_size)}):
            _flip(path, offset)
            done = protected.run("verify", "--all", "--checksum", expect=None)
            text = (done.stdout + done.stderr).decode()
            assert "Traceback" not in text
            if done.returncode == 0:
                # An index, a cache: what it says must be provable from elsewhere.
                # A note of a promise or a restore is no stored data; test_note_files.py has what a flipped bit does to it.
                assert "sqlite" in path.name or path.parent.name in ("promised", "restores"), (
                    f"{path} at {offset} was missed"
                )
                protected.run(
                    "restore",
                    "-s",
                    snapshot,
                    "-p",
                    str(root / "file1"),
                    "-d",
                    str(protected.top / "o"),
                    "--overwrite",
                )
            else:
                assert done.returncode in (1, 2, DAMAGED), text
            if done.returncode != 0:
                _flip(path, offset)
    protected.run("verify", "--all", "--checksum")


def test_a_repository_that_is_being_written_is_not_taken_for_damaged(protected: Live, root: Path) -> None:
    """verify --checksum while one snapshot after another is committed finds nothing wrong."""
    over = threading.Event()

    def keep_writing() -> None:
        while not over.is_set():
            (root / "file").write_bytes(os.urandom(3_000_000))
            (root / "small").write_bytes(os.urandom(100))
            protected.snapshot()

    writing = threading.Thread(target=keep_writing)
    writing.start()
    try:
        for _ in range(12):
            protected.run("verify", "--all", "--checksum")
    finally:
        over.set()
        writing.join()
