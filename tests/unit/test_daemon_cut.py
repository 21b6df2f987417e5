"""The cut over several roots: all or none, and nothing stays held."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import cast

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from support.fake_daemon import FakeClient, FakeOverlay, FakeWorker

from ciuic.daemon.cut import PREPARE_SECONDS, CutFailed, cut_together, flush_all
from ciuic.daemon.supervisor import RootSupervisor
from ciuic.daemon.worker_process import Worker
from ciuic.fuse_layer.control_frames import USE_OF_HOLD_SECONDS


def test_all_are_held_before_any_is_cut_and_cut_before_any_is_released() -> None:
    """The order that makes one instant of several roots."""
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
    """Whatever fails: no root stays held, and a root that was cut for nothing is told so."""
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
    assert not any(overlay.held for overlay in overlays)


def test_cuts_that_are_too_far_apart_do_not_count() -> None:
    """The first root's hold may have run out before the last root was cut: no instant of both."""
    overlays = [FakeOverlay(name) for name in "ab"]
    parts = [(overlay.name, FakeClient(overlay)) for overlay in overlays]
    seconds = iter([5.0, 5.0 + USE_OF_HOLD_SECONDS + 0.1])
    with pytest.raises(CutFailed, match="longer"):
        cut_together(parts, clock=lambda: next(seconds))
    assert [overlay.pending for overlay in overlays] == [[], []]


def test_no_root_is_held_until_another_has_written_what_changed() -> None:
    """The first worker answers its release only when the second one was released."""
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
    """Of several roots the one whose worker did not answer is named."""
    overlays = [FakeOverlay("/a"), FakeOverlay("/b", fail_on={"cut"})]
    with pytest.raises(CutFailed, match="/b"):
        cut_together([(overlay.name, FakeClient(overlay)) for overlay in overlays])


@pytest.mark.parametrize("failing", [False, True])
def test_writers_are_given_a_moment_beside_the_flush(failing: bool) -> None:
    """Every worker is asked to prepare, on a connection of its own; one that does not answer holds up no snapshot."""
    overlay = FakeOverlay("a", fail_on={"prepare"} if failing else ())
    worker = FakeWorker(overlay, "s")
    flushed: list[str] = []

    async def flush_one(path: str, worker: Worker) -> bool:
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
