"""Tests of requests that are repeated for a limited time."""

from __future__ import annotations

from itertools import count

import pytest

from ciuic.remote.objects.model import RemoteUnreachable, UntrustedStore
from ciuic.remote.reading.retry_policy import RetryPolicy
from ciuic.repository import log


def test_a_request_that_is_repeated_says_so_once_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """After ten seconds the reason is told, once for all requests that have it; after the time of the policy the error is raised."""
    told: list[tuple[str, object]] = []
    monkeypatch.setattr(log, "sink", lambda event, fields: told.append((event, fields["error"])))
    ticks = count(0, 6)
    policy = RetryPolicy(20, clock=lambda: float(next(ticks)))
    monkeypatch.setattr(policy._ended, "wait", lambda seconds: False)
    names = iter(f"cannot read {number}: no answer" for number in range(100))

    def request() -> None:
        raise RemoteUnreachable(next(names))

    for _ in range(2):
        with pytest.raises(RemoteUnreachable):
            policy.call(request)
    assert told == [("remote_request_repeated", "cannot read 1: no answer")]


def test_a_certificate_that_is_none_is_told_at_once() -> None:
    """A store whose certificate is not trusted is asked once: who waits at a terminal can mend it."""
    asked = count()

    def request() -> None:
        next(asked)
        raise UntrustedStore("cannot read x: its TLS certificate has expired")

    with pytest.raises(UntrustedStore):
        RetryPolicy(60).call(request)
    assert next(asked) == 1
