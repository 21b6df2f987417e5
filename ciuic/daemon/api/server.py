"""Server of the control API: Hypercorn's HTTP under trio, on a socket that runtime.py has bound.

The mode and group of the socket admit root and the members of `control.group`, who are administrators.
Guarantees: an error in one connection ends that connection and nothing else, whatever its caller does; no
more than `MAX_CONNECTIONS` are served at once, some of them reserved for root, and a caller beyond that gets
an error; at the end requests in flight get a few seconds, then their connections close, also those whose
callers do not read. Removing the socket file is left to the daemon that created it.
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
from starlette.types import ASGIApp, Receive, Scope, Send

from ciuic.daemon.api.api import refusal
from ciuic.errors import Busy, NotPermitted
from ciuic.protocol.peer_socket import caller_of

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup

# Time for requests in flight at a stop, after which their connections close.
GRACEFUL_SECONDS = 3.0
KEEP_ALIVE_SECONDS = 5.0
# Far below the limit of descriptors, so that callers cannot keep captures from starting.
MAX_CONNECTIONS = 512
# Divisor: one connection of so many is reserved for root, so that a program of a group member that opens too
# many does not keep root out.
ROOT_SHARE = 8
# Errors that a caller may cause by closing its connection at any time.
_HUNG_UP = (trio.BrokenResourceError, trio.BusyResourceError, trio.ClosedResourceError)
_REVOKED = NotPermitted(
    "the group that may use the daemon's control socket was changed while this connection was open",
    hint="connect again, as root or as a member of the present [control] group",
)
log = structlog.get_logger(__name__)


async def serve_api(
    app: Starlette,
    listener: socket.socket,
    stopped: Callable[[], Awaitable[None]],
    revocations: Callable[[], int] = lambda: 0,
    *,
    max_connections: int = MAX_CONNECTIONS,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve the application until `stopped` returns. Takes over `listener`.

    Args:
        app: the control API.
        listener: listening socket.
        stopped: returns when the daemon ends.
        revocations: returns how often the socket was taken back from a group. Connections from before take no
            request any more, except root's.
        max_connections: most connections at once.
        task_status: told when the socket is served.
    """
    connections = _Connections(app, revocations, max_connections)
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
    """Connection that handles a caller who closes it while Hypercorn answers."""

    async def protocol_send(self, event: Event) -> None:
        try:
            await super().protocol_send(event)
        # Another task of Hypercorn is closing the connection. The error once left the nursery of all
        # connections, and ended the daemon.
        except trio.BusyResourceError:
            await self.stream.aclose()
            await self.protocol.handle(Closed())


class _Connections:
    """All connections of the socket.

    `hypercorn.trio.serve` is not used: an error of one of its connections ends it.
    """

    def __init__(self, app: Starlette, revocations: Callable[[], int], max_connections: int) -> None:
        self._config = _http_config()
        self._app = app
        self._revocations = revocations
        self._context = WorkerContext(None)
        self._max_connections = max_connections
        self._max_of_others = max_connections - max_connections // ROOT_SHARE
        self._count = 0
        # Connections of users other than root.
        self._others = 0

    async def handle(self, stream: trio.SocketStream) -> None:
        """Serve one connection.

        Raises nothing but cancellation and other BaseExceptions that are no Exception.
        """
        of_others = int(not _is_root(stream))
        if self._count >= self._max_connections or (of_others and self._others >= self._max_of_others):
            await _turn_away(stream)
            return
        self._count += 1
        self._others += of_others
        try:
            await self._serve(stream, self._until_revoked() if of_others else self._app)
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

    def _until_revoked(self) -> ASGIApp:
        """Return the application for one connection, which refuses requests after a revocation.

        The mode of the socket keeps new connections out and not those that are open: one with a request every
        few seconds would stay an administrator's for ever. What is being answered is answered, such as the
        reload that revokes.
        """
        before = self._revocations()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            is_permitted = self._revocations() == before
            await (self._app if is_permitted else refusal(_REVOKED))(scope, receive, send)

        return app

    async def _serve(self, stream: trio.SocketStream, app: ASGIApp) -> None:
        wrapped: AppWrapper = wrap_app(app, self._config.wsgi_max_body_size, "asgi")  # type: ignore[arg-type]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_close_when_cancelled, stream)
            await _Connection(
                wrapped,
                self._config,
                self._context,
                ConnectionState(LifespanState()),
                stream,  # type: ignore[arg-type]  # its annotation knows of TLS only
            )
            nursery.cancel_scope.cancel()

    async def wind_down(self) -> None:
        """Close the connections in which no request is being served."""
        await self._context.terminated.set()


def _http_config() -> Config:
    config = Config()
    # `_note` logs what goes wrong in a connection.
    config.errorlog = None
    config.accesslog = None
    config.h11_max_incomplete_size = 64 * 1024
    # Hypercorn keeps a connection for so long even when the caller has closed it; commands close theirs at
    # once.
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
    # Hypercorn shields its sends, so that without this a caller who does not read would keep the daemon from
    # ending.
    try:
        await trio.sleep_forever()
    finally:
        stream.socket.close()


async def _turn_away(stream: trio.SocketStream) -> None:
    """Refuse a caller beyond the limit, in so few bytes that the send need not wait for them to be read."""
    answer = refusal(
        Busy(
            "the daemon has too many callers at once",
            hint="close other connections to its control socket, or try again later",
        )
    )
    head = "".join(f"{name.decode()}: {value.decode()}\r\n" for name, value in answer.raw_headers)
    # The answer fits into the socket's buffer; the limit is for a caller whose buffer is full.
    with trio.move_on_after(1), suppress(*_HUNG_UP):
        await stream.send_all(
            f"HTTP/1.1 {answer.status_code} \r\nconnection: close\r\n{head}\r\n".encode() + bytes(answer.body)
        )


def _note(error: Exception) -> None:
    """Log the error of a connection: at debug level where the caller closed it, as an error otherwise."""
    causes = _leaves(error)
    if all(isinstance(cause, _HUNG_UP) for cause in causes):
        log.debug("caller_hung_up", error=repr(causes[0]))
    else:
        log.error("connection_failed", exc_info=error)


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for one in error.exceptions for leaf in _leaves(one)]
    return [error]
