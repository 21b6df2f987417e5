"""Garbage for both sockets: HTTP that is none, requests that cannot be meant, frames that are not; and who still answers."""

from __future__ import annotations

import random
import socket
import struct
from contextlib import suppress
from pathlib import Path

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
_VALUES = (
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
    """Never one that would be carried out: stop and reload are left out, and a snapshot names a root that is none."""
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
    """For a worker's control socket; never one that would hold, cut or stop."""
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
        body = bytearray(body[: rng.randrange(len(body) + 1)]) + rng.randbytes(3)
    return struct.pack("<I", len(body)) + bytes(body)


def send(path: Path, data: bytes, *, descriptors: tuple[int, ...] = ()) -> None:
    """Sends it, reads a little of the answer if there is one, hangs up."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(_PATIENCE_SECONDS)
        sock.connect(str(path))
        # Refused before it was all sent; or not answered, because it is no whole request: then it is we who hang up.
        with suppress(BrokenPipeError, ConnectionResetError, TimeoutError):
            if descriptors:
                socket.send_fds(sock, [data[:1]], list(descriptors))
                data = data[1:]
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            sock.recv(65536)
