"""Packs on their way to a store: their size, requests that are repeated, and failures that last."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.remote.object_names import new_pack_ref
from ciuic.remote.objects.memory_objects import MemoryObjects
from ciuic.remote.objects.model import RemoteRefused, RemoteUnreachable, UntrustedStore
from ciuic.remote.uploader import (
    FIRST_PACK_BYTES,
    LARGEST_PACK_BYTES,
    MAX_REFUSALS,
    ClosedPack,
    Outbox,
    PackSize,
    Persistence,
)


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


@given(seconds=st.lists(st.floats(0.001, 60), max_size=200))
def test_a_pack_is_a_small_part_of_what_was_stored(seconds: list[float]) -> None:
    """A pack is at most a sixteenth of what is stored, or takes a quarter of a second: a kill loses no more."""
    size = PackSize()
    stored = 0
    for one in seconds:
        quarter = size.bytes_per_second / 4
        assert FIRST_PACK_BYTES <= size.size_bytes <= max(FIRST_PACK_BYTES, stored // 16, quarter)
        stored += size.size_bytes
        size.stored(size.size_bytes, one)


@pytest.mark.parametrize(
    ("bytes_per_second", "expected"),
    [(100 << 20, LARGEST_PACK_BYTES), (256 << 10, 2 << 20), (1 << 10, FIRST_PACK_BYTES)],
)
def test_a_pack_takes_about_eight_seconds(bytes_per_second: int, expected: int) -> None:
    """After much was stored at a steady rate of one connection, a pack takes eight seconds, within the limits."""
    size = PackSize()
    for _ in range(400):
        size.stored(size.size_bytes, size.size_bytes / bytes_per_second)
    assert size.size_bytes == pytest.approx(expected, rel=0.01)


class NoPause(threading.Event):
    """Event that is waited for without waiting."""

    def wait(self, timeout: float | None = None) -> bool:
        return self.is_set()


def _failing(error: type[Exception], times: int) -> Callable[[], int]:
    numbers = count(1)

    def request() -> int:
        number = next(numbers)
        if number <= times:
            raise error(f"attempt {number}")
        return number

    return request


@pytest.mark.parametrize("refusal", [RemoteRefused, UntrustedStore])
def test_refusals_end_an_upload_that_is_to_end(refusal: type[Exception]) -> None:
    """The allowed number of refusals, or of certificates that are none, is retried and the next is raised; a store that does not answer is retried without limit."""
    stop = NoPause()
    told: list[str] = []
    allowed = _failing(refusal, MAX_REFUSALS)
    persist = Persistence(stop, told.append, MAX_REFUSALS)
    assert persist(allowed) == MAX_REFUSALS + 1
    assert told[-1] == ""
    with pytest.raises(refusal, match=f"attempt {MAX_REFUSALS + 1}"):
        persist(_failing(refusal, 1000))
    assert persist(_failing(RemoteUnreachable, 1000)) == 1001
    assert Persistence(stop, told.append)(_failing(refusal, 1000)) == 1001
