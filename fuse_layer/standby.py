"""A process that has imported everything that a worker needs, and waits to become one.

When a worker dies the job waits for its successor, and most of that wait would be the start of an interpreter (0.2 s of
processor time, more on a busy host). So one process is kept ready for whichever root needs it first, and the next one is
started when it is used.

    python -m ciuic.fuse_layer.standby        (standard input: a socket on which the arguments and descriptors come)

Guarantees: it ends when whoever started it goes away without using it.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import structlog

FIRST_PASSED_FD: Final = 100
"""The descriptors that come get the numbers from here on."""
_MESSAGE_BYTES: Final = 65536
_MAX_FDS: Final = 8
log = structlog.get_logger(__name__)


class SpareProcess:
    """The starting side: one spare at a time. Not thread-safe."""

    def __init__(self, cwd: Path, environment: Mapping[str, str]) -> None:
        self._cwd = cwd
        self._environment = dict(environment)
        self._child: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def prepare(self) -> None:
        """Start the spare, unless there is one. Without memory or processes to spare there is none: no error."""
        if self._child is not None and self._child.poll() is None:
            return
        self._let_go()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "ciuic.fuse_layer.standby"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                cwd=self._cwd,
                env=self._environment,
            )
            self._socket = ours
        except OSError as error:
            ours.close()
            log.warning("no_spare_worker", error=str(error))
        finally:
            theirs.close()

    def become(self, arguments: Sequence[str], fds: Sequence[int]) -> subprocess.Popen[bytes] | None:
        """The spare becomes a worker with these arguments, in which descriptor number ``fds[i]`` is FIRST_PASSED_FD + i.
        None when there is no spare that listens."""
        child, to = self._child, self._socket
        if child is None or to is None or child.poll() is not None:
            return None
        try:
            socket.send_fds(to, [json.dumps(list(arguments)).encode()], list(fds))
        except OSError:
            return None
        to.close()
        self._child = self._socket = None
        return child

    def close(self) -> None:
        """The spare ends."""
        self._let_go()

    def _let_go(self) -> None:
        child, self._child = self._child, None
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if child is not None:
            child.wait()


def main() -> int:
    """Wait for a root to serve, then serve it."""
    # Imported here, so that whoever only starts spares does not import a worker.
    from ciuic.fuse_layer import worker

    with socket.socket(fileno=os.dup(0)) as come:
        message, fds, _, _ = socket.recv_fds(come, _MESSAGE_BYTES, _MAX_FDS)
    if not message:
        return 0
    for index, fd in enumerate(fds):
        os.dup2(fd, FIRST_PASSED_FD + index, inheritable=False)
        os.close(fd)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return worker.main(json.loads(message))


if __name__ == "__main__":
    sys.exit(main())
