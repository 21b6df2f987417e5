"""What follows an incident, with time held still: who gets a snapshot, what is said where none is, and when the alert is raised."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

import trio
import trio.testing

from ciuic.control_types import Event, Incident, SnapshotRequest, SnapshotState
from ciuic.daemon.alerts import Alerts
from ciuic.daemon.emergency import MOST_ALERTS, Emergencies
from ciuic.daemon.events import EventBus
from ciuic.daemon.trainer import Identity, Trainer
from ciuic.daemon.trainers import RETURN_SECONDS, Trainers
from ciuic.daemon.watch_book import WatchRecord
from ciuic.errors import CiuicError

NOBODYS_PID = (1 << 22) + 5
"""Above every limit of the kernel."""


class Cut(NamedTuple):
    state: SnapshotState


class Bench:
    """Emergencies over snapshots that are only counted, and a clock that jumps."""

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


def trainer(name: str, uid: int = 0) -> Trainer:
    return Trainer(
        Identity(uid, 7, 8), -1, name=name, where="/w", kind="pid", heartbeat_seconds=0.0, since_ns=0
    )  # fmt: skip


def test_those_that_die_together_share_a_snapshot() -> None:
    """One cut, whose message names them, and each incident names the cut."""
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


def test_whoever_dies_again_and_again_leaves_something_for_the_others() -> None:
    """Three an hour for one trainer, six for one user, twelve in all; an hour later there are some again."""
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


def test_a_daemon_that_is_started_again_does_not_begin_to_count_anew() -> None:
    """What its predecessor took within the hour counts."""
    first, second = Bench(per_hour=1), Bench(per_hour=1)

    async def story() -> None:
        first.emergencies.report(trainer("a"), "died", "")
        await trio.sleep(2)

    first.run(story)

    async def again() -> None:
        second.emergencies.remember(first.incidents)
        second.emergencies.report(trainer("a"), "died", "")
        await trio.sleep(2)

    second.run(again)
    assert second.incidents[0].no_snapshot == "it has had 1 within the hour"


def test_why_there_is_no_snapshot_is_said() -> None:
    """No root, too many that wait, a defect: the incident has the reason, the alert stands all the same, and the next one is tried."""
    bench = Bench()

    async def none(request: SnapshotRequest) -> Cut:
        await trio.lowlevel.checkpoint()
        raise CiuicError("no root is mounted")

    async def defect(request: SnapshotRequest) -> Cut:
        await trio.lowlevel.checkpoint()
        raise ZeroDivisionError

    async def story() -> None:
        for take in (none, defect, bench.cut):
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
    """A cut that takes a minute holds nobody up: the incident is told after ten seconds, and has its snapshot later."""
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


def test_what_recovers_has_no_alert_and_no_snapshot() -> None:
    """And alerts of trainers that never come again do not pile up."""
    bench = Bench()

    async def story() -> None:
        bench.emergencies.report(trainer("a"), "hung", "")
        await trio.sleep(2)
        bench.emergencies.report(trainer("a"), "recovered", "")
        await trio.sleep(2)
        assert bench.alerts.standing() == []
        for number in range(MOST_ALERTS + 10):
            bench.emergencies.report(trainer(f"t{number}"), "lost", "")
        await trio.sleep(2)

    bench.run(story)
    assert len(bench.requests) == 1
    assert len(bench.alerts.standing()) == MOST_ALERTS


def test_one_of_which_nobody_can_tell_is_lost() -> None:
    """Gone while no daemon watched, and its writer has not come back for half a minute: a warning, and no snapshot."""
    bench = Bench()
    record = WatchRecord(
        uid=0, pid=NOBODYS_PID, start_ticks=5, name="a", where="/w", kind="library", heartbeat_seconds=0.0, since_ns=0
    )  # fmt: skip
    changes: list[int] = []

    async def story() -> None:
        trainers = Trainers(
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
