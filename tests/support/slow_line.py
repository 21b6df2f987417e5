"""A line of a given rate and delay, as the ProxyCommand of ssh: ``slow_line.py HOST PORT BYTES_A_SECOND DELAY_SECONDS``.

Each direction is a line of its own: bytes are sent one after the other at the rate, and arrive after the delay.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import time

_PIECE_BYTES = 4096
# What is under way on the line; more is not taken from the sender, as a real one's buffers are limited.
_MAX_PIECES = 64


def carry(read_fd: int, write_fd: int, rate: float, delay: float, end: socket.socket | None) -> None:
    """Carry bytes until the sender ends."""
    under_way: queue.Queue[tuple[float, bytes]] = queue.Queue(_MAX_PIECES)

    def deliver() -> None:
        while True:
            at, data = under_way.get()
            time.sleep(max(0.0, at - time.monotonic()))
            if not data:
                break
            view = memoryview(data)
            try:
                while view:
                    view = view[os.write(write_fd, view) :]
            except OSError:
                os._exit(0)
        if end is not None:
            end.shutdown(socket.SHUT_WR)

    receiver = threading.Thread(target=deliver)
    receiver.start()
    free_at = time.monotonic()
    while data := os.read(read_fd, _PIECE_BYTES):
        free_at = max(free_at, time.monotonic()) + len(data) / rate
        time.sleep(max(0.0, free_at - time.monotonic()))
        under_way.put((free_at + delay, data))
    under_way.put((free_at + delay, b""))
    receiver.join()


def main() -> None:
    host, port, rate, delay = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
    with socket.create_connection((host, port)) as line:
        there = threading.Thread(target=carry, args=(0, line.fileno(), rate, delay, line), daemon=True)
        there.start()
        carry(line.fileno(), 1, rate, delay, None)


if __name__ == "__main__":
    main()
