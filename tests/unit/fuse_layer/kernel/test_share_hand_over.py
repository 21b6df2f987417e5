"""Tests of a hand-over of a session while a restore has extents shared."""

from __future__ import annotations

import errno
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from ciuic.fuse_layer.kernel import worker as kernel_worker
from ciuic.fuse_layer.kernel.worker import KernelWorker
from ciuic.fuse_layer.worker_lifecycle import WorkerContext
from ciuic.protocol.worker_frames import Share


def test_nothing_is_shared_once_the_tracking_is_being_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A share that has begun is in what the successor gets; a later one is refused, and written instead."""
    happened: list[str] = []
    begun, may_end = threading.Event(), threading.Event()

    def share(*_: int) -> None:
        begun.set()
        assert may_end.wait(30)
        happened.append("shared and marked")

    session = SimpleNamespace(park=lambda seconds: happened.append("parked") or True, end=lambda: None)
    monkeypatch.setattr(kernel_worker, "_LAST_ANSWER_SECONDS", 0)
    worker: Any = KernelWorker(WorkerContext("/root", -1, "/nowhere", None), lambda **_: None)  # type: ignore[arg-type, return-value]
    worker._device = "0:77"
    worker._driver = SimpleNamespace(share=share, session=session)
    worker._core = SimpleNamespace(save_for_successor=lambda: happened.append("tracking saved"))
    worker._journal = SimpleNamespace(kept=True)
    wanted = Share(device="0:77", node=5, source_offset=0, offset=0, length=4096)
    sharing = threading.Thread(target=worker.share, args=(wanted, 0))
    sharing.start()
    assert begun.wait(30)
    leaving = threading.Thread(target=worker.hand_over)
    leaving.start()
    may_end.set()
    sharing.join(30)
    leaving.join(30)
    assert happened == ["shared and marked", "parked", "tracking saved"]
    with pytest.raises(OSError, match="handed over") as refused:
        worker.share(wanted, 0)
    assert refused.value.errno == errno.EOPNOTSUPP
