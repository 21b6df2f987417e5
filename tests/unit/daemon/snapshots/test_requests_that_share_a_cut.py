"""Tests of snapshot requests: which share a cut, that none is refused needlessly, and the look-up by id."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from support.fake_daemon import Bench, FakeOverlay
from support.until import until_async

from ciuic.daemon.base.runtime import CutRecord, PendingRecord
from ciuic.daemon.roots.worker_process import OverlayWorker
from ciuic.daemon.snapshots.pending import (
    MAX_PENDING,
    MAX_PENDING_OF_A_USER,
    MAX_PENDING_OF_USERS,
    PendingSnapshot,
)
from ciuic.daemon.snapshots.requests import find_state
from ciuic.errors import CiuicError, NotFound, Unreachable
from ciuic.protocol.control_types import SnapshotRequest
from ciuic.types import Pair


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.close()


class Requests:
    """Requests that were made, and the result of each, in the order in which they were made."""

    def __init__(self, bench: Bench, nursery: trio.Nursery) -> None:
        self._bench = bench
        self._nursery = nursery
        self.outcomes: list[PendingSnapshot | CiuicError | None] = []

    def make(
        self,
        request: SnapshotRequest | None = None,
        *,
        pair: Pair | None = None,
        user: int | None = None,
    ) -> trio.CancelScope:
        """Make one more request; cancelling the scope makes its requester disappear."""
        self.outcomes.append(None)
        scope, number = trio.CancelScope(), len(self.outcomes) - 1

        async def take() -> None:
            with scope:
                try:
                    self.outcomes[number] = await self._bench.snapshots.take(
                        request or SnapshotRequest(), pair=pair, user=user
                    )
                except CiuicError as error:
                    self.outcomes[number] = error

        self._nursery.start_soon(take)
        return scope

    async def answered(self) -> list[PendingSnapshot]:
        """Return the results of all requests, a snapshot each."""
        await until_async(lambda: None not in self.outcomes)
        found = [one for one in self.outcomes if isinstance(one, PendingSnapshot)]
        assert len(found) == len(self.outcomes), self.outcomes
        return found


def run(bench: Bench, script: Callable[[Requests], Awaitable[None]], *, captures: bool = False) -> None:
    """Run ``script``, with or without the capture task."""

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            if captures:
                nursery.start_soon(bench.snapshots.capturing.run)
            with trio.fail_after(60):
                await script(Requests(bench, nursery))
            nursery.cancel_scope.cancel()

    trio.run(main)


def hold_first_flush(bench: Bench) -> tuple[trio.Event, trio.Event]:
    """Make the first cut wait; return two events: it has begun, and let it go on."""
    begun, go_on = trio.Event(), trio.Event()

    async def flush(root: str, worker: OverlayWorker) -> bool:
        bench.flushed.append(root)
        begun.set()
        await go_on.wait()
        return True

    bench.flush = flush
    return begun, go_on


def test_waiting_requests_share_the_next_cut(bench: Bench) -> None:
    """Requests that wait share the next cut, never one that has begun before they were made.

    What a requester wants in the snapshot has been written when the request is made, and not before.
    """
    overlay = FakeOverlay()
    bench.add_root("/a", overlay)
    begun, go_on = hold_first_flush(bench)

    async def script(requests: Requests) -> None:
        requests.make()
        await begun.wait()
        for number in range(100):
            requests.make(SnapshotRequest(message=f"m{number}"))
        await trio.testing.wait_all_tasks_blocked()
        go_on.set()
        first, *others = await requests.answered()
        (shared,) = {one.id for one in others}
        assert shared != first.id
        assert others[0].state.message.count("; ") == 3
        assert others[0].state.message.endswith("; and 97 more")

    run(bench, script)
    assert overlay.pending == [1, 2]
    assert bench.flushed == ["/a", "/a"]


@pytest.mark.parametrize(
    "other", [SnapshotRequest(tags=["x"]), SnapshotRequest(hold=True), SnapshotRequest(roots=["/a"])]
)
def test_different_requests_are_cut_apart(bench: Bench, other: SnapshotRequest) -> None:
    """Requests with other roots, tags or hold are cut apart; /a alone is not all."""
    bench.add_root("/a", FakeOverlay("a"))
    bench.add_root("/b", FakeOverlay("b"))
    begun, go_on = hold_first_flush(bench)

    async def script(requests: Requests) -> None:
        requests.make()
        await begun.wait()
        for request in (SnapshotRequest(), other, SnapshotRequest(), other):
            requests.make(request)
        await trio.testing.wait_all_tasks_blocked()
        go_on.set()
        _, plain, special, plain_too, special_too = await requests.answered()
        assert plain is plain_too
        assert special is special_too
        assert plain is not special
        assert (special.record.tags, special.record.hold) == (other.tags, other.hold)

    run(bench, script)


def test_a_pair_is_never_shared(bench: Bench) -> None:
    """A paired snapshot is never shared, as it names the state of one training."""
    bench.add_root("/a", FakeOverlay())
    begun, go_on = hold_first_flush(bench)

    async def script(requests: Requests) -> None:
        requests.make()
        await begun.wait()
        pairs = [Pair(of="training", id=f"cs-00000{number}", time_ns=number) for number in (1, 2)]
        for pair in pairs:
            requests.make(pair=pair)
        requests.make()
        await trio.testing.wait_all_tasks_blocked()
        go_on.set()
        _, *others = await requests.answered()
        assert len({one.id for one in others}) == 3
        assert [one.record.pair for one in others] == [*pairs, None]
        assert [one.record.requested for one in others][2]

    run(bench, script)


def test_requests_wait_for_a_full_queue_and_are_not_refused(bench: Bench) -> None:
    """Requests beyond the queue's limit wait and share the next cut, and none is refused.

    Before, 587 of 598 requests made while eight snapshots waited were refused.
    """
    overlay = FakeOverlay()
    bench.add_root("/a", overlay)
    gate = trio.Event()
    bench.gates = [gate]

    async def script(requests: Requests) -> None:
        for _ in range(MAX_PENDING):
            await bench.snapshots.take(SnapshotRequest())
        for _ in range(598):
            requests.make()
        await trio.testing.wait_all_tasks_blocked()
        assert len(overlay.pending) == MAX_PENDING
        assert bench.snapshots.caller_waits
        gate.set()
        assert len({one.id for one in await requests.answered()}) == 1

    run(bench, script, captures=True)
    assert len(overlay.pending) + len(overlay.committed) + len(overlay.aborted) == MAX_PENDING + 1


def test_requester_that_disconnects_does_not_affect_others(bench: Bench) -> None:
    """Another requester cuts when the one that cuts for all disconnects."""
    overlay = FakeOverlay()
    bench.add_root("/a", overlay)
    begun, go_on = hold_first_flush(bench)

    async def script(requests: Requests) -> None:
        async with bench.snapshots._turns.cut(None):
            leader = requests.make()
            requests.make()
            await trio.testing.wait_all_tasks_blocked()
        await begun.wait()
        leader.cancel()
        go_on.set()
        await until_async(lambda: requests.outcomes[1] is not None)
        assert isinstance(requests.outcomes[1], PendingSnapshot)
        assert requests.outcomes[0] is None
        assert not bench.snapshots._requests._all

    run(bench, script)


def test_a_cut_that_fails_fails_for_all_that_share_it(bench: Bench) -> None:
    """A failed cut fails for all that share it, and the next request tries again."""
    overlay = FakeOverlay()
    bench.add_root("/a", overlay)
    bench.roots["/a"].worker = None
    bench.roots["/a"].state = "failed"

    async def script(requests: Requests) -> None:
        async with bench.snapshots._turns.cut(None):
            for _ in range(3):
                requests.make()
            await trio.testing.wait_all_tasks_blocked()
        await until_async(lambda: None not in requests.outcomes)
        assert [str(one) for one in requests.outcomes] == ["not mounted: /a"] * 3
        assert not bench.snapshots.caller_waits
        with pytest.raises(CiuicError, match="not mounted"):
            await bench.snapshots.take(SnapshotRequest())

    run(bench, script)


def _pairs() -> Iterator[Pair]:
    """Yield pairs of different trainings."""
    for number in itertools.count(1):
        yield Pair(of="training", id=f"cs-{number:06}", time_ns=number)


def test_one_user_keeps_no_other_from_cuts(bench: Bench) -> None:
    """While the flush of one user's root hangs behind 50 requests, another user and an administrator cut at once."""
    bench.add_root("/a", FakeOverlay("a"))
    bench.add_root("/b", FakeOverlay("b"))
    begun, go_on = trio.Event(), trio.Event()

    async def flush(root: str, worker: OverlayWorker) -> bool:
        if root == "/a":
            begun.set()
            await go_on.wait()
        return True

    bench.flush = flush

    async def script(requests: Requests) -> None:
        pairs = _pairs()
        for _ in range(50):
            requests.make(SnapshotRequest(roots=["/a"]), pair=next(pairs), user=1)
        await begun.wait()
        for user in (2, None):
            taken = await bench.snapshots.take(SnapshotRequest(roots=["/b"]), pair=next(pairs), user=user)
            assert taken.record.user == user
        assert requests.outcomes == [None] * 50

    run(bench, script)


