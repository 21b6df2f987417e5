"""Retention: which snapshots stay and why, as a pure function of the snapshots, the policy and the time.

A snapshot is kept if **any** rule keeps it; the newest one and held ones always stay. Rules only add: a
further rule, or a larger number, never removes a snapshot that stayed without it. ciuic.maintenance.prune
does the removing.

``keep_hourly = 24`` keeps the newest snapshot of each of the last 24 hours *that have one*, in local time;
days, weeks (ISO, Monday first), months and years likewise. Hours without a snapshot do not use up the number,
so a machine that was off for a month still has its days. When clocks go back, the hour that comes twice
counts as two.

``keep_within`` measures the time in which snapshots were taken. A step from one to the next, or from the
newest to now, counts as at most a quarter of ``keep_within`` (a day, where that is longer): a clock that
jumps ten years ahead, or a machine that was off for a long time, must not remove everything but the last few.
Time stamps ahead of now count as now. "Newest" and "last" are meant in the order of commits, which a clock
that was set does not change. Snapshots that are taken regularly are kept for exactly
``keep_within``.

Safety snapshots, which restores take before they change anything, do not count in the rules of other
snapshots, and those rules do not keep them. They have rules of their own: ``keep_safety`` works like
``keep_within``, at least ``MIN_SAFETY`` stay, and none goes while a restore that it can undo is the newest
change of the restored paths. Held ones and those with a tag of ``keep_tags`` stay as well.

A snapshot also stays while a remote has not stored it yet. A remote that has never stored anything keeps only
the snapshots of the last ``UNSTORED_DAYS`` days, so that a remote that was set up and forgotten does not fill
the disk. This is the one rule that yields before the disk is full (ciuic.maintenance.prune).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, tzinfo
from itertools import islice
from types import MappingProxyType
from typing import Protocol

import msgspec

from ciuic.types import SnapshotId, is_safety, order_of

NS_PER_SECOND = 10**9
TAG_EMERGENCY = "emergency"
"""Tag of snapshots that the daemon took because a trainer died or hung."""
TRAINING = "its training decides"
UNDOES = "can undo the newest change of what was restored"
MIN_SAFETY = 3
"""Number of newest safety snapshots that always stay: an operator who restores wrongly tries again twice."""
_DAY_NS = 86400 * NS_PER_SECOND
NEWEST = "newest"
UNSTORED_DAYS = 7
"""Age limit of what stays for a remote that has never stored anything."""


class SnapshotFacts(Protocol):
    """Facts about a snapshot that retention needs.

    A catalogue row and `ciuic.types.Snapshot` both have them.
    """

    @property
    def id(self) -> SnapshotId:
        """Snapshot id."""

    @property
    def time_ns(self) -> int:
        """Wall clock at the cut, in nanoseconds."""

    @property
    def order_ns(self) -> int:
        """Place in the order of commits."""

    @property
    def tags(self) -> tuple[str, ...]:
        """Tags, which `RetentionPolicy.keep_tags` names."""

    @property
    def message(self) -> str:
        """Message; its beginning marks a safety snapshot."""

    @property
    def held(self) -> bool:
        """True for a held snapshot, which always stays."""


class RetentionPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Rules of ``[retention]``; 0 or empty turns a rule off."""

    keep_within_seconds: int = 7 * 86400
    keep_last: int = 3
    keep_hourly: int = 0
    keep_daily: int = 0
    keep_weekly: int = 0
    keep_monthly: int = 0
    keep_yearly: int = 0
    keep_tags: tuple[str, ...] = ()
    keep_emergency: int = 3
    """Number of newest emergency snapshots to keep: an operator who comes back after weeks wants the last
    ones."""
    keep_safety_seconds: int = 7 * 86400
    """How long safety snapshots stay."""


class MinFree(msgspec.Struct, frozen=True):
    """Free space that retention keeps on the repository's file system: a size, or a share of the whole."""

    size_bytes: int = 0
    share: float = 0.0

    def floor_bytes(self, total_bytes: int) -> int:
        """Return the larger of size and share in bytes, on a file system of ``total_bytes``."""
        return max(self.size_bytes, int(self.share * total_bytes))


