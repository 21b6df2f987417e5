"""Tests of drills by the daemon: when one is due, what keeps it from beginning, and what becomes of its outcome."""

from __future__ import annotations

import os
import random
import stat
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import trio.testing
from support.checkpoint_files import make_torch
from support.cli_repository import FIRST_NS, CliRepository
from support.damage import make

from ciuic.config import load_config
from ciuic.daemon.base.events import Alerts, EventBus
from ciuic.daemon.base.metrics import Metrics
from ciuic.daemon.base.settings import Settings, settings_of
from ciuic.daemon.drills import KEY_DRILL, KEY_LATE, Drills, is_memory_short, next_drill_ns
from ciuic.protocol.control_types import StatusDocument, rfc3339
from ciuic.protocol.last_drill import LastDrill, add_drill, drill_status, read_drills
from ciuic.repository import Repository

WEEK = 7 * 86_400
NOW_NS = time.time_ns()
"""The processes note the real time."""


def record(age_seconds: float, verdict: Any = "good") -> LastDrill:
    return LastDrill(time_ns=NOW_NS - round(age_seconds * 1e9), verdict=verdict, seconds=1.0, reason="why")


class Drilled:
    """A daemon with one repository of two snapshots, and a drill each week."""

    def __init__(self, top: Path, *, script: str = "", **more: Any) -> None:
        (top / "scratch").mkdir()
        self.top = top
        self.made = CliRepository(top / "repository", top / "root")
        for number in range(2):
            self.made.snapshot({b"file": os.urandom(9000), b"other": b"%d" % number})
        self.alerts = Alerts(EventBus(lambda: NOW_NS), lambda: NOW_NS)
        self.settings = Settings(
            socket=top / "c",
            runtime_dir=top,
            repository=top / "repository",
            drill_every_seconds=WEEK,
            drill_scratch=top / "scratch",
        )
        command = [sys.executable, "-c", script] if script else []
        more.setdefault("is_memory_short", lambda: False)
        self.drills = Drills(
            lambda: self.settings, self.alerts, cwd=top, now_ns=lambda: NOW_NS, command=command, **more
        )

    def look(self) -> list[LastDrill]:
        """Look once, as each minute, and return the records."""
        trio.run(self.drills.once)
        return read_drills(self.made.path)

    def alert_keys(self) -> list[str]:
        return [alert.key for alert in self.alerts.standing()]


def test_when_the_next_is_due() -> None:
    """At once without a record or with one of the future, else one interval later, and a day after one that was not good."""
    assert next_drill_ns([], WEEK, NOW_NS) == NOW_NS
    assert next_drill_ns([record(-86_400)], WEEK, NOW_NS) == NOW_NS
    assert next_drill_ns([record(100)], WEEK, NOW_NS) == NOW_NS + (WEEK - 100) * 10**9
    assert (
        next_drill_ns([record(100, "damaged"), record(200)], WEEK, NOW_NS) == NOW_NS + (86_400 - 100) * 10**9
    )
    assert next_drill_ns([record(100, "failed")], 3600, NOW_NS) == NOW_NS + 3500 * 10**9


def test_a_due_drill_is_done_and_noted_once(tmp_path: Path) -> None:
    """The process restores, compares, and leaves nothing but its record; the next look finds none due."""
    made = Drilled(tmp_path)
    (found,) = made.look()
    assert (found.verdict, found.files) == ("good", 4)
    assert os.listdir(tmp_path / "scratch") == []
    assert made.alert_keys() == []
    # A record of this very second may lie after the time that the test holds still.
    add_drill(made.made.path, record(5))
    assert len(made.look()) == 2


def test_the_confined_process_restores_everything(tmp_path: Path) -> None:
    """Links, long attributes, sparse files, other owners, checkpoints: no privilege and no system call is missing."""
    made = Drilled(tmp_path)
    all_structures = make(tmp_path / "all")
    dice = random.Random(1)
    made.made.snapshot(
        {
            b"model.pt": make_torch(dice),
            b"of another": (b"content", {"uid": 4711, "gid": 4712, "mode": stat.S_IFREG | 0o640}),
        }
    )
    for repository, files in ((all_structures.repository, 60), (made.made.path, 4)):
        made.settings = made.settings._replace(repository=repository)
        trio.run(made.drills.once)
        (found,) = read_drills(repository)
        assert (found.verdict, found.reason) == ("good", "")
        assert found.files >= files
    assert os.listdir(tmp_path / "scratch") == []


def test_damage_is_an_alert_until_a_drill_is_good(tmp_path: Path) -> None:
    """Also where the drill was done by hand, and none is configured."""
    made = Drilled(tmp_path)
    for pack in (made.made.path / "packs").glob("*.pack"):
        body = bytearray(pack.read_bytes())
        body[400:-400:50] = bytes(len(body[400:-400:50]))
        pack.write_bytes(body)
    damage = made.look()[0]
    assert damage.verdict == "damaged"
    assert made.alert_keys()[0] == KEY_DRILL
    made.settings = made.settings._replace(drill_every_seconds=0)
    # Neither one that could not be done nor one of something else says that the damage is gone.
    for later in (record(0, "failed"), record(0)):
        add_drill(made.made.path, later)
        made.look()
        (alert,) = made.alerts.standing()
        assert (alert.key, alert.severity) == (KEY_DRILL, "problem")
    add_drill(made.made.path, msgspec.structs.replace(damage, verdict="failed", snapshot=""))
    add_drill(made.made.path, msgspec.structs.replace(damage, verdict="good"))
    made.look()
    assert made.alert_keys() == []
    add_drill(made.made.path, record(0, "failed"))
    made.look()
    (alert,) = made.alerts.standing()
    assert (alert.key, alert.severity) == (KEY_DRILL, "warning")


