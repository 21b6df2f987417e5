"""Progress of long commands: a line on a terminal, JSON lines with CIUIC_PROGRESS=json, otherwise nothing.

Guarantees: only stderr is written to, a terminal at most ten times a second, JSON lines at most twice a second (and
always the last state). Leaves to the library what is counted. Not rich's progress: that hides the cursor, which a killed
restore would leave hidden, and costs its import in commands that take no time.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, NamedTuple

from ciuic.cli.shared.messages import plural, shown
from ciuic.cli.shared.session import current
from ciuic.units import human_duration, human_size

_TERMINAL_SECONDS: Final = 0.1
# docs/cli.md promises at most two lines a second.
_JSON_SECONDS: Final = 0.5
_LEAST_NAME: Final = 12
"""Columns below which a name is left out and not cut."""
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
        import json

        _write_stderr(json.dumps(document) + "\n")


class LineReporter(Reporter):
    """Reporter whose state is one line."""

    def line(self, elapsed_seconds: float, width: int | None = None) -> str:
        """Return the line, no wider than ``width`` columns: what matters less is left out, how long it still takes the last."""
        state = self.state
        done, total = state.get("bytes_done", 0), state.get("bytes_total", 0)
        parts: list[_Part] = [_Part(6, self.task)]
        if "step" in state:
            parts.append(_Part(5, state["step"]))
            if state["total"]:
                parts += _share(state["done"] / state["total"])
        share = done / total if total else 0.0
        if total:
            parts += [*_share(share), _Part(5, f"{human_size(done)} of {human_size(total)}")]
        elif done:
            parts.append(_Part(5, human_size(done)))
        if state.get("files_total"):
            parts.append(_Part(2, f"{state.get('files_done', 0)}/{state['files_total']} files"))
        elif state.get("files_done"):
            parts.append(_Part(2, plural(state["files_done"], "file")))
        if done and elapsed_seconds > 0:
            parts.append(_Part(7, f"{human_size(done / elapsed_seconds)}/s"))
        left_seconds = state.get("seconds_left")
        # A guess from the bytes done so far, where nobody has an estimate that knows what is to come.
        if left_seconds is None and 0 < share < 1:
            left_seconds = elapsed_seconds * (1 - share) / share
        if left_seconds is not None:
            parts.append(_Part(8, f"{human_duration(left_seconds)} left"))
        if state.get("reason"):
            parts.append(_Part(4, state["reason"]))
        if state.get("path"):
            parts.append(_Part(1, shown(state["path"])))
        return _fitted(parts, width)


class _TerminalLine(LineReporter):
    """Line that is rewritten in place, and removed at the end because the command's result says it better."""

    def show(self, elapsed_seconds: float) -> None:
        # Asked each time: the window may be resized. One column is left free, because some terminals wrap
        # after the last one. A terminal that does not know its width says 0: COLUMNS, or 80.
        width = os.get_terminal_size(sys.stderr.fileno()).columns
        if not width:
            import shutil

            width = shutil.get_terminal_size().columns
        _write_stderr(_CLEAR_LINE + self.line(elapsed_seconds, max(width - 1, 10)))

    def finish(self) -> None:
        _write_stderr(_CLEAR_LINE)


class _Part(NamedTuple):
    """A part of the line; the one of the lowest rank gives way first."""

    rank: int
    text: str


def _share(share: float) -> list[_Part]:
    return [_Part(3, _bar(share)), _Part(9, f"{share:4.0%}")]


def _fitted(parts: list[_Part], width: int | None) -> str:
    parts = list(parts)
    while True:
        line = "  ".join(part.text for part in parts)
        excess = 0 if width is None else _columns(line) - width
        if excess <= 0:
            return line
        least = min(parts, key=lambda part: part.rank)
        # A name may be cut, and is still of use; so is the last part.
        if len(parts) == 1 or (least.rank == 1 and _columns(least.text) - excess >= _LEAST_NAME):
            kept = least.text
            while _columns(kept) > _columns(least.text) - excess:
                kept = kept[:-1]
            parts[parts.index(least)] = _Part(least.rank, kept)
        else:
            parts.remove(least)


def _columns(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    # Most text is of characters of one column.
    if text.isascii():
        return len(text)
    import unicodedata

    return sum(
        0 if unicodedata.combining(one) else 2 if unicodedata.east_asian_width(one) in "WF" else 1
        for one in text
    )


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


_reporters: ContextVar[Callable[[str], Reporter] | None] = ContextVar("_reporters", default=None)


@contextmanager
def reported_by(make: Callable[[str], Reporter]) -> Iterator[None]:
    """Have this thread's progress reported by what ``make`` returns for a task, in place of stderr."""
    before = _reporters.set(make)
    try:
        yield
    finally:
        _reporters.reset(before)


def _reporter(task: str) -> Reporter:
    make = _reporters.get()
    if make is not None:
        return make(task)
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
