"""Tests of what a set of hosts leaves in a remote: its marks and those of other sets, and requests that cannot be meant."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
from support.until import until

from ciuic.errors import CiuicError, UsageError
from ciuic.remote.documents import StoredSetMark, StoredSetPlan
from ciuic.remote.objects.memory_objects import MemoryObjects, forget_bucket
from ciuic.remote.objects.model import ObjectInfo, UntrustedStore
from ciuic.remote.sealing.sealer import MasterKey, Sealer
from ciuic.remote.sets import SetIncomplete, SetMeeting, SetRequest, remove_old_sets
from ciuic.types import SetMember

BUCKET = "sets-of-hosts"
SEALER = Sealer(b"r" * 16, MasterKey(b"k" * 32))


class _Aged(MemoryObjects):
    """A store in which what was there when it was opened is a day older."""

    def __init__(self) -> None:
        super().__init__(BUCKET)
        self._old = {info.name for info in super().list("")}

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        for info in super().list(prefix, after=after):
            yield info._replace(
                modified_ns=info.modified_ns - (25 * 3600 * 10**9 if info.name in self._old else 0)
            )


class _Daemon:
    """A daemon whose cut is the place in the set."""

    def flush(self) -> bool:
        return True

    def hold(self, member: SetMember, limit_seconds: float, *, flushed: bool) -> _Held:
        return _Held(member)


class _Held:
    def __init__(self, member: SetMember) -> None:
        self._member = member

    def cut(self) -> SetMember:
        return self._member

    def release(self) -> None:
        pass


@pytest.fixture
def objects() -> Iterator[MemoryObjects]:
    yield MemoryObjects(BUCKET)
    forget_bucket(BUCKET)


def request(member: str, name: str = "night") -> SetRequest:
    return SetRequest(name, ("a", "b"), member, hold_limit_seconds=30.0)


def cut_both(objects: MemoryObjects, name: str = "night") -> list[SetMember]:
    """Cut a set of two hosts."""
    found: list[SetMember] = []

    def take(member: str) -> None:
        found.append(SetMeeting(objects, SEALER, request(member, name)).take(_Daemon()))

    threads = [threading.Thread(target=take, args=(member,)) for member in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(found, key=lambda place: place.member)


def test_objects_of_older_sets_are_removed_by_a_later_one(objects: MemoryObjects) -> None:
    """What a set leaves is gone after one that was cut a day later, and its name may be used again."""
    first = cut_both(objects)
    assert [(place.name, place.member, place.members) for place in first] == [
        ("night", "a", ("a", "b")),
        ("night", "b", ("a", "b")),
    ]
    before = {info.name for info in objects.list("")}
    cut_both(_Aged(), "next")
    after = {info.name for info in objects.list("")}
    assert not before & after
    assert len(after) == len(before) == 7
    assert cut_both(objects)[0].id != first[0].id
    # What a host that may not delete has left.
    assert remove_old_sets(objects) == 0
    aged = _Aged()
    cut_both(MemoryObjects(BUCKET), "last")
    assert remove_old_sets(aged) == 14
    assert len(list(objects.list(""))) == 7


def test_names_of_objects_tell_nothing(objects: MemoryObjects) -> None:
    """Neither the name of the set nor that of a host can be seen or guessed without the key."""
    cut_both(objects)
    plan = next(info.name for info in objects.list("sets/plans/"))
    everything = b"".join(objects.get(info.name) + info.name.encode() for info in objects.list(""))
    assert b"night" not in everything
    assert Sealer(b"r" * 16, None).hide("set night") not in plan


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"members": ("a", "b", "a")}, "named once, got twice: a"),
        ({"member": "c"}, "this host, c, is none of a, b"),
        ({"name": "two\nlines"}, "cannot be a name"),
        ({"name": ""}, "cannot be a name"),
        ({"hold_limit_seconds": 0.0}, "above 0"),
        ({"hold_limit_seconds": float("nan")}, "above 0"),
        ({"wait_seconds": 1e9}, "at most 3600"),
    ],
)
def test_requests_that_cannot_be_meant_are_refused(
    objects: MemoryObjects, changed: dict[str, object], message: str
) -> None:
    """A request that no set can come of is refused before anything is asked of the store."""
    with pytest.raises(UsageError, match=message):
        SetMeeting(objects, SEALER, request("a")._replace(**changed))  # type: ignore[arg-type]
    assert not list(objects.list(""))


def test_hosts_that_are_asked_for_different_members_are_told(objects: MemoryObjects) -> None:
    """A command that names other hosts than the one before it is refused, and does not end that one's attempt."""
    first = SetMeeting(objects, SEALER, request("a")._replace(wait_seconds=0.2))
    outcomes: list[CiuicError] = []

    def wait() -> None:
        with pytest.raises(CiuicError) as caught:
            first.take(_Daemon())
        outcomes.append(caught.value)

    thread = threading.Thread(target=wait)
    thread.start()
    until("a plan", lambda: list(objects.list("sets/plans/")))
    with pytest.raises(
        UsageError, match="another host was asked for the set 'night' of a, b, this one for a, c"
    ):
        SetMeeting(objects, SEALER, request("a")._replace(members=("a", "c"))).take(_Daemon())
    thread.join()
    assert "b did not come" in outcomes[0].message


class _Untrusted(MemoryObjects):
    """A store whose certificate is of another."""

    def create(self, name: str, data: bytes) -> bool:
        raise UntrustedStore(name)

    def get(self, name: str) -> bytes:
        raise UntrustedStore(name)


def test_a_store_that_cannot_be_trusted_is_not_waited_for(objects: MemoryObjects) -> None:
    """Its certificate is of another, which asking again does not change: the command ends at once."""

    def sleep(seconds: float) -> None:
        if seconds:
            pytest.fail("it waits")

    with pytest.raises(UntrustedStore):
        SetMeeting(_Untrusted(BUCKET), SEALER, request("a"), sleep=sleep).take(_Daemon())


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
