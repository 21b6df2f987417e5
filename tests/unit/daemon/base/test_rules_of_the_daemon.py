"""Tests of small rules that other parts rely on: alerts, events, retries, metrics, spans."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from ciuic.daemon.base.events import BACKLOG, Alerts, EventBus
from ciuic.daemon.base.metrics import Metrics, SnapshotCourse, SpanWriter
from ciuic.daemon.capture.job import EXIT_INTERRUPTED, EXIT_UNDO_LOST, Failed
from ciuic.daemon.snapshots.capture_process import CODE_KILLED
from ciuic.daemon.snapshots.pending import BUSY_PATIENCE_SECONDS, MAX_ATTEMPTS, retry_after
from ciuic.protocol.control_types import (
    Alert,
    Progress,
    RemoteStatus,
    RootStatus,
    SnapshotState,
    SnapshotSummary,
    StatusDocument,
    rfc3339,
)
from ciuic.protocol.span_spool import SPANS_NAME, SpoolPosition, read_spans
from ciuic.repository import Repository


class Clock:
    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


def test_an_alert_keeps_its_beginning() -> None:
    """An alert reported again keeps its start time, only a new text is announced, and clearing removes it."""
    clock = Clock()
    bus = EventBus(clock)
    alerts = Alerts(bus, clock)
    with bus.subscribe() as listener:
        for number, text in enumerate(["a", "a", "b"]):
            clock.now_ns = number * 10**9
            alerts.report("k", text)
        (alert,) = alerts.standing()
        assert (alert.since, alert.message) == (rfc3339(0), "b")
        alerts.clear("k")
        alerts.clear("k")
        assert alerts.standing() == []
        bus.close()

        async def kinds() -> list[str]:
            return [event.kind async for event in listener.events()]

        assert trio.run(kinds) == ["alert_raised", "alert_raised", "alert_cleared"]


def test_problems_stand_before_warnings() -> None:
    """Problems are listed before warnings."""
    alerts = Alerts(EventBus(lambda: 0), lambda: 0)
    alerts.report("w", "w", severity="warning")
    alerts.report("p", "p")
    assert [alert.key for alert in alerts.standing()] == ["p", "w"]


def test_slow_listener_loses_the_oldest_events() -> None:
    """The bus never waits for a slow listener, which keeps the newest events."""
    bus = EventBus(lambda: 0)

    async def main() -> list[str]:
        with bus.subscribe() as slow:
            for number in range(BACKLOG + 10):
                bus.emit("e", detail=str(number))
            bus.close()
            return [event.detail async for event in slow.events()]

    assert trio.run(main) == [str(number) for number in range(10, BACKLOG + 10)]


def test_listening_to_a_closed_bus_ends_at_once() -> None:
    """A listener that comes after the bus was closed ends at once."""
    bus = EventBus(lambda: 0)
    bus.close()

    async def main() -> list[str]:
        with bus.subscribe() as late, trio.fail_after(5):
            return [event.kind async for event in late.events()]

    assert trio.run(main) == []


@pytest.mark.parametrize(
    ("code", "attempts", "waited", "after"),
    [
        (75, 50, 0.0, 5.0),
        (75, 1, BUSY_PATIENCE_SECONDS, None),
        (CODE_KILLED, 1, 0.0, 1.0),
        (CODE_KILLED, 2, 0.0, 2.0),
        (CODE_KILLED, MAX_ATTEMPTS, 0.0, None),
        (EXIT_INTERRUPTED, 1, 0.0, 1.0),
        (1, 1, 0.0, 15.0),
        (1, MAX_ATTEMPTS, 0.0, None),
        (EXIT_UNDO_LOST, 1, 0.0, None),
        (4, 1, 0.0, None),
        (7, 1, 0.0, None),
    ],
)
def test_when_a_capture_is_tried_again(code: int, attempts: int, waited: float, after: float | None) -> None:
    """A capture is retried rarely and not for ever, and only after errors that may pass."""
    assert retry_after(Failed(error="", code=code), attempts, waited).after_seconds == after


def test_metrics_are_those_of_the_status() -> None:
    """Gauges follow the status document, and a removed root leaves no series behind."""
    metrics = Metrics()
    status = StatusDocument(
        version="1",
        pid=1,
        since="",
        now="",
        roots=[RootStatus(path='/a "x"', state="mounted", dirty_bytes=7)],
        last_snapshot=SnapshotSummary(id="cs-1", time=rfc3339(5 * 10**9)),
        captures=[
            SnapshotState(id="b", state="failed"),
            SnapshotState(id="a", state="capturing", progress=Progress(share=0.25, paused_seconds=9)),
        ],
        alerts=[Alert(key="k", severity="problem", since="", message="")],
        remotes=[RemoteStatus(name="nas", snapshots=3, size_bytes=4096, seconds=60, stored=8)],
    )

    def samples(document: StatusDocument) -> dict[tuple[str, str], float]:
        families = text_string_to_metric_families(metrics.text(document).decode())
        return {
            (sample.name, ",".join(sample.labels.values())): sample.value
            for family in families
            for sample in family.samples
        }

    assert {samples(status)["ciuic_snapshots_total", outcome] for outcome in ("committed", "failed")} == {0}
    assert samples(status)["ciuic_trainer_incidents_total", "died"] == 0
    metrics.snapshots.labels("committed").inc()
    seen = samples(status)
    assert seen["ciuic_root_mounted", '/a "x"'] == 1
    assert seen["ciuic_root_dirty_bytes", '/a "x"'] == 7
    assert seen["ciuic_snapshots_pending", ""] == 1
    assert seen["ciuic_last_snapshot_timestamp_seconds", ""] == 5
    assert seen["ciuic_snapshots_total", "committed"] == 1
    assert seen["ciuic_alerts", "problem"] == 1
    assert (seen["ciuic_capture_share", ""], seen["ciuic_capture_paused_seconds", ""]) == (0.25, 9)
    behind = {name: value for (name, remote), value in seen.items() if remote == "nas"}
    assert behind == {
        "ciuic_remote_behind_snapshots": 3,
        "ciuic_remote_behind_bytes": 4096,
        "ciuic_remote_behind_seconds": 60,
        "ciuic_remote_stored_snapshots": 8,
    }
    status.remotes = [RemoteStatus(name="nas", last_drill=rfc3339(7 * 10**9), drill_ok=True)]
    assert samples(status)["ciuic_remote_last_drill_timestamp_seconds", "nas"] == 7
    assert samples(status)["ciuic_remote_last_drill_ok", "nas"] == 1
    status.remotes = [RemoteStatus(name="nas", last_drill=rfc3339(8 * 10**9))]
    assert samples(status)["ciuic_remote_last_drill_ok", "nas"] == 0
    status.remotes = []
    assert not any(name.startswith("ciuic_remote_") for name, _ in samples(status))
    status.captures = []
    assert samples(status)["ciuic_capture_share", ""] == 1
    status.roots = []
    assert not any(name.startswith("ciuic_root_") for name, _ in samples(status))


@pytest.mark.parametrize("is_wanted", [True, False])
def test_spans_are_written_only_for_an_exporter(tmp_path: Path, is_wanted: bool) -> None:
    """Without `exporter.otlp` there is no file; a span ends at its start or later, has the reason of a failure, and costs no snapshot."""
    place, spool = tmp_path / "repository", tmp_path / SPANS_NAME
    with Repository.create(place) as repository:
        id_ = repository.id
    for end_ns, error in ((4_000_000, ""), (10, "no space")):
        course = SnapshotCourse("cs-a", 1_000_000, end_ns, {"ciuic.snapshot.files": 1}, error)
        trio.run(SpanWriter(spool, lambda: is_wanted, lambda: place).write, course)
        trio.run(SpanWriter(spool, lambda: is_wanted, lambda: tmp_path / "gone").write, course)
    assert spool.exists() == is_wanted
    found = [
        (one.repository, one.start_ns, one.end_ns, one.error, one.attributes["ciuic.snapshot.outcome"])
        for one in read_spans(spool, SpoolPosition(), 9).spans
    ]
    written = [
        (id_, 1_000_000, 4_000_000, "", "committed"),
        (id_, 1_000_000, 1_000_000, "no space", "failed"),
    ]
    assert found == (written if is_wanted else [])
