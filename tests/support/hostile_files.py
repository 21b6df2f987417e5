"""FUSE file system of a hostile owner, where a close never returns. `python -m support.hostile_files DIR`

One file, `f`, served over /dev/fuse by hand. FLUSH, which close(2) waits for, is answered only to the process
that opened the file. The server's end frees all that wait: the kernel aborts the connection with its last
descriptor.
"""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_HEADER = struct.Struct("<IIQQIIII")
_ATTRIBUTES = struct.Struct("<QQQQQQIIIIIIIIII")
_LOOKUP, _GETATTR, _OPEN, _RELEASE, _FLUSH, _INIT = 1, 3, 14, 18, 25, 26
_NO_ANSWER = (2, 42)
"""Opcodes FORGET and BATCH_FORGET."""
_ENOSYS = 38
_LONG_SECONDS = 3600


def _attributes(ino: int) -> bytes:
    mode = 0o40755 if ino == 1 else 0o100666
    return _ATTRIBUTES.pack(ino, 0, 0, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


class _Server:
    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._openers: set[int] = set()

    def serve(self) -> None:
        while True:
            try:
                request = os.read(self._fd, 1 << 20)
            except OSError:
                return
            _, operation, unique, ino, _, _, pid, _ = _HEADER.unpack_from(request)
            answer = self._answer(operation, ino, pid)
            if answer is not None:
                error, body = answer
                os.write(self._fd, struct.pack("<IiQ", 16 + len(body), -error, unique) + body)

    def _answer(self, operation: int, ino: int, pid: int) -> tuple[int, bytes] | None:
        if operation == _INIT:
            return 0, struct.pack("<IIII", 7, 31, 65536, 0) + struct.pack(
                "<HHIIHH", 12, 9, 1 << 17, 1, 32, 0
            ).ljust(48, b"\0")
        if operation == _LOOKUP:
            return 0, struct.pack("<QQQQII", 2, 0, _LONG_SECONDS, _LONG_SECONDS, 0, 0) + _attributes(2)
        if operation == _GETATTR:
            return 0, struct.pack("<QII", _LONG_SECONDS, 0, 0) + _attributes(ino)
        if operation == _OPEN:
            self._openers.add(pid)
            return 0, struct.pack("<QII", 1, 0, 0)
        if operation == _FLUSH:
            return (0, b"") if pid in self._openers else None
        if operation == _RELEASE:
            return 0, b""
        return None if operation in _NO_ANSWER else (_ENOSYS, b"")


@contextmanager
def hostile_files(directory: Path) -> Iterator[Path]:
    """Mount it there for the block, for every user; yield the path of the file.

    At the end every waiting call returns.
    """
    directory.mkdir()
    server = subprocess.Popen(
        [sys.executable, "-m", "support.hostile_files", str(directory)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        cwd="/",
    )
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == b"mounted\n"
        yield directory / "f"
    finally:
        server.kill()
        server.communicate(timeout=30)
        subprocess.run(["umount", "-l", directory], check=False, timeout=30)


def main() -> None:
    fd = os.open("/dev/fuse", os.O_RDWR)
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    if libc.mount(b"hostile", os.fsencode(sys.argv[1]), b"fuse.hostile", 0, options) != 0:
        raise OSError(ctypes.get_errno(), "mount")
    sys.stdout.write("mounted\n")
    sys.stdout.flush()
    _Server(fd).serve()


if __name__ == "__main__":
    main()
