"""Tests of searches for bypasses: of one that fails nothing is known, and captures are none whenever they begin."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path
from typing import Never

import pytest
import trio
import trio.testing
from support.fake_daemon import NoMounts

from ciuic.daemon.base.events import Alerts, EventBus
from ciuic.daemon.roots.bypass_watch import LOOK_SECONDS, BypassWatch
from ciuic.daemon.roots.mount_hooks import RealMounts
from ciuic.system.bypass import Bypasser, Use


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "too many"), ValueError("odd")])
def test_a_search_that_fails_finds_nothing_out(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """A failed search over an adopted mount is no proof that nothing bypasses it, and is repeated with pauses.

    A failed search among known processes forgets none of them.
    """
    alerts, mounts = Alerts(EventBus(lambda: 0), lambda: 0), NoMounts([])
    watch = BypassWatch("/a", mounts, alerts)
    writer = Bypasser(2, "python train.py", 0, (Use("open", b"/a/log", True),))
    answers: list[list[Bypasser] | Exception] = [error, error, [writer]]
    searched_at: list[float] = []

    async def bypassing(root: str, ignore: object, only: object) -> list[Bypasser]:
        await trio.lowlevel.checkpoint()
        searched_at.append(trio.current_time())
        answer = answers.pop(0) if answers else error
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(mounts, "bypassing", bypassing)

    async def main() -> None:
        watch.mounted(adopted=True)
        assert not watch.has_gap
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch.run, set)
            await trio.sleep(LOOK_SECONDS * 1.5)
            assert watch.has_gap
            assert not watch.all_accounted
            (alert,) = alerts.standing()
            assert alert.key == "bypass:/a"
            assert "not known" in alert.message
            assert str(error) in alert.message
        await watch.refresh(set())
        assert [process.pid for process in watch.processes] == [2]
        assert not watch.all_accounted
        (alert,) = alerts.standing()
        assert "2 (python train.py)" in alert.message
        # The last one is the refresh.
        assert [round(at - searched_at[0]) for at in searched_at] == [0, 60, 120, 120]

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_capture_that_begins_during_a_search_is_no_bypass(tmp_path: Path) -> None:
    """Processes of ciuic are asked for again after the search: one that began meanwhile was seen, and is no bypass."""
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    ) as process:
        written_down = [set[int](), {process.pid}]

        def no_options(_settings: object) -> Never:
            raise AssertionError("no worker is started")

        mounts = RealMounts(no_options, lambda _root: written_down.pop(0) if written_down else set())
        # Its working directory is the root from the start: it is found as soon as it exists.
        found = trio.run(mounts.bypassing, str(tmp_path), (), {process.pid})
        again = trio.run(mounts.bypassing, str(tmp_path), (), {process.pid})
        assert process.stdin is not None
        process.stdin.close()
    assert found == []
    assert [one.pid for one in again] == [process.pid], "as a stranger it would have been found"
