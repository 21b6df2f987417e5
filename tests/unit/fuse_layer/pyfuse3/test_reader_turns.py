"""Tests of turns at reading requests: no request waits while no task reads."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import trio
import trio.testing

from ciuic.fuse_layer.pyfuse3_driver import RUN_OF_TURNS, TURN_WATCH_SECONDS, ReaderTurns


def run(task: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run on an event loop whose clock jumps when nothing else is to do."""

    async def main() -> None:
        with trio.fail_after(1000):
            await task()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def test_task_that_did_not_wait_keeps_the_turn() -> None:
    """A task that takes the turn again without having waited does not queue behind the others."""

    async def task() -> None:
        turns, order = ReaderTurns(), []

        async def other() -> None:
            async with turns:
                order.append("other")

        async with trio.open_nursery() as nursery:
            async with turns:
                nursery.start_soon(other)
                await trio.testing.wait_all_tasks_blocked()
            async with turns:
                order.append("first again")
            turns.hand_on()
        assert order == ["first again", "other"]

    run(task)


def test_a_turn_is_exclusive_and_handed_on_to_all_in_the_end() -> None:
    """Ten tasks that wait between their turns never read at the same time, and all get a turn."""

    async def task() -> None:
        turns, reading, done = ReaderTurns(), [], []

        async def session(number: int) -> None:
            for _ in range(20):
                async with turns:
                    reading.append(number)
                    assert len(reading) == 1
                    await trio.lowlevel.checkpoint()
                    reading.remove(number)
                turns.hand_on()
                await trio.sleep(number / 100)
            turns.hand_on()
            done.append(number)

        async with trio.open_nursery() as nursery:
            for number in range(10):
                nursery.start_soon(session, number)
        assert sorted(done) == list(range(10))

    run(task)


def test_a_task_that_ends_without_handing_on_is_noticed() -> None:
    """A task that ended with the turn is noticed within WATCH_SECONDS by each of the others."""

    async def task() -> None:
        turns, woken = ReaderTurns(), []

        async def other(number: int) -> None:
            async with turns:
                woken.append((number, trio.current_time()))

        async with trio.open_nursery() as watching:
            watching.start_soon(turns.watch)
            async with trio.open_nursery() as nursery:
                async with turns:
                    for number in range(5):
                        nursery.start_soon(other, number)
                    await trio.testing.wait_all_tasks_blocked()
                started = trio.current_time()
            watching.cancel_scope.cancel()
        assert sorted(number for number, _ in woken) == [0, 1, 2, 3, 4]
        assert max(when for _, when in woken) - started <= 5 * TURN_WATCH_SECONDS

    run(task)


def test_a_cancelled_reader_leaves_the_turn_free(pipe: tuple[int, int]) -> None:
    """A cancelled reader, as at the end of the handshake, leaves the turn free."""

    async def task() -> None:
        turns = ReaderTurns()
        with trio.move_on_after(1):
            async with turns:
                await turns.wait_readable(pipe[0])
        async with turns:
            os.write(pipe[1], b"x")
            await turns.wait_readable(pipe[0])

    run(task)


@pytest.mark.parametrize("in_threads", [0, 1])
def test_the_loop_gets_its_chance(pipe: tuple[int, int], in_threads: int) -> None:
    """Other tasks of the loop run after RUN_OF_TURNS requests, or at once while threads work."""

    async def task() -> None:
        turns, others = ReaderTurns(), 0
        turns.waiting = in_threads
        os.write(pipe[1], b"x")

        async def background() -> None:
            nonlocal others
            while True:
                await trio.lowlevel.checkpoint()
                others += 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(background)
            for _ in range(10 * RUN_OF_TURNS):
                async with turns:
                    await turns.wait_readable(pipe[0])
            nursery.cancel_scope.cancel()
        assert others >= (9 * RUN_OF_TURNS if in_threads else 5)

    run(task)