def test_places_of_a_user_are_limited(bench: Bench) -> None:
    """One user's snapshots leave places to the next user, and those of all users to administrators."""
    overlay = FakeOverlay()
    bench.add_root("/a", overlay)

    async def script(requests: Requests) -> None:
        pairs = _pairs()
        for user in (1, 2):
            for _ in range(MAX_PENDING):
                requests.make(pair=next(pairs), user=user)
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert bench.snapshots.is_full(user)
            assert len(overlay.pending) == (MAX_PENDING_OF_A_USER if user == 1 else MAX_PENDING_OF_USERS)
        for number in range(MAX_PENDING - MAX_PENDING_OF_USERS):
            requests.make(SnapshotRequest(tags=[str(number)]))
        await until_async(lambda: len(overlay.pending) == MAX_PENDING)

    run(bench, script)


def test_administrators_are_first(bench: Bench) -> None:
    """An administrator's cut that became possible last is made before those of users that wait."""
    bench.add_root("/a", FakeOverlay())

    async def script(requests: Requests) -> None:
        pairs = _pairs()
        async with bench.snapshots._turns.cut(None):
            for user in range(1, MAX_PENDING_OF_USERS):
                requests.make(pair=next(pairs), user=user)
            await trio.testing.wait_all_tasks_blocked(0.05)
            requests.make()
            await trio.testing.wait_all_tasks_blocked(0.05)
        taken = await requests.answered()
        assert min(taken, key=lambda one: one.record.time_ns) is taken[-1]

    run(bench, script)