class Decision(msgspec.Struct, frozen=True):
    """Decision about one snapshot: kept for ``reasons``, or removed when there are none."""

    id: SnapshotId
    time_ns: int
    reasons: tuple[str, ...] = ()
    remotes: tuple[str, ...] = ()
    """Remotes for which the snapshot stays: they have not stored it yet. Each is one of ``reasons``, the last."""

    @property
    def kept(self) -> bool:
        """True if any rule keeps the snapshot."""
        return bool(self.reasons)

    @property
    def local_reasons(self) -> tuple[str, ...]:
        """Reasons that have nothing to do with a remote."""
        return self.reasons[: len(self.reasons) - len(self.remotes)]


class RetentionPlan(msgspec.Struct, frozen=True):
    """Decisions about all snapshots, newest first."""

    decisions: tuple[Decision, ...] = msgspec.field(default=())

    @property
    def kept(self) -> tuple[Decision, ...]:
        """Decisions for the snapshots that stay, newest first."""
        return tuple(decision for decision in self.decisions if decision.kept)

    @property
    def removed(self) -> tuple[SnapshotId, ...]:
        """Snapshots to remove, oldest first: an interrupted removal has then deleted what matters least."""
        return tuple(decision.id for decision in reversed(self.decisions) if not decision.kept)


def plan_retention(
    snapshots: Iterable[SnapshotFacts],
    policy: RetentionPolicy,
    *,
    now_ns: int,
    tz: tzinfo | None = None,
    states: Container[str] = (),
    having: Mapping[bytes, Container[str]] = MappingProxyType({}),
    undoes: Callable[[SnapshotId], bool] = lambda _: False,
    remotes: Mapping[str, Container[str] | None] = MappingProxyType({}),
) -> RetentionPlan:
    """Decide about each snapshot.

    Args:
        snapshots: All snapshots, in any order.
        policy: The rules.
        now_ns: The current time.
        tz: Time zone of hours and days; None is the local one of the process.
        states: Ids of training states (`Snapshot.is_state`). They stay and count in no rule: their trainings
            decide about them.
        having: For each root that some partial snapshot lacks, the snapshots that have it
            (`snapshots_having`). All rules are applied once more to these alone, so that a partial snapshot
            takes no other's place and the last one that has a root stays.
        undoes: Whether a safety snapshot can undo a restore that is the newest change of its paths; called
            only if none of these rules keeps it.
        remotes: For each remote, the snapshots that it has stored or does not want; None for a remote that
            has never stored any.
    """
    # In the order of commits: one that a clock ahead dated later must not pass for the newest.
    # The id decides between equal places, so that two runs never remove different snapshots.
    everything = sorted(snapshots, key=order_of, reverse=True)
    counted = [snapshot for snapshot in everything if snapshot.id not in states]
    # Safety snapshots have rules of their own, and take no place in the others.
    ordered = [snapshot for snapshot in counted if not is_safety(snapshot.tags, snapshot.message)]
    reasons: dict[SnapshotId, list[str]] = {snapshot.id: [] for snapshot in counted}
    _apply_rules(ordered, policy, now_ns, tz, reasons)
    _keep_safety(counted, policy, now_ns, reasons, undoes)
    # Sorted, so that the reasons of a decision come in the same order in every run.
    for root, ids in sorted(having.items()):
        # Where no ordinary snapshot has the root, the newest safety snapshot is the last one that has it.
        those = [s for s in ordered if s.id in ids] or [s for s in counted if s.id in ids][:1]
        again: dict[SnapshotId, list[str]] = {snapshot.id: [] for snapshot in those}
        _apply_rules(those, policy, now_ns, tz, again)
        name = root.decode("utf-8", "backslashreplace")
        for id_, found in again.items():
            # "newest" with this root is always added: that reason protects a snapshot from removal for
            # min_free.
            new = found if not reasons[id_] else [reason for reason in found if reason == NEWEST]
            reasons[id_].extend(f"{reason} with {name}" for reason in new)
    # Last: a snapshot that waits for a remote takes no other's place in the rules above.
    waiting = _waiting_for_remotes(counted, remotes, now_ns)
    return RetentionPlan(
        tuple(_decided(s, reasons.get(s.id, [TRAINING]), waiting.get(s.id, ())) for s in everything)
    )


