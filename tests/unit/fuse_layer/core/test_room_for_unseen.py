"""The watch over free space for writers that pass the worker by."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from ciuic.fuse_layer.core.overlay_hooks import RoomForUnseen


def test_a_disk_that_cannot_be_asked_fails_no_call_of_the_job() -> None:
    """Neither a removal nor an open raises when statvfs(2) fails."""
    undo = SimpleNamespace(active=True, takes_space=True, directory_fd=-1)
    room = RoomForUnseen(
        cast("Any", SimpleNamespace(undo=undo)),
        cast("Any", SimpleNamespace(room=lambda: SimpleNamespace(size_bytes=1 << 30))),
        cast("Any", SimpleNamespace(any_open=True)),
    )
    room.look()
    assert not room.is_short()
