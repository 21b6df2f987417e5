"""Tests of the arithmetic of the least share of work with a deadline, and of its priority."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.daemon.base.process_priority import MAX_WEIGHT, weight_of
from ciuic.system.precedence import BEST_EFFORT, IDLE, IoPriority, io_priority_of, nice_of
from ciuic.system.urgency import MIN_SHARE, Urgency, default_finish_within_seconds

_SHARES = st.floats(0.0001, 1.0)
_SECONDS = st.floats(0.0, 1e6)


def test_the_share_rises_evenly_by_its_logarithm_and_is_all_at_the_deadline() -> None:
    """The share rises evenly by its logarithm, 1 %, 10 %, 100 %, and is all at the deadline."""
    urgency = Urgency(min_share=0.01, finish_within_seconds=300)
    assert [round(urgency.least_share(seconds), 3) for seconds in (0, 150, 225, 300, 9999)] == [
        0.01, 0.1, 0.316, 1.0, 1.0,
    ]  # fmt: skip


def test_time_before_the_terms_were_sent_counts() -> None:
    """Terms sent in the middle continue from those before."""
    before = Urgency(min_share=0.01, finish_within_seconds=300)
    after = Urgency(min_share=0.01, finish_within_seconds=300, elapsed_seconds=100)
    assert after.least_share(20) == pytest.approx(before.least_share(120))


@given(_SHARES, st.floats(0.0, 1e5), _SECONDS, _SECONDS, st.booleans())
def test_the_least_share_is_a_share_and_never_falls(
    share: float, within: float, first: float, second: float, requested: bool
) -> None:
    """The least share is within 0 and 1 and never falls; after its deadline it is 1."""
    urgency = Urgency(min_share=share, finish_within_seconds=within, requested=requested)
    early, late = urgency.least_share(min(first, second)), urgency.least_share(max(first, second))
    assert share <= early * (1 + 1e-9)
    assert early <= late <= 1
    assert not requested or early >= 0.5
    if within and max(first, second) >= within:
        assert late == 1


def test_work_without_a_deadline_ends_too() -> None:
    """The least share of work without a deadline doubles every ten minutes."""
    urgency = Urgency(min_share=0.01)
    assert [round(urgency.least_share(600 * n), 2) for n in range(8)] == [
        0.01,
        0.02,
        0.04,
        0.08,
        0.16,
        0.32,
        0.64,
        1,
    ]


@pytest.mark.parametrize(("interval", "within"), [(3600, 300), (86400, 300), (1200, 100), (60, 5), (1, 1)])
def test_the_default_deadline_is_a_twelfth_of_the_interval(interval: int, within: float) -> None:
    """The default deadline is a twelfth of the interval, at most five minutes and at least a second."""
    assert default_finish_within_seconds(interval) == within


@given(_SHARES, _SHARES)
def test_more_share_is_never_a_worse_place(one: float, other: float) -> None:
    """Nice value and weight rise with the share."""
    less, more = sorted((one, other))
    assert 0 <= nice_of(more) <= nice_of(less) <= 19
    assert 1 <= weight_of(less) <= weight_of(more) <= MAX_WEIGHT


def test_the_place_of_some_shares() -> None:
    """The priority starts at the lowest and is the job's at the deadline; requested work has half."""
    assert [nice_of(share) for share in (MIN_SHARE, 0.1, 0.5, 1.0)] == [19, 10, 3, 0]
    assert [weight_of(share) for share in (0.0, MIN_SHARE, 0.1, 0.5, 1.0)] == [1, 1, 16, 64, 100]
    idle = IoPriority(IDLE, 0)
    assert [io_priority_of(share, idle) for share in (MIN_SHARE, 0.5, 1.0)] == [
        idle, IoPriority(BEST_EFFORT, 7), IoPriority(BEST_EFFORT, 4),
    ]  # fmt: skip
    # A value set by the operator stays.
    for text in ("none", "best-effort:6"):
        assert io_priority_of(1.0, IoPriority.parse(text)) == IoPriority.parse(text)
