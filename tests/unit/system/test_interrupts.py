"""Tests of signals that end a command."""

from __future__ import annotations

import subprocess
import sys

# One import's lock after the other is made and removed by the callback of its weak reference; likewise objects with a finalizer.
_PROGRAM = """
import signal, sys, threading
from importlib._bootstrap import _get_module_lock
# A shell that starts the tests in the background has it ignored, which commands respect.
signal.signal(signal.SIGINT, signal.default_int_handler)
{install}

class Finalized:
    def __del__(self):
        for _ in range(20):
            pass

def work():
    while True:
        _get_module_lock("some.module")
        Finalized()
        sum(range(200))

def send():
    for _ in range(200):
        ready.wait()
        ready.clear()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

ready = threading.Event()
threading.Thread(target=send, daemon=True).start()
for number in range(200):
    try:
        ready.set()
        work()
    except KeyboardInterrupt:
        pass
print("raised")
"""


def test_no_interrupt_is_lost_in_imports_and_finalizers() -> None:
    """Each of 200 signals raises KeyboardInterrupt once, wherever between imports and finalizers it comes."""
    program = _PROGRAM.format(
        install="from ciuic.system.interrupts import raise_interrupts; raise_interrupts()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr, done.returncode) == ("raised\n", "", 0)
