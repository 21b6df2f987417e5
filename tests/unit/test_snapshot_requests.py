"""Requests for snapshots that come together: who shares a cut with whom, and that none is refused while there is another way."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import trio
import trio.testing
from support.fake_daemon import Bench, FakeOverlay, until

from ciuic.control_types import SnapshotRequest
from ciuic.daemon.pending import PendingSnapshot
from ciuic.daemon.snapshots import MAX_PENDING
from ciuic.daemon.worker_process import Worker
from ciuic.errors import CiuicError
from ciuic.types import Pair


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.close()


class Requests:
    """Requests that were made, and what became of each, in the order in which they were made."""

    def __init__(self, bench: Bench, nursery: trio.Nursery) -> None:
        self._bench = bench
        self._nursery = nursery
        self.outcomes: list[PendingSnapshot | CiuicError | None] = []

    def make(self, request: SnapshotRequest | None = None, *, pair: Pair | None = None) -> trio.CancelScope:
        """Make one more; cancel the scope to have its requester go away."""
        self.outcomes.append(None)
        scope, number = trio.CancelScope(), len(self.outcomes) - 1

        async def take() -> None:
            with scope:
                try:
                    self.outcomes[number] = await self._bench.snapshots.take(
                        request or SnapshotRequest(), pair=pair
                    )
                except CiuicError as error:
                    self.outcomes[number] = error

        self._nursery.start_soon(take)
        return scope

    async def answered(self) -> list[PendingSnapshot]:
        """Return what all of them got: a snapshot each."""
        await until(lambda: None not in self.outcomes)
        found = [one for one in self.outcomes if isinstance(one, PendingSnapshot)]
        assert len(found) == len(self.outcomes), self.outcomes
        return found


def run(bench: Bench, script: Callable[[Requests], Awaitable[None]], *, captures: bool = False) -> None:
    """Runs ``script``, with or without the task that captures."""

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            if captures:
                nursery.start_soon(bench.snapshots.capturing.run)
            with trio.fail_after(60):
                await script(Requests(bench, nursery))
            nursery.cancel_scope.cancel()

    trio.run(main)


def hold_first_flush(bench: Bench) -> tuple[trio.Event, trio.Event]:
    """The first cut begins, and then waits: (it has begun, let it go on)."""
    begun, go_on = trio.Event(), trio.Event()

    async def flush(root: str, worker: Worker) -> bool:
        bench.flushed.append(root)
        begun.set()
        await go_on.wait()
        return True

    bench.snapshots._context = bench.snapshots._context._replace(flush=flush)
    return begun, go_on


def test_those_that_wait_for_a_cut_share_the_next_and_never_one_that_has_begun(bench: Bench) -> None:
    """A request must be in the snapshot whose id it gets: what it wants in has been written when it is made, and not before."""
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
def test_those_that_ask_for_something_else_get_something_else(bench: Bench, other: SnapshotRequest) -> None:
    """Roots, tags and hold are properties of the snapshot; /a alone is not all."""
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
    """It names the one state of a training that it belongs to."""
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


def test_a_full_queue_is_waited_for_and_nobody_is_refused(bench: Bench) -> None:
    """598 requests while eight snapshots wait: 587 of them were refused. They share the cut that there is room for next."""
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
        assert bench.snapshots.somebody_waits
        gate.set()
        assert len({one.id for one in await requests.answered()}) == 1

    run(bench, script, captures=True)
    assert len(overlay.pending) + len(overlay.committed) + len(overlay.aborted) == MAX_PENDING + 1


def test_one_that_goes_away_takes_nobody_along(bench: Bench) -> None:
    """Its connection ends while it cuts for all: another of them cuts."""
    overlay = FakeOverlay()
    bench.add_root("/a", overlay)
    begun, go_on = hold_first_flush(bench)

    async def script(requests: Requests) -> None:
        async with bench.snapshots._cut_lock:
            leader = requests.make()
            requests.make()
            await trio.testing.wait_all_tasks_blocked()
        await begun.wait()
        leader.cancel()
        go_on.set()
        await until(lambda: requests.outcomes[1] is not None)
        assert isinstance(requests.outcomes[1], PendingSnapshot)
        assert requests.outcomes[0] is None
        assert not bench.snapshots._requests._all

    run(bench, script)


def test_a_cut_that_fails_fails_for_all_that_share_it(bench: Bench) -> None:
    """Each would meet the same again, one after the other; the next request tries anew."""
    overlay = FakeOverlay()
    bench.add_root("/a", overlay)
    bench.roots["/a"].worker = None
    bench.roots["/a"].state = "failed"

    async def script(requests: Requests) -> None:
        async with bench.snapshots._cut_lock:
            for _ in range(3):
                requests.make()
            await trio.testing.wait_all_tasks_blocked()
        await until(lambda: None not in requests.outcomes)
        assert [str(one) for one in requests.outcomes] == ["not mounted: /a"] * 3
        assert not bench.snapshots.somebody_waits
        with pytest.raises(CiuicError, match="not mounted"):
            await bench.snapshots.take(SnapshotRequest())

    run(bench, script)
