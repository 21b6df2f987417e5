"""Host in namespaces of its own: its disk, its processes and its network end with it.

A program of the host is process 1 there. The disk is a tmpfs that is mounted in the host's mount namespace alone; the
network has the loopback device and, on it, one door to one server outside.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from support.live import wait_for

_CLONE_NEWNET = 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_IFREQ = struct.Struct("16sh22x")
_PIECE_BYTES = 1 << 16
_libc = ctypes.CDLL(None, use_errno=True)


class LonelyHost:
    """Host that runs one program, which may start others.

    Args:
        command: Program, which is told the port of the door as its last argument.
        server: Host and port of the only server that the host can reach.
        pace: Called for each piece that the server sends, with its size: waits where the network is to be slow.
    """

    def __init__(
        self,
        command: Sequence[str],
        server: tuple[str, int],
        pace: Callable[[int], object] = lambda _size_bytes: None,
    ) -> None:
        namespaces = ["--mount", "--net", "--pid", "--ipc", "--uts", "--fork", "--kill-child", "--mount-proc"]
        # The shell waits until the door is there, and is replaced by the program, which so is process 1.
        script = 'read -r port; exec "$@" "$port" 2>&1'
        self.process = subprocess.Popen(
            ["unshare", *namespaces, "--", "sh", "-c", script, "sh", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # The program's own messages go where its output goes; unshare complains of being killed.
            stderr=subprocess.DEVNULL,
            text=True,
            # A Ctrl-C is the story's, which ends its hosts.
            start_new_session=True,
        )
        try:
            self._first: int = wait_for("the host's first process", self._child, 30)
            self._door = Door(self._first, server, pace)
        except BaseException:
            self.process.kill()
            raise
        assert self.process.stdin is not None
        self.process.stdin.write(f"{self._door.port}\n")
        self.process.stdin.flush()

    def _child(self) -> int:
        assert self.process.poll() is None
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        # unshare itself until its namespace of processes is another one.
        if children and os.readlink(f"/proc/{children[0]}/ns/net") != os.readlink("/proc/self/ns/net"):
            return int(children[0])
        return 0

    def tell(self, line: str) -> None:
        """Give the program a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def destroy(self) -> None:
        """Kill every process of the host at one moment; its disk, mounts and network are gone on return."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._first, signal.SIGKILL)
            # unshare ends when the kernel has ended the whole namespace of processes.
            self.process.wait(60)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self._door.close()


class Door:
    """Port on a host's loopback device that leads to a server outside, for any number of connections."""

    def __init__(self, first_process: int, server: tuple[str, int], pace: Callable[[int], object]) -> None:
        self._server = server
        self._pace = pace
        self._listener = _listen_in(first_process)
        self.port: int = self._listener.getsockname()[1]
        # Started here, not in the host's network: what a thread connects to is outside.
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                inside, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(inside,), daemon=True).start()

    def _serve(self, inside: socket.socket) -> None:
        with inside, contextlib.suppress(OSError), socket.create_connection(self._server, 30) as outside:
            outside.settimeout(None)
            for one in (inside, outside):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            back = threading.Thread(target=_pump, args=(outside, inside, self._pace), daemon=True)
            back.start()
            _pump(inside, outside, lambda _size_bytes: None)
            back.join()

    def close(self) -> None:
        """Let no caller in any more."""
        # Closing alone would not wake the thread that accepts.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def _pump(source: socket.socket, target: socket.socket, pace: Callable[[int], object]) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(_PIECE_BYTES):
            pace(len(data))
            target.sendall(data)
    # Either end is told that the other one has ended.
    for one in (source, target):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_WR if one is target else socket.SHUT_RD)


def _listen_in(process: int) -> socket.socket:
    """Return a socket that listens on the loopback device of a process's network."""
    made: list[socket.socket] = []
    failures: list[OSError] = []

    def make() -> None:
        try:
            network = os.open(f"/proc/{process}/ns/net", os.O_RDONLY)
            try:
                if _libc.setns(network, _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            finally:
                os.close(network)
            _raise_loopback()
            listener = socket.socket()
            listener.bind(("127.0.0.1", 0))
            listener.listen(64)
            made.append(listener)
        except OSError as error:
            failures.append(error)

    # A thread of its own, which ends: the network is that of a thread, and this one's stays as it is.
    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return made[0]


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        answer = fcntl.ioctl(control, _SIOCGIFFLAGS, _IFREQ.pack(b"lo", 0))
        flags = _IFREQ.unpack(answer)[1]
        fcntl.ioctl(control, _SIOCSIFFLAGS, _IFREQ.pack(b"lo", flags | _IFF_UP))
