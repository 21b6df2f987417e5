"""Log set-up of ciuic's processes: events on standard error, which survives the death of its reader.

`configure` writes JSON lines under systemd or into a file, and colours on a terminal. Events are stable snake_case
phrases with fields. Overlay workers log JSON to the same standard error, by a set-up of their own.

The standard error of a daemon started in a shell is often a pipe (``ciuic daemon 2>&1 | tee log``). When its reader
is killed, every line would raise BrokenPipeError, in the daemon's event loop and in the workers that serve a job's
files. Through a `LogStream` lines that cannot be written are lost, and the program goes on.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO, cast

import structlog
from structlog.typing import Processor


class LogStream:
    """The part of a text file that loggers use. Neither writing nor flushing raises OSError."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        """Write a line, or lose it; return the number of characters written."""
        try:
            self._file.write(text)
        except (OSError, ValueError):
            # The reader has ended, the disk is full, or the file was closed (ValueError).
            return 0
        return len(text)

    def flush(self) -> None:
        """Write out the buffer, or lose it."""
        try:
            self._file.flush()
        except (OSError, ValueError):
            return

    def isatty(self) -> bool:
        """Return whether the file is a terminal."""
        return self._file.isatty()


def configure(*, verbose: bool = False, stream: TextIO | None = None, as_json: bool | None = None) -> None:
    """Set up structlog and the standard library's logging (Hypercorn, APScheduler) for the whole process.

    Args:
        verbose: log at debug level.
        stream: destination; standard error by default.
        as_json: log JSON; None: unless `stream` is a terminal.
    """
    # Loses the lines of a reader that has gone: the error of such a write once ended tasks of the event loop.
    out = cast(TextIO, LogStream(sys.stderr if stream is None else stream))
    render_json = not out.isatty() if as_json is None else as_json
    level = logging.DEBUG if verbose else logging.INFO
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    renderer: list[Processor]
    if render_json:
        # Without local variables: they are pages long, and may hold file contents and names that do not
        # belong in a log.
        tracebacks = structlog.processors.ExceptionRenderer(
            structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        )
        renderer = [tracebacks, structlog.processors.JSONRenderer()]
    else:
        renderer = [
            structlog.dev.ConsoleRenderer(
                colors=out.isatty(), exception_formatter=structlog.dev.plain_traceback
            )
        ]
    structlog.configure(
        processors=[*shared, *renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(out),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # Libraries log warnings and errors only, so that the default run is quiet.
    root.setLevel(logging.DEBUG if verbose else logging.WARNING)
    logging.getLogger("apscheduler").setLevel(logging.WARNING)
