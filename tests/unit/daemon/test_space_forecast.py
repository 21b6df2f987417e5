"""When the repository's file system will be full: the rate, what disturbs it, its file, and the alert."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ciuic.config import AlertConfig
from ciuic.daemon.base.events import Alerts, EventBus
from ciuic.daemon.base.metrics import Metrics
from ciuic.daemon.housekeeping import DaemonHousekeeping
from ciuic.daemon.snapshots.space_watch import HISTORY_NAME, SpaceForecast, SpaceSample, growth_rate
from ciuic.protocol.control_types import RepositoryStatus, StatusDocument

GIB = 1 << 30
HOUR_NS = 3600 * 10**9
BEGIN_NS = 1_790_000_000 * 10**9


def samples(*used_gib: float, own_gib: float = 0) -> list[SpaceSample]:
    return [
        SpaceSample(BEGIN_NS + hour * HOUR_NS, round(used * GIB), round(own_gib * hour * GIB))
        for hour, used in enumerate(used_gib)
    ]


def rate_gib(*used_gib: float) -> float:
    rate = growth_rate(samples(*used_gib))
    assert rate is not None
    return rate.all_bytes / GIB


def test_a_rate_needs_a_day_and_a_half() -> None:
    """A first snapshot is no growth."""
    assert growth_rate(samples(*range(35))) is None
    assert growth_rate([SpaceSample(BEGIN_NS, 1, 1)] * 50) is None
    assert rate_gib(*range(36)) == 24


@pytest.mark.parametrize("at_hour", [20, 84, 150])
def test_one_prune_does_not_move_the_rate(at_hour: int) -> None:
    """What grows by a GiB an hour grows so before and after 300 GiB were pruned."""
    used = [500 + hour - (300 if hour >= at_hour else 0) for hour in range(168)]
    assert rate_gib(*used) == pytest.approx(24, rel=0.05)


def test_what_is_pruned_each_day_does_not_fill() -> None:
    """A use that goes up and down by turns has no rate that fills a disk within weeks."""
    used = [500 + 10 * (hour % 24) for hour in range(168)]
    assert rate_gib(*used) == 0


def test_noise_and_wrong_clocks_do_not_move_the_rate() -> None:
    """A tenth of wild samples, and small noise in all, leave the rate as it is."""
    chance = random.Random(5)
    used = [500 + hour + chance.uniform(-3, 3) for hour in range(168)]
    for hour in chance.sample(range(168), 16):
        used[hour] = chance.uniform(0, 2000)
    assert rate_gib(*used) == pytest.approx(24, rel=0.1)


class Disk:
    """A file system of a TiB with a repository, and the daemon that looks at it each half hour."""

    def __init__(self, path: Path) -> None:
        self.now_ns = BEGIN_NS
        self.path = path
        self.used_bytes = 900 * GIB
        self.alerts = Alerts(EventBus(lambda: self.now_ns), lambda: self.now_ns)
        self.restart()

    def restart(self) -> None:
        self.forecast = SpaceForecast(lambda: self.now_ns)
        settings = SimpleNamespace(alert=AlertConfig())
        parts: Any = SimpleNamespace(
            alerts=self.alerts, settings=settings, forecast=self.forecast, now_ns=lambda: self.now_ns
        )
        self.housekeeping = DaemonHousekeeping(parts)

    def facts(self) -> RepositoryStatus:
        return RepositoryStatus(
            path=str(self.path),
            exists=True,
            used_bytes=self.used_bytes,
            free_bytes=1024 * GIB - self.used_bytes,
            total_bytes=1024 * GIB,
        )

    def pass_time(self, hours: int, gib_an_hour: int) -> list[str]:
        """Let time pass, and return the keys of the alerts that stand then."""
        for _ in range(2 * hours):
            self.now_ns += HOUR_NS // 2
            self.used_bytes += gib_an_hour * GIB // 2
            facts = self.facts()
            self.forecast.note(facts)
            self.housekeeping._tell_forecast(facts)
        return [alert.key for alert in self.alerts.standing()]


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


def test_a_disk_that_fills_is_an_alert_until_it_is_pruned(disk: Disk) -> None:
    """The alert comes three days ahead, stands over a restart of the daemon, and ends where there is room again."""
    assert disk.pass_time(35, 1) == []
    assert disk.pass_time(18, 1) == ["full"]
    (alert,) = disk.alerts.standing()
    assert "within 3d00h at the rate of the last week; it is mostly other data" in alert.message
    disk.restart()
    assert disk.pass_time(1, 1) == ["full"]
    disk.used_bytes = 500 * GIB
    assert disk.pass_time(1, 1) == []


def test_the_samples_outlive_the_daemon(disk: Disk) -> None:
    """One sample an hour of one week is kept; those of a clock that was ahead are dropped."""
    disk.pass_time(200, 0)
    content = (disk.path / HISTORY_NAME).read_bytes()
    assert content.count(b"[") - 1 == 169
    disk.restart()
    disk.forecast.note(disk.facts())
    assert disk.forecast.rate is not None
    disk.now_ns -= 100 * HOUR_NS
    disk.pass_time(2, 0)
    assert (disk.path / HISTORY_NAME).read_bytes().count(b"[") - 1 < 75


@pytest.mark.parametrize("content", [b"", b"[[", b"[[1,2]]", b"[[-1,2,3]]", b"[" * 60000])
def test_a_damaged_history_is_none(disk: Disk, content: bytes) -> None:
    """The daemon begins anew where the file cannot be read."""
    (disk.path / HISTORY_NAME).write_bytes(content)
    assert disk.pass_time(37, 2) == ["full"]


def test_the_metric_is_absent_while_nothing_fills() -> None:
    """`ciuic_store_full_in_seconds` exists where the file system fills."""
    metrics = Metrics()
    for seconds, shown in ((60.0, True), (None, False)):
        repository = RepositoryStatus(path="/r", full_in_seconds=seconds)
        status = StatusDocument(version="1", pid=1, since="", now="", repository=repository)
        assert (b'ciuic_store_full_in_seconds{path="/r"} 60.0' in metrics.text(status)) == shown
