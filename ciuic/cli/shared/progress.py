"""Progress of long commands: a line on a terminal, JSON lines with CIUIC_PROGRESS=json, otherwise nothing.

Guarantees: only stderr is written to, a terminal at most ten times a second, JSON lines at most twice a second (and
always the last state). Leaves to the library what is counted. Not rich's progress: that hides the cursor, which a killed
restore would leave hidden, and costs its import in commands that take no time.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from ciuic.cli.shared.messages import plural, shown
from ciuic.cli.shared.session import current
from ciuic.units import human_duration, human_size

_TERMINAL_SECONDS: Final = 0.1
# docs/cli.md promises at most two lines a second.
_JSON_SECONDS: Final = 0.5
# Return and erase to the end of the line (ECMA-48, EL), which every terminal but a dumb one understands.
_CLEAR_LINE: Final = "\r\x1b[K"


class Reporter:
    """Reporter that keeps the newest state and shows it when enough time has passed.

    State: ``bytes_done``, ``bytes_total``, ``files_done``, ``files_total`` (absolute; totals 0 while unknown), ``path``, and
    ``seconds_left`` where somebody knows better than the bytes done so far (None: nobody does);
    or ``step``, ``done`` and ``total`` where what is counted changes from step to step.
    """

    shows = True
    """True if anybody sees it."""

    def __init__(self, task: str, interval_seconds: float) -> None:
        self.task = task
        self.began = time.monotonic()
        self.state: dict[str, Any] = {}
        self._interval_seconds = interval_seconds
        # The first state is shown after one interval: a command that takes no time shows no progress.
        self._shown_at = self.began

    def update(self, **state: Any) -> None:
        """Note the newest state."""
        self.state = state
        now = time.monotonic()
        if now - self._shown_at >= self._interval_seconds:
            self._shown_at = now
            self.show(now - self.began)

    def step(self, step: str, done: int, total: int) -> None:
        """Update the state in the form in which check and prune report it."""
        self.update(step=step, done=done, total=total)

    def show(self, elapsed_seconds: float) -> None:
        """Show the state."""
        raise NotImplementedError

    def finish(self) -> None:
        """End the display. Called once, however the run ended."""


class _Silent(Reporter):
    shows = False

    def __init__(self) -> None:
        super().__init__("", float("inf"))

    def show(self, elapsed_seconds: float) -> None:
        """Show nothing: there is no terminal."""


class _JsonLines(Reporter):
    def show(self, elapsed_seconds: float) -> None:
        self._write("running", elapsed_seconds)

    def finish(self) -> None:
        self._write("finished", time.monotonic() - self.began)

    def _write(self, state: str, elapsed_seconds: float) -> None:
        document = {
            "task": self.task,
            "state": state,
            "elapsed_seconds": round(elapsed_seconds, 3),
            **{key: value for key, value in self.state.items() if key != "path"},
        }
        path = self.state.get("path", b"")
        if path:
            document["path"] = path.decode("utf-8", "backslashreplace")
        _write_stderr(json.dumps(document) + "\n")


class _TerminalLine(Reporter):
    """Line that is rewritten in place, and removed at the end because the command's result says it better."""

    def show(self, elapsed_seconds: float) -> None:
        # Asked each time: the window may be resized. One column is left free, because some terminals wrap
        # after the last one.
        width = os.get_terminal_size(sys.stderr.fileno()).columns
        _write_stderr(_CLEAR_LINE + self.line(elapsed_seconds)[: max(width - 1, 10)])

    def finish(self) -> None:
        _write_stderr(_CLEAR_LINE)

    def line(self, elapsed_seconds: float) -> str:
        state = self.state
        done, total = state.get("bytes_done", 0), state.get("bytes_total", 0)
        parts = [self.task]
        if "step" in state:
            parts.append(state["step"])
            if state["total"]:
                parts.append(f"{_bar(state['done'] / state['total'])} {state['done'] / state['total']:4.0%}")
        share = done / total if total else 0.0
        if total:
            parts.append(f"{_bar(share)} {share:4.0%}  {human_size(done)} of {human_size(total)}")
        elif done:
            parts.append(human_size(done))
        if state.get("files_total"):
            parts.append(f"{state.get('files_done', 0)}/{state['files_total']} files")
        elif state.get("files_done"):
            parts.append(plural(state["files_done"], "file"))
        if done and elapsed_seconds > 0:
            parts.append(f"{human_size(done / elapsed_seconds)}/s")
        left_seconds = state.get("seconds_left")
        # A guess from the bytes done so far, where nobody has an estimate that knows what is to come.
        if left_seconds is None and 0 < share < 1:
            left_seconds = elapsed_seconds * (1 - share) / share
        if left_seconds is not None:
            parts.append(f"{human_duration(left_seconds)} left")
        if state.get("reason"):
            parts.append(state["reason"])
        if state.get("path"):
            parts.append(shown(state["path"]))
        return "  ".join(parts)


def _bar(share: float) -> str:
    filled = min(20, int(share * 20))
    return "━" * filled + "╌" * (20 - filled)


def _write_stderr(text: str) -> None:
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (BrokenPipeError, UnicodeEncodeError):
        # Progress that nobody sees (or that the locale cannot spell) must not end the work.
        return


def _reporter(task: str) -> Reporter:
    # Wherever stderr goes, and with -q: it was asked for.
    if os.environ.get("CIUIC_PROGRESS", "") == "json":
        return _JsonLines(task, _JSON_SECONDS)
    if current().verbosity < 0 or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        return _Silent()
    return _TerminalLine(task, _TERMINAL_SECONDS)


@contextmanager
def progress(task: str) -> Iterator[Reporter]:
    """Yield a reporter. When the block ends, the line is removed or the last JSON line printed."""
    reporter = _reporter(task)
    try:
        yield reporter
    finally:
        reporter.finish()
