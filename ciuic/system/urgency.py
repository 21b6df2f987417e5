"""Least share of the time for background work, which rises as the deadline nears.

Guarantees: the least share never falls while the terms stay the same, is 1 from the deadline on, and is never below one half for
requested work. The module only computes: ciuic.system.io_throttle and ciuic.system.precedence act on it.
"""

from __future__ import annotations

import msgspec

MIN_SHARE = 0.01
"""Default of `capture.min_share`: work that no caller waits for is throttled almost completely at first."""
REQUESTED_MIN_SHARE = 0.5
"""Least share of work that a caller waits for: as much as the job takes itself, and no more."""
MAX_DEFAULT_FINISH_WITHIN_SECONDS = 300.0
"""Longest default deadline: an operator who looks again after five minutes should find the snapshot committed."""
DEFAULT_INTERVAL_PARTS = 12
"""Divisor of the interval that gives the default deadline: a snapshot is in progress for at most a twelfth of the time."""
# Shortest default deadline, for intervals of seconds: with a shorter one the work would hardly be throttled.
_MIN_DEFAULT_FINISH_WITHIN_SECONDS = 1.0
# Without a deadline the least share doubles in this time, so that the work ends: work of ten seconds takes eleven minutes at worst,
# and work of a thousand seconds seventy minutes.
_DOUBLING_SECONDS = 600.0


class Urgency(msgspec.Struct, kw_only=True, frozen=True):
    """Terms under which a process works beside the job, as the daemon sends them."""

    min_share: float = 1.0
    """Least share of the time at the beginning, more than 0 and at most 1; 1: the work is not throttled."""
    finish_within_seconds: float = 0.0
    """Time from the beginning to the deadline; 0: there is no deadline."""
    elapsed_seconds: float = 0.0
    """Time from the beginning to the moment at which these terms were sent."""
    requested: bool = False
    """True if a caller waits for the work, or for work that is queued behind it."""

    def least_share(self, seconds: float) -> float:
        """Return the least share ``seconds`` after the terms were sent.

        With a deadline it rises evenly by its logarithm, as nice values do: a share of 1 % is 10 % after half of the time, 32 % after
        three quarters, and 100 % at the deadline.
        """
        elapsed_seconds = self.elapsed_seconds + max(0.0, seconds)
        if self.finish_within_seconds > 0:
            left = max(0.0, 1 - elapsed_seconds / self.finish_within_seconds)
            share = float(self.min_share**left)
        else:
            # The exponent is bounded to keep the power finite; 2**64 times the least share is more than 1 in any case.
            share = self.min_share * 2.0 ** min(64.0, elapsed_seconds / _DOUBLING_SECONDS)
        if self.requested:
            share = max(share, REQUESTED_MIN_SHARE)
        return min(1.0, share)


def default_finish_within_seconds(interval_seconds: float) -> float:
    """Return the deadline of captures where none is configured."""
    return max(
        _MIN_DEFAULT_FINISH_WITHIN_SECONDS,
        min(MAX_DEFAULT_FINISH_WITHIN_SECONDS, interval_seconds / DEFAULT_INTERVAL_PARTS),
    )