class _Store:
    """Repository with neither committed nor lost snapshots."""

    def find(self, snapshot_id: str) -> None:
        return None

    def lost(self, snapshot_id: str) -> None:
        return None


def test_a_promised_snapshot_is_no_unknown_one_while_the_daemon_starts(bench: Bench) -> None:
    """A caller that waits for a predecessor's snapshot gets it, and one that does not is to ask again."""
    overlay = FakeOverlay()
    bench.add_root("/a", overlay)
    overlay.pending = [1]
    record = PendingRecord(id="cs-1", time_ns=1, cuts=[CutRecord(path="/a", session="s", epoch=1)])
    store: Any = _Store()

    async def main() -> None:
        states = []

        async def wait() -> None:
            states.append(await find_state(bench.snapshots, store, "cs-1", wait=True))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            for id_ in ("cs-1", "cs-2"):
                with pytest.raises(Unreachable, match="starting"):
                    await find_state(bench.snapshots, store, id_, wait=False)
            await bench.snapshots.resume([record])
            nursery.start_soon(bench.snapshots.capturing.run)
            with trio.fail_after(60):
                await until_async(lambda: states)
            nursery.cancel_scope.cancel()
        assert [state.id for state in states] == ["cs-1"]
        for wait_for_it in (False, True):
            with pytest.raises(NotFound):
                await find_state(bench.snapshots, store, "cs-2", wait=wait_for_it)

    trio.run(main)
