"""Attacker: a host whose key starts ``ciuic remote serve`` on another machine.

The memory of that machine stays its own.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from ciuic.errors import Damaged
from ciuic.remote.objects.pipe_protocol import (
    BODY,
    HEAD,
    MAGIC,
    MESSAGE,
    PAGE,
    VERSION,
    Request,
    decode_request,
)

_LIMIT_BYTES = 64 << 20
_OBJECT_BYTES = 16 << 20
"""Size of the largest packs."""
_SENT_BYTES = {"crumbs": 4 << 20}
_PAYLOADS = {
    "names": msgspec.msgpack.encode(Request("delete", names=["n" * 1000] * PAGE)),
    "reads": msgspec.msgpack.encode(Request("get", "object")),
    "ends": msgspec.msgpack.encode(Request("tail", "object", length=_OBJECT_BYTES)),
    "ranges": msgspec.msgpack.encode(Request("ranges", "object", ranges=[(0, 16 << 10)] * PAGE)),
    "lists": msgspec.msgpack.encode(Request("list", "")),
}


def _frames(kind: str) -> Iterator[bytes]:
    """Yield what this client sends, without end."""
    number = 1
    while True:
        number += 1
        if kind in _PAYLOADS:
            yield HEAD.pack(number, MESSAGE, len(_PAYLOADS[kind])) + _PAYLOADS[kind]
            continue
        request = msgspec.msgpack.encode(Request("put", f"new/{number}", body_bytes=_OBJECT_BYTES))
        yield HEAD.pack(number, MESSAGE, len(request)) + request
        size, several = (2, 4096) if kind == "crumbs" else (1 << 20, 1)
        for _ in range(0, _OBJECT_BYTES, size * several):
            yield (HEAD.pack(number, BODY, size) + bytes(size)) * several


def _peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


@pytest.mark.parametrize("kind", [*_PAYLOADS, "bodies", "crumbs"])
def test_a_client_that_reads_no_reply_takes_no_memory(tmp_path: Path, kind: str) -> None:
    """Whatever a client sends without reading replies, the server takes at most 64 MiB for it.

    Of a body in frames of two bytes, it takes little more than the bytes.
    """
    (tmp_path / "object").write_bytes(bytes(_OBJECT_BYTES))
    command = [sys.executable, "-m", "ciuic", "remote", "serve", "--stdio", "--append-only", str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        fd = server.stdin.fileno()
        assert server.stdout.read(len(MAGIC)) == MAGIC
        opening = msgspec.msgpack.encode(Request("open", length=VERSION))
        os.write(fd, HEAD.pack(1, MESSAGE, len(opening)) + opening)
        server.stdout.read(1)
        before = _peak_bytes(server.pid)
        moved = threading.Event()

        def send() -> None:
            sent = 0
            with contextlib.suppress(BrokenPipeError):
                for frames in _frames(kind):
                    if sent > _SENT_BYTES.get(kind, 256 << 20):
                        return
                    sent += os.write(fd, frames)
                    moved.set()

        sender = threading.Thread(target=send)
        sender.start()
        peak = before
        # Until it is done, or blocked because the server reads no more.
        while sender.is_alive() and moved.wait(2.0):
            moved.clear()
            peak = max(peak, _peak_bytes(server.pid))
        assert server.poll() is None
        server.kill()
        sender.join()
    assert peak - before < _SENT_BYTES.get(kind, _LIMIT_BYTES)


@pytest.mark.parametrize("endless", [{"names": ["ab"] * 340_000}, {"ranges": [(0, 1)] * 340_000}])
def test_a_request_has_no_more_entries_than_a_page(endless: dict[str, object]) -> None:
    """A frame full of entries, each of which would cost twenty times its bytes, is refused before they are made."""
    payload = msgspec.msgpack.encode({"operation": "delete", **endless})
    tracemalloc.start()
    try:
        with pytest.raises(Damaged):
            decode_request(payload)
        assert tracemalloc.get_traced_memory()[1] < len(payload)
    finally:
        tracemalloc.stop()
