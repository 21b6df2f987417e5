"""One root kept served: mounted, mounted again, given up loudly, taken away cleanly."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator

import pytest
import trio
import trio.testing
from support.fake_daemon import FakeOverlay, FakeWorker, NoMounts

import ciuic.daemon.supervisor as supervisor_module
from ciuic.bypass import Bypasser, Use
from ciuic.daemon import bypass_watch
from ciuic.daemon.alerts import Alerts
from ciuic.daemon.events import EventBus
from ciuic.daemon.settings import RootSettings
from ciuic.daemon.supervisor import RootSupervisor
from ciuic.daemon.worker_process import Worker
from ciuic.errors import CiuicError, NotFound


async def until(condition: Callable[[], bool]) -> None:
    """Polls: what is waited for happens in processes and threads of the worker, which raise no event here."""
    with trio.fail_after(20):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.01)


class Stage:
    """A supervisor over prepared workers, and what it reported."""

    def __init__(self) -> None:
        self.events = EventBus(lambda: 0)
        self.alerts = Alerts(self.events, lambda: 0)
        self.sessions: list[str] = []
        self.order: list[str] = []
        self.made: list[FakeWorker] = []
        self.busy = False
        """What follows a new session does not end."""

    def worker(self, session: str) -> FakeWorker:
        made = FakeWorker(FakeOverlay("/a"), session)
        self.made.append(made)
        return made

    def supervisor(self, *workers: Worker | Exception) -> RootSupervisor:
        self.mounts = NoMounts(workers)
        original = self.mounts.detach_dead

        async def detach(root: str) -> None:
            # While anybody has the session open the mount hangs, and what hangs is not detached.
            assert self.mounts.forgotten > 0
            self.order.append("detached")
            await original(root)

        self.mounts.detach_dead = detach  # type: ignore[method-assign]

        async def started(path: str, worker: Worker) -> None:
            await trio.lowlevel.checkpoint()
            self.sessions.append(worker.session)
            if self.busy:
                await trio.sleep_forever()

        return RootSupervisor(
            RootSettings("/a"),
            self.mounts,
            alerts=self.alerts,
            events=self.events,
            on_session=started,
            on_session_lost=lambda path, session: self.order.append(f"lost {session}"),
        )

    def run(
        self, supervisor: RootSupervisor, script: Callable[[], Awaitable[None]], *, autojump: bool = False
    ) -> None:
        async def main() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(supervisor.run)
                await supervisor.settled()
                await script()
                nursery.cancel_scope.cancel()

        clock = trio.testing.MockClock(autojump_threshold=0) if autojump else None
        trio.run(main, clock=clock)


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage()
    yield made
    for worker in made.made:
        worker.kill()
        worker.close()


def test_a_dead_worker_is_replaced(stage: Stage) -> None:
    """The captures of its session end first, then the dead mount goes, then a new worker comes."""
    first, second = stage.worker("one"), stage.worker("two")
    supervisor = stage.supervisor(first, second)

    async def script() -> None:
        await until(lambda: stage.sessions == ["one"])
        first.kill()
        await until(lambda: stage.sessions == ["one", "two"])
        assert (supervisor.state, supervisor.restarts, supervisor.worker) == ("mounted", 1, second)

    stage.run(supervisor, script)
    assert stage.order == ["lost one", "detached"]
    (alert,) = stage.alerts.standing()
    assert (alert.key, alert.severity) == ("worker:/a", "warning")
    assert "SIGKILL" in alert.message


def test_a_worker_that_dies_while_its_session_is_taken_up_is_replaced(stage: Stage) -> None:
    """What is to be done for a new session may wait for a cut, and that for this root to be served: its worker is watched meanwhile."""
    stage.busy = True
    first, second, third = (stage.worker(name) for name in ("one", "two", "three"))
    supervisor = stage.supervisor(first, second, third)

    async def script() -> None:
        await until(lambda: stage.sessions == ["one"])
        first.kill()
        await until(lambda: stage.sessions == ["one", "two"])
        second.kill()
        await until(lambda: stage.sessions == ["one", "two", "three"])
        assert (supervisor.state, supervisor.worker) == ("mounted", third)

    stage.run(supervisor, script)


@pytest.mark.parametrize("ends", [True, False], ids=["umount", "umount -l"])
def test_an_overlay_that_somebody_else_took_off_is_mounted_anew(stage: Stage, ends: bool) -> None:
    """No attempt to go on with a session that is over, and the alert says what became of open files: a worker that lives on serves
    them, and has nothing pending in the undo log that it shares with the next one."""
    first, second = stage.worker("one"), stage.worker("two")
    supervisor = stage.supervisor(first, second)

    async def script() -> None:
        await until(lambda: stage.sessions == ["one"])
        stage.mounts.mounted = False
        if ends:
            first.session_is_over = lambda: True  # type: ignore[method-assign]
            await until(lambda: supervisor.state == "restarting")
            first.kill()
        await until(lambda: stage.sessions == ["one", "two"])
        assert (supervisor.state, supervisor.worker) == ("mounted", second)
        assert supervisor.lingers is not ends

    stage.run(supervisor, script)
    assert stage.order[0] == "lost one"
    assert stage.mounts.successions == []
    (alert,) = stage.alerts.standing()
    assert alert.key == "unmounted:/a"
    assert ("no file was open" if ends else "go on being served") in alert.message


def test_a_root_that_cannot_be_mounted_is_tried_again(stage: Stage) -> None:
    """An alert says why and what to do; it goes when the root comes."""
    supervisor = stage.supervisor(NotFound("/a does not exist", hint="make it"), stage.worker("one"))
    seen = []

    async def script() -> None:
        seen.extend(stage.alerts.standing())
        assert supervisor.state == "failed"
        await until(lambda: supervisor.state == "mounted")

    stage.run(supervisor, script, autojump=True)
    assert [(alert.key, alert.hint) for alert in seen] == [("root:/a", "make it")]
    assert stage.alerts.standing() == []


def test_attempts_become_rarer(stage: Stage) -> None:
    """A root that stays away is not hammered: within an hour fewer than two hundred attempts."""
    failures = [NotFound("gone") for _ in range(1000)]
    supervisor = stage.supervisor(*failures)

    async def script() -> None:
        await trio.sleep(3600)

    stage.run(supervisor, script, autojump=True)
    assert 100 < 1000 - len(stage.mounts.workers) < 200


def test_a_worker_that_dies_while_it_is_stopped_leaves_no_session(stage: Stage) -> None:
    """Everybody has let go of it before its mount is taken off, ourselves included: a mount that somebody holds would hang."""
    worker = stage.worker("one")
    worker.session_fd = os.open("/dev/null", os.O_RDONLY)
    worker.overlay.fail_on = {"status"}
    supervisor = stage.supervisor(worker)
    closed: list[bool] = []
    original = stage.mounts.detach_dead

    async def detach(root: str) -> None:
        closed.append(worker.closed)
        await original(root)

    stage.mounts.detach_dead = detach  # type: ignore[method-assign]

    async def script() -> None:
        worker.is_alive = lambda: False  # type: ignore[method-assign]
        await supervisor.stop()

    stage.run(supervisor, script)
    assert closed == [True]
    assert supervisor.state == "unmounted"


def test_stopping_detaches_and_waits_for_the_worker(stage: Stage) -> None:
    """Pending epochs are given back before the worker is told to stop; afterwards nothing is mounted."""
    worker = stage.worker("one")
    worker.overlay.pending = [4]
    supervisor = stage.supervisor(worker)

    async def script() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(supervisor.stop)
            await until(lambda: "stop /a" in worker.overlay.log)
            assert worker.overlay.aborted == [4]
            stage.mounts.mounted = False
            worker.kill()
        assert supervisor.state == "unmounted"

    stage.run(supervisor, script)
    assert stage.order == ["lost one"]


def test_a_worker_with_open_handles_is_left_alive(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that holds files open keeps its worker: the root counts as unmounted, the process lives on."""
    monkeypatch.setattr(supervisor_module, "LINGER_NOTICE_SECONDS", 0.2)
    worker = stage.worker("one")
    supervisor = stage.supervisor(worker)

    async def script() -> None:
        stage.mounts.mounted = False
        await supervisor.stop()
        assert supervisor.state == "unmounted"
        os.kill(worker.pid, 0)

    stage.run(supervisor, script)
    assert stage.alerts.standing() == []