def test_a_failed_drill_is_told_as_one(tmp_path: Path) -> None:
    """It is no damage, which `ciuic verify` would find; it stands since the newest one."""
    made = Drilled(tmp_path)
    made.settings = made.settings._replace(drill_every_seconds=0)
    for age_seconds in (100, 7):
        add_drill(made.made.path, record(age_seconds, "failed"))
        made.look()
        (alert,) = made.alerts.standing()
        assert (alert.message, alert.since) == (
            "the last drill failed: why",
            rfc3339(record(age_seconds).time_ns),
        )
        assert "verify" not in alert.hint


def test_a_full_scratch_is_a_failed_drill(tmp_path: Path) -> None:
    """What cannot be done is told, and repeated after a day and not each minute."""
    made = Drilled(tmp_path)
    made.settings = made.settings._replace(drill_scratch=tmp_path / "nowhere")
    (found,) = made.look()
    assert found.verdict == "failed"
    assert "nowhere" in found.reason
    assert KEY_DRILL in made.alert_keys()


@pytest.mark.parametrize("why", ["is_busy", "is_memory_short"])
def test_other_work_and_short_memory_go_first(tmp_path: Path, why: str) -> None:
    """The drill stays due, and no process begins."""
    stands = True
    made = Drilled(tmp_path, **{why: lambda: stands})
    assert made.look() == []
    stands = False
    assert len(made.look()) == 1


def test_short_memory_ends_a_drill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that runs when memory becomes short is told to end; the next begins an hour later at the earliest."""
    answers = iter([False])
    begun = tmp_path / "begun"
    script = f"import pathlib, signal; pathlib.Path({str(begun)!r}).touch(); signal.pause()"
    monkeypatch.setattr("ciuic.daemon.drills._WATCH_SECONDS", 0.01)
    made = Drilled(tmp_path, script=script, is_memory_short=lambda: next(answers, True) and begun.exists())

    async def twice() -> None:
        # In one run: the clock of another begins elsewhere.
        await made.drills.once()
        begun.unlink()
        await made.drills.once()

    trio.run(twice)
    assert read_drills(made.made.path) == []
    assert not begun.exists()


def test_a_process_without_outcome_is_not_repeated_each_minute(tmp_path: Path) -> None:
    """One that was killed leaves no record: the next begins an hour later."""
    begun = tmp_path / "begun"
    made = Drilled(tmp_path, script=f"open({str(begun)!r}, 'a').write('x'); raise SystemExit(9)")

    async def twice() -> None:
        await made.drills.once()
        await made.drills.once()

    trio.run(twice)
    assert begun.read_text() == "x"


def test_a_repository_without_snapshots_is_tried_again_at_the_next_look(tmp_path: Path) -> None:
    """A daemon that begins with an empty repository drills as soon as it has a snapshot, not an hour later."""
    made = Drilled(tmp_path)
    Repository.create(tmp_path / "empty").close()
    made.settings = made.settings._replace(repository=tmp_path / "empty")

    async def looks() -> None:
        await made.drills.once()
        made.settings = made.settings._replace(repository=made.made.path)
        await made.drills.once()

    trio.run(looks)
    assert [one.verdict for one in read_drills(made.made.path)] == ["good"]
    assert made.alert_keys() == []


def test_a_drill_that_is_late_is_an_alert(tmp_path: Path) -> None:
    """After twice the interval without a good one."""
    made = Drilled(tmp_path, is_busy=lambda: True)
    add_drill(made.made.path, record(2 * WEEK - 5))
    made.look()
    assert made.alert_keys() == []
    (made.made.path / "drills").unlink()
    add_drill(made.made.path, record(2 * WEEK + 5))
    made.look()
    assert made.alert_keys() == [KEY_LATE]


def test_metrics_have_the_last_drill() -> None:
    """Time, outcome and interval; zeros where there was none."""
    status = StatusDocument(version="1", pid=1, since="", now="")

    def samples() -> dict[str, float]:
        lines = Metrics().text(status).decode().splitlines()
        return {
            name: float(value)
            for name, _, value in (
                line.partition(" ") for line in lines if "drill" in line and line[0] != "#"
            )
        }

    assert set(samples().values()) == {0.0}
    status.drill = drill_status(LastDrill(time_ns=FIRST_NS, verdict="good", seconds=1.0))
    status.drill.interval_seconds = WEEK
    assert samples() == {
        "ciuic_last_drill_timestamp_seconds": FIRST_NS / 1e9,
        "ciuic_last_drill_ok": 1,
        "ciuic_drill_interval_seconds": WEEK,
    }


def test_the_configuration_says_how_often(tmp_path: Path) -> None:
    """[drill] every and scratch; by default there is none."""
    file = tmp_path / "ciuic.toml"
    file.write_text('[drill]\nevery = "7d"\nscratch = "/data/scratch"\n')
    found = settings_of(load_config(file))
    assert (found.drill_every_seconds, found.drill_scratch) == (WEEK, Path("/data/scratch"))
    file.write_text("")
    assert settings_of(load_config(file)).drill_every_seconds == 0


def test_short_memory_is_known_by_size_and_pressure(tmp_path: Path) -> None:
    """Less than a tenth available, or more than a tenth of the time waited for; unknown is not short."""
    assert not is_memory_short(tmp_path)
    (tmp_path / "pressure").mkdir()
    (tmp_path / "meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 99 kB\n")
    assert is_memory_short(tmp_path)
    (tmp_path / "meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 500 kB\n")
    assert not is_memory_short(tmp_path)
    (tmp_path / "pressure/memory").write_text(
        "some avg10=12.50 avg60=0.00 avg300=0.00 total=1\nfull avg10=0 total=1\n"
    )
    assert is_memory_short(tmp_path)
