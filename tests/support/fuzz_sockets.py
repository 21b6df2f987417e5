"""Garbage for both sockets (HTTP, requests, frames), and the check that both still answer."""

from __future__ import annotations

import random
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

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
