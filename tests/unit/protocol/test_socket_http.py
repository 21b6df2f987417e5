"""Tests of the client of Unix sockets that speak HTTP."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ciuic.protocol.socket_http import Connection


def test_a_full_queue_is_waited_for(short_tmp: Path) -> None:
    """A caller waits where others have filled the queue of the listener, and takes nobody for absent."""
    path = os.fspath(short_tmp / "socket")
    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as pool:
        listener.bind(path)
        listener.listen(0)
        with socket.socket(socket.AF_UNIX) as first:
            first.connect(path)
            later = pool.submit(Connection, path, connect_seconds=60)
            with pytest.raises(TimeoutError):
                later.result(0.3)
            listener.accept()[0].close()
            with later.result():
                listener.accept()[0].close()
