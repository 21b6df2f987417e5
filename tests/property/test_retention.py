"""Tests of retention: rules only add, the newest and the held stay, calendars are local."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from msgspec.structs import replace

from ciuic.repository.writing.writer import place_in_order
from ciuic.retention import TAG_EMERGENCY, RetentionPlan, RetentionPolicy, plan_retention
from ciuic.types import Snapshot, SnapshotId

UTC = timezone.utc
BERLIN = ZoneInfo("Europe/Berlin")
NOW = datetime(2026, 11, 21, 12, 30, tzinfo=UTC)
NOW_NS = int(NOW.timestamp()) * 10**9
NOTHING = RetentionPolicy(keep_within_seconds=0, keep_last=0, keep_emergency=0)
RULES = (
    "keep_last",
    "keep_hourly",
    "keep_daily",
    "keep_weekly",
    "keep_monthly",
    "keep_yearly",
    "keep_emergency",
)


def snapshot(number: int, time_ns: int, *, tags: tuple[str, ...] = (), held: bool = False) -> Snapshot:
    return Snapshot(
        id=SnapshotId(f"cs-{number:06x}"), time_ns=time_ns, host="h", roots=(), tags=tags, held=held
    )


def snapshots_at(*times: datetime) -> list[Snapshot]:
    return [snapshot(number, int(time.timestamp()) * 10**9) for number, time in enumerate(times)]


ages = st.integers(-3 * 86400, 5 * 365 * 86400) | st.integers(0, 3 * 86400)


@st.composite
def histories(draw: st.DrawFn) -> list[Snapshot]:
    tags = st.sampled_from([(), ("good",), ("other",), ("good", "other"), (TAG_EMERGENCY,)])
    made = draw(st.lists(st.tuples(ages, tags, st.sampled_from([False] * 5 + [True])), max_size=30))
    return [snapshot(n, NOW_NS - age * 10**9, tags=t, held=h) for n, (age, t, h) in enumerate(made)]


@st.composite
def policies(draw: st.DrawFn) -> RetentionPolicy:
    numbers = {rule: draw(st.sampled_from([0, 0, 1, 2, 5, 1000])) for rule in RULES}
    within = draw(st.sampled_from([0, 3600, 86400, 30 * 86400]))
    return RetentionPolicy(
        keep_within_seconds=within,
        keep_tags=draw(st.sampled_from([(), ("good",), ("good", "other")])),
        **numbers,
    )


def kept_ids(plan: RetentionPlan) -> set[SnapshotId]:
    return {decision.id for decision in plan.kept}


@given(history=histories(), policy=policies())
def test_newest_and_held_always_stay(history: list[Snapshot], policy: RetentionPolicy) -> None:
    """The newest snapshot and the held ones stay under any policy, and every snapshot is decided once."""
    plan = plan_retention(history, policy, now_ns=NOW_NS, tz=UTC)
    assert sorted(d.id for d in plan.decisions) == sorted(s.id for s in history)
    assert kept_ids(plan) | set(plan.removed) == {s.id for s in history}
    assert not kept_ids(plan) & set(plan.removed)
    assert all(s.id in kept_ids(plan) for s in history if s.held)
    if history:
        assert max(history, key=lambda s: (s.time_ns, s.id)).id in kept_ids(plan)


@given(history=histories(), policy=policies(), more=policies())
def test_rules_only_add(history: list[Snapshot], policy: RetentionPolicy, more: RetentionPolicy) -> None:
    """A policy that is at least as generous in every rule never removes what the other keeps."""
    generous = RetentionPolicy(
        keep_within_seconds=max(policy.keep_within_seconds, more.keep_within_seconds),
        keep_tags=tuple({*policy.keep_tags, *more.keep_tags}),
        **{rule: max(getattr(policy, rule), getattr(more, rule)) for rule in RULES},
    )
    assert kept_ids(plan_retention(history, policy, now_ns=NOW_NS, tz=BERLIN)) <= kept_ids(
        plan_retention(history, generous, now_ns=NOW_NS, tz=BERLIN)
    )


@given(history=histories(), policy=policies())
def test_a_plan_applied_twice_removes_nothing_more(history: list[Snapshot], policy: RetentionPolicy) -> None:
    """A plan applied twice at the same time removes nothing more: prune may be interrupted and rerun."""
    first = plan_retention(history, policy, now_ns=NOW_NS, tz=BERLIN)
    left = [s for s in history if s.id in kept_ids(first)]
    assert kept_ids(plan_retention(left, policy, now_ns=NOW_NS, tz=BERLIN)) == kept_ids(first)


@given(history=histories(), policy=policies(), data=st.data())
def test_states_of_trainings_stay_and_count_in_no_rule(
    history: list[Snapshot], policy: RetentionPolicy, data: st.DataObject
) -> None:
    """States of trainings are all kept, and do not change what becomes of the other snapshots."""
    states = data.draw(st.sets(st.sampled_from([one.id for one in history]))) if history else set()
    plan = plan_retention(history, policy, now_ns=NOW_NS, tz=BERLIN, states=states)
    alone = plan_retention([one for one in history if one.id not in states], policy, now_ns=NOW_NS, tz=BERLIN)
    assert [one.id for one in plan.decisions] == [
        one.id for one in plan_retention(history, policy, now_ns=NOW_NS, tz=BERLIN).decisions
    ]
    assert states <= kept_ids(plan)
    assert tuple(one for one in plan.decisions if one.id not in states) == alone.decisions


@st.composite
def remotes_of(draw: st.DrawFn, history: list[Snapshot]) -> dict[str, frozenset[str] | None]:
    """Generate what some remotes need no more: nothing yet, or any part of the history."""
    some = st.frozensets(st.sampled_from([one.id for one in history])) if history else st.just(frozenset())
    return draw(st.dictionaries(st.sampled_from(["nas", "backup", "cold"]), st.none() | some))


@given(history=histories(), policy=policies(), data=st.data())
def test_remotes_only_add(history: list[Snapshot], policy: RetentionPolicy, data: st.DataObject) -> None:
    """Remotes keep what they have not stored, name it, and change nothing about the reasons of other rules."""
    remotes = data.draw(remotes_of(history))
    plain = plan_retention(history, policy, now_ns=NOW_NS, tz=BERLIN)
    plan = plan_retention(history, policy, now_ns=NOW_NS, tz=BERLIN, remotes=remotes)
    assert [(one.id, one.local_reasons) for one in plan.decisions] == [
        (one.id, one.reasons) for one in plain.decisions
    ]
    for decision in plan.decisions:
        assert decision.reasons[len(decision.local_reasons) :] == tuple(
            f"not on remote {name} yet" for name in decision.remotes
        )
        for name, done in remotes.items():
            if done is not None:
                assert (name in decision.remotes) is (decision.id not in done)
    assert kept_ids(plan) == kept_ids(plain) | {one.id for one in plan.decisions if one.remotes}


@given(history=histories(), policy=policies(), data=st.data())
def test_a_remote_that_stores_more_keeps_less(
    history: list[Snapshot], policy: RetentionPolicy, data: st.DataObject
) -> None:
    """What a remote has stored in addition never keeps a further snapshot; one that has all keeps none."""
    remotes = {name: done for name, done in data.draw(remotes_of(history)).items() if done is not None}
    more = {
        name: done
        | (data.draw(st.frozensets(st.sampled_from([s.id for s in history]))) if history else set())
        for name, done in remotes.items()
    }
    plans = [
        kept_ids(plan_retention(history, policy, now_ns=NOW_NS, tz=UTC, remotes=one))
        for one in ({}, {name: {s.id for s in history} for name in remotes}, more, remotes)
    ]
    assert plans[0] == plans[1]
    assert plans[1] <= plans[2] <= plans[3]


@given(history=histories(), data=st.data())
def test_states_of_trainings_wait_for_no_remote(history: list[Snapshot], data: st.DataObject) -> None:
    """Training states stay for their training alone: a remote adds nothing to them."""
    states = data.draw(st.sets(st.sampled_from([one.id for one in history]))) if history else set()
    plan = plan_retention(
        history, NOTHING, now_ns=NOW_NS, tz=UTC, states=states, remotes={"nas": frozenset()}
    )
    assert all(bool(one.remotes) is (one.id not in states) for one in plan.decisions)


def test_a_remote_that_never_stored_anything_keeps_a_week() -> None:
    """A remote without any snapshot keeps those of the last seven days, one that has some all that it lacks."""
    history = snapshots_at(*(NOW - timedelta(hours=12 * n) for n in range(40)))
    never = plan_retention(history, NOTHING, now_ns=NOW_NS, tz=UTC, remotes={"nas": None})
    assert {one.id for one in never.decisions if one.remotes} == {s.id for s in history[: 2 * 7 + 1]}
    assert never.decisions[1].reasons == ("not on remote nas yet",)
    stalled = plan_retention(history, NOTHING, now_ns=NOW_NS, tz=UTC, remotes={"nas": frozenset()})
    assert all(one.remotes == ("nas",) for one in stalled.decisions)


@given(ahead=st.timedeltas(timedelta(0), timedelta(days=20000)))
def test_a_clock_that_jumps_ahead_does_not_empty_the_week(ahead: timedelta) -> None:
    """A clock that jumps ahead releases at most a quarter of the week that stays for a new remote."""
    history = snapshots_at(*_hourly(7 * 24, NOW))
    now_ns = int((NOW + ahead).timestamp()) * 10**9
    plan = plan_retention(history, NOTHING, now_ns=now_ns, tz=UTC, remotes={"nas": None})
    assert {s.id for s in history[: 7 * 24 * 3 // 4]} <= {one.id for one in plan.decisions if one.remotes}


@given(history=histories(), policy=policies(), data=st.data())
def test_order_of_listing_is_no_matter(
    history: list[Snapshot], policy: RetentionPolicy, data: st.DataObject
) -> None:
    """The plan depends on the snapshots, not on the order in which they are given."""
    shuffled = data.draw(st.permutations(history))
    assert plan_retention(shuffled, policy, now_ns=NOW_NS, tz=UTC) == plan_retention(
        history, policy, now_ns=NOW_NS, tz=UTC
    )


@settings(max_examples=50)
@given(history=histories(), number=st.integers(1, 6), rule=st.sampled_from(RULES[1:-1]))
def test_calendar_rules_keep_at_most_their_number(history: list[Snapshot], number: int, rule: str) -> None:
    """A calendar rule alone keeps at most its number, each in its own period, the newest of that period."""
    plan = plan_retention(history, replace(NOTHING, **{rule: number}), now_ns=NOW_NS, tz=UTC)
    name = rule.removeprefix("keep_")
    by_rule = [d for d in plan.kept if any(reason.startswith(name) for reason in d.reasons)]
    form = {
        "hourly": "%Y-%m-%d %H",
        "daily": "%Y-%m-%d",
        "weekly": "%G-%V",
        "monthly": "%Y-%m",
        "yearly": "%Y",
    }[name]

    def period(time_ns: int) -> str:
        return datetime.fromtimestamp(time_ns // 10**9, UTC).strftime(form)

    periods = [period(d.time_ns) for d in by_rule]
    assert len(set(periods)) == len(periods)
    newest = {p: max((s.time_ns, s.id) for s in history if period(s.time_ns) == p)[1] for p in periods}
    assert [newest[p] for p in periods] == [d.id for d in by_rule]
    assert len(by_rule) == min(number, len({period(s.time_ns) for s in history}))


def test_days_are_local() -> None:
    """Two moments on either side of local midnight are two days in that zone, and one day in UTC."""
    history = snapshots_at(datetime(2026, 6, 1, 21, 30, tzinfo=UTC), datetime(2026, 6, 1, 22, 30, tzinfo=UTC))
    policy = replace(NOTHING, keep_daily=7)
    assert len(plan_retention(history, policy, now_ns=NOW_NS, tz=BERLIN).kept) == 2
    assert len(plan_retention(history, policy, now_ns=NOW_NS, tz=UTC).kept) == 1


def test_the_hour_that_comes_twice_is_two_hours() -> None:
    """The hour that comes twice when clocks go back counts as two: 02:30 summer and winter time are kept."""
    history = snapshots_at(
        datetime(2026, 10, 25, 0, 30, tzinfo=UTC), datetime(2026, 10, 25, 1, 30, tzinfo=UTC)
    )
    assert len(plan_retention(history, replace(NOTHING, keep_hourly=24), now_ns=NOW_NS, tz=BERLIN).kept) == 2


def test_periods_without_a_snapshot_use_up_nothing() -> None:
    """The days before a month without snapshots are still kept after it."""
    history = snapshots_at(*(NOW - timedelta(days=40 + day) for day in range(5)), NOW)
    plan = plan_retention(history, replace(NOTHING, keep_daily=4), now_ns=NOW_NS, tz=UTC)
    assert [d.time_ns for d in plan.kept] == sorted((s.time_ns for s in history), reverse=True)[:4]


def test_plan_has_the_reasons() -> None:
    """Each snapshot kept says every rule that keeps it; the others go oldest first."""
    history = snapshots_at(*(NOW - timedelta(hours=hours) for hours in (0, 30, 60, 90)))
    history[3] = snapshot(3, history[3].time_ns, tags=("good",), held=True)
    policy = replace(NOTHING, keep_last=1, keep_tags=("good",))
    plan = plan_retention(history, policy, now_ns=NOW_NS, tz=UTC)
    assert [d.reasons for d in plan.decisions] == [("newest", "last 1 of 1"), (), (), ("held", "tag good")]
    assert plan.removed == (SnapshotId("cs-000002"), SnapshotId("cs-000001"))


def test_the_newest_emergencies_stay_however_old() -> None:
    """The newest emergency snapshots stay at any age, even when a crash loop made many after them."""
    history = snapshots_at(*(NOW - timedelta(days=days) for days in range(10, 18)))
    history = [
        snapshot(n, one.time_ns, tags=(TAG_EMERGENCY,) if n % 2 else ()) for n, one in enumerate(history)
    ]
    plan = plan_retention(history, replace(NOTHING, keep_emergency=2), now_ns=NOW_NS, tz=UTC)
    assert [decision.reasons for decision in plan.kept] == [
        ("newest",),
        ("emergency 1 of 2",),
        ("emergency 2 of 2",),
    ]


@pytest.mark.parametrize(("age_seconds", "stays"), [(3600, True), (3601, False)])
def test_the_edge_of_keep_within(age_seconds: int, stays: bool) -> None:
    """A snapshot exactly as old as keep_within stays, and one a second older is removed."""
    history = snapshots_at(NOW, NOW - timedelta(seconds=age_seconds))
    plan = plan_retention(history, replace(NOTHING, keep_within_seconds=3600), now_ns=NOW_NS, tz=UTC)
    assert (len(plan.kept) == 2) is stays


def test_the_machines_own_time_zone() -> None:
    """The process's own zone is used without a configured one, and the plan is complete."""
    history = snapshots_at(*(NOW - timedelta(hours=hours) for hours in range(5)))
    assert len(plan_retention(history, replace(NOTHING, keep_hourly=5), now_ns=NOW_NS).kept) == 5


