"""Tests of emergency snapshots with a fake clock: for which trainers, and when the alert is raised."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator
from typing import NamedTuple

import pytest
import trio
import trio.testing

from ciuic.daemon.base.events import Alerts, EventBus
from ciuic.daemon.trainers.registry import (
    MAX_ALERTS,
    RETURN_SECONDS,
    Emergencies,
    ProcessIdentity,
    TrainerRegistry,
    WatchedTrainer,
    WatchRecord,
)
from ciuic.errors import CiuicError
from ciuic.protocol.control_types import Event, Incident, SnapshotRequest, SnapshotState
from ciuic.protocol.heartbeat_page import Goodbye, HeartbeatPage
from ciuic.protocol.watch_client import Hello

NOBODYS_PID = (1 << 22) + 5
"""A pid above every limit of the kernel."""


class Cut(NamedTuple):
    state: SnapshotState


class Bench:
    """Emergencies over counted fake snapshots, and a clock that jumps."""

    def __init__(self, per_hour: int = 3) -> None:
        self.requests: list[SnapshotRequest] = []
        self.take: Callable[[SnapshotRequest], Awaitable[Cut]] = self.cut
        self.incidents: list[Incident] = []
        self.told: list[Event] = []
        self.events = EventBus(self.now_ns)
        self.alerts = Alerts(self.events, self.now_ns)
        self.emergencies = Emergencies(
            lambda request: self.take(request),
            alerts=self.alerts,
            events=self.events,
            now_ns=self.now_ns,
            per_hour=lambda: per_hour,
            on_incident=self.incidents.append,
        )

    @staticmethod
    def now_ns() -> int:
        return 10**18 + int(trio.current_time() * 1e9)

    async def cut(self, request: SnapshotRequest) -> Cut:
        await trio.lowlevel.checkpoint()
        self.requests.append(request)
        return Cut(SnapshotState(id=f"cs-{len(self.requests)}", state="pending"))

    def run(self, story: Callable[[], Awaitable[None]]) -> None:
        async def main() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.emergencies.run)
                await story()
                await trio.sleep(2)
                nursery.cancel_scope.cancel()

        trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def trainer(name: str, uid: int = 0) -> WatchedTrainer:
    return WatchedTrainer(
        ProcessIdentity(uid, 7, 8), -1, name=name, where="/w", kind="pid", heartbeat_seconds=0.0, since_ns=0
    )  # fmt: skip


def test_trainers_that_die_at_once_share_a_snapshot() -> None:
    """Trainers that die together share one cut, whose message names them, and each incident names the cut."""
    bench = Bench()

    async def story() -> None:
        for number in range(5):
            bench.emergencies.report(trainer(f"t{number}"), "died", "was killed by SIGKILL")
            await trio.sleep(0.01)

    bench.run(story)
    (request,) = bench.requests
    assert request.tags == ["emergency"]
    assert request.message.startswith("trainer t0 (/w), pid 7 died: was killed by SIGKILL; trainer t1")
    assert request.message.endswith("and 2 more")
    assert {incident.snapshot for incident in bench.incidents} == {"cs-1"}
    assert len(bench.alerts.standing()) == 5


def test_emergency_snapshots_have_limits_per_hour() -> None:
    """Emergency snapshots are limited to three an hour for a trainer, six for a user and twelve in all."""
    bench = Bench()

    async def story() -> None:
        for name, uid in [*[("a", 4711)] * 4, ("b", 4711), ("c", 4711), ("d", 4711), ("e", 4711)]:
            bench.emergencies.report(trainer(name, uid), "failed", "")
            await trio.sleep(10)
        for number in range(8):
            bench.emergencies.report(trainer(f"r{number}"), "failed", "")
            await trio.sleep(10)
        await trio.sleep(3600)
        bench.emergencies.report(trainer("a", 4711), "failed", "")

    bench.run(story)
    refused = [(one.trainer.name, one.no_snapshot) for one in bench.incidents if not one.snapshot]
    assert refused == [
        ("a", "it has had 3 within the hour"),
        ("e", "trainers of 4711 have had 6 within the hour"),
        ("r6", "there were 12 within the hour"),
        ("r7", "there were 12 within the hour"),
    ]
    assert bench.incidents[-1].snapshot == "cs-13"


def test_a_restarted_daemon_counts_emergency_snapshots_of_its_predecessor() -> None:
    """A restarted daemon counts the emergency snapshots of its predecessor within the hour."""
    first, second = Bench(per_hour=1), Bench(per_hour=1)

    async def story() -> None:
        first.emergencies.report(trainer("a"), "died", "")
        await trio.sleep(2)

    first.run(story)

    async def retry() -> None:
        second.emergencies.remember(first.incidents)
        second.emergencies.report(trainer("a"), "died", "")
        await trio.sleep(2)

    second.run(retry)
    assert second.incidents[0].no_snapshot == "it has had 1 within the hour"


def test_incident_without_snapshot_has_the_reason() -> None:
    """An incident without a snapshot names the reason, keeps its alert, and does not affect the next."""
    bench = Bench()

    async def no_cut(request: SnapshotRequest) -> Cut:
        await trio.lowlevel.checkpoint()
        raise CiuicError("no root is mounted")

    async def defect(request: SnapshotRequest) -> Cut:
        await trio.lowlevel.checkpoint()
        raise ZeroDivisionError

    async def story() -> None:
        for take in (no_cut, defect, bench.cut):
            bench.take = take
            bench.emergencies.report(trainer("a"), "died", "")
            await trio.sleep(2)
            assert "trainer:a:/w" in bench.alerts

    bench.run(story)
    first, second, third = bench.incidents
    assert first.no_snapshot == "no root is mounted"
    assert "defect" in second.no_snapshot
    assert third.snapshot == "cs-1"


def test_the_alert_does_not_wait_for_a_slow_disk() -> None:
    """The alert of a cut that takes a minute is raised after ten seconds, and gets its snapshot later."""
    bench = Bench()

    async def slow(request: SnapshotRequest) -> Cut:
        await trio.sleep(60)
        return await bench.cut(request)

    async def story() -> None:
        bench.take = slow
        bench.emergencies.report(trainer("a"), "hung", "no beat for 5 s")
        await trio.sleep(12)
        assert "trainer:a:/w" in bench.alerts
        assert bench.incidents[0].snapshot == ""
        await trio.sleep(60)
        assert bench.incidents[0].snapshot == "cs-1"

    bench.run(story)


def test_trainer_that_recovers_has_no_alert_and_no_snapshot() -> None:
    """A trainer that recovers has no alert and no snapshot; alerts of lost trainers are bounded."""
    bench = Bench()

    async def story() -> None:
        bench.emergencies.report(trainer("a"), "hung", "")
        await trio.sleep(2)
        bench.emergencies.report(trainer("a"), "recovered", "")
        await trio.sleep(2)
        assert bench.alerts.standing() == []
        for number in range(MAX_ALERTS + 10):
            bench.emergencies.report(trainer(f"t{number}"), "lost", "")
        await trio.sleep(2)

    bench.run(story)
    assert len(bench.requests) == 1
    assert len(bench.alerts.standing()) == MAX_ALERTS


def test_silence_is_an_alert_until_it_beats(page: HeartbeatPage) -> None:
    """The alert begins once, ends with a beat, and goes with the trainer."""
    bench = Bench()

    async def story() -> None:
        trainers = TrainerRegistry(
            alerts=bench.alerts, emergencies=bench.emergencies, now_ns=bench.now_ns, on_change=lambda: None,
            silence=lambda: 20,
        )  # fmt: skip
        hello = Hello(
            name="a", where="/w", kind="library", pid=NOBODYS_PID, start_ticks=5, heartbeat_seconds=0.0
        )
        async with trio.open_nursery() as nursery:
            trainers.nursery = nursery
            watched = trainers.add(ProcessIdentity(0, NOBODYS_PID, 5), -1, [os.dup(page.fd)], hello)

            def keys(seconds: int, *, beats: bool) -> list[str]:
                for _ in range(seconds):
                    if beats:
                        page.beat()
                    trainers._look_at(watched)
                return [alert.key for alert in bench.alerts.standing()]

            assert keys(30, beats=True) == []
            assert keys(299, beats=False) == []
            assert keys(3, beats=False) == ["beat:a:/w"]
            (alert,) = bench.alerts.standing()
            assert alert.message.endswith("has stopped to beat: it used to every 1s")
            assert keys(1, beats=True) == []
            assert keys(700, beats=False) == ["beat:a:/w"]
            trainers.drop(watched)
            assert bench.alerts.standing() == []
            nursery.cancel_scope.cancel()

    bench.run(story)
    assert bench.requests == []


def test_a_loss_that_is_no_number_is_an_alert_until_it_is_in_order(page: HeartbeatPage) -> None:
    """The alert names the step and the newest snapshot before it, and ends with ten ordinary losses or by --forget."""
    bench = Bench()

    async def story() -> None:
        trainers = TrainerRegistry(
            alerts=bench.alerts, emergencies=bench.emergencies, now_ns=bench.now_ns, on_change=lambda: None,
            newest_snapshot=lambda before_ns: "cs-abcdef",
        )  # fmt: skip
        hello = Hello(
            name="a", where="/w", kind="library", pid=NOBODYS_PID, start_ticks=5, heartbeat_seconds=0.0
        )
        async with trio.open_nursery() as nursery:
            trainers.nursery = nursery
            watched = trainers.add(ProcessIdentity(0, NOBODYS_PID, 5), -1, [os.dup(page.fd)], hello)

            def texts(*losses: float) -> list[str]:
                for loss in losses:
                    page.report_loss(watched.status().step, loss)
                    page.beat(watched.status().step + 1)
                    trainers._look_at(watched)
                return [alert.message.partition(" pid ")[2] for alert in bench.alerts.standing()]

            assert texts(*[2.0, 2.1] * 20) == []
            assert texts(9.0) == [f"{NOBODYS_PID} spiked to 9 at step 40; it was 2.05"]
            (alert,) = bench.alerts.standing()
            assert (alert.key, alert.severity) == ("loss:a:/w", "warning")
            assert alert.hint == "the newest snapshot before it: cs-abcdef; ciuic hold keeps it"
            assert texts(float("nan"), 2.0) == [f"{NOBODYS_PID} is no finite number at step 41; it was 2.1"]
            assert [one.severity for one in bench.alerts.standing()] == ["problem"]
            assert texts(*[2.0] * 9) == []
            assert len(texts(float("inf"))) == 1
            assert trainers.forget("a") == 1
            assert bench.alerts.standing() == []
            # Losses that were there before the first look may be in every snapshot.
            second = HeartbeatPage()
            second.report_loss(1, float("nan"))
            late = Hello(
                name="b", where="/w", kind="library", pid=NOBODYS_PID, start_ticks=6, heartbeat_seconds=0.0
            )
            trainers._look_at(trainers.add(ProcessIdentity(0, NOBODYS_PID, 6), -1, [os.dup(second.fd)], late))
            second.close()
            assert [one.hint for one in bench.alerts.standing()] == [
                "ciuic list shows the snapshots before it; ciuic hold keeps it"
            ]
            nursery.cancel_scope.cancel()

    bench.run(story)
    assert bench.requests == []


def test_saves_that_keep_failing_are_an_alert_until_one_succeeds(page: HeartbeatPage) -> None:
    """The second failure in a row raises the alert, once, and the next success, or --forget, clears it.

    A manager that was made again in the same process, as in a notebook, is the one that counts.
    """
    bench = Bench()

    async def story() -> None:
        trainers = TrainerRegistry(
            alerts=bench.alerts, emergencies=bench.emergencies, now_ns=bench.now_ns, on_change=lambda: None
        )
        hello = Hello(name="a", where="/w", kind="library", pid=NOBODYS_PID, start_ticks=5)
        identity = ProcessIdentity(0, NOBODYS_PID, 5)
        again = HeartbeatPage()
        async with trio.open_nursery() as nursery:
            trainers.nursery = nursery
            watched = trainers.add(identity, -1, [os.dup(page.fd)], hello)

            def alerts(*errors: str, of: HeartbeatPage = page) -> list[str]:
                for error in errors:
                    of.report_save(error)
                trainers._look_at(watched)
                return [f"{one.severity} {one.key} {one.message}" for one in bench.alerts.standing()]

            fails = [
                f"problem saves:a:/w the saves of trainer a (/w), pid {NOBODYS_PID} fail: the disk is full"
            ]
            assert alerts("", "the disk is full") == []
            assert alerts("the disk is full") == fails
            assert alerts("another reason") == fails
            status = watched.status()
            assert (status.failed_saves, status.save_error) == (3, "another reason")
            assert bench.alerts.standing()[0].since == status.failing_since
            assert alerts("") == []
            assert not watched.status().failed_saves
            assert alerts("x") == []
            assert alerts(*["the disk is full"] * 200) == fails
            watched = trainers.add(identity, os.dup(page.fd), [os.dup(again.fd)], hello)
            assert alerts(of=again) == []
            assert alerts("x", "the disk is full", of=again) == fails
            assert trainers.forget("a") == 1
            assert bench.alerts.standing() == []
            nursery.cancel_scope.cancel()
        again.close()

    bench.run(story)
    assert bench.requests == []


def test_a_run_that_ended_with_failing_saves_is_told(page: HeartbeatPage) -> None:
    """Saves that failed right before the end of the process are an alert, which stands until the training is started again."""
    bench = Bench()

    async def story() -> None:
        trainers = TrainerRegistry(
            alerts=bench.alerts, emergencies=bench.emergencies, now_ns=bench.now_ns, on_change=lambda: None
        )
        hello = Hello(name="a", where="/w", kind="library", pid=NOBODYS_PID, start_ticks=5)
        # The end of a pipe is readable at once, as the pidfd of a process that has ended.
        life, write_end = os.pipe()
        os.close(write_end)
        for error in ("the disk is full",) * 2:
            page.report_save(error)
        page.say_goodbye(Goodbye.CLOSED)
        async with trio.open_nursery() as nursery:
            trainers.nursery = nursery
            trainers.add(ProcessIdentity(0, NOBODYS_PID, 5), life, [os.dup(page.fd)], hello)
        assert [alert.key for alert in bench.alerts.standing()] == ["saves:a:/w"]
        async with trio.open_nursery() as nursery:
            trainers.nursery = nursery
            trainers.add(ProcessIdentity(0, NOBODYS_PID, 6), -1, [], hello)
        assert bench.alerts.standing() == []

    bench.run(story)


@pytest.fixture
def page() -> Iterator[HeartbeatPage]:
    made = HeartbeatPage()
    yield made
    made.close()


def test_trainer_gone_without_a_witness_is_lost() -> None:
    """A trainer gone while no daemon watched gets a warning without snapshot after half a minute."""
    bench = Bench()
    record = WatchRecord(
        uid=0, pid=NOBODYS_PID, start_ticks=5, name="a", where="/w", kind="library", heartbeat_seconds=0.0, since_ns=0
    )  # fmt: skip
    changes: list[int] = []

    async def story() -> None:
        trainers = TrainerRegistry(
            alerts=bench.alerts, emergencies=bench.emergencies, now_ns=bench.now_ns, on_change=lambda: changes.append(1)
        )  # fmt: skip
        async with trio.open_nursery() as nursery:
            trainers.nursery = nursery
            trainers.take_over([record])
            await trio.sleep(RETURN_SECONDS - 1)
            assert bench.incidents == []
            assert trainers.records() == [record]
        await trio.sleep(2)
        assert trainers.records() == []

    bench.run(story)
    (incident,) = bench.incidents
    assert (incident.kind, incident.snapshot) == ("lost", "")
    assert bench.requests == []
    assert [alert.severity for alert in bench.alerts.standing()] == ["warning"]
