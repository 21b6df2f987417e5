"""Workers killed under a random job, each of whose calls is compared with one on a plain directory."""

from __future__ import annotations

import pytest
from support.depth import by_depth
from torture import twins

_KILLS = by_depth(100, 300)
_MAX_SECONDS = 120.0
"""Time limit for slow machines, on which fewer workers are killed and as many calls compared."""


@pytest.mark.mount
@pytest.mark.slow
@pytest.mark.full
def test_no_call_differs_from_a_plain_directorys_while_workers_are_killed() -> None:
    """Operations on three roots with three threads each answer as in a plain directory under worker kills."""
    figures = twins.run(_MAX_SECONDS, 20, kills=_KILLS)
    failures = [failure for figure in figures for failure in figure.failures]
    assert not failures, "\n".join(failures)
    assert figures[0].count > _KILLS / 10
