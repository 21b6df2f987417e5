"""Full, failing and missing disks under a running daemon: the job sees plain files, ciuic recovers.

The slow faults (captures are tried three times) run in random order under ``make torture``.

Both sockets get garbage (HTTP, requests, frames) and still answer.
"""

from __future__ import annotations

import os
import random
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.faults import FAULTS, Site, open_descriptors

_PATIENCE_SECONDS = 0.05
_PATHS = (
    "/v1/status",
    "/v1/snapshots",
    "/v1/snapshots/cs-123456",
    "/v1/roots",
    "/v1/prune",
    "/v1/nothing",
    "/metrics",
    "/",
    "*",
    "//",
)
_VALUES: tuple[Any, ...] = (
    None,
    -1,
    2**70,
    1e308,
    "",
    "\x00",
    "/etc\x00",
    "a" * 5000,
    [],
    {},
    [[]],
    True,
    "../../etc",
    "cs-000000",
)
_NAMES = ("path", "roots", "message", "tags", "hold", "wait", "dry_run", "", "__class__", "p\x00")


def http_request(rng: random.Random) -> bytes:
    """Return a request that is never carried out: not stop nor reload, and no snapshot of a real root."""
    kind = rng.randrange(5)
    if kind == 0:
        return rng.randbytes(rng.randrange(1, 400))
    if kind == 1:
        return b"GET /" + b"a" * rng.choice((10, 5000, 70_000)) + b" HTTP/1.1\r\nHost: x\r\n\r\n"
    if kind == 2:
        return b"POST /v1/roots HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n{" % rng.choice(
            (1, 5, 10**15)
        )
    method = rng.choice((b"GET", b"POST", b"DELETE", b"PUT", b"BREW"))
    path = rng.choice(_PATHS).encode()
    body: dict[str, object] = {rng.choice(_NAMES): rng.choice(_VALUES) for _ in range(rng.randrange(3))}
    if path == b"/v1/snapshots":
        body["roots"] = rng.choice(("/", ["/no/such/root"], [3], {}))
    if path == b"/v1/prune":
        body["dry_run"] = rng.choice((True, 7, "x"))
    data = bytearray(msgspec.json.encode(body))
    if kind == 4 and path not in (b"/v1/snapshots", b"/v1/prune"):
        for _ in range(rng.randrange(4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
    return b"%s %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (
        method,
        path,
        len(data),
        data,
    )


def frame(rng: random.Random) -> bytes:
    """Return a frame for a worker's control socket that never holds, cuts or stops."""
    kind = rng.randrange(4)
    if kind == 0:
        return rng.randbytes(rng.randrange(1, 100))
    if kind == 1:
        return struct.pack("<I", rng.choice((0, 1, 2**16 + 1, 2**32 - 1))) + rng.randbytes(20)
    body = msgspec.msgpack.encode({
        "do": rng.choice(("status", "committed", "abort", "release", "dance", "", None, 3, ["stop"], {"hold": 1}, b"cut")),
        rng.choice(("epoch", "timeout_ms", "grace_s")): rng.choice((None, -1, 2**63, 1e300, "x", True, [], 10**9)),
    })  # fmt: skip
    if kind == 2:
        body = body[: rng.randrange(len(body) + 1)] + rng.randbytes(3)
    return struct.pack("<I", len(body)) + body


def send(path: Path, data: bytes, *, descriptors: tuple[int, ...] = ()) -> None:
    """Send it, read a little of the answer if there is one, and close the connection."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(_PATIENCE_SECONDS)
        sock.connect(str(path))
        # Refused before all was sent; or not answered as an incomplete request, and closed by this side.
        with suppress(BrokenPipeError, ConnectionResetError, TimeoutError):
            if descriptors:
                socket.send_fds(sock, [data[:1]], list(descriptors))
                data = data[1:]
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            sock.recv(65536)


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
        send(control, http_request(rng))
        send(worker, frame(rng))
        send(worker, frame(rng), descriptors=(0, 1) if number % 10 == 0 else ())
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
