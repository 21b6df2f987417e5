"""Captures beside a user of the disk that always waits, with a wait figure that the test writes."""

from __future__ import annotations

import json
import os
import signal
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.live import Live
from support.until import until

from ciuic.protocol.control import ControlClient
from ciuic.system.privileges import Capability, permitted

pytestmark = pytest.mark.mount

_SECONDS = 90
_FILES, _FILE_BYTES = 16, 1 << 20
_SLOW = 'min_share = "0.01%"\nfinish_within = "7d"'
"""Settings under which a tenth of a second of work takes a quarter of an hour."""


@contextmanager
def waiting(run_dir: Path) -> Iterator[None]:
    """Publish another worker's wait figure, which grows as fast as time passes."""
    end, began = threading.Event(), time.monotonic()

    def publish() -> None:
        with open(run_dir / "worker-test.sock.waits", "wb", buffering=0) as file:
            while not end.wait(0.002):
                os.pwrite(file.fileno(), struct.pack("<Q", int((time.monotonic() - began) * 1e6)), 0)

    (run_dir / "worker-test.sock.waits").write_bytes(bytes(8))
    thread = threading.Thread(target=publish)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
        (run_dir / "worker-test.sock.waits").unlink()


def captures_of(live: Live) -> list[dict[str, Any]]:
    """Return the captures on their way."""
    with ControlClient(live.top / "run" / "control.sock") as control:
        return [
            {
                "id": one.id,
                "share": one.progress.share if one.progress and one.progress.files_done else 1.0,
                "left": one.seconds_left,
            }
            for one in control.status().captures
        ]


def capture_pid(live: Live) -> int:
    """Return the pid of the running capture, as the daemon's journal names it."""
    pending = json.loads((live.top / "run" / "pending.json").read_text())
    return next(int(one["capture_pid"]) for one in pending if one["capture_pid"])


@pytest.fixture
def slowed(tmp_path: Path) -> Iterator[Live]:
    """Provide a daemon whose scheduled capture is slowed down almost to nothing."""
    root = tmp_path / "root"
    root.mkdir()
    tables = f'\n[[root]]\npath = "{root}"\n'
    with Live(tmp_path, interval="2s", more_config=tables) as live:
        live.config.write_text(live.config.read_text().replace('min_share = "100%"', _SLOW))
        live.start(root)
        live.snapshot()
        with waiting(tmp_path / "run"):
            for number in range(_FILES):
                (root / str(number)).write_bytes(os.urandom(_FILE_BYTES))
            until("a slow capture", lambda: any(one["share"] < 0.01 for one in captures_of(live)), _SECONDS)
            yield live


def test_a_configuration_read_again_reaches_the_capture_that_runs(slowed: Live) -> None:
    """A configuration reread on SIGHUP speeds up the running capture, which commits at once."""
    (waits, *_) = captures_of(slowed)
    assert waits["left"] is None or waits["left"] > 60
    slowed.config.write_text(slowed.config.read_text().replace(_SLOW, 'min_share = "100%"'))
    assert slowed.daemon is not None
    slowed.daemon.send_signal(signal.SIGHUP)
    until("the commit", lambda: waits["id"] in {one.id for one in slowed.list()}, _SECONDS)


def test_a_requested_snapshot_hurries_the_running_one(slowed: Live) -> None:
    """A requested snapshot hurries the slow one before it; forty at once get few snapshots and no refusal."""
    (waits, *_) = captures_of(slowed)
    pid = capture_pid(slowed)
    if Capability.SYS_NICE in permitted():
        assert os.getpriority(os.PRIO_PROCESS, pid) == 19

    def ask(number: int) -> str:
        with ControlClient(slowed.top / "run" / "control.sock") as control:
            return control.take_snapshot(message=f"m{number}", wait=True).id

    with ThreadPoolExecutor(40) as pool:
        ids = set(pool.map(ask, range(40)))
    committed = {one.id for one in slowed.list()}
    assert ids | {waits["id"]} <= committed
    assert len(ids) < 20
