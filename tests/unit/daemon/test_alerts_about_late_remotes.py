"""Periodic checks of the daemon: alerts about remotes that fall behind, and about known damage."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from support.cli_repository import FIRST_NS, SECOND_NS, CliRepository

from ciuic.daemon.base.events import Alerts, EventBus
from ciuic.daemon.base.repository_store import Store
from ciuic.daemon.housekeeping import DaemonHousekeeping
from ciuic.protocol.known_damage import DamagedPlace, note_damage
from ciuic.protocol.stored_remotely import STATE_VARIABLE, RemotePlace, StoredRecord, write_record
from ciuic.repository import Repository


class Checked:
    """A daemon with one repository and the remotes "nas", with a limit of a minute, and "cloud", without one."""

    def __init__(self, top: Path) -> None:
        self.now_ns = FIRST_NS
        self.made = CliRepository(top / "repository", top / "root")
        self.alerts = Alerts(EventBus(lambda: self.now_ns), lambda: self.now_ns)
        self.settings = SimpleNamespace(
            max_lags=(("nas", 60),),
            remotes=tuple(RemotePlace(name, f"file:///mnt/{name}") for name in ("nas", "cloud")),
            repository=self.made.path,
        )
        daemon: Any = SimpleNamespace(
            settings=self.settings,
            alerts=self.alerts,
            store=Store(top / "repository", block_bytes=1 << 18),
            now_ns=lambda: self.now_ns,
        )
        self._housekeeping = DaemonHousekeeping(daemon)

    @property
    def look_at_worker(self) -> Any:
        """Check of one worker."""
        return self._housekeeping._look_at_worker

    def look_at_damage(self) -> list[str]:
        """Return the messages of the alerts that stand after a look at the record of known damage."""
        trio.run(self._housekeeping._look_at_damage)
        return [alert.message for alert in self.alerts.standing()]

    def keys(self, seconds: float) -> list[str]:
        """Return the keys of the alerts that stand so long after the first snapshot."""
        self.now_ns = FIRST_NS + round(seconds * SECOND_NS)
        trio.run(self._housekeeping._look_at_remotes)
        return [alert.key for alert in self.alerts.standing()]


def test_state_that_another_program_deleted_is_one_alert(checked: Checked) -> None:
    """The alert names the root and what to look for, once, until the worker ends."""
    status = SimpleNamespace(renewed=0, abandoned=(), since=0)

    async def ask(_question: Any) -> Any:
        return status

    worker: Any = SimpleNamespace(pid=1, ask=ask)
    for times, keys in ((0, []), (1, ["state:/r"]), (2, ["state:/r"])):
        status.renewed = times
        trio.run(checked.look_at_worker, "/r", worker)
        assert [alert.key for alert in checked.alerts.standing()] == keys
    (alert,) = checked.alerts.standing()
    assert ".ciuic-state" in alert.message
    assert "git clean" in alert.hint


def test_known_damage_is_an_alert_until_it_is_refuted(checked: Checked) -> None:
    """A scrub that finds damage is told as a problem at the next look, by what it found and where; so is its end."""
    assert checked.look_at_damage() == []
    note_damage(checked.made.path, [DamagedPlace(where="/r/model.pt", reason="bad", by="verify")])
    (message,) = checked.look_at_damage()
    assert message.endswith("1 damaged place; found last by ciuic verify: /r/model.pt: bad")
    assert checked.alerts.standing()[0].severity == "problem"
    note_damage(checked.made.path, [], refuted=lambda known: True)
    assert checked.look_at_damage() == []


@pytest.fixture
def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checked:
    (tmp_path / "upload").mkdir()
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "upload"))
    return Checked(tmp_path)


def test_a_remote_that_falls_behind_is_an_alert(checked: Checked) -> None:
    """The alert stands from the limit on, names what is known, and ends with the upload."""
    assert checked.keys(1e6) == []
    id_ = checked.made.snapshot({b"file": b"content"})
    assert checked.keys(60) == []
    assert checked.keys(61) == ["remote:nas"]
    (alert,) = checked.alerts.standing()
    assert alert.message == "remote nas is behind by more than 1m: nothing was ever uploaded from this host"
    with Repository.open(checked.made.path) as repository:
        record = StoredRecord(repository=repository.id, stored=frozenset({str(id_)}), tail_ns=1)
    write_record("nas", record)
    assert checked.keys(1e6) == []


def test_the_alert_goes_with_its_limit(checked: Checked) -> None:
    """A reload that takes the limit or the remote away ends the alert."""
    checked.made.snapshot({b"file": b"content"})
    assert checked.keys(61) == ["remote:nas"]
    checked.settings.max_lags = ()
    assert checked.keys(62) == []