def _decided(snapshot: SnapshotFacts, reasons: Sequence[str], remotes: Sequence[str]) -> Decision:
    waits = (f"not on remote {name} yet" for name in remotes)
    return Decision(snapshot.id, snapshot.time_ns, (*reasons, *waits), tuple(remotes))


def snapshots_having(
    roots: Mapping[SnapshotId, Collection[bytes]], left_out: Iterable[bytes]
) -> dict[bytes, frozenset[SnapshotId]]:
    """Return ``having`` for `plan_retention`, from the roots in each snapshot and the roots left out."""
    return {
        lacked: frozenset(id_ for id_, paths in roots.items() if lacked in paths) for lacked in set(left_out)
    }


def _apply_rules(
    ordered: Sequence[SnapshotFacts],
    policy: RetentionPolicy,
    now_ns: int,
    tz: tzinfo | None,
    reasons: dict[SnapshotId, list[str]],
) -> None:
    _keep_always(ordered, reasons)
    _keep_recent(ordered, policy, now_ns, reasons)
    for number, singular, bucket_of in _BUCKETS:
        _keep_buckets(ordered, number(policy), singular, bucket_of, tz, reasons)
    for snapshot in ordered:
        wanted = [tag for tag in policy.keep_tags if tag in snapshot.tags]
        reasons[snapshot.id].extend(f"tag {tag}" for tag in wanted)
    emergencies = (snapshot for snapshot in ordered if TAG_EMERGENCY in snapshot.tags)
    for position, snapshot in enumerate(islice(emergencies, policy.keep_emergency), 1):
        reasons[snapshot.id].append(f"emergency {position} of {policy.keep_emergency}")


def _keep_always(ordered: Sequence[SnapshotFacts], reasons: dict[SnapshotId, list[str]]) -> None:
    if ordered:
        reasons[ordered[0].id].append(NEWEST)
    for snapshot in ordered:
        if snapshot.held:
            reasons[snapshot.id].append("held")


