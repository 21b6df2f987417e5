"""Log setup of the daemon.

JSON lines under systemd or into a file, colours on a terminal, always on standard error.

Events are stable snake_case phrases with fields. Workers and captures log JSON to the same standard error by
themselves.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO, cast

import structlog
from structlog.typing import Processor

from ciuic.system.log_stream import LogStream


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
