"""How the daemon speaks: JSON lines under systemd or into a file, colours on a terminal, always on stderr.

Events are stable snake_case phrases with fields. Workers and captures log JSON to the same stderr by themselves.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO, cast

import structlog
from structlog.typing import Processor

from ciuic.log_stream import LogStream


def configure(*, verbose: bool = False, stream: TextIO | None = None, as_json: bool | None = None) -> None:
    """Sets structlog and the standard library's logging (Hypercorn, APScheduler) up for the whole process.

    ``as_json`` None: JSON unless ``stream`` is a terminal.
    """
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
        # Without locals: they are pages long, and hold what is nobody's business in a log (file contents, names).
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
    # Libraries speak up only when something is wrong: the default run is quiet.
    root.setLevel(logging.DEBUG if verbose else logging.WARNING)
    for chatty in ("hypercorn.access", "apscheduler"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