def _keep_safety(
    ordered: Sequence[SnapshotFacts],
    policy: RetentionPolicy,
    now_ns: int,
    reasons: dict[SnapshotId, list[str]],
    undoes: Callable[[SnapshotId], bool],
) -> None:
    """Apply the rules of safety snapshots.

    ``ordered`` includes the other snapshots, because ages are measured from snapshot to snapshot.
    """
    # Steps are limited as for keep_within (`_keep_recent`).
    within_ns = policy.keep_safety_seconds * NS_PER_SECOND
    ages_ns = _ages_ns(ordered, now_ns, max(within_ns // 4, _DAY_NS))
    dated = [pair for pair in zip(ordered, ages_ns, strict=True) if is_safety(pair[0].tags, pair[0].message)]
    for position, (snapshot, age_ns) in enumerate(dated, 1):
        found = reasons[snapshot.id]
        if position <= MIN_SAFETY:
            found.append(f"safety {position} of {MIN_SAFETY}")
        if within_ns > 0 and age_ns <= within_ns:
            found.append("within keep_safety")
        if snapshot.held:
            found.append("held")
        found.extend(f"tag {tag}" for tag in policy.keep_tags if tag in snapshot.tags)
        # Last, because it loads and compares snapshots.
        if not found and undoes(snapshot.id):
            found.append(UNDOES)


def _waiting_for_remotes(
    ordered: Sequence[SnapshotFacts], remotes: Mapping[str, Container[str] | None], now_ns: int
) -> dict[SnapshotId, list[str]]:
    """Return the remotes that each snapshot waits for, by name in their order; no key for those of none."""
    waiting: dict[SnapshotId, list[str]] = {}
    for name, done in sorted(remotes.items()):
        # Steps are limited as for keep_within (`_keep_recent`): a clock that jumps ahead lets nothing go.
        limit_ns = UNSTORED_DAYS * _DAY_NS
        ages_ns = _ages_ns(ordered, now_ns, limit_ns // 4)
        for snapshot, age_ns in zip(ordered, ages_ns, strict=True):
            if (age_ns <= limit_ns) if done is None else (snapshot.id not in done):
                waiting.setdefault(snapshot.id, []).append(name)
    return waiting


def _keep_recent(
    ordered: Sequence[SnapshotFacts],
    policy: RetentionPolicy,
    now_ns: int,
    reasons: dict[SnapshotId, list[str]],
) -> None:
    for position, snapshot in enumerate(ordered[: policy.keep_last]):
        reasons[snapshot.id].append(f"last {position + 1} of {policy.keep_last}")
    # Each step counts for a quarter of the time at most (or a day), so that a clock that jumps ahead, or a
    # machine that was off, does not let all snapshots expire at once.
    if policy.keep_within_seconds > 0:
        within_ns = policy.keep_within_seconds * NS_PER_SECOND
        for snapshot, age_ns in zip(
            ordered, _ages_ns(ordered, now_ns, max(within_ns // 4, _DAY_NS)), strict=True
        ):
            if age_ns <= within_ns:
                reasons[snapshot.id].append("within keep_within")


def _ages_ns(ordered: Sequence[SnapshotFacts], now_ns: int, longest_step_ns: int) -> Iterator[int]:
    """Yield the age of each snapshot.

    No step counts for more than ``longest_step_ns``: a longer one may be a wrong clock.
    """
    age_ns, after_ns = 0, now_ns
    for snapshot in ordered:
        # A time stamp after the next newer one, or ahead of now, adds no age.
        if snapshot.time_ns < after_ns:
            age_ns += min(after_ns - snapshot.time_ns, longest_step_ns)
            after_ns = snapshot.time_ns
        yield age_ns


_Bucket = tuple[object, ...]


def _hour(time: datetime) -> _Bucket:
    # The UTC offset tells apart the two hours of the same name when the clock goes back.
    return (*_day(time), time.hour, time.utcoffset())


def _day(time: datetime) -> _Bucket:
    return (time.year, time.month, time.day)


def _week(time: datetime) -> _Bucket:
    # ISO year and week: the first days of January may belong to the last week of the year before.
    return tuple(time.isocalendar())[:2]


def _month(time: datetime) -> _Bucket:
    return (time.year, time.month)


def _year(time: datetime) -> _Bucket:
    return (time.year,)


_BUCKETS: tuple[tuple[Callable[[RetentionPolicy], int], str, Callable[[datetime], _Bucket]], ...] = (
    (lambda policy: policy.keep_hourly, "hourly", _hour),
    (lambda policy: policy.keep_daily, "daily", _day),
    (lambda policy: policy.keep_weekly, "weekly", _week),
    (lambda policy: policy.keep_monthly, "monthly", _month),
    (lambda policy: policy.keep_yearly, "yearly", _year),
)


def _keep_buckets(
    ordered: Sequence[SnapshotFacts],
    number: int,
    singular: str,
    bucket_of: Callable[[datetime], _Bucket],
    tz: tzinfo | None,
    reasons: dict[SnapshotId, list[str]],
) -> None:
    seen: set[_Bucket] = set()
    for snapshot in ordered:
        # Only buckets with a snapshot are counted: a machine that was off for a month keeps its days.
        if len(seen) >= number:
            return
        bucket = bucket_of(_local(snapshot.time_ns, tz))
        if bucket not in seen:
            seen.add(bucket)
            reasons[snapshot.id].append(f"{singular} {len(seen)} of {number}")


def _local(time_ns: int, tz: tzinfo | None) -> datetime:
    moment = datetime.fromtimestamp(time_ns // NS_PER_SECOND, tz)
    # The offset that was in force then, not today's: daylight saving changes it.
    return moment if tz is not None else moment.astimezone()


def __getattr__(name: str) -> object:
    """Return the class that was called ``Plan`` up to version 0.1."""
    if name != "Plan":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("ciuic.retention.Plan is called RetentionPlan", DeprecationWarning, stacklevel=2)
    return RetentionPlan
