"""Signals to a command and to one below it: each is taken once, whoever was sent it, and the end is told as a shell tells it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.site import CHECKOUT
from support.until import until

from ciuic.cli.commands.slurm import RelayedCommand

_RELAY = """
import os, signal, sys
# Ignored where the tests run in the background of a shell, and the relay would leave it so.
signal.signal(signal.SIGINT, signal.SIG_DFL)
from ciuic.cli.commands.slurm import RelayedCommand
with RelayedCommand(sys.argv[1:], os.environ) as running:
    code = running.wait(lambda: None)
    print("told", running.told and running.told.name, flush=True)
sys.exit(code)
"""
_COMMAND = """
import signal, sys, time
got = []
for name in sys.argv[1].split(","):
    signal.signal(getattr(signal, name), lambda number, _: got.append(signal.Signals(number).name))
print("ready", flush=True)
while "SIGINT" not in got:
    time.sleep(0.01)
print(",".join(got), flush=True)
sys.exit(7)
"""


def _relayed(catches: str, tell: Callable[[subprocess.Popen[str]], None]) -> tuple[int, list[str]]:
    """Run a command that catches signals until SIGINT; return exit code and lines."""
    with subprocess.Popen(
        [sys.executable, "-c", _RELAY, sys.executable, "-c", _COMMAND, catches],
        stdout=subprocess.PIPE, text=True, start_new_session=True, cwd=CHECKOUT,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        tell(process)
        lines = process.stdout.read().split()
        return process.wait(30), lines


def _caught_by(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """Return when the relay has read a signal, so that the next one does not belong to it."""

    def is_taken() -> bool:
        status = Path(f"/proc/{process.pid}/status").read_text()
        return all(
            not int(line.split()[1], 16) & 1 << (number - 1)
            for line in status.splitlines()
            if line.startswith(("SigPnd", "ShdPnd"))
        )

    until("the signal", is_taken)


def test_a_signal_to_the_relay_alone_is_passed_on() -> None:
    """A signal that the relay alone got reaches the command; one that would only kill it becomes SIGTERM."""

    def tell(process: subprocess.Popen[str]) -> None:
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
            process.send_signal(number)
            _caught_by(process, number)

    code, lines = _relayed("SIGTERM,SIGUSR2,SIGINT", tell)
    assert code == 7
    assert sorted(lines[0].split(",")) == ["SIGINT", "SIGTERM", "SIGUSR2"]
    assert lines[1:] == ["told", "SIGUSR1"]


class _Interrupted(list[int]):
    """Signals that have arrived, with one more that arrives when they have just been read."""

    def __init__(self, running: RelayedCommand, number: int) -> None:
        super().__init__([signal.SIGCONT])
        self._running, self._number = running, number

    def __iter__(self) -> Iterator[int]:
        yield from super().__iter__()
        self._running._on_signal(self._number, None)


def test_a_signal_that_comes_while_others_are_read_is_passed_on() -> None:
    """A handler runs between any two instructions, and what it notes is not dropped with what was read."""
    with RelayedCommand(["sleep", "60"], os.environ) as running:
        running._arrived = _Interrupted(running, signal.SIGTERM)
        running._relay()
        running._relay()
        end = time.monotonic() + 20
        code = running.wait(lambda: end)
        if code is None:
            running._process.kill()
            running._process.wait()
    assert code == 128 + signal.SIGTERM


def test_a_signal_to_all_processes_of_a_job_reaches_the_command_once() -> None:
    """A signal that Slurm sends to all processes of a job is not sent to the command again."""

    def tell(process: subprocess.Popen[str]) -> None:
        # All of the session, as a container of processes is signalled; the next one to the relay alone, at once.
        os.killpg(process.pid, signal.SIGTERM)
        process.send_signal(signal.SIGINT)

    code, lines = _relayed("SIGTERM,SIGINT", tell)
    assert (code, lines[:2]) == (7, ["SIGTERM,SIGINT", "told"])


@pytest.mark.parametrize(("words", "code"), [(["true"], 0), (["sh", "-c", "kill -9 $$"], 137)])
def test_the_exit_code_is_that_of_a_shell(words: list[str], code: int) -> None:
    """The command's exit code is returned, 128 and the signal for one that was killed."""
    done = subprocess.run(
        [sys.executable, "-c", _RELAY, *words], cwd=CHECKOUT, check=False, timeout=60, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (code, "told None\n")


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