WEEK = replace(NOTHING, keep_within_seconds=7 * 86400)


def _hourly(count: int, newest: datetime) -> list[datetime]:
    return [newest - timedelta(hours=hours) for hours in range(count)]


@given(ahead=st.timedeltas(timedelta(0), timedelta(days=20000)), taken=st.integers(0, 5))
def test_a_clock_that_jumps_ahead_takes_a_quarter_at_most(ahead: timedelta, taken: int) -> None:
    """A clock that jumps ahead removes at most a quarter of an hourly week, the oldest by sequence.

    This holds for any jump and whether or not snapshots were taken since; with the clock put right again
    nothing is lost beyond the oldest hour.
    """
    history = snapshots_at(*_hourly(7 * 24, NOW))
    later = NOW + ahead
    after = [
        snapshot(1000 + number, int((later + timedelta(hours=number)).timestamp()) * 10**9)
        for number in range(taken)
    ]
    now_ns = after[-1].time_ns if after else int(later.timestamp()) * 10**9
    stays = kept_ids(plan_retention([*history, *after], WEEK, now_ns=now_ns, tz=UTC))
    assert {s.id for s in history[: 7 * 24 * 3 // 4 - taken - 1]} <= stays
    assert {s.id for s in after} <= stays
    left = [s for s in [*history, *after] if s.id in stays]
    again = kept_ids(plan_retention(left, WEEK, now_ns=NOW_NS + 3600 * 10**9, tz=UTC))
    assert len(again) >= len(left) - 1


@given(back=st.timedeltas(timedelta(0), timedelta(days=20000)))
def test_a_clock_put_back_removes_nothing(back: timedelta) -> None:
    """Snapshots with a time in the future do not count as old."""
    history = snapshots_at(*_hourly(100, NOW))
    now_ns = int((NOW - back).timestamp()) * 10**9
    assert kept_ids(plan_retention(history, WEEK, now_ns=now_ns, tz=UTC)) == {s.id for s in history}


@given(interval_hours=st.integers(1, 42), days=st.integers(1, 60))
def test_regular_snapshots_are_kept_exactly_for_keep_within(interval_hours: int, days: int) -> None:
    """Snapshots are kept exactly as long as keep_within says, with clock steps up to a quarter of it."""
    history = snapshots_at(*(NOW - timedelta(hours=interval_hours * n) for n in range(200)))
    within = timedelta(days=max(days, 7))
    policy = replace(NOTHING, keep_within_seconds=int(within.total_seconds()))
    expected = {s.id for s in history if s.time_ns >= NOW_NS - policy.keep_within_seconds * 10**9}
    assert kept_ids(plan_retention(history, policy, now_ns=NOW_NS, tz=UTC)) == expected


def test_sparse_snapshots_do_not_pile_up() -> None:
    """Five snapshots stay of those further apart than keep_within, not all."""
    history = snapshots_at(*(NOW - timedelta(days=10 * n) for n in range(30)))
    assert len(plan_retention(history, WEEK, now_ns=NOW_NS, tz=UTC).kept) == 5


STEPS = st.lists(
    st.tuples(
        st.timedeltas(timedelta(seconds=1), timedelta(days=3)),
        st.just(timedelta(0)) | st.timedeltas(timedelta(days=-20000), timedelta(days=20000)),
    ),
    min_size=1,
    max_size=25,
)
"""For each commit the true time since the one before, and by how much the clock is wrong at it."""


def _committed(steps: list[tuple[timedelta, timedelta]], *, parents: bool) -> tuple[list[Snapshot], int]:
    """Return snapshots in the order of their commits under a clock that is set, and the last reading of it."""
    made: list[Snapshot] = []
    true_ns = clock_ns = NOW_NS
    for number, (passed, wrong) in enumerate(steps):
        true_ns += passed // timedelta(microseconds=1) * 1000
        clock_ns = max(1, true_ns + wrong // timedelta(microseconds=1) * 1000)
        place = place_in_order(
            clock_ns,
            now_ns=clock_ns,
            newest_ns=max((one.order_ns for one in made), default=-1),
            parent_ns=made[-1].order_ns if parents and made else -1,
        )
        made.append(structs.replace(snapshot(0xFFFF - number, clock_ns), placed_ns=place))
    return made, clock_ns


@given(steps=STEPS, parents=st.booleans(), last=st.integers(1, 5))
def test_the_order_is_that_of_commits_whatever_the_clock_does(
    steps: list[tuple[timedelta, timedelta]], parents: bool, last: int
) -> None:
    """A clock that is set in either direction never makes an older snapshot the newest or one of the last."""
    history, now_ns = _committed(steps, parents=parents)
    assert sorted(history, key=lambda one: (-one.order_ns, one.id)) == history[::-1]
    plan = plan_retention(history, replace(NOTHING, keep_last=last), now_ns=now_ns, tz=UTC)
    assert [decision.id for decision in plan.kept] == [one.id for one in history[::-1][:last]]


def test_a_snapshot_comes_after_its_parent_of_the_same_instant() -> None:
    """Of two snapshots with one time the one that was built on the other is the newer."""
    assert place_in_order(5, now_ns=9, newest_ns=5, parent_ns=5) == 6


@given(steps=STEPS, policy=policies(), wrong=st.timedeltas(timedelta(days=-20000), timedelta(days=20000)))
def test_the_newest_commit_stays_whatever_the_clock_does(
    steps: list[tuple[timedelta, timedelta]], policy: RetentionPolicy, wrong: timedelta
) -> None:
    """No rule of the calendar prefers a snapshot of the future to the one just taken."""
    history, now_ns = _committed(steps, parents=False)
    now_ns += wrong // timedelta(microseconds=1) * 1000
    plan = plan_retention(history, policy, now_ns=now_ns, tz=UTC)
    assert plan.decisions[0].id == history[-1].id
    assert plan.decisions[0].kept
    for rule in ("hourly", "daily", "weekly", "monthly", "yearly"):
        if getattr(policy, f"keep_{rule}"):
            assert any(reason.startswith(f"{rule} 1 of") for reason in plan.decisions[0].reasons)


@given(ahead=st.timedeltas(timedelta(hours=2), timedelta(days=20000)))
def test_one_snapshot_of_the_future_lets_nothing_else_expire(ahead: timedelta) -> None:
    """With one hour of a clock ahead between, snapshots stay for keep_within as if it had been right."""
    steps = [(timedelta(hours=1), ahead if number == 90 else timedelta(0)) for number in range(100)]
    history, now_ns = _committed(steps, parents=False)
    policy = replace(NOTHING, keep_within_seconds=30 * 3600)
    kept = kept_ids(plan_retention(history, policy, now_ns=now_ns, tz=UTC))
    assert kept == {one.id for one in history[-31:]}
