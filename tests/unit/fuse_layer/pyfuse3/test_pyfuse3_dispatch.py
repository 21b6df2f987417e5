"""Tests of where operations run, and of what happens to their exceptions."""

from __future__ import annotations

import errno
import itertools
import threading
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any, cast

import pyfuse3
import pytest
import structlog.testing
import trio
import trio.testing
from support.until import until

from ciuic.fuse_layer.core.overlay_core import OverlayCore
from ciuic.fuse_layer.pyfuse3_driver import CAUTIOUS_SECONDS, SLOW_SECONDS, Dispatch, Pyfuse3Driver
from ciuic.fuse_layer.tracking.gate import Gate, GateHeld


class FakeCore:
    """The part of the core that Dispatch calls."""

    pending = False


def run(task: Callable[[], Awaitable[Any]]) -> Any:
    """Run an async function on an event loop of its own."""

    async def main() -> Any:
        with trio.fail_after(60):
            return await task()

    return trio.run(main)


def thread_id() -> int:
    """Record the thread that an operation runs in."""
    return threading.get_ident()


def test_short_operations_run_on_the_event_loop() -> None:
    """Operations run on the event loop with nothing pending and nothing slow."""

    async def task() -> None:
        dispatch = Dispatch(FakeCore())
        assert await dispatch.read(thread_id) == threading.get_ident()
        assert await dispatch.change(thread_id) == threading.get_ident()

    run(task)


def test_long_operations_and_changes_while_an_epoch_is_pending_do_not() -> None:
    """Long operations, and changes while an epoch is pending, run in threads; reads stay on the loop."""

    async def task() -> None:
        core = FakeCore()
        dispatch = Dispatch(core)
        core.pending = True
        here = threading.get_ident()
        assert await dispatch.change(thread_id) != here
        assert await dispatch.read(thread_id) == here
        for long in (dispatch.long_read, dispatch.long_change, dispatch.sync):
            assert await long(thread_id) != here

    run(task)


def test_an_operation_that_the_gate_turned_away_runs_once_in_a_thread() -> None:
    """An operation that gets GateHeld on the loop waits in a thread, and its effect happens once."""

    async def task() -> None:
        gate = Gate()
        gate.inline_thread = threading.get_ident()
        dispatch = Dispatch(FakeCore())
        done: list[int] = []

        def operation() -> str:
            with gate:
                done.append(thread_id())
                return "result"

        token = gate.hold(60)
        async with trio.open_nursery() as nursery:
            results: list[str] = []

            async def change() -> None:
                results.append(await dispatch.change(operation))

            nursery.start_soon(change)
            await trio.testing.wait_all_tasks_blocked()
            assert done == []
            gate.release(token)
        assert results == ["result"]
        assert len(done) == 1
        assert done[0] != threading.get_ident()

    run(task)


def test_for_how_long_operations_wait_is_counted() -> None:
    """Waiting time is counted on the loop, in threads and on failures, but once for several at a time.

    Quick operations count as no waiting.
    """
    now = 100.0

    def wait(seconds: float) -> None:
        nonlocal now
        now += seconds

    def fail() -> None:
        wait(2)
        raise OSError("no")

    async def task() -> None:
        dispatch = Dispatch(FakeCore(), clock=lambda: now)
        for _ in range(100):
            await dispatch.read(wait, 0.001)
            await dispatch.change(wait, 0.001)
            await dispatch.sync(wait, 0.001)
        assert dispatch.latency.microseconds == 0
        await dispatch.read(wait, 1)
        with pytest.raises(OSError, match="no"):
            await dispatch.long_change(fail)
        assert dispatch.latency.microseconds == pytest.approx(3_000_000)
        both = threading.Barrier(2)

        def wait_with_the_other() -> None:
            both.wait()
            if both.wait() == 0:
                wait(4)
            both.wait()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(dispatch.sync, wait_with_the_other)
            nursery.start_soon(dispatch.long_read, wait_with_the_other)
        assert dispatch.latency.microseconds == pytest.approx(7_000_000)

    run(task)


def test_waiting_operation_is_published_while_it_waits() -> None:
    """A long operation, such as an fsync on a slow disk, is published at once, so captures slow down."""
    end = threading.Event()

    async def task() -> None:
        dispatch = Dispatch(FakeCore())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(dispatch.watch)
            nursery.start_soon(dispatch.sync, end.wait)
            try:
                wait_for_figure = partial(
                    until, "the figure", lambda: dispatch.latency.microseconds > 20_000, 50
                )
                await trio.to_thread.run_sync(wait_for_figure)
            finally:
                end.set()
            nursery.cancel_scope.cancel()

    run(task)


def test_after_a_slow_operation_others_run_in_threads_for_a_while() -> None:
    """Operations run in threads for some time after one made the loop wait."""
    now = 100.0

    def clock() -> float:
        return now

    async def task() -> None:
        nonlocal now
        dispatch = Dispatch(FakeCore(), clock)
        here = threading.get_ident()

        def slow() -> None:
            nonlocal now
            now += 2 * SLOW_SECONDS

        await dispatch.read(slow)
        assert await dispatch.read(thread_id) != here
        assert await dispatch.change(thread_id) != here
        now += CAUTIOUS_SECONDS + 0.001
        assert await dispatch.read(thread_id) == here

    run(task)


