"""Workers that are killed under a random job, each of whose calls is compared with a plain directory's (torture/twins.py)."""

from __future__ import annotations

import pytest
from torture import twins

_KILLS = 300
_MAX_SECONDS = 120.0
"""For a machine on which a take-over takes seconds: fewer workers die there, and as much is compared."""


@pytest.mark.mount
@pytest.mark.slow
def test_no_call_differs_from_a_plain_directorys_while_workers_are_killed() -> None:
    """Three roots, three threads each: every operation that FUSE carries answers as it does in a directory without us."""
    figures = twins.run(_MAX_SECONDS, 20, kills=_KILLS)
    failures = [failure for figure in figures for failure in figure.failures]
    assert not failures, "\n".join(failures)
    assert figures[0].count > _KILLS / 10
