"""Tests of requests of an upload that are repeated: for ever by a process that goes on, not by one that is to end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count

import pytest

from ciuic.remote.objects.model import RemoteRefused, RemoteUnreachable, UntrustedStore
from ciuic.remote.uploader import MAX_REFUSALS, Persistence


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
