"""Serving the control API: Hypercorn under trio on a socket that runtime.py has bound.

Guarantees: at the end requests in flight get a few seconds, then their connections close; the socket's name is removed
only by whoever made it.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable

import trio
from hypercorn.config import Config
from hypercorn.trio import serve
from starlette.applications import Starlette

GRACEFUL_SECONDS = 3.0
KEEP_ALIVE_SECONDS = 5.0


async def serve_api(
    app: Starlette,
    listener: socket.socket,
    stopped: Callable[[], Awaitable[None]],
    *,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serves ``app`` until ``stopped`` returns. Takes ``listener`` over."""
    config = Config()
    config.bind = [f"fd://{listener.detach()}"]
    config.graceful_timeout = GRACEFUL_SECONDS
    config.errorlog = None
    config.accesslog = None
    config.h11_max_incomplete_size = 64 * 1024
    # Hypercorn holds on to a connection for so long after the caller has hung up, too; commands hang up at once.
    config.keep_alive_timeout = KEEP_ALIVE_SECONDS
    config.read_timeout = None  # a wait for a first capture may take hours
    config.include_server_header = False
    await serve(app, config, shutdown_trigger=stopped, task_status=task_status)  # type: ignore[arg-type]
