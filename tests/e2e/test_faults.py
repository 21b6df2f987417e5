"""Full, failing and missing disks under a running daemon: the job sees plain files, ciuic recovers.

The slow faults (captures are tried three times) run in random order under ``make torture``.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import fuzz_sockets
from support.faults import FAULTS, Site, open_descriptors

pytestmark = pytest.mark.mount

QUICK = (
    "store_unmounted",
    "store_absent_at_start",
    "root_sectors_break",
    "runtime_directory_full",
    "worker_out_of_descriptors",
)


@pytest.fixture
def site(short_tmp: Path) -> Iterator[Site]:
    with Site(short_tmp, seed=5) as one:
        yield one


def test_faults_one_after_the_other(site: Site) -> None:
    """The job sees plain files through each fault, and an alert states the fault and its start.

    Once the cause is gone the next scheduled snapshot is committed, restores exactly, and the alert ends.
    """
    for fault in QUICK:
        FAULTS[fault](site)
        site.check_recovered()
    assert site.job.operations > 100


def test_garbage_on_the_sockets(site: Site) -> None:
    """Daemon and worker answer after a thousand invalid requests, without leaks or unknown errors."""
    rng = random.Random(8)
    control, (worker,) = site.top / "run/control.sock", (site.top / "run").glob("worker-*.sock")
    daemon_pid, worker_pid = int(site.status()["pid"]), site.worker_pid()
    for number in range(300):
        fuzz_sockets.send(control, fuzz_sockets.http_request(rng))
        fuzz_sockets.send(worker, fuzz_sockets.frame(rng))
        fuzz_sockets.send(worker, fuzz_sockets.frame(rng), descriptors=(0, 1) if number % 10 == 0 else ())
    with site.job.paused():
        assert site.job.differences == []
    assert open_descriptors(daemon_pid) < 100
    assert open_descriptors(worker_pid) < 100
    text = site.live.daemon_log.read_text()
    for sign in ("request_failed", "control_request_failed", "Traceback"):
        assert sign not in text, text[text.index(sign) - 300 :][:3000]
    site.check_recovered()
    assert (int(site.status()["pid"]), site.worker_pid()) == (daemon_pid, worker_pid)
    assert {path.name: os.stat(path).st_mode & 0o777 for path in (control, worker)} == {
        control.name: 0o600,
        worker.name: 0o600,
    }
