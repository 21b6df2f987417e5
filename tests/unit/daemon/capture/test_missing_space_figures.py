"""What a snapshot without room says: need, free space and reserve agree, and the missing space is what another attempt lacks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support.stored import store

from ciuic.daemon.capture import space
from ciuic.daemon.capture.job import CaptureJob
from ciuic.daemon.capture.space import CaptureRoom, NoRoom
from ciuic.repository import Repository
from ciuic.units import human_size

MIB = 1 << 20


@pytest.mark.parametrize("full", [False, True])
def test_the_need_begins_with_the_write_that_was_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    """A capture that the reserve ends needs more than was free without the reserve, and something is to be freed."""
    capacity, reserve = (0 if full else 32 * MIB), 8 * MIB
    with Repository.create(tmp_path / "repo") as made:
        available = lambda path: capacity - made.stored_bytes()  # noqa: E731
        monkeypatch.setattr(space, "available_bytes", available)
        monkeypatch.setattr(space, "total_bytes", lambda path: 64 * MIB)
        monkeypatch.setattr(space, "available_bytes", available)
        job = CaptureJob(
            repository=str(made.path), id="cs-abc123", time_ns=1, host="h", roots=(), reserve_bytes=reserve
        )
        room = CaptureRoom(job)
        with Repository.open(made.path, disk=room.disk) as opened, opened.writer() as writer:
            with pytest.raises(OSError, match="No space left") as refused:
                store(writer, {b"file": random.Random(1).randbytes(48 * MIB)}, number=1)
            failure = room.failed(refused.value, writer)
    assert isinstance(failure, NoRoom)
    assert room.disk.refused is not None
    needed = failure.needed_bytes + room.disk.refused.wanted_bytes + room.disk.margin_bytes
    missing = needed - (capacity - reserve)
    assert missing > 0
    assert f"it needs more than {human_size(needed)}" in str(failure)
    assert f"free at least {human_size(missing)} there" in failure.hint
