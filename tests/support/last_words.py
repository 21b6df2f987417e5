"""What the processes of a parallel run were doing when they died, for the end of the run's report.

pytest-xdist names the test of a worker that died, and no more. Here each worker has a file of its own, which receives the
stacks of its threads when a signal kills it or when a test's time is up, and then its child processes as well. The
controller prints the files of the workers that died as the last part of the report.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_timeout
from support import leftovers

_INPUT = "last_words"
_FRAME_OF_PYTEST = re.compile(
    r'^  File ".*/(_pytest|pluggy|xdist|execnet|pytest_timeout\w*)[/.].*\n', re.MULTILINE
)
_SECONDS_TO_END = 10.0
_MAX_COMMAND = 200


def register(config: pytest.Config) -> None:
    """Keep the last words of this run's workers, in a worker and in the controller."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Controller())
    elif _INPUT in config.workerinput:
        config.pluginmanager.register(Worker(Path(config.workerinput[_INPUT])))


class Worker:
    """A plugin that writes what this process is doing when it dies."""

    def __init__(self, path: Path) -> None:
        self._stream = path.open("a", buffering=1, encoding="utf-8")

    def pytest_sessionstart(self) -> None:
        """Send stacks to the file, no longer to where pytest sends them."""
        faulthandler.enable(self._stream, all_threads=True)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Keep what is said of one test alone."""
        self._stream.truncate(0)
        self._stream.write(f"process {os.getpid()}, {nodeid}\n")

    @pytest.hookimpl(tryfirst=True)
    def pytest_timeout_set_timer(self, item: Any, settings: pytest_timeout.Settings) -> bool | None:
        """Set a timer that ends the process as pytest-timeout's thread does, once its last words are written."""
        if settings.method != "thread":
            return None
        timer = threading.Timer(settings.timeout, self._end, (item, settings))
        timer.name = f"time limit of {item.nodeid}"

        def cancel() -> None:
            timer.cancel()
            timer.join()

        item.cancel_timeout = cancel
        timer.start()
        return True

    def _end(self, item: pytest.Item, settings: pytest_timeout.Settings) -> None:
        if not settings.disable_debugger_detection and pytest_timeout.is_debugging():
            return
        try:
            self._stream.write(f"The test took longer than its {settings.timeout:g} s.\n")
            faulthandler.dump_traceback(self._stream, all_threads=True)
            self._stream.writelines(f"{line}\n" for line in descendants(os.getpid()))
        finally:
            pytest_timeout.timeout_timer(item, settings)


class Controller:
    """A plugin that reports the last words of the workers that died."""

    def __init__(self) -> None:
        self._directory: Path | None = None
        self._words: list[tuple[str, str]] = []

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell a worker where to write."""
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="ciuic-last-words-"))
        node.workerinput[_INPUT] = str(self._directory / node.gateway.id)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Keep what a worker wrote that ended before its time."""
        if error is not None:
            path = Path(node.workerinput[_INPUT])
            words = (
                path.read_text(encoding="utf-8", errors="replace") if path.exists() else "It wrote nothing.\n"
            )
            end = _end_of(node.gateway)
            self._words.append((f"{node.gateway.id} {end}", _FRAME_OF_PYTEST.sub("", words)))
            # Also at once: the run may be ended from outside.
            reporter = node.config.pluginmanager.get_plugin("terminalreporter")
            reporter.write(f"\n{node.gateway.id} {end}: {self._words[-1][1]}", flush=True)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
        """Print the words after everything else: of long output often only the end is kept."""
        yield
        for title, words in self._words:
            terminalreporter.section(f"last words of {title}", red=True)
            terminalreporter.write(words)

    def pytest_unconfigure(self) -> None:
        """Remove the files."""
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)


def _end_of(gateway: Any) -> str:
    """Say how a worker's process ended."""
    try:
        status = gateway._io.popen.wait(timeout=_SECONDS_TO_END)
    except (AttributeError, subprocess.TimeoutExpired):
        return "(still running)"
    if status < 0:
        return f"(killed by {signal.Signals(-status).name})"
    return f"(exit status {status})"


def descendants(pid: int, depth: int = 0) -> Iterator[str]:
    """Describe the processes below one: their states, what they wait for in the kernel, and their commands."""
    for child in sorted(leftovers.child_pids(pid)):
        # It ended meanwhile.
        with contextlib.suppress(OSError):
            proc = Path(f"/proc/{child}")
            state = proc.joinpath("stat").read_text(errors="replace").rpartition(")")[2].split()[0]
            command = (
                proc.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            )
            command = command or f"[{proc.joinpath('comm').read_text(errors='replace').strip()}]"
            waits = proc.joinpath("wchan").read_text()
            yield f"{'  ' * depth}child {child} {state} {waits} {command[:_MAX_COMMAND]}"
            yield from descendants(child, depth + 1)
