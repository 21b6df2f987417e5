"""Attacker: another host of a set, which is started over ssh and says or waits what it wants, or forges marks with a valid key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ciuic.cli.commands import snapshot as snapshot_command
from ciuic.cli.commands.snapshot import OtherHosts
from ciuic.errors import Partial
from ciuic.remote.documents import StoredSetMark, StoredSetPlan, encode_set_object
from ciuic.remote.object_names import set_mark_name, set_plan_name
from ciuic.remote.objects.memory_objects import MemoryObjects, forget_bucket
from ciuic.remote.sealing.sealer import MasterKey, Sealer
from ciuic.remote.sets import SetIncomplete, SetMeeting, SetNotCut, SetRequest
from ciuic.types import SetMember


def _ssh(tmp_path: Path, script: str) -> dict[str, str]:
    program = tmp_path / "ssh"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return {"CIUIC_SSH_COMMAND": str(program), "PATH": "/usr/bin:/bin"}


def test_a_host_that_never_ends_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that says much and does not end costs its part of the set, within a limit of time."""
    monkeypatch.setattr(snapshot_command, "_CUT_SECONDS", 0.5)
    with OtherHosts(("a", "b"), "a", [], _ssh(tmp_path, "exec yes")) as others:
        with pytest.raises(Partial, match="no end within"):
            others.finish()
        assert all(len(said.text()) <= 64 << 10 for said in others._said["b"])


def test_what_a_host_says_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the last lines of a failed host's 64 MB of output are kept and shown."""
    told: list[str] = []
    monkeypatch.setattr(snapshot_command, "note", told.append)
    script = "yes | head -c 64000000 >&2; echo last words >&2; exit 3"
    with OtherHosts(("a", "b"), "a", [], _ssh(tmp_path, script)) as others:
        with pytest.raises(Partial, match="exit code 3"):
            others.finish()
        assert len(others._said["b"][1].text()) <= 64 << 10
    assert told[-1] == "b: last words"
    assert len(told) <= 10


class _Liar:
    """Host ``b``, which has the key of the remote; the daemon of host ``a``, in whose hold it lies."""

    def __init__(self, objects: MemoryObjects, decision: str) -> None:
        self._objects, self._decision = objects, decision
        self._sealer = Sealer(b"r" * 16, MasterKey(b"k" * 32))
        self.limits: list[float] = []
        self.ends: list[str] = []
        self._plan = StoredSetPlan(id="1" * 32, name="night", members=("a", "b"), hold_limit_seconds=60)
        self._says(set_plan_name(self._sealer.hide("set night"), 1), self._plan)
        self._says(self._mark("here", "b"), StoredSetMark(by="2" * 32))

    def _mark(self, mark: Any, member: str = "") -> str:
        name = self._sealer.hide(f"member {self._plan.id} {member}") if member else ""
        return set_mark_name(self._plan.id, mark, name)

    def _says(self, name: str, content: StoredSetPlan | StoredSetMark) -> None:
        self._objects.create(name, encode_set_object(self._sealer, name, content))

    def meet(self) -> None:
        SetMeeting(self._objects, self._sealer, SetRequest("night", ("a", "b"), "a", 0.5, 0)).take(self)

    def flush(self) -> bool:
        return True

    def hold(self, member: SetMember, limit_seconds: float, *, flushed: bool) -> _Liar:
        self.limits.append(limit_seconds)
        if self._decision:
            self._says(self._mark("ready", "a"), StoredSetMark(by="2" * 32, set=member.id))
            self._says(self._mark("decision"), StoredSetMark(by="2" * 32, decision="cut", set=member.id))
        return self

    def cut(self) -> None:
        self.ends.append("cut")

    def release(self) -> None:
        self.ends.append("released")


@pytest.fixture
def objects() -> Iterator[MemoryObjects]:
    yield MemoryObjects("lies")
    forget_bucket("lies")


def test_a_plan_of_another_host_holds_nobody_for_longer(objects: MemoryObjects) -> None:
    """A host is held for no longer than it was asked for, whatever the plan that it finds says."""
    liar = _Liar(objects, "")
    with pytest.raises(SetNotCut):
        liar.meet()
    assert liar.limits == [0.5]
    assert liar.ends == ["released"]


class _Clock:
    """Clock that each request, and nothing else, moves on."""

    def __init__(self, objects: MemoryObjects) -> None:
        self._objects = objects
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def __getattr__(self, name: str) -> Any:
        self.now += 0.05
        return getattr(self._objects, name)


@pytest.mark.parametrize("mark", ["decision", "go"])
def test_attempts_without_number_are_not_passed_over_for_longer_than_is_waited(
    objects: MemoryObjects, mark: Any
) -> None:
    """Thousands of attempts of a liar, given up or to be given up, end with the time to wait, and hold nobody."""
    liar = _Liar(objects, "")
    sealer = Sealer(b"r" * 16, MasterKey(b"k" * 32))
    said = StoredSetMark(by="2" * 32, decision="abort" if mark == "decision" else "", here=("3" * 32,) * 2)
    for number in range(2, 1000):
        plan = StoredSetPlan(id=f"{number:032x}", name="night", members=("a", "b"), hold_limit_seconds=60)
        objects.create(
            set_plan_name(sealer.hide("set night"), number),
            encode_set_object(sealer, set_plan_name(sealer.hide("set night"), number), plan),
        )
        name = set_mark_name(plan.id, mark)
        objects.create(name, encode_set_object(sealer, name, said))
    first = set_mark_name("1" * 32, "decision")
    abort = StoredSetMark(by="2" * 32, decision="abort")
    objects.create(first, encode_set_object(sealer, first, abort))
    clock: Any = _Clock(objects)
    meeting = SetMeeting(
        clock, sealer, SetRequest("night", ("a", "b"), "a", 0.5, 30), clock=clock, sleep=lambda seconds: None
    )
    with pytest.raises(SetNotCut, match="attempts were given up"):
        meeting.take(liar)
    assert 30 <= clock.now < 32
    assert liar.limits == []


def test_a_decision_without_ones_own_ready_is_none(objects: MemoryObjects) -> None:
    """A host cuts nothing where another one has said that it is ready, and has decided."""
    liar = _Liar(objects, "cut")
    with pytest.raises(SetIncomplete):
        liar.meet()
    assert liar.ends == ["released"]
