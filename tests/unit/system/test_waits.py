"""Waits for what no event tells of."""

from __future__ import annotations

import pytest

from ciuic.system import poll
from ciuic.system.poll import wait_until


@pytest.mark.parametrize(("looks", "found"), [(1, True), (3, True), (4, True), (5, False)])
def test_a_wait_looks_once_more_after_its_end(
    monkeypatch: pytest.MonkeyPatch, looks: int, found: bool
) -> None:
    """With 3 seconds and a pause of one, the fourth look is the last; without any, the first."""
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(poll.time, "monotonic", lambda: now)
    monkeypatch.setattr(poll.time, "sleep", sleep)
    left = iter([*[False] * (looks - 1), True])
    assert wait_until(lambda: next(left), 3.0, 1.0) is found
    assert now == min(looks - 1.0, 3.0)
    assert not wait_until(lambda: False, 0.0, 1.0)
    assert now == min(looks - 1.0, 3.0)