class FailingCore(FakeCore):
    """Core whose operations all raise a given exception."""

    inline_thread: int | None = None

    def __init__(self, error: Callable[[], BaseException]) -> None:
        self.error = error
        # The groups of operations, too.
        self.nodes = self.names = self.files = self.attributes = self.directories = self

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def operation(*_args: Any, **_kwargs: Any) -> Any:
            raise self.error()

        return operation


class Context:
    uid, gid, umask, pid = 1000, 1000, 0o022, 1


class Fields:
    update_mode = True
    update_uid = update_gid = update_size = update_atime = update_mtime = False


def _requests(driver: Pyfuse3Driver) -> Iterator[tuple[str, Awaitable[Any]]]:
    ctx, entry = cast(Any, Context()), pyfuse3.EntryAttributes()
    yield "lookup", driver.lookup(1, b"n", ctx)
    yield "getattr", driver.getattr(1, ctx)
    yield "setattr", driver.setattr(1, entry, cast(Any, Fields()), None, ctx)
    yield "readlink", driver.readlink(2, ctx)
    yield "mknod", driver.mknod(1, b"n", 0o644, 0, ctx)
    yield "mkdir", driver.mkdir(1, b"n", 0o755, ctx)
    yield "symlink", driver.symlink(1, b"n", b"t", ctx)
    yield "link", driver.link(2, 1, b"n", ctx)
    yield "unlink", driver.unlink(1, b"n", ctx)
    yield "rmdir", driver.rmdir(1, b"n", ctx)
    yield "rename", driver.rename(1, b"n", 1, b"m", 0, ctx)
    yield "open", driver.open(2, 0, ctx)
    yield "create", driver.create(1, b"n", 0o644, 0, ctx)
    yield "read", driver.read(1, 0, 10)
    yield "write", driver.write(1, 0, b"x")
    yield "large write", driver.write(1, 0, b"x" * 1_000_000)
    yield "flush", driver.flush(1)
    yield "release", driver.release(1)
    yield "fsync", driver.fsync(1, False)
    yield "opendir", driver.opendir(1, ctx)
    yield "releasedir", driver.releasedir(1)
    yield "fsyncdir", driver.fsyncdir(1, True)
    yield "statfs", driver.statfs(ctx)
    yield "getxattr", driver.getxattr(1, b"user.a", ctx)
    yield "setxattr", driver.setxattr(1, b"user.a", b"", ctx)
    yield "listxattr", driver.listxattr(1, ctx)
    yield "removexattr", driver.removexattr(1, b"user.a", ctx)


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (lambda: OSError(errno.EDQUOT, "quota"), errno.EDQUOT),
        (lambda: OSError("no errno"), errno.EIO),
        (lambda: ValueError("a bug"), errno.EIO),
        (RecursionError, errno.EIO),
        (MemoryError, errno.EIO),
    ],
)
def test_every_request_is_answered_after_any_exception(
    error: Callable[[], BaseException], answer: int
) -> None:
    """Any exception of the core becomes FUSEError, EIO if it has no errno, as others would end the server."""
    driver = Pyfuse3Driver(cast(OverlayCore, FailingCore(error)))

    async def task() -> None:
        count = 0
        for name, request in _requests(driver):
            count += 1
            with pytest.raises(pyfuse3.FUSEError) as caught:
                await request
            assert caught.value.errno == answer, name
        assert driver.requests == count

    with structlog.testing.capture_logs() as events:
        run(task)
    assert bool(events) == (not isinstance(error(), OSError))


def test_forget_never_raises() -> None:
    """Forget never raises, as an exception would end the server."""
    driver = Pyfuse3Driver(cast(OverlayCore, FailingCore(ValueError)))
    with structlog.testing.capture_logs() as events:
        run(lambda: driver.forget([(2, 1), (3, 1)]))
    assert [event["event"] for event in events] == ["forget_failed"]


def test_a_name_that_is_not_there_is_remembered_as_absent() -> None:
    """A failed lookup is answered with inode 0 and a long life, so the kernel remembers the absence."""
    driver = Pyfuse3Driver(cast(OverlayCore, FailingCore(lambda: FileNotFoundError(errno.ENOENT, "gone"))))
    entry = run(lambda: driver.lookup(1, b"n", cast(Any, Context())))
    assert entry.st_ino == 0
    assert entry.entry_timeout > 1000


def test_many_waiting_changes_leave_threads_for_reads() -> None:
    """A read that needs a thread gets one while a cut holds a hundred changes."""

    async def task() -> None:
        release = threading.Event()
        dispatch = Dispatch(FakeCore())

        def turned_away() -> None:
            if threading.current_thread() is threading.main_thread():
                raise GateHeld
            assert release.wait(60)

        async with trio.open_nursery() as nursery:
            for _ in itertools.repeat(None, 100):
                nursery.start_soon(dispatch.change, turned_away)
            await trio.testing.wait_all_tasks_blocked()
            assert await dispatch.long_read(lambda: "data") == "data"
            await dispatch.sync(lambda: None)
            release.set()

    run(task)
