"""Marks that a held host finds in a remote: about its own set or another, in time or too late."""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest.mock import Mock

import pytest

from ciuic.remote.documents import StoredSetMark, StoredSetPlan
from ciuic.remote.objects.memory_objects import MemoryObjects, forget_bucket
from ciuic.remote.sealing.sealer import MasterKey, Sealer
from ciuic.remote.sets import SetIncomplete, SetMeeting, SetRequest

_MEMBERS = ("a", "b")
_OURS, _OTHER = "1" * 32, "2" * 32


@pytest.fixture
def meeting() -> Iterator[SetMeeting]:
    bucket = f"sets-{os.urandom(6).hex()}"
    made = SetMeeting(
        MemoryObjects(bucket),
        Sealer(bytes(16), MasterKey.generate()),
        SetRequest(name="night", members=_MEMBERS, member="a"),
    )
    made._set_id = _OURS
    yield made
    forget_bucket(bucket)


@pytest.mark.parametrize(("set_id", "decision"), [(_OURS, "cut"), (_OTHER, "abort"), (None, "abort")])
def test_a_decision_to_cut_another_set_cuts_nothing(
    meeting: SetMeeting, set_id: str | None, decision: str
) -> None:
    """Only a decision about the very set for which this host is held lets it cut."""
    mark = StoredSetMark(by="3" * 32, decision="cut", set=set_id)
    assert meeting._decided(mark) == decision


@pytest.mark.parametrize(("set_id", "unready"), [(_OURS, []), (_OTHER, ["b"])])
def test_a_host_that_was_held_for_another_set_is_not_ready(
    meeting: SetMeeting, set_id: str, unready: list[str]
) -> None:
    """A mark that an earlier meeting has left does not say that its host is held now."""
    plan = StoredSetPlan(id="4" * 32, name="night", members=_MEMBERS, hold_limit_seconds=1)
    meeting._create(meeting._mark(plan, "ready", "b"), StoredSetMark(by="3" * 32, set=set_id))
    waited_for = ["b"]
    meeting._strike_out(plan, "ready", waited_for)
    assert waited_for == unready


def test_a_host_that_hears_too_late_says_that_the_set_lacks_it(
    meeting: SetMeeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the decision to cut could not be read within the hold, this host says that others have snapshots."""
    plan = StoredSetPlan(id="4" * 32, name="night", members=_MEMBERS, hold_limit_seconds=1)
    assert meeting._decide(plan, "cut") == "cut"
    monkeypatch.setattr(meeting, "_agree", Mock(return_value=None))
    daemon = Mock()
    with pytest.raises(SetIncomplete):
        meeting._hold(daemon, plan, counts=False, flushed=True)
    daemon.hold.return_value.release.assert_called_once()
    daemon.hold.return_value.cut.assert_not_called()


@pytest.mark.parametrize("ours", [True, False])
def test_the_go_of_an_earlier_meeting_ends_the_attempt(meeting: SetMeeting, ours: bool) -> None:
    """That all are here is believed only where it names this very command, not one of its host that was killed."""
    plan = StoredSetPlan(id="4" * 32, name="night", members=_MEMBERS, hold_limit_seconds=1)
    go = StoredSetMark(by="3" * 32, here=(meeting._nonce if ours else "5" * 32, "6" * 32))
    meeting._create(meeting._mark(plan, "go"), go)
    assert meeting._until_all_here(plan) == (go if ours else None)
