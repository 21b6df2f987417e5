"""Serving the control API: Hypercorn's HTTP under trio, on a socket that runtime.py has bound.

The mode and group of the socket let in root and the members of ``control.group``, who are administrators. Guarantees: what goes wrong
in one connection ends that connection and nothing else, whatever its caller does; no more than ``MOST_CONNECTIONS`` are served at
once, some of them root's alone, and one caller too many is told so; at the end requests in flight get a few seconds, then their
connections close, also those whose callers do not read.
The socket's name is removed only by whoever made it.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import cast

import structlog
import trio
from hypercorn.config import Config
from hypercorn.events import Closed, Event
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import AppWrapper, ConnectionState, LifespanState
from hypercorn.utils import wrap_app
from starlette.applications import Starlette

from ciuic.daemon.api import refusal
from ciuic.errors import Busy
from ciuic.peer_socket import caller_of

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup

GRACEFUL_SECONDS = 3.0
KEEP_ALIVE_SECONDS = 5.0
MOST_CONNECTIONS = 512
ROOTS_SHARE = 8
"""One connection of so many is for root alone: a member of the group whose program runs wild does not keep the operator out."""
_HUNG_UP = (trio.BrokenResourceError, trio.BusyResourceError, trio.ClosedResourceError)
"""What a caller who goes away in the middle may leave behind."""
log = structlog.get_logger(__name__)


async def serve_api(
    app: Starlette,
    listener: socket.socket,
    stopped: Callable[[], Awaitable[None]],
    *,
    most_connections: int = MOST_CONNECTIONS,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serves ``app`` until ``stopped`` returns. Takes ``listener`` over."""
    connections = _Connections(app, most_connections)
    listening = trio.SocketListener(trio.socket.from_stdlib_socket(listener))
    async with trio.open_nursery() as handling:
        async with trio.open_nursery() as accepting:
            accepting.start_soon(
                partial(trio.serve_listeners, connections.handle, [listening], handler_nursery=handling)
            )
            task_status.started()
            await stopped()
            accepting.cancel_scope.cancel()
        await connections.wind_down()
        handling.cancel_scope.deadline = trio.current_time() + GRACEFUL_SECONDS


class _Connection(TCPServer):
    """Hypercorn may answer while another of its tasks is closing the connection: that is a caller who has gone."""

    async def protocol_send(self, event: Event) -> None:
        try:
            await super().protocol_send(event)
        except trio.BusyResourceError:
            await self.stream.aclose()
            await self.protocol.handle(Closed())


class _Connections:
    """All callers of the socket. ``hypercorn.trio.serve`` will not do: an error of one of its connections ends it."""

    def __init__(self, app: Starlette, most: int) -> None:
        self._config = _http_config()
        self._app: AppWrapper = wrap_app(app, self._config.wsgi_max_body_size, "asgi")  # type: ignore[arg-type]
        self._context = WorkerContext(None)
        self._most = most
        self._most_of_others = most - most // ROOTS_SHARE
        self._count = 0
        self._others = 0
        """Those that are not root's."""

    async def handle(self, stream: trio.SocketStream) -> None:
        """One connection from beginning to end. Raises nothing but cancellation (and what is no Exception)."""
        of_others = int(not _is_root(stream))
        if self._count >= self._most or (of_others and self._others >= self._most_of_others):
            await _turn_away(stream)
            return
        self._count += 1
        self._others += of_others
        try:
            await self._serve(stream)
        except BaseExceptionGroup as group:
            failed, others = group.split(Exception)
            if failed is not None:
                _note(failed)
            if others is not None:
                raise others from None
        except Exception as error:
            _note(error)
        finally:
            self._count -= 1
            self._others -= of_others

    async def _serve(self, stream: trio.SocketStream) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_close_when_cancelled, stream)
            await _Connection(
                self._app,
                self._config,
                self._context,
                ConnectionState(LifespanState()),
                stream,  # type: ignore[arg-type]  # its annotation knows of TLS only
            )
            nursery.cancel_scope.cancel()

    async def wind_down(self) -> None:
        """Connections in which no request is being served close now."""
        await self._context.terminated.set()


def _http_config() -> Config:
    config = Config()
    config.errorlog = None
    config.accesslog = None
    config.h11_max_incomplete_size = 64 * 1024
    # Hypercorn holds on to a connection for so long after the caller has hung up, too; commands hang up at once.
    config.keep_alive_timeout = KEEP_ALIVE_SECONDS
    config.read_timeout = None  # a wait for a first capture may take hours
    config.include_server_header = False
    return config


def _is_root(stream: trio.SocketStream) -> bool:
    try:
        return caller_of(cast(socket.socket, stream.socket)).uid == 0
    except OSError:
        return False


async def _close_when_cancelled(stream: trio.SocketStream) -> None:
    # Hypercorn shields what it sends: a caller who does not read would keep the daemon from ending for ever.
    try:
        await trio.sleep_forever()
    finally:
        stream.socket.close()


async def _turn_away(stream: trio.SocketStream) -> None:
    """Tells one caller too many, in so few bytes that nobody has to wait for them to be read."""
    answer = refusal(
        Busy(
            "the daemon has too many callers at once",
            hint="who holds its control socket open? try again later",
        )
    )
    head = "".join(f"{name.decode()}: {value.decode()}\r\n" for name, value in answer.raw_headers)
    with trio.move_on_after(1), suppress(*_HUNG_UP):
        await stream.send_all(
            f"HTTP/1.1 {answer.status_code} \r\nconnection: close\r\n{head}\r\n".encode() + bytes(answer.body)
        )


def _note(error: Exception) -> None:
    """A caller who hung up is nobody's fault; anything else is ours."""
    causes = _leaves(error)
    if all(isinstance(cause, _HUNG_UP) for cause in causes):
        log.debug("caller_hung_up", error=repr(causes[0]))
    else:
        log.error("connection_failed", exc_info=error)


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for one in error.exceptions for leaf in _leaves(one)]
    return [error]
