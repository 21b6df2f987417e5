"""Tests of one supervised root: mounted, remounted, given up with an alert, and unmounted."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator

import pytest
import trio
import trio.testing
from support.fake_daemon import FakeOverlay, FakeWorker, NoMounts
from support.until import until_async

import ciuic
import ciuic.daemon.roots.supervisor as supervisor_module
from ciuic.daemon.base.events import Alerts, EventBus
from ciuic.daemon.base.settings import RootSettings
from ciuic.daemon.roots import bypass_watch
from ciuic.daemon.roots.supervisor import RootSupervisor
from ciuic.daemon.roots.worker_process import OverlayWorker
from ciuic.errors import CiuicError, NotFound
from ciuic.fuse_layer.system.mounts import MountsInside, MovedMounts
from ciuic.system.bypass import Bypasser, BypassingMount, Use


class Stage:
    """A supervisor over prepared workers, and what it reported."""

    def __init__(self) -> None:
        self.events = EventBus(lambda: 0)
        self.alerts = Alerts(self.events, lambda: 0)
        self.sessions: list[str] = []
        self.order: list[str] = []
        self.made: list[FakeWorker] = []
        self.busy = False
        """True makes the handler of a new session never end."""

    def worker(self, session: str) -> FakeWorker:
        made = FakeWorker(FakeOverlay("/a"), session)
        self.made.append(made)
        return made

    def supervisor(self, *workers: OverlayWorker | Exception) -> RootSupervisor:
        self.mounts = NoMounts(workers)
        original = self.mounts.detach_dead

        async def detach(root: str) -> None:
            # While any process has the session open the mount hangs, and a hanging mount is not detached.
            assert self.mounts.forgotten > 0
            self.order.append("detached")
            await original(root)

        self.mounts.detach_dead = detach  # type: ignore[method-assign]

        async def started(path: str, worker: OverlayWorker) -> None:
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
    """The captures of a dead worker end first, then its mount is removed, then a new worker starts."""
    first, second = stage.worker("one"), stage.worker("two")
    supervisor = stage.supervisor(first, second)

    async def script() -> None:
        await until_async(lambda: stage.sessions == ["one"])
        first.kill()
        await until_async(lambda: stage.sessions == ["one", "two"])
        assert (supervisor.state, supervisor.restarts, supervisor.worker) == ("mounted", 1, second)

    stage.run(supervisor, script)
    assert stage.order == ["lost one", "detached"]
    (alert,) = stage.alerts.standing()
    assert (alert.key, alert.severity) == ("worker:/a", "warning")
    assert "SIGKILL" in alert.message


def test_a_worker_that_dies_while_its_session_is_taken_up_is_replaced(stage: Stage) -> None:
    """A worker that dies while its new session is handled is replaced.

    The handler may wait for a cut, and the cut for this root to be served, so the worker is watched
    meanwhile.
    """
    stage.busy = True
    first, second, third = (stage.worker(name) for name in ("one", "two", "three"))
    supervisor = stage.supervisor(first, second, third)

    async def script() -> None:
        await until_async(lambda: stage.sessions == ["one"])
        first.kill()
        await until_async(lambda: stage.sessions == ["one", "two"])
        second.kill()
        await until_async(lambda: stage.sessions == ["one", "two", "three"])
        assert (supervisor.state, supervisor.worker) == ("mounted", third)

    stage.run(supervisor, script)


@pytest.mark.parametrize("ends", [True, False], ids=["umount", "umount -l"])
def test_unmounted_overlay_is_mounted_again(stage: Stage, ends: bool) -> None:
    """A root whose overlay was unmounted by another process is mounted again, with an alert about open files.

    A session that is over is not continued. A worker that lives on serves the open files, and has nothing
    pending in the undo log that it shares with the next one.
    """
    first, second = stage.worker("one"), stage.worker("two")
    supervisor = stage.supervisor(first, second)

    async def script() -> None:
        await until_async(lambda: stage.sessions == ["one"])
        stage.mounts.mounted = False
        if ends:
            first.session_is_over = lambda: True  # type: ignore[method-assign]
            await until_async(lambda: supervisor.state == "restarting")
            first.kill()
        await until_async(lambda: stage.sessions == ["one", "two"])
        assert (supervisor.state, supervisor.worker) == ("mounted", second)
        assert supervisor.lingers is not ends

    stage.run(supervisor, script)
    assert stage.order[0] == "lost one"
    assert stage.mounts.successions == []
    (alert,) = stage.alerts.standing()
    assert alert.key == "unmounted:/a"
    assert ("no file was open" if ends else "go on being served") in alert.message


def test_a_root_that_cannot_be_mounted_is_tried_again(stage: Stage) -> None:
    """A failed mount is retried; its alert says why and what to do, and is cleared when the mount works."""
    supervisor = stage.supervisor(NotFound("/a does not exist", hint="make it"), stage.worker("one"))
    seen = []

    async def script() -> None:
        seen.extend(stage.alerts.standing())
        assert supervisor.state == "failed"
        await until_async(lambda: supervisor.state == "mounted")

    stage.run(supervisor, script, autojump=True)
    assert [(alert.key, alert.hint) for alert in seen] == [("root:/a", "make it")]
    assert stage.alerts.standing() == []


def test_attempts_become_rarer(stage: Stage) -> None:
    """Retries become rarer: within an hour fewer than two hundred attempts."""
    failures = [NotFound("gone") for _ in range(1000)]
    supervisor = stage.supervisor(*failures)

    async def script() -> None:
        await trio.sleep(3600)

    stage.run(supervisor, script, autojump=True)
    assert 100 < 1000 - len(stage.mounts.workers) < 200


@pytest.mark.parametrize("is_seen", [True, False], ids=["before", "during"])
def test_a_worker_that_dies_beside_the_stop_has_a_successor_that_unmounts(
    stage: Stage, is_seen: bool
) -> None:
    """A successor unmounts in place of a worker that died before or during a stop, so open files are served on."""
    first, second = stage.worker("one"), stage.worker("two")
    first.session_fd = os.open("/dev/null", os.O_RDONLY)
    first.overlay.fail_on = {"status"}
    supervisor = stage.supervisor(first)

    async def script() -> None:
        await until_async(lambda: stage.sessions == ["one"])
        if is_seen:
            # The successor that the supervisor starts by itself never comes.
            first.kill()
            await until_async(lambda: stage.mounts.successions == [False])
        else:
            first.is_alive = lambda: False  # type: ignore[method-assign]
        stage.mounts.workers.append(second)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(supervisor.stop)
            await until_async(lambda: "stop /a" in second.overlay.log)
            stage.mounts.mounted = False
            second.kill()

    stage.run(supervisor, script)
    assert "detached" not in stage.order
    assert supervisor.state == "unmounted"
    assert first.closed
    assert second.closed


@pytest.mark.parametrize("outlasts", [True, False])
def test_a_stop_while_a_death_is_looked_at_has_a_successor_that_unmounts(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, outlasts: bool
) -> None:
    """A look at the mount is cancelled by the stop, or, in a thread, outlasts it: in neither case the session is forgotten."""
    first, second = stage.worker("one"), stage.worker("two")
    first.session_fd = os.open("/dev/null", os.O_RDONLY)
    supervisor = stage.supervisor(first)
    looks, look, wait = trio.Event(), stage.mounts.is_mounted, first.wait

    async def wait_as_of_an_adopted_one() -> None:
        await wait()

    first.wait = wait_as_of_an_adopted_one  # type: ignore[method-assign,assignment]

    async def is_mounted(root: str) -> bool:
        if not looks.is_set():
            looks.set()
            with trio.CancelScope(shield=outlasts):
                await until_async(lambda: supervisor.state == "stopping")
                return await look(root)
        return await look(root)

    async def script() -> None:
        await until_async(lambda: stage.sessions == ["one"])
        monkeypatch.setattr(stage.mounts, "is_mounted", is_mounted)
        stage.mounts.workers.append(second)
        first.overlay.fail_on = {"status"}
        first.kill()
        await looks.wait()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(supervisor.stop)
            await until_async(lambda: "stop /a" in second.overlay.log)
            stage.mounts.mounted = False
            second.kill()

    stage.run(supervisor, script)
    assert "detached" not in stage.order
    assert supervisor.state == "unmounted"
    assert first.closed


def test_a_worker_that_dies_while_it_is_stopped_leaves_no_session(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All descriptors of a session are closed before its mount is removed, which would hang otherwise.

    A session is given up after as many attempts as at any other time.
    """
    monkeypatch.setattr("ciuic.fuse_layer.journal.succession.SUCCESSION_SECONDS", (0.0,) * 3)
    worker = stage.worker("one")
    worker.session_fd = os.open("/dev/null", os.O_RDONLY)
    worker.overlay.fail_on = {"status"}
    supervisor = stage.supervisor(worker, *[CiuicError("no process to be had")] * 3)
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
    assert len(stage.mounts.successions) == 3
    assert closed == [True]
    assert supervisor.state == "unmounted"


