"""The search for the first bad snapshot."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.cli.commands.mount import Bisection


@given(st.data(), st.integers(1, 200))
def test_the_first_bad_one_is_found(data: st.DataObject, count: int) -> None:
    """Exactly and with as few trials as there can be; where some cannot be tried, it is among those that are named, and none too many."""
    first_bad = data.draw(st.integers(0, count - 1))
    # The last is known to be bad, whether or not it could be tried again.
    skipped = data.draw(st.one_of(st.just(set()), st.sets(st.integers(0, count - 1))))
    search = Bisection(range(count))
    trials = 0
    while (at := search.next()) is not None:
        trials += 1
        search.note("skip" if at in skipped else "bad" if at >= first_bad else "good")
    assert first_bad in search.suspects
    if not skipped:
        assert list(search.suspects) == [first_bad]
        assert trials <= math.ceil(math.log2(count))
    # No trial could tell them apart: all but the last are those that cannot be tried.
    assert set(search.suspects[:-1]) <= skipped
    assert trials <= count


def test_nothing_to_search_is_refused() -> None:
    """A row has at least the bad one; no trial is taken that was not asked for."""
    with pytest.raises(ValueError, match="bad"):
        Bisection([])
    with pytest.raises(ValueError, match="none to try"):
        Bisection([1]).note("bad")
