"""Attacker programs of other users against the sockets that every user may connect to.

Each is run by `second_user.run_as`, or kept running.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from support.second_user import _BECOME, User

IMPORTS = """
import array, encodings.idna, os, socket, struct, sys, threading, time
from pathlib import Path
from ciuic.protocol import pairing
from ciuic.errors import CiuicError
from ciuic.system.poll import receive_queued
from ciuic.protocol.watch_client import Hello, introduce
sys.path.insert(0, sys.argv.pop())
from support.socket_callers import connected, send_descriptors
def hello(name="stranger"):
    return Hello(name=name, where="/", kind="pid", pid=os.getpid(), start_ticks=0)
def packed(name="stranger"):
    import msgspec
    return msgspec.msgpack.encode(hello(name))
"""

SEND_A_FILE = """
# A descriptor that does not close, in the place of the page; then the answer, if one comes.
fd = os.open(sys.argv[2], os.O_RDONLY)
with connected(sys.argv[1]) as caller:
    sent = send_descriptors(caller, packed(), [os.pidfd_open(os.getpid()), fd])
    caller.settimeout(60)
    print("sent" if sent else "not sent", receive_queued(lambda: caller.recv(1 << 16)))
"""

SEND_A_LINGERING_SOCKET = """
# The last close of this waits until its data has been sent, or ten minutes.
listener = socket.create_server(("127.0.0.1", 0))
sender = socket.create_connection(listener.getsockname())
peer, _ = listener.accept()
sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 600))
sender.setblocking(False)
try:
    while True:
        sender.send(b"x" * 65536)
except BlockingIOError:
    pass
callers = [connected(path) for path in sys.argv[1:]]
sent = [send_descriptors(caller, b"x", [sender.fileno()], 2) for caller in callers]
if any(sent):
    # Theirs is the last one now, unless they have closed it already: then this close is what lingers.
    threading.Thread(target=os.close, args=(sender.detach(),), daemon=True).start()
print("ready", flush=True)
sys.stdin.read()
"""

FLOOD = """
# Connections that say nothing, again and again as they are hung up on.
import select
path, count = sys.argv[1], int(sys.argv[2])
kind = getattr(socket, (sys.argv + ["SOCK_SEQPACKET"])[3])
callers = {}
poll = select.poll()
def one_more():
    caller = socket.socket(socket.AF_UNIX, kind)
    try:
        caller.connect(path)
    except OSError:
        caller.close()
        return
    callers[caller.fileno()] = caller
    poll.register(caller, select.POLLIN)
for _ in range(count):
    one_more()
print("ready", flush=True)
poll.register(0, select.POLLIN)
while True:
    for fd, _ in poll.poll():
        if fd == 0:
            sys.exit()
        poll.unregister(fd)
        callers.pop(fd).close()
        one_more()
    time.sleep(0.01)
"""

INTRODUCE = """
try:
    introduce(sys.argv[1], hello(sys.argv[2]), [os.pidfd_open(os.getpid())], seconds=60)
    print("welcome", flush=True)
except CiuicError as error:
    print(type(error).__name__, error.message, flush=True)
"""

CUT = """
question = pairing.Cut(training="cs-aaaaaaaa", repository="/home/x/snapshots", time_ns=1, hold_reason=sys.argv[2])
try:
    with pairing.ask(sys.argv[1], question) as connection:
        found = pairing.answer(connection, 60)
    print(found.id, found.note)
except CiuicError as error:
    print(type(error).__name__, error.message)
"""

CUTS = """
# As fast as they are committed, which is how a job that snapshots in a loop asks.
from ciuic.errors import Busy
for number in range(100):
    try:
        with pairing.ask(sys.argv[1], pairing.Cut(training="cs-aaaaaaaa", repository="/x", time_ns=1)) as connection:
            id_ = pairing.answer(connection, 60).id
    except Busy as error:
        print(error.message)
        if "within" in error.message and "asked for" in error.message:
            break
        time.sleep(0.1)
        continue
    print(id_)
    while pairing.states_of(sys.argv[1], (id_,), 30).states != {id_: "committed"}:
        time.sleep(0.05)
"""

KNOWN = """
print(sorted(pairing.states_of(sys.argv[1], tuple(sys.argv[2:]), 60).states.items()))
"""


def _command(user: User, script: str, *arguments: str) -> list[str]:
    from pathlib import Path

    tests = str(Path(__file__).parents[1])
    become = f"become({user.uid}, {user.gid}, {list(user.groups)})\n"
    return [sys.executable, "-c", _BECOME + IMPORTS + become + script, *arguments, tests]


def attack(user: User, script: str, *arguments: str) -> str:
    """Run the program to its end; return its output."""
    done = subprocess.run(
        _command(user, script, *arguments), capture_output=True, text=True, check=False, timeout=120, cwd="/"
    )
    return done.stdout.strip() + done.stderr.strip().rpartition("\n")[2]


@contextmanager
def attacking(user: User, script: str, *arguments: str) -> Iterator[None]:
    """Run the program for the block; it prints `ready`, and ends when its standard input does."""
    process = subprocess.Popen(
        _command(user, script, *arguments), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/"
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield
    finally:
        process.communicate(timeout=60)