def test_a_stop_beside_the_start_of_a_successor_recovers_the_session(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop that comes while no worker serves has one that goes on with the session unmount, so open files are served on."""
    worker = stage.worker("one")
    supervisor = stage.supervisor(CiuicError("no process to be had"))

    async def recover(settings: RootSettings) -> OverlayWorker:
        await trio.lowlevel.checkpoint()
        stage.mounts.mounted = True
        return worker

    monkeypatch.setattr(stage.mounts, "recover", recover)

    async def script() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(supervisor.stop)
            await until_async(lambda: "stop /a" in worker.overlay.log)
            stage.mounts.mounted = False
            worker.kill()

    stage.run(supervisor, script)
    assert "detached" not in stage.order
    assert supervisor.state == "unmounted"


def test_stopping_detaches_and_waits_for_the_worker(stage: Stage) -> None:
    """Pending epochs are given back before the worker is asked to stop, and nothing is mounted afterwards."""
    worker = stage.worker("one")
    worker.overlay.pending = [4]
    supervisor = stage.supervisor(worker)

    async def script() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(supervisor.stop)
            await until_async(lambda: "stop /a" in worker.overlay.log)
            assert worker.overlay.aborted == [4]
            stage.mounts.mounted = False
            worker.kill()
        assert supervisor.state == "unmounted"

    stage.run(supervisor, script)
    assert stage.order == ["lost one"]


def test_a_worker_with_open_handles_is_left_alive(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker with open handles is left alive, and its root counts as unmounted."""
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
    """A mount that stays raises an alert that tells the operator how to remove it."""
    monkeypatch.setattr(supervisor_module, "STOP_TIMEOUT_SECONDS", 0.3)
    supervisor = stage.supervisor(stage.worker("one"))

    async def script() -> None:
        await supervisor.stop()
        assert supervisor.state != "unmounted"

    stage.run(supervisor, script)
    (alert,) = stage.alerts.standing()
    assert "umount -l /a" in alert.hint


def test_mounts_inside_that_cannot_be_moved_are_named(stage: Stage) -> None:
    """A root whose overlay has a mount that cannot be moved stays served, its session is kept, and the alert names the mount."""
    worker = stage.worker("one")
    supervisor = stage.supervisor(worker)

    async def refuse(root: str, backing_fd: int) -> MovedMounts:
        await trio.lowlevel.checkpoint()
        raise MountsInside(
            "/a/disk is mounted inside the overlay of /a and cannot be moved", hint="unmount it there first"
        )

    stage.mounts.move_mounts_inside = refuse  # type: ignore[method-assign]

    async def script() -> None:
        await supervisor.stop()
        assert supervisor.state != "unmounted"
        assert "/a/disk" in supervisor.error
        assert "stop /a" not in worker.overlay.log
        assert (stage.mounts.held, stage.mounts.forgotten) == ([worker.session], 0)
        os.kill(worker.pid, 0)

    stage.run(supervisor, script)
    (alert,) = stage.alerts.standing()
    assert "/a/disk is mounted inside" in alert.message
    assert alert.hint == "unmount it there first"


def test_writers_that_go_round_are_named_until_they_end(stage: Stage) -> None:
    """Processes that can write past the overlay are named in an alert until they end."""
    reader = Bypasser(1, "reader", 0, (Use("open", b"/a/f", False),))
    writer = Bypasser(2, "python train.py", 0, (Use("open", b"/a/log", True),))
    supervisor = stage.supervisor(stage.worker("one"))
    stage.mounts.found = [reader, writer]

    async def script() -> None:
        assert supervisor.bypass.has_gap
        # Wait for the scan that the mount has begun.
        await supervisor.refresh_bypassing()
        assert not supervisor.bypass.all_accounted
        assert [process.pid for process in supervisor.bypass.processes] == [2]
        (alert,) = stage.alerts.standing()
        assert "2 (python train.py)" in alert.message
        status = await supervisor.status()
        assert [(report.pid, report.paths) for report in status.bypassing] == [(2, ["/a/log"])]
        stage.mounts.found = [reader]
        await supervisor.refresh_bypassing()
        assert supervisor.bypass.processes == []

    stage.run(supervisor, script)
    assert stage.alerts.standing() == []


def test_no_alert_names_a_worker_that_serves_open_files(stage: Stage) -> None:
    """A worker that serves open files is not named, though it bypasses the overlay mounted after it.

    Ending it would take the job's files away.
    """
    old = Bypasser(2, "python -m ciuic.fuse_layer.worker ", 0, (Use("open", b"/a/log", True),))
    supervisor = stage.supervisor(stage.worker("one"))
    stage.mounts.found = [old]

    async def script() -> None:
        await supervisor.refresh_bypassing()
        (alert,) = stage.alerts.standing()
        assert alert.hint.startswith("leave the overlay worker alone")

    stage.run(supervisor, script)


def test_a_look_that_does_not_end_delays_no_mount(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scan of /proc that does not end delays no mount; captures compare everything, with an alert."""
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
        assert supervisor.bypass.has_gap
        assert not supervisor.bypass.all_accounted
        await until_async(lambda: bool(stage.alerts.standing()))
        (alert,) = stage.alerts.standing()
        assert "not known" in alert.message
        free.set()
        await until_async(lambda: supervisor.bypass.all_accounted)

    stage.run(supervisor, script)
    assert stage.alerts.standing() == []


@pytest.mark.parametrize("version", ["0.0.1", ciuic.__version__])
def test_an_older_worker_hands_over_when_its_successor_can_be_forked(stage: Stage, version: str) -> None:
    """An older worker, or one that tracks nothing, hands over only when its successor can be forked.

    So the job need not wait.
    """
    old = stage.worker("one")
    old.adopted, old.session_fd, old.version = True, os.open("/dev/null", os.O_RDONLY), version
    old.plain = version == ciuic.__version__
    supervisor = stage.supervisor(old)

    async def prepared() -> None:
        await trio.lowlevel.checkpoint()
        stage.order.append("ready to fork")

    async def handed_over(worker: OverlayWorker) -> None:
        await trio.lowlevel.checkpoint()
        stage.order.append("handed over")

    stage.mounts.prepare_successor = prepared  # type: ignore[method-assign]
    supervisor.hand_over = handed_over  # type: ignore[method-assign]

    async def script() -> None:
        await trio.lowlevel.checkpoint()

    stage.run(supervisor, script)
    assert stage.order == ["ready to fork", "handed over"]
    assert [alert.key for alert in stage.alerts.standing()] == ["plain:/a"] * old.plain


def test_abandoned_session_is_removed_from_systemd(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The descriptor of a given-up session is removed from systemd, or its mount would hang for ever."""
    first, later = stage.worker("one"), stage.worker("two")
    first.session_fd = os.open("/dev/null", os.O_RDONLY)
    monkeypatch.setattr("ciuic.fuse_layer.journal.succession.SUCCESSION_SECONDS", (0.0, 0.0))
    refused = [CiuicError("no worker can be forked")] * 3
    supervisor = stage.supervisor(first, *refused, later)
    original = stage.mounts.forget

    async def forget(root: str) -> None:
        stage.order.append("forgotten")
        await original(root)

    stage.mounts.forget = forget  # type: ignore[method-assign]

    async def script() -> None:
        await until_async(lambda: stage.sessions == ["one"])
        first.kill()
        await until_async(lambda: stage.sessions == ["one", "two"])

    stage.run(supervisor, script)
    assert stage.order == ["lost one", "forgotten", "detached"]


def test_mounts_that_go_round_are_named_until_they_end(stage: Stage) -> None:
    """A mount past the overlay is found at any time; after its end processes are looked for once more."""
    supervisor = stage.supervisor(stage.worker("one"))
    bind = BypassingMount(b"/data", b"/a/part", 7, "python", elsewhere=True)
    writer = Bypasser(8, "opened it there", 0, (Use("open", b"/a/log", True),))

    async def script() -> None:
        await supervisor.refresh_bypassing()
        assert supervisor.bypass.all_accounted
        supervisor.bypass.has_gap = False
        stage.mounts.found_mounts = [bind]
        await supervisor.refresh_bypassing()
        assert supervisor.bypass.has_gap
        assert not supervisor.bypass.all_accounted
        (alert,) = stage.alerts.standing()
        assert "/a/part at /data in the mount namespace of process 7 (python)" in alert.message
        (report,) = (await supervisor.status()).bypassing_mounts
        assert (report.place, report.shows, report.pid, report.elsewhere) == ("/data", "/a/part", 7, True)
        stage.mounts.found_mounts, stage.mounts.found = [], [writer]
        await supervisor.refresh_bypassing()
        assert [process.pid for process in supervisor.bypass.processes] == [8]
        assert not supervisor.bypass.all_accounted
        stage.mounts.found = []
        await supervisor.refresh_bypassing()
        assert supervisor.bypass.all_accounted
        # Until a snapshot has compared everything.
        assert supervisor.bypass.has_gap

    stage.run(supervisor, script)
    assert stage.alerts.standing() == []


def test_a_later_look_that_fails_leaves_a_gap_until_one_succeeds(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it cannot be found out whether a mount goes round the overlay, captures compare everything."""
    monkeypatch.setattr(bypass_watch, "LOOK_SECONDS", 0.05)
    supervisor = stage.supervisor(stage.worker("one"))
    failing = True

    async def bypassing_mounts(root: str, ignore: object) -> list[BypassingMount]:
        await trio.lowlevel.checkpoint()
        if failing:
            raise OSError(24, "too many open files")
        return []

    async def script() -> None:
        nonlocal failing
        await supervisor.refresh_bypassing()
        supervisor.bypass.has_gap = False
        monkeypatch.setattr(stage.mounts, "bypassing_mounts", bypassing_mounts)
        monkeypatch.setattr(bypass_watch, "PATIENCE_SECONDS", 0.01)
        await supervisor.refresh_bypassing()
        assert supervisor.bypass.has_gap
        assert not supervisor.bypass.all_accounted
        failing = False
        await until_async(lambda: supervisor.bypass.all_accounted)

    stage.run(supervisor, script)
    assert stage.alerts.standing() == []
