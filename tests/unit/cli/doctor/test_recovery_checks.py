"""`ciuic doctor --recovery`: each line of the checklist, and all of them on a host with a remote."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from support.cli_repository import CliRepository, Host

from ciuic.cli.commands import doctor as checks
from ciuic.cli.probes import Finding, Probes
from ciuic.config import Config, RootConfig
from ciuic.protocol.last_drill import LastDrill
from ciuic.repository import Repository
from ciuic.retention import RetentionPolicy

HOUR_NS = 3600 * 10**9


def levels(findings: Any) -> list[str]:
    return [finding.level for finding in findings]


def test_a_root_without_a_young_snapshot(tmp_path: Path) -> None:
    """In none at all, older than two intervals, and young."""
    made = CliRepository(tmp_path / "repository", tmp_path / "root")
    config = Config(roots=(RootConfig(tmp_path / "root"),))
    with Repository.open(made.path) as repository:
        assert levels(checks.snapshots_are_young(repository, config, 0)) == ["problem"]
    made.snapshot({b"a": b"b"}, time_ns=10 * HOUR_NS)
    with Repository.open(made.path) as repository:
        assert levels(checks.snapshots_are_young(repository, config, 11 * HOUR_NS)) == ["ok"]
        assert levels(checks.snapshots_are_young(repository, config, 13 * HOUR_NS)) == ["problem"]
        assert levels(checks.snapshots_are_young(repository, Config(), 0)) == ["problem"]


@pytest.mark.parametrize(
    ("policy", "level"),
    [
        (RetentionPolicy(), "ok"),
        (RetentionPolicy(keep_within_seconds=86_400), "warning"),
        (RetentionPolicy(keep_within_seconds=3600, keep_daily=7), "ok"),
    ],
)
def test_how_far_back_snapshots_reach(policy: RetentionPolicy, level: str) -> None:
    """Three days at least, by whichever rule."""
    assert levels(checks.retention_reaches_back(Config(retention=policy))) == [level]


def test_the_last_drill() -> None:
    """Never, damaged, long ago, and lately; an interval allows twice its time."""
    now_ns = 1000 * 24 * HOUR_NS

    def level(days: float, every_seconds: int | None = None, verdict: Any = "good") -> str:
        drill = LastDrill(time_ns=now_ns - round(days * 24 * HOUR_NS), verdict=verdict, seconds=1.0)
        return levels(checks.last_drill_is_good([drill], every_seconds, now_ns))[0]

    assert levels(checks.last_drill_is_good([], None, now_ns)) == ["warning"]
    assert level(1) == "ok"
    assert level(1, verdict="damaged") == "problem"
    assert level(40) == "warning"
    assert level(40, 30 * 86_400) == "ok"


def test_room_for_a_restore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of the root in its newest snapshot against the free space of its disk."""
    made = CliRepository(tmp_path / "repository", tmp_path / "root")
    made.root.mkdir()
    made.snapshot({b"a": bytes(5000)})
    config = Config(roots=(RootConfig(made.root),))
    with Repository.open(made.path) as repository:
        assert levels(checks.restore_has_room(repository, config, Probes())) == ["ok"]
        monkeypatch.setattr("ciuic.system.disk_space.available_bytes", lambda path: 4999)
        (finding,) = checks.restore_has_room(repository, config, Probes())
    assert finding.level == "warning"
    assert "4.88 KiB in its newest snapshot" in finding.message


def ticked(host: Host, code: int) -> dict[str, Finding]:
    document = host.json("doctor", "--recovery", expect=code)
    return {row["check"]: Finding(**row) for row in document["findings"]}


def test_the_whole_list_on_a_host_with_a_remote(short_tmp: Path) -> None:
    """Each line becomes ok with what it asks for; a remote that only this host's file opens is a problem."""
    host = Host(short_tmp / "one")
    (host.top / "root").mkdir(exist_ok=True)
    config = Path(host.env["CIUIC_CONFIG"])
    config.write_text(f'{config.read_text()}\n[[root]]\npath = "{host.top}/root"\n')
    made = CliRepository(host.repository, host.top / "root", make=not Repository.exists(host.repository))
    made.snapshot({b"file": b"content"}, time_ns=time.time_ns())
    before = ticked(host, 0)
    assert {name: one.level for name, one in before.items()} == {
        "recovery: work at risk": "ok",
        "recovery: retention": "ok",
        "recovery: damage": "ok",
        "recovery: drill": "warning",
        "recovery: remote": "warning",
        "recovery: room": "ok",
    }
    host.run("drill")
    host.run("remote", "init", f"file://{short_tmp}/nas")
    host.run("remote", "upload", "--once")
    host.run("remote", "drill")
    after = ticked(host, 0)
    assert {one.level for one in after.values()} == {"ok"}, after
    assert "recovery" in after["recovery: key remote"].message
    assert "0 problems, 0 warnings" in host.run("doctor", "--recovery").stdout.decode()
    (recovery,) = [
        row["slot"] for row in host.json("remote", "keys", "list")["slots"] if row["kind"] == "recovery"
    ]
    host.run("remote", "keys", "remove", recovery, "-y")
    assert ticked(host, 1)["recovery: key remote"].level == "problem"
    (short_tmp / "nas").rename(short_tmp / "away")
    assert ticked(host, 0)["recovery: key remote"].level != "ok"
    host.fails("doctor", "--recovery", "/", code=2)


def test_a_repository_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    """One line, a problem."""
    made = CliRepository(tmp_path / "repository", tmp_path / "root")
    for name in ("config", "config.copy"):
        (made.path / name).unlink(missing_ok=True)
    done = made.run("doctor", "--recovery", "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["problems"] == 1