def test_a_worker_that_does_not_stop_is_an_alert(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the mount stays, the operator is told how to get rid of it."""
    monkeypatch.setattr(supervisor_module, "STOP_TIMEOUT_SECONDS", 0.3)
    supervisor = stage.supervisor(stage.worker("one"))

    async def script() -> None:
        await supervisor.stop()
        assert supervisor.state != "unmounted"

    stage.run(supervisor, script)
    (alert,) = stage.alerts.standing()
    assert "umount -l /a" in alert.hint


def test_writers_that_go_round_are_named_until_they_end(stage: Stage) -> None:
    """Only those that can write count; when they end, so does the alert."""
    reader = Bypasser(1, "reader", 0, (Use("open", b"/a/f", False),))
    writer = Bypasser(2, "python train.py", 0, (Use("open", b"/a/log", True),))
    supervisor = stage.supervisor(stage.worker("one"))
    stage.mounts.found = [reader, writer]

    async def script() -> None:
        assert supervisor.untrusted
        await supervisor.refresh_bypassing()  # waits for the look that the mount has begun
        assert not supervisor.all_accounted
        assert [process.pid for process in supervisor.bypassing] == [2]
        (alert,) = stage.alerts.standing()
        assert "2 (python train.py)" in alert.message
        status = await supervisor.status()
        assert [(report.pid, report.paths) for report in status.bypassing] == [(2, ["/a/log"])]
        stage.mounts.found = [reader]
        await supervisor.refresh_bypassing()
        assert supervisor.bypassing == []

    stage.run(supervisor, script)
    assert stage.alerts.standing() == []


def test_a_look_that_does_not_end_delays_no_mount(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A /proc that somebody makes slow: the root is served at once, everything is compared until more is known, and it is said."""
    monkeypatch.setattr(bypass_watch, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(bypass_watch, "PATIENCE_SECONDS", 0.01)
    supervisor = stage.supervisor(stage.worker("one"))
    free = trio.Event()

    async def bypassing(root: str, ignore: object, only: object) -> list[Bypasser]:
        await free.wait()
        return []

    monkeypatch.setattr(stage.mounts, "bypassing", bypassing)

    async def script() -> None:
        assert supervisor.state == "mounted"
        await supervisor.refresh_bypassing()
        assert supervisor.untrusted
        assert not supervisor.all_accounted
        await until(lambda: bool(stage.alerts.standing()))
        (alert,) = stage.alerts.standing()
        assert "not known" in alert.message
        free.set()
        await until(lambda: supervisor.all_accounted)

    stage.run(supervisor, script)
    assert stage.alerts.standing() == []


def test_an_older_worker_hands_over_when_its_successor_can_be_forked(stage: Stage) -> None:
    """The job waits from the hand-over on, and must not wait for an interpreter that starts."""
    old = stage.worker("one")
    old.adopted, old.session_fd, old.version = True, os.open("/dev/null", os.O_RDONLY), "0.0.1"
    supervisor = stage.supervisor(old)

    async def prepared() -> None:
        await trio.lowlevel.checkpoint()
        stage.order.append("ready to fork")

    async def handed_over(worker: Worker) -> None:
        await trio.lowlevel.checkpoint()
        stage.order.append("handed over")

    stage.mounts.prepare_successor = prepared  # type: ignore[method-assign]
    supervisor.hand_over = handed_over  # type: ignore[method-assign]

    async def script() -> None:
        await trio.lowlevel.checkpoint()

    stage.run(supervisor, script)
    assert stage.order == ["ready to fork", "handed over"]


def test_a_session_that_is_given_up_is_kept_by_nobody(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """What systemd kept of it would let the mount hang for ever, with the job in it, where it must be dead to be taken off."""
    first, later = stage.worker("one"), stage.worker("two")
    first.session_fd = os.open("/dev/null", os.O_RDONLY)
    monkeypatch.setattr("ciuic.fuse_layer.succession.SUCCESSION_SECONDS", (0.0, 0.0))
    refused = [CiuicError("no worker can be forked")] * 3
    supervisor = stage.supervisor(first, *refused, later)
    original = stage.mounts.forget

    async def forget(root: str) -> None:
        stage.order.append("forgotten")
        await original(root)

    stage.mounts.forget = forget  # type: ignore[method-assign]

    async def script() -> None:
        await until(lambda: stage.sessions == ["one"])
        first.kill()
        await until(lambda: stage.sessions == ["one", "two"])

    stage.run(supervisor, script)
    assert stage.order == ["lost one", "forgotten", "detached"]
