"""The brake of collections: no retention trips it, and who gives up everything always does."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import timezone
from typing import Any, NamedTuple

import pytest

from ciuic.remote.upkeep.brake import Level, Times, is_sudden, level_of
from ciuic.retention import RetentionPolicy, plan_retention
from ciuic.types import SnapshotId

HOUR_NS = 3600 * 10**9
DAY_NS = 24 * HOUR_NS


_STEPS_NS = (HOUR_NS // 2, HOUR_NS, 6 * HOUR_NS, DAY_NS, 3 * DAY_NS, 0)


class Fact(NamedTuple):
    id: SnapshotId
    time_ns: int
    stored_ns: int
    tags: tuple[str, ...] = ()
    message: str = ""
    held: bool = False

    @property
    def order_ns(self) -> int:
        return self.time_ns


def policy(within_days: float = 0, last: int = 0, **rules: Any) -> RetentionPolicy:
    return RetentionPolicy(keep_within_seconds=int(within_days * 86400), keep_last=last, **rules)


POLICIES = {
    "gfs": policy(keep_hourly=24, keep_daily=7, keep_weekly=4, keep_monthly=12),
    "gfs dense": policy(within_days=2, last=3, keep_hourly=48, keep_daily=14, keep_weekly=8, keep_monthly=6),
    "gfs sparse": policy(keep_daily=7, keep_weekly=4),
    "default": policy(within_days=7, last=3),
    "within a month": policy(within_days=30, last=3),
    "last 1": policy(last=1),
    "last 5": policy(last=5),
    "last 40": policy(last=40),
    "months": policy(last=3, keep_monthly=12),
}


class Host:
    """Host whose snapshots come at a changing rate, and whose retention runs after each; a collector comes by times."""

    def __init__(self, seed: int, policy: RetentionPolicy, collections_days: float) -> None:
        self.rng = random.Random(seed)
        self.policy = policy
        self.days = collections_days
        self.now_ns = 400 * DAY_NS
        self.live: list[Fact] = []
        self.gone: list[int] = []
        self.levels: list[Level] = []
        self.count = 0

    def snapshot(self, time_ns: int, *, is_online: bool) -> None:
        self.count += 1
        self.live.append(Fact(SnapshotId(f"cs-{self.count:08x}"), time_ns, time_ns if is_online else 0))
        # For the test's own time: each plan looks at all of them.
        if is_online and self.count % (1 + len(self.live) // 40) == 0:
            self.catch_up()

    def catch_up(self) -> None:
        """Store what was not, the newest first, and give up what retention does not keep."""
        plan = plan_retention(self.live, self.policy, now_ns=self.now_ns, tz=timezone.utc)
        removed = set(plan.removed)
        self.gone += [one.stored_ns for one in self.live if one.id in removed and one.stored_ns]
        self.live = [one for one in self.live if one.id not in removed]
        for at, one in reversed(list(enumerate(self.live))):
            if not one.stored_ns:
                self.now_ns += HOUR_NS // 60
                self.live[at] = one._replace(stored_ns=self.now_ns)

    def pass_days(self, days: float, every_ns: int | None = None) -> None:
        """Let time pass, with a snapshot every so often, or in periods of dense, daily and rare snapshots, and of none."""
        end_ns = self.now_ns + int(days * DAY_NS)
        while self.now_ns < end_ns:
            step_ns = every_ns or self.rng.choice(_STEPS_NS)
            is_online = every_ns is not None or self.rng.random() < 0.7
            until_ns = min(end_ns, self.now_ns + int(self.rng.uniform(0.2, 12) * DAY_NS))
            while step_ns and self.now_ns + step_ns < until_ns:
                self.now_ns += int(step_ns * self.rng.uniform(0.6, 1.0))
                self.snapshot(self.now_ns, is_online=is_online)
            self.now_ns = until_ns
            if is_online or self.rng.random() < 0.8:
                self.catch_up()

    def times(self) -> Times:
        return Times([one.stored_ns for one in self.live if one.stored_ns], self.gone)

    def collect(self) -> None:
        self.levels = [*self.levels, level_of(self.now_ns, self.times(), self.levels)]
        # What is younger than a day stays.
        self.gone = [time_ns for time_ns in self.gone if time_ns > self.now_ns - DAY_NS]

    def months(self) -> Iterator[None]:
        for _ in range(int(180 / self.days)):
            self.pass_days(self.days * self.rng.choice([0.3, 1, 1, 1, 2]))
            yield
            self.collect()


@pytest.mark.parametrize("days", [1, 7, 30])
@pytest.mark.parametrize("kind", POLICIES)
def test_no_retention_trips(kind: str, days: float) -> None:
    """Months of dense, daily and rare snapshots, and of none, with collections now and then, are never called sudden."""
    for seed in range(2):
        host = Host(seed, POLICIES[kind], days)
        for at, _ in enumerate(host.months()):
            times = host.times()
            assert not is_sudden(host.now_ns, times, host.levels), (seed, at, host.levels[-3:])
            # Nor on a machine without levels.
            assert not is_sudden(host.now_ns, times, ()), (seed, at)
            # Who gives up everything always trips, there as well.
            nothing = Times([], [*times.live, *times.gone])
            assert is_sudden(host.now_ns, nothing, host.levels) == is_sudden(host.now_ns, nothing, ())
            assert is_sudden(host.now_ns, nothing, ()) == bool(times.live)


@pytest.mark.parametrize("kind", [kind for kind in POLICIES if kind.startswith("gfs")])
def test_who_leaves_a_rotation_little_trips(kind: str) -> None:
    """Of a host that snapshots regularly all but a few, and all but false ones that were stored today, are missed by a later collection."""
    host = Host(1, POLICIES[kind], 7)
    for at in range(26):
        host.pass_days(7, every_ns=6 * HOUR_NS)
        host.collect()
        live, gone = host.times()
        for count in (1, 2) if at > 8 else ():
            for left in (sorted(live)[-count:], sorted(live)[:count], host.rng.sample(list(live), count)):
                rest = [*gone, *(time_ns for time_ns in live if time_ns not in left)]
                assert is_sudden(host.now_ns + DAY_NS, Times(left, rest), host.levels), (at, left)
            false = [host.now_ns + host.rng.randrange(DAY_NS) for _ in live]
            assert is_sudden(host.now_ns + DAY_NS, Times(false, [*gone, *live]), host.levels), at
