"""A worker that leaves its session to a successor, and a restore that has extents shared meanwhile."""

from __future__ import annotations

import errno
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from ciuic.fuse_layer import kernel_worker
from ciuic.fuse_layer.control_frames import Share
from ciuic.fuse_layer.kernel_worker import KernelWorker
from ciuic.fuse_layer.worker_parts import Place


def test_nothing_is_shared_once_the_tracking_is_being_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in work is waited for and is in what the successor gets; what comes later is refused, and then written."""
    happened: list[str] = []
    begun, may_end = threading.Event(), threading.Event()

    def share(*_: int) -> None:
        begun.set()
        assert may_end.wait(30)
        happened.append("shared and marked")

    session = SimpleNamespace(park=lambda seconds: happened.append("parked") or True, end=lambda: None)
    monkeypatch.setattr(kernel_worker, "_LAST_ANSWER_SECONDS", 0)
    worker: Any = KernelWorker(Place("/root", -1, "/nowhere", None), lambda **_: None)  # type: ignore[arg-type, return-value]
    worker._device = "0:77"
    worker._driver = SimpleNamespace(share=share, session=session)
    worker._core = SimpleNamespace(save_for_successor=lambda: happened.append("tracking saved"))
    worker._ledger = SimpleNamespace(kept=True)
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
