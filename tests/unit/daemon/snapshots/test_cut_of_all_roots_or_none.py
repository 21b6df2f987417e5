"""Tests of the cut over several roots: all or none, and no root stays held."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import cast

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from support.fake_daemon import FakeClient, FakeOverlay, FakeWorker

from ciuic.daemon.roots.supervisor import RootSupervisor
from ciuic.daemon.roots.worker_process import OverlayWorker
from ciuic.daemon.snapshots.cut import PREPARE_SECONDS, CutFailed, RootCut, cut_all, cut_together, flush_all
from ciuic.protocol.worker_frames import USE_OF_HOLD_SECONDS


def test_all_are_held_before_any_is_cut_and_cut_before_any_is_released() -> None:
    """All roots are held before any is cut, and all cut before any is released."""
    log: list[str] = []
    overlays = [FakeOverlay(name, log=log) for name in "ab"]
    cuts = cut_together([(overlay.name, FakeClient(overlay)) for overlay in overlays])
    assert log[:4] == ["hold a", "hold b", "cut a", "cut b"]
    assert sorted(log[4:]) == ["release a", "release b"]
    assert [(cut.path, cut.epoch) for cut in cuts] == [("a", 1), ("b", 1)]


@given(
    st.lists(st.sets(st.sampled_from(["hold", "cut", "release", "abort"])), min_size=1, max_size=4),
)
def test_every_root_is_cut_or_none_counts(failures: list[set[str]]) -> None:
    """Roots do not stay held after any failure, and a root that was cut in vain is told so, not that it is committed."""
    overlays = [FakeOverlay(str(number), fail_on=fail) for number, fail in enumerate(failures)]
    parts = [(overlay.name, FakeClient(overlay)) for overlay in overlays]
    try:
        cuts = cut_together(parts)
    except CutFailed:
        assert any({"hold", "cut"} & fail for fail in failures)
        for overlay, fail in zip(overlays, failures, strict=True):
            assert overlay.pending == [] or "abort" in fail
    else:
        assert not any({"hold", "cut"} & fail for fail in failures)
        assert [cut.path for cut in cuts] == [overlay.name for overlay in overlays]
    assert not any(overlay.held or overlay.committed for overlay in overlays)


def test_cuts_that_are_too_far_apart_do_not_count() -> None:
    """Cuts too far apart do not count, as the first root's hold may have ended before the last cut."""
    overlays = [FakeOverlay(name) for name in "ab"]
    parts = [(overlay.name, FakeClient(overlay)) for overlay in overlays]
    seconds = iter([5.0, 5.0 + USE_OF_HOLD_SECONDS + 0.1])
    with pytest.raises(CutFailed, match="longer"):
        cut_together(parts, clock=lambda: next(seconds))
    assert [overlay.pending for overlay in overlays] == [[], []]
    assert [(overlay.aborted, overlay.committed) for overlay in overlays] == [([1], []), ([1], [])]


def test_roots_are_released_before_any_sealed_file_is_written() -> None:
    """All roots are released before any answers that its sealed file is written."""
    overlays = [FakeOverlay(name) for name in "ab"]
    released = threading.Event()

    class Slow(FakeClient):
        def release(self) -> None:
            assert released.wait(10)
            super().release()

    class Quick(FakeClient):
        def release(self) -> None:
            super().release()
            released.set()

    assert len(cut_together([("a", Slow(overlays[0])), ("b", Quick(overlays[1]))])) == 2


def test_the_message_names_the_root_that_failed() -> None:
    """The error names the root whose worker did not answer."""
    overlays = [FakeOverlay("/a"), FakeOverlay("/b", fail_on={"cut"})]
    with pytest.raises(CutFailed, match="/b"):
        cut_together([(overlay.name, FakeClient(overlay)) for overlay in overlays])


@pytest.mark.parametrize("failing", [False, True])
def test_a_worker_that_does_not_prepare_delays_no_snapshot(failing: bool) -> None:
    """Every worker is asked to prepare on its own connection, and a missing answer delays no snapshot."""
    overlay = FakeOverlay("a", fail_on={"prepare"} if failing else ())
    worker = FakeWorker(overlay, "s")
    flushed: list[str] = []

    async def flush_one(path: str, worker: OverlayWorker) -> bool:
        flushed.append(path)
        return True

    supervisor = cast(RootSupervisor, SimpleNamespace(path="/a", worker=worker))
    try:
        assert trio.run(flush_all, [supervisor], flush_one)
    finally:
        worker.kill()
        worker.close()
    assert overlay.prepared_seconds == [PREPARE_SECONDS]
    assert flushed == ["/a"]


class _Replaced:
    """A root whose worker dies before the cut; ``worker`` is what its supervisor knows at each query."""

    path = "/a"

    def __init__(self, known: list[object | None]) -> None:
        self._known = known

    @property
    def worker(self) -> object | None:
        return self._known.pop(0) if len(self._known) > 1 else self._known[0]


async def _cut_all(root: _Replaced) -> list[RootCut]:
    async with cut_all([cast(RootSupervisor, root)], nullcontext) as cuts:
        return cuts


def _worker(session: str, client: FakeClient) -> object:
    return SimpleNamespace(session=session, connect=lambda: client)


@pytest.mark.parametrize("between", [False, True], ids=["at once", "with a moment without worker"])
def test_cut_names_the_session_of_the_worker_that_made_it(
    between: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cut names the session of the worker that made it, although its successor uses the same path.

    The successor counts epochs from 1 again, and its supervisor learns of it a moment later.
    """
    monkeypatch.setattr("ciuic.daemon.snapshots.cut.CUT_PAUSES_SECONDS", (0.0,) * 4)
    overlay = FakeOverlay("a")
    at_path = FakeClient(overlay, "new")
    known = [_worker("old", at_path), *([None] if between else []), _worker("new", at_path)]
    cuts = trio.run(_cut_all, _Replaced(known))
    assert [(cut.path, cut.session, cut.epoch) for cut in cuts] == [("/a", "new", 1)]
    assert overlay.pending == [1]


def test_worker_that_stays_away_fails_the_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cut fails in bounded time without a worker, and nothing is cut."""
    monkeypatch.setattr("ciuic.daemon.snapshots.cut.CUT_PAUSES_SECONDS", (0.0,) * 4)
    overlay = FakeOverlay("a")
    with pytest.raises(CutFailed, match="replaced"):
        trio.run(_cut_all, _Replaced([_worker("old", FakeClient(overlay, "new"))]))
    with pytest.raises(CutFailed, match="ended"):
        trio.run(_cut_all, _Replaced([None]))
    assert overlay.pending == []
