"""Tests of safety snapshots: no rule of the others counts them, and they have rules of their own."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ciuic.retention import MIN_SAFETY, NEWEST, UNDOES, RetentionPolicy, plan_retention
from ciuic.types import SAFETY_MESSAGE, TAG_SAFETY, Snapshot, SnapshotId

DAY_NS = 86400 * 10**9
NOW_NS = 10_000 * DAY_NS
NOTHING = RetentionPolicy(keep_within_seconds=0, keep_last=0, keep_emergency=0, keep_safety_seconds=0)


def snapshot(number: int, days: float, *, safety: bool = False, held: bool = False) -> Snapshot:
    return Snapshot(
        id=SnapshotId(f"cs-{number:06x}"),
        time_ns=NOW_NS - int(days * DAY_NS),
        host="h",
        roots=(),
        tags=(TAG_SAFETY,) if safety else (),
        message=f"{SAFETY_MESSAGE}cs-abcdef" if safety else "",
        held=held,
    )


@st.composite
def histories(draw: st.DrawFn) -> list[Snapshot]:
    made = draw(st.lists(st.tuples(st.integers(0, 60), st.booleans(), st.booleans()), max_size=25))
    return [snapshot(n, days, safety=safety, held=held) for n, (days, safety, held) in enumerate(made)]


@given(histories(), st.integers(0, 5), st.integers(0, 3))
@settings(deadline=None)
def test_safety_snapshots_change_nothing_for_the_others(
    history: list[Snapshot], last: int, hourly: int
) -> None:
    """Rules of number treat ordinary snapshots the same with and without safety snapshots among them."""
    policy = replace(NOTHING, keep_last=last, keep_hourly=hourly, keep_daily=hourly)
    ordinary = [one for one in history if not one.tags]
    kept_without_safety = {one.id for one in plan_retention(ordinary, policy, now_ns=NOW_NS).kept}
    kept_with_safety = {one.id for one in plan_retention(history, policy, now_ns=NOW_NS).kept}
    assert kept_with_safety & {one.id for one in ordinary} == kept_without_safety


@given(histories())
@settings(deadline=None)
def test_the_newest_three_safety_snapshots_stay(history: list[Snapshot]) -> None:
    """The newest three safety snapshots stay under any rules; a fourth goes unless it is held."""
    plan = plan_retention(history, NOTHING, now_ns=NOW_NS)
    safety = sorted((one for one in history if one.tags), key=lambda one: (one.time_ns, one.id), reverse=True)
    kept = {one.id for one in plan.kept}
    assert [one.id in kept for one in safety] == [
        position < MIN_SAFETY or one.held for position, one in enumerate(safety)
    ]


def test_safety_snapshots_stay_for_keep_safety() -> None:
    """Safety snapshots stay for keep_safety, and longer only while they can still undo something."""
    history = [snapshot(n, n, safety=True) for n in range(12)] + [snapshot(100 + n, n) for n in range(12)]
    policy = replace(NOTHING, keep_safety_seconds=7 * 86400)
    plan = plan_retention(history, policy, now_ns=NOW_NS, undoes=lambda id_: id_ == history[10].id)
    reasons = {decision.id: decision.reasons for decision in plan.decisions}
    assert [bool(reasons[one.id]) for one in history[:12]] == [True] * 8 + [False, False, True, False]
    assert reasons[history[10].id] == (UNDOES,)
    assert [one.id for one in plan.kept if one.id >= history[12].id] == [history[12].id]
    assert reasons[history[12].id] == (NEWEST,)


def test_a_tag_alone_makes_no_safety_snapshot() -> None:
    """A snapshot tagged safety by an operator is kept by the ordinary rules, and found as the latest."""
    tagged = replace_tags(snapshot(1, 30))
    plan = plan_retention([tagged, snapshot(2, 40)], NOTHING, now_ns=NOW_NS)
    assert [one.id for one in plan.kept] == [tagged.id]
    assert plan.kept[0].reasons == (NEWEST,)


def replace_tags(one: Snapshot) -> Snapshot:
    return Snapshot(id=one.id, time_ns=one.time_ns, host="h", roots=(), tags=(TAG_SAFETY,), message="mine")


def test_the_last_one_that_has_a_root_stays_though_it_is_a_safety_snapshot() -> None:
    """The newest safety snapshot stays where no ordinary one has a root that partial ones lack."""
    history = [snapshot(n, 20 + n, safety=True) for n in range(5)] + [snapshot(9, 1)]
    plan = plan_retention(history, NOTHING, now_ns=NOW_NS, having={b"/a": {history[4].id}})
    assert history[4].id in {one.id for one in plan.kept}
