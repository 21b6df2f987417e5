"""Tests of which snapshots of a training stay: rules only add, and the time of removal does not matter."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.training.rules import Best, EverySeconds, EverySteps, Held, Keep, Latest, RetentionCandidate, kept
from ciuic.training.writer.messages import RetentionRules

RULES = st.one_of(
    st.builds(Latest, st.integers(1, 6)),
    st.builds(EverySteps, st.integers(1, 60)),
    st.builds(EverySeconds, st.integers(1, 600)),
    st.builds(
        Best, st.integers(1, 4), st.sampled_from(["loss", "accuracy"]), st.sampled_from(["min", "max"])
    ),
    st.builds(Held),
)
METRICS = st.dictionaries(
    st.sampled_from(["loss", "accuracy"]), st.sampled_from([0.0, 0.5, 1.0, -1.0, float("nan"), float("inf")])
)


@st.composite
def histories(draw: st.DrawFn) -> list[RetentionCandidate]:
    """Generate snapshots of one run or two, in the order in which they were taken."""
    found, time_ns, step = [], 0, 0
    for number in range(draw(st.integers(0, 20))):
        time_ns += draw(st.integers(1, 200)) * 10**9
        step += draw(st.integers(0, 40))
        found.append(
            RetentionCandidate(
                f"cs-{number:04d}",
                time_ns,
                draw(st.sampled_from([False, False, False, True])),
                draw(st.sampled_from(["a", "b"])),
                draw(st.sampled_from([step, step, None])),
                draw(METRICS),
            )
        )
    return found


@given(histories(), st.lists(RULES, max_size=3), RULES)
def test_a_further_rule_removes_nothing(
    history: list[RetentionCandidate], rules: list[Keep], further: Keep
) -> None:
    """A further rule removes nothing that the others keep, except for the first: without any, all stay."""
    if rules:
        assert set(kept(history, rules)) <= set(kept(history, [*rules, further]))
    else:
        assert set(kept(history, rules)) == {one.id for one in history}


@given(histories(), st.integers(1, 6))
def test_a_larger_number_removes_nothing(history: list[RetentionCandidate], number: int) -> None:
    """A larger number of latest or best snapshots to keep removes nothing more."""
    for less, more in (
        (Latest(number), Latest(number + 1)),
        (Best(number, "loss"), Best(number + 1, "loss")),
    ):
        assert set(kept(history, [less])) <= set(kept(history, [more]))


@given(histories(), st.lists(RULES, min_size=1, max_size=3))
def test_the_newest_and_the_held_stay(history: list[RetentionCandidate], rules: list[Keep]) -> None:
    """The newest and the held snapshots stay under any rules."""
    stay = kept(list(reversed(history)), rules)
    assert {one.id for one in history if one.held} <= set(stay)
    assert not history or history[-1].id in stay


@given(histories(), st.lists(RULES, min_size=1, max_size=3))
def test_removal_after_each_snapshot_equals_removal_at_the_end(
    history: list[RetentionCandidate], rules: list[Keep]
) -> None:
    """Removing after each snapshot leaves the same snapshots as removing at the end."""
    there: list[RetentionCandidate] = []
    for one in history:
        there.append(one)
        stay = kept(there, rules)
        there = [other for other in there if other.id in stay]
    assert {one.id for one in there} == set(kept(history, rules))


def test_each_rule_keeps_its_snapshots() -> None:
    """Each rule keeps the snapshots of a worked example."""
    history = [
        RetentionCandidate(
            str(number),
            number * 10 * 10**9,
            number == 3,
            "run",
            number * 100,
            {"loss": (5.0, 1.0, 3.0)[number % 3]},
        )
        for number in range(10)
    ]

    def stay(*rules: Keep) -> str:
        return "".join(sorted(kept(history, rules)))

    assert stay(Held()) == "39"
    assert stay(Latest(2)) == "389"
    assert stay(EverySteps(400)) == "03489"
    assert stay(EverySeconds(50)) == "0359"
    assert stay(Best(2, "loss")) == "1349"
    assert stay(Best(1, "loss", "max"), Latest(2)) == "0389"
    assert stay() == "0123456789"


@given(st.lists(RULES))
def test_rules_travel_to_the_writer(rules: list[Keep]) -> None:
    """Rules reach the writer process unchanged."""
    packed = msgspec.msgpack.encode(RetentionRules(keep=tuple(rules)))
    assert msgspec.msgpack.decode(packed, type=RetentionRules) == RetentionRules(keep=tuple(rules))


@pytest.mark.parametrize(
    "make", [lambda: Latest(0), lambda: EverySteps(0), lambda: EverySeconds(0), lambda: Best(0, "x")]
)
def test_a_rule_that_cannot_be_meant_is_refused(make: object) -> None:
    """An invalid rule is refused where it is written."""
    with pytest.raises(ValueError):  # noqa: PT011 (whichever)
        make()  # type: ignore[operator]
