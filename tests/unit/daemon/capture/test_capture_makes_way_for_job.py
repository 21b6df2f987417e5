"""A real capture beside a job that waits; the test writes the figure that a worker would publish."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ciuic.daemon.capture.job import (
    CaptureJob,
    CaptureProgress,
    Done,
    Message,
    RootJob,
    decode_message,
    encode_job,
)
from ciuic.repository import Repository
from ciuic.system.urgency import Urgency

_PATIENCE_SECONDS = 120
_FILES, _FILE_BYTES = 32, 4 << 20


@contextmanager
def waiting_job(runtime_dir: Path) -> Iterator[threading.Event]:
    """Grow a worker's figure as fast as time passes, until the event is set."""
    end = threading.Event()
    began = time.monotonic()

    def publish() -> None:
        with open(runtime_dir / "worker-1.sock.waits", "wb", buffering=0) as file:
            while not end.wait(0.002):
                os.pwrite(file.fileno(), struct.pack("<Q", int((time.monotonic() - began) * 1e6)), 0)

    thread = threading.Thread(target=publish)
    (runtime_dir / "worker-1.sock.waits").write_bytes(bytes(8))
    thread.start()
    try:
        yield end
    finally:
        end.set()
        thread.join()


def test_a_capture_makes_way_while_the_job_waits_and_ends_soon_after(tmp_path: Path) -> None:
    """A capture slows down while the job waits, reports how much and why, and then completes."""
    root, repository, runtime = tmp_path / "root", tmp_path / "repository", tmp_path / "run"
    root.mkdir()
    runtime.mkdir()
    for number in range(_FILES):
        (root / str(number)).write_bytes(os.urandom(_FILE_BYTES))
    Repository.create(repository).close()
    job = CaptureJob(
        repository=str(repository),
        id="cs-abcdef",
        time_ns=time.time_ns(),
        host="here",
        roots=(RootJob(path=os.fsencode(root)),),
        urgency=Urgency(min_share=0.01),
        runtime_dir=str(runtime),
    )
    heard: list[Message] = []
    with waiting_job(runtime) as end:
        process = subprocess.Popen(
            [sys.executable, "-m", "ciuic.daemon.capture.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        watchdog = threading.Timer(_PATIENCE_SECONDS, process.kill)
        watchdog.start()
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(encode_job(job))
            process.stdin.close()
            for line in process.stdout:
                heard.append(decode_message(line))
                if isinstance(heard[-1], CaptureProgress) and heard[-1].pace.share < 0.1:
                    end.set()
            assert process.wait() == 0
        finally:
            watchdog.cancel()
            process.kill()
            process.wait()
            process.stdout.close()
    slowed = [one.pace for one in heard if isinstance(one, CaptureProgress) and one.pace.share < 0.1]
    assert slowed
    assert max(pace.waiting for pace in slowed) > 0.05
    assert slowed[-1].paused_seconds > 0
    assert isinstance(heard[-1], Done)
    with Repository.open(repository) as opened:
        assert [str(id_) for id_ in opened.snapshots.ids()] == ["cs-abcdef"]
