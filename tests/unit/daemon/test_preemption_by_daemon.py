"""What the daemon does on notices: the upload is told before the cut, repeated notices cut nothing, a successor hears them again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import trio

from ciuic.config import PreemptionConfig
from ciuic.daemon import preemption
from ciuic.daemon.base.events import Alerts, EventBus
from ciuic.daemon.jobs import NoticeLine
from ciuic.daemon.preemption import Preemption
from ciuic.errors import CiuicError
from ciuic.protocol.control_types import SnapshotRequest
from ciuic.protocol.stored_remotely import STATE_VARIABLE
from ciuic.remote.upload_deadline import read_deadline


class _Site:
    """A daemon's part, and the state directory of an upload."""

    def __init__(self, top: Path) -> None:
        self.state = top
        self.taken: list[SnapshotRequest] = []
        self.told_before_cut: list[bool] = []
        self.failure: BaseException | None = None
        self.alerts = Alerts(EventBus(lambda: 0), lambda: 0)
        self.restart()

    def restart(self) -> None:
        settings: Any = lambda: SimpleNamespace(preemption=PreemptionConfig())  # noqa: E731
        self.part = Preemption(
            settings,
            self._take,
            self.alerts,
            EventBus(lambda: 0),
            cwd=self.state,
            as_service=False,
            on_urgency=lambda: None,
        )

    async def _take(self, request: SnapshotRequest) -> Any:
        self.told_before_cut.append(read_deadline(self.state) is not None)
        if self.failure is not None:
            raise self.failure
        self.taken.append(request)
        return SimpleNamespace(state=None)

    def hear(self, key: str = "1", seconds: float = 60, kind: Any = "notice") -> int:
        """Hear a line of the process that asks; return the number of snapshots so far."""
        line = NoticeLine(kind=kind, key=key, text=f"notice {key}", seconds=seconds)
        trio.run(self.part._hear, msgspec.json.encode(line))
        return len(self.taken)

    def a_second_later(self) -> None:
        trio.run(self.part._make_up)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Site:
    """Provide a site whose upload has a state directory."""
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path))
    return _Site(tmp_path)


def test_the_upload_is_told_before_the_cut(site: _Site) -> None:
    """One snapshot for a notice, however often it comes; an earlier end is told, and a withdrawn one is over."""
    assert [site.hear(), site.hear(), site.hear("2", 90), site.hear("3", 30)] == [1, 1, 1, 1]
    assert site.told_before_cut == [True]
    assert site.taken[0].tags == ["before-preemption"]
    found = read_deadline(site.state)
    assert found is not None
    assert found.cause == "notice 3"
    assert site.part.is_near
    site.hear("3", kind="withdrawn")
    found = read_deadline(site.state)
    assert found is not None
    assert found.cause == "notice 1"
    for key in ("1", "2"):
        assert "preemption" in site.alerts
        site.hear(key, kind="withdrawn")
    assert read_deadline(site.state) is None
    assert "preemption" not in site.alerts
    assert not site.part.is_near


def test_a_daemon_killed_before_the_cut_has_a_successor_that_cuts(site: _Site) -> None:
    """The note is there, the cut is not: the service tells the successor again."""
    site.failure = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        site.hear()
    assert read_deadline(site.state) is not None
    site.failure = None
    site.restart()
    assert site.hear() == 1


def test_a_snapshot_that_fails_is_an_alert(site: _Site) -> None:
    """The upload knows the deadline all the same."""
    site.failure = CiuicError("no disk")
    assert site.hear() == 0
    assert "preemption-snapshot" in site.alerts
    assert read_deadline(site.state) is not None


def test_a_snapshot_that_fails_is_tried_again_until_the_end(
    site: _Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, and not after a notice that was taken back."""
    monkeypatch.setattr(preemption, "_AGAIN_SECONDS", 0)
    site.failure = CiuicError("no disk")
    site.hear()
    site.a_second_later()
    site.failure = None
    for _ in range(2):
        site.a_second_later()
    assert [one.message for one in site.taken] == ["notice 1"]
    assert "preemption-snapshot" not in site.alerts
    site.restart()
    site.failure = CiuicError("no disk")
    site.hear()
    site.hear(kind="withdrawn")
    site.failure = None
    site.a_second_later()
    assert len(site.taken) == 1


def test_an_upload_that_starts_after_the_notice_is_told(site: _Site) -> None:
    """Its directory is made by itself."""
    site.state.rmdir()
    site.hear()
    site.state.mkdir()
    site.a_second_later()
    found = read_deadline(site.state)
    assert found is not None
    assert found.cause == "notice 1"


def test_an_end_that_is_hours_away_makes_nothing_urgent(site: _Site) -> None:
    """Captures make way for the jobs until the last hour."""
    site.hear("1", seconds=2 * 3600)
    assert not site.part.is_near
    site.hear("2", seconds=1800)
    assert site.part.is_near


def test_without_an_upload_no_directory_is_made(site: _Site) -> None:
    """Its directory belongs to its service manager."""
    site.state.rmdir()
    assert site.hear() == 1
    assert not site.state.exists()
