"""Packs that are on their way to a store."""

from __future__ import annotations

import threading

import pytest

from ciuic.remote.object_names import new_pack_ref
from ciuic.remote.objects.memory_objects import MemoryObjects
from ciuic.remote.uploader import ClosedPack, Outbox, PackSize, Persistence


class _Failing(MemoryObjects):
    """Store that fails for good with every object."""

    def put(self, *arguments: object) -> None:
        raise OSError("the store has failed")


def _send(outbox: Outbox, packs: int) -> None:
    for _ in range(packs):
        outbox.hand_over(ClosedPack(new_pack_ref("data"), [b"x"], 1, ()))
    outbox.wait()


@pytest.mark.parametrize("packs", [1, 3])
def test_a_pack_that_was_not_stored_ends_the_upload(packs: int) -> None:
    """Whoever waits for its packs hears that one was not stored, the last one too."""
    outbox = Outbox(_Failing("unused"), Persistence(threading.Event()), PackSize(None))
    try:
        with pytest.raises(OSError, match="the store has failed"):
            _send(outbox, packs)
        assert outbox.take_stored() == []
    finally:
        outbox.close()
