"""Tests of snapshots that are held first and cut when somebody decides: one hold, one decision, and an end in any case."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import trio
import trio.testing
from support.fake_daemon import Bench, FakeOverlay

from ciuic.daemon.snapshots.requests import HeldSnapshots
from ciuic.errors import CiuicError, NotFound, Unreachable, UsageError
from ciuic.protocol.control_types import MAX_HOLD_LIMIT_SECONDS, HoldRequest, SnapshotRequest
from ciuic.types import SetMember

MEMBER = SetMember(id="ab" * 16, name="night", member="a", members=("a", "b"))
LONG_SECONDS = MAX_HOLD_LIMIT_SECONDS


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.close()


def request(limit_seconds: float = LONG_SECONDS, member: SetMember = MEMBER) -> HoldRequest:
    return HoldRequest(
        snapshot=SnapshotRequest(message="m", tags=["t"]), set_member=member, limit_seconds=limit_seconds
    )


def run(bench: Bench, script: Callable[[HeldSnapshots], Awaitable[None]]) -> None:
    async def main() -> None:
        held = HeldSnapshots(bench.snapshots)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(held.run)
            await trio.testing.wait_all_tasks_blocked()
            with trio.fail_after(60):
                await script(held)
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_what_is_held_is_cut_by_its_decision(bench: Bench) -> None:
    """All roots are held when the token comes, and the snapshot of the decision has its place in the set."""
    overlays = [FakeOverlay(name) for name in "ab"]
    for overlay in overlays:
        bench.add_root(f"/{overlay.name}", overlay)

    async def script(held: HeldSnapshots) -> None:
        token = (await held.hold(request())).token
        assert [(overlay.held, overlay.pending) for overlay in overlays] == [(True, []), (True, [])]
        state = await held.decide(token, cut=True)
        assert state is not None
        (record,) = bench.snapshots.pending_records()
        assert (record.id, record.set_member, record.message, record.tags) == (state.id, MEMBER, "m", ["t"])
        with pytest.raises(NotFound):
            await held.decide(token, cut=True)

    run(bench, script)
    assert [(overlay.held, overlay.pending) for overlay in overlays] == [(False, [1]), (False, [1])]


@pytest.mark.parametrize("how", ["decision", "limit", "end of the daemon"])
def test_a_hold_ends_without_a_cut(bench: Bench, how: str) -> None:
    """A hold that nobody wants cut ends, and keeps no other snapshot waiting."""
    overlay = FakeOverlay()
    bench.add_root("/a", overlay)

    async def script(held: HeldSnapshots) -> None:
        token = (await held.hold(request(0.05 if how == "limit" else LONG_SECONDS))).token
        if how == "end of the daemon":
            return
        if how == "decision":
            assert await held.decide(token, cut=False) is None
        # It waits for the hold, as every cut does.
        pending = await bench.snapshots.take(SnapshotRequest())
        assert pending.record.set_member is None
        with pytest.raises(NotFound):
            await held.decide(token, cut=True)

    run(bench, script)
    assert not overlay.held
    assert overlay.pending == ([] if how == "end of the daemon" else [1])


def test_the_second_hold_comes_after_the_first(bench: Bench) -> None:
    """Two commands that hold at once are served one after the other."""
    bench.add_root("/a", FakeOverlay())
    ends: list[str] = []

    async def second(held: HeldSnapshots) -> None:
        token = (await held.hold(request())).token
        ends.append("second held")
        await held.decide(token, cut=True)

    async def script(held: HeldSnapshots) -> None:
        token = (await held.hold(request())).token
        async with trio.open_nursery() as nursery:
            nursery.start_soon(second, held)
            await trio.testing.wait_all_tasks_blocked()
            ends.append("first decided")
            await held.decide(token, cut=True)

    run(bench, script)
    assert ends == ["first decided", "second held"]
    assert len(bench.snapshots.pending_records()) == 2


def test_a_hold_that_its_worker_has_ended_gives_no_snapshot(bench: Bench) -> None:
    """A worker that refuses the cut, because its hold is over, leaves no epoch and no snapshot of the set."""
    first, late = FakeOverlay("a"), FakeOverlay("b", fail_on={"cut"})
    bench.add_root("/a", first)
    bench.add_root("/b", late)

    async def script(held: HeldSnapshots) -> None:
        token = (await held.hold(request())).token
        with pytest.raises(CiuicError, match="no snapshot could be cut: /b"):
            await held.decide(token, cut=True)

    run(bench, script)
    assert (first.held, late.held, first.pending, late.pending) == (False, False, [], [])
    assert bench.snapshots.pending_records() == []


def test_roots_that_cannot_be_held_are_told_at_once(bench: Bench) -> None:
    """A hold that fails has no token, and holds no other root."""
    first = FakeOverlay("a")
    bench.add_root("/a", first)
    bench.add_root("/b", FakeOverlay("b", fail_on={"hold"}))

    async def script(held: HeldSnapshots) -> None:
        with pytest.raises(CiuicError, match="/b"):
            await held.hold(request())

    run(bench, script)
    assert not first.held


@pytest.mark.parametrize("limit_seconds", [0.0, -1.0, float("nan"), 2 * MAX_HOLD_LIMIT_SECONDS])
def test_limits_that_cannot_be_meant_are_refused(bench: Bench, limit_seconds: float) -> None:
    """No job is held without end."""

    async def script(held: HeldSnapshots) -> None:
        with pytest.raises(UsageError, match="limit"):
            await held.hold(request(limit_seconds))

    run(bench, script)


def test_a_place_that_no_snapshot_can_have_is_refused(bench: Bench) -> None:
    """What the repository would refuse at the commit is refused before anything is held."""

    async def script(held: HeldSnapshots) -> None:
        with pytest.raises(UsageError, match="none of them"):
            await held.hold(request(member=SetMember(id="ab" * 16, name="n", member="c", members=("a", "b"))))

    run(bench, script)


def test_nothing_is_held_before_the_daemon_runs(bench: Bench) -> None:
    """A daemon that starts or stops refuses, because nobody would end the hold."""

    async def main() -> None:
        with pytest.raises(Unreachable):
            await HeldSnapshots(bench.snapshots).hold(request())

    trio.run(main)
