"""Ages of the newest snapshots: clocks that are set, restarts, a repository that cannot be read, and the alert."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from support.cli_repository import CliRepository

from ciuic.daemon.base.events import Alerts, EventBus
from ciuic.daemon.base.metrics import Metrics
from ciuic.daemon.base.repository_store import Store
from ciuic.daemon.base.runtime import RuntimeDirectory
from ciuic.daemon.housekeeping import DaemonHousekeeping
from ciuic.daemon.snapshots.schedule import SnapshotAges
from ciuic.protocol.control_types import RootStatus, StatusDocument

_SECOND = 10**9
_HOUR = 3600 * _SECOND
_BOOTED_NS = 1_790_000_000 * _SECOND


class Machine:
    """A host that has been up for ten hours, with a wall clock that can be set."""

    def __init__(self, runtime: RuntimeDirectory) -> None:
        self.boot_ns = 10 * _HOUR
        self.set_ns = 0
        self.boot = "first"
        self.runtime = runtime
        self.restart()

    def now_ns(self) -> int:
        return _BOOTED_NS + self.boot_ns + self.set_ns

    def restart(self) -> None:
        """Start another daemon."""
        self.ages = SnapshotAges(self.runtime, self.now_ns, lambda: self.boot_ns, lambda: self.boot)

    def look(self, id_: str, time_ns: int, *, is_readable: bool = True) -> float | None:
        """Note the newest snapshot of the root, and return its age in hours."""
        found: Any = SimpleNamespace(id=id_, time_ns=time_ns, tags=()) if id_ else None
        self.ages.note({"/r": found}, is_readable=is_readable)
        seconds = self.ages.seconds("/r")
        return None if seconds is None else seconds / 3600


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    runtime = RuntimeDirectory(tmp_path)
    runtime.acquire()
    yield Machine(runtime)
    runtime.release()


@pytest.mark.parametrize("step_hours", [-100, -1, 1, 100])
def test_no_clock_makes_a_snapshot_younger_or_older(machine: Machine, step_hours: int) -> None:
    """The age of a snapshot that is known goes on by the time since boot, also under the next daemon."""
    cut_ns = machine.now_ns()
    assert machine.look("cs-1", cut_ns) == 0
    machine.boot_ns += _HOUR
    machine.set_ns = step_hours * _HOUR
    assert machine.look("cs-1", cut_ns) == 1
    machine.restart()
    machine.boot_ns += _HOUR
    assert machine.look("cs-1", cut_ns) == 2


@pytest.mark.parametrize("step_hours", [-100, -1, 1, 100])
def test_the_clock_is_set_between_cut_and_commit(machine: Machine, step_hours: int) -> None:
    """A snapshot whose cut was dated by the clock as it was then has the age of its cut."""
    cut_ns = machine.now_ns()
    machine.boot_ns += _HOUR // 2
    machine.set_ns = step_hours * _HOUR
    assert machine.look("", 0) is None
    machine.boot_ns += _HOUR // 2
    assert machine.look("cs-1", cut_ns) == 1


@pytest.mark.parametrize("step_hours", [-100, -1, 1, 100])
def test_a_cut_that_the_daemon_saw_has_no_second_meaning(machine: Machine, step_hours: int) -> None:
    """After a step back the clock gives the same times again; a cut after it is as young as it is."""
    machine.boot_ns += _HOUR
    machine.set_ns = step_hours * _HOUR
    machine.look("", 0)
    machine.boot_ns += _HOUR // 2
    cut_ns = machine.now_ns()
    machine.ages.cut("cs-1")
    machine.boot_ns += _HOUR // 2
    assert machine.look("cs-1", cut_ns) == 0.5


def test_a_snapshot_of_the_future_is_not_recent(machine: Machine) -> None:
    """One that no clock of this boot can have dated counts as old as the boot."""
    assert machine.look("cs-1", machine.now_ns() + _HOUR) == 10
    machine.boot_ns += _HOUR
    assert machine.look("cs-1", machine.now_ns() + _HOUR) == 11


def test_the_age_goes_on_without_a_repository(machine: Machine) -> None:
    """A repository that cannot be read takes no age back; one without the snapshot does."""
    cut_ns = machine.now_ns()
    machine.look("cs-1", cut_ns)
    machine.boot_ns += 3 * _HOUR
    assert machine.look("", 0, is_readable=False) == 3
    assert machine.look("", 0) is None


def test_another_boot_begins_anew(machine: Machine) -> None:
    """A record of another boot means nothing; the wall clock says how old the snapshot is."""
    cut_ns = machine.now_ns()
    machine.look("cs-1", cut_ns)
    machine.boot, machine.boot_ns, machine.set_ns = "second", _HOUR, 14 * _HOUR
    machine.restart()
    assert machine.look("cs-1", cut_ns) == 5


def test_a_damaged_record_is_none(machine: Machine) -> None:
    """A file that cannot be read costs what it knew."""
    (machine.runtime.path / "snapshot-ages.json").write_text("[{")
    assert machine.look("cs-1", machine.now_ns() - _HOUR) == 1


def test_an_overdue_root_is_an_alert_until_it_has_a_snapshot(machine: Machine, tmp_path: Path) -> None:
    """The alert begins after two intervals and 5 minutes though the clock was put back, and ends with the snapshot."""
    root = tmp_path / "root"
    store = Store(tmp_path / "repository", block_bytes=1 << 18)
    alerts = Alerts(EventBus(machine.now_ns), machine.now_ns)
    settings = SimpleNamespace(roots=[SimpleNamespace(path=str(root))], interval_seconds=3600)
    parts: Any = SimpleNamespace(
        settings=settings, alerts=alerts, ages=machine.ages, now_ns=machine.now_ns, store=store
    )
    housekeeping = DaemonHousekeeping(parts)

    def keys() -> list[str]:
        trio.run(housekeeping._look_at_ages)
        return [alert.key for alert in alerts.standing()]

    def text() -> str:
        (alert,) = alerts.standing()
        return alert.message

    assert keys() == []
    machine.boot_ns += 2 * _HOUR + 300 * _SECOND
    machine.set_ns = -50 * _HOUR
    assert keys() == []
    machine.boot_ns += _SECOND
    assert keys() == [f"overdue:{root}"]
    assert text() == f"there is no snapshot of {root} after 2h05m, and one is due every 1h00m"
    made = CliRepository(tmp_path / "repository", root)
    machine.ages.cut("cs-000001")
    made.snapshot({b"file": b"content"}, time_ns=machine.now_ns())
    assert keys() == []
    machine.boot_ns += 3 * _HOUR
    assert keys() == [f"overdue:{root}"]
    assert text() == f"the newest snapshot of {root} is older than 2h05m, and one is due every 1h00m"
    settings.roots = []
    assert keys() == []


def test_the_metric_has_the_age_of_each_root() -> None:
    """A root without a snapshot has no age."""
    roots = [RootStatus(path="/a", seconds_since_last=90.0), RootStatus(path="/b")]
    text = Metrics().text(StatusDocument(version="1", pid=1, since="", now="", roots=roots)).decode()
    lines = [line for line in text.splitlines() if line.startswith("ciuic_root_snapshot_age_seconds")]
    assert lines == ['ciuic_root_snapshot_age_seconds{root="/a"} 90.0']


def test_the_newest_snapshot_from_before_is_one_that_was_listed_then(machine: Machine) -> None:
    """Of the root that holds the file, no safety snapshot; its time, and what an earlier daemon knew, prove nothing."""

    def note(**tags: tuple[str, ...]) -> None:
        found: dict[str, Any] = {
            f"/{root}": SimpleNamespace(id=f"cs-{root}", time_ns=machine.now_ns() - _HOUR, tags=of_it)
            for root, of_it in tags.items()
        }
        machine.ages.note(found, is_readable=True)

    note(a=(), b=())
    listed_ns = machine.boot_ns
    assert machine.ages.newest(listed_ns, "/a/f") == ""
    machine.boot_ns += _SECOND
    note(a=(), b=("safety",))
    assert machine.ages.newest(listed_ns + 1, "/a/f") == "cs-a"
    assert machine.ages.newest(listed_ns + 1) == "cs-a"
    machine.boot_ns += _SECOND
    for path in ("/b/f", "/ab/f", "/elsewhere"):
        assert machine.ages.newest(machine.boot_ns, path) == ""
    machine.restart()
    note(a=())
    assert machine.ages.newest(machine.boot_ns) == ""
