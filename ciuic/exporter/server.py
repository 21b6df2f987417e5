"""HTTP server of the exporter.

Guarantees: at most `MAX_CALLERS` connections are served at once, each for a limited time, so that callers from a network cannot fill
the memory; a further one takes the place of the oldest, so that callers who say nothing keep nobody out. A request has no body and
changes nothing. At a loopback address a request must name that: a page of the web whose name leads to it gets no answer. While the daemon is gone, the answer is ``ciuic_up 0`` and nothing else of
the daemon: figures of the past would look like present ones.

References: Prometheus text exposition format 0.0.4; "Writing exporters" (prometheus.io), which asks for 200 and ``up``-like metrics.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from ciuic import __version__
from ciuic.errors import Busy, CiuicError, NotPermitted, Unreachable
from ciuic.protocol.metrics_file import MAX_AGE_SECONDS, read_metrics

MAX_CALLERS: Final = 32
"""Connections at once; a Prometheus has one."""
_MAX_THREADS: Final = 48
"""Threads, with those of connections that were closed just now. The service may have 64."""
_CALLER_SECONDS: Final = 10.0
_TEXT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_INDEX: Final = b"ciuic: metrics are at /metrics\n"


def metrics_text(path: Path) -> bytes:
    """Return the answer to a scrape: the daemon's metrics, and whether the daemon writes them.

    Args:
        path: file that the daemon writes.
    """
    began = time.monotonic()
    problem = ""
    document = b""
    age = -1.0
    try:
        document, age = read_metrics(path)
        if age > MAX_AGE_SECONDS:
            problem, document = f"the daemon has written nothing for {age:.0f} s", b""
    except Unreachable as error:
        problem = error.message
    # HELP lines have one line each; a path may have line ends.
    comment = f"# {' '.join(problem.split())}\n" if problem else ""
    own = (
        f"{comment}"
        "# HELP ciuic_up 1 if the daemon writes its metrics\n# TYPE ciuic_up gauge\n"
        f"ciuic_up {0 if problem else 1}\n"
        "# HELP ciuic_metrics_age_seconds Age of the daemon's metrics; -1 if there are none\n"
        f"# TYPE ciuic_metrics_age_seconds gauge\nciuic_metrics_age_seconds {age:.3f}\n"
        "# HELP ciuic_exporter_info Version of the exporter\n# TYPE ciuic_exporter_info gauge\n"
        f'ciuic_exporter_info{{version="{__version__}"}} 1\n'
        "# HELP ciuic_exporter_read_seconds Time that it took to read the metrics\n"
        "# TYPE ciuic_exporter_read_seconds gauge\n"
        f"ciuic_exporter_read_seconds {time.monotonic() - began:.6f}\n"
    )
    return own.encode("utf-8", "backslashreplace") + document


def _names_this_host(host: str | None) -> bool:
    """Return whether a Host header is none, localhost or an address: a name of the web may lead here by its owner's choice."""
    if host is None:
        return True
    name = host.strip()
    bare = name[1:].partition("]")[0] if name.startswith("[") else name.rpartition(":")[0] or name
    if bare.rstrip(".").lower() == "localhost":
        return True
    try:
        ipaddress.ip_address(bare)
    except ValueError:
        return False
    return True


class ExporterServer(ThreadingHTTPServer):
    """Server of the metrics in ``path`` at ``listen``; `serve_forever` serves until `shutdown`.

    Raises:
        Busy: another process listens there.
        NotPermitted: the port needs a privilege.
        CiuicError: the address cannot be used.
    """

    # A caller that does not read must not keep the process from ending.
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, listen: str, path: Path, more: Callable[[], str] = lambda: "") -> None:
        host, _, port = listen.rpartition(":")
        host = host.strip("[]")
        self.address_family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        self.path = path
        self.more = more
        """Returns metrics of the exporter's own other work."""
        self.is_local = ipaddress.ip_address(host).is_loopback
        """Only this host reaches it."""
        self._free_threads = threading.BoundedSemaphore(_MAX_THREADS)
        # When each connection began, the oldest first. Changed by the threads that serve them.
        self._callers: dict[socket.socket, float] = {}
        self._callers_lock = threading.Lock()
        try:
            super().__init__((host, int(port)), _Handler)
        except PermissionError as error:
            raise NotPermitted(
                f"cannot listen at {listen}: {error.strerror}", hint="use a port from 1024 on"
            ) from error
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise Busy(
                    f"another process listens at {listen}", hint="choose another `exporter.listen`"
                ) from error
            raise CiuicError(f"cannot listen at {listen}: {error.strerror}") from error

    def server_bind(self) -> None:
        """Bind the socket, without looking up the host's name, which may wait for a name server."""
        # HTTPServer.server_bind calls getfqdn().
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread, in the place of the oldest if too many are served."""
        if not self._free_threads.acquire(blocking=False):
            self.shutdown_request(request)
            return
        with self._callers_lock:
            if len(self._callers) >= MAX_CALLERS:
                self._hang_up(next(iter(self._callers)))
            self._callers[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        # No thread can be started.
        except BaseException:
            self._end(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._end(request)

    def service_actions(self) -> None:
        """Hang up on callers whose time is over: one that sends a byte now and then passes every single timeout."""
        with self._callers_lock:
            began_before = time.monotonic() - _CALLER_SECONDS
            for caller in [one for one, began in self._callers.items() if began < began_before]:
                self._hang_up(caller)

    def _hang_up(self, caller: socket.socket) -> None:
        """End a connection, whose thread then ends; with the lock held, so that it is not closed meanwhile."""
        del self._callers[caller]
        # Its caller may have hung up.
        with suppress(OSError):
            caller.shutdown(socket.SHUT_RDWR)

    def _end(self, caller: socket.socket) -> None:
        with self._callers_lock:
            self._callers.pop(caller, None)
        self._free_threads.release()

    def shutdown_request(self, request: Any) -> None:
        """Close a connection, which nobody hangs up on any more: its descriptor may be another's at once."""
        with self._callers_lock:
            self._callers.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do nothing: a caller may hang up at any time, which needs no action."""


class _Handler(BaseHTTPRequestHandler):
    server: ExporterServer
    server_version = "ciuic-exporter"
    sys_version = ""
    # Of each receive and send.
    timeout = _CALLER_SECONDS

    def do_GET(self) -> None:
        """Answer with the metrics, or with where they are."""
        path = self.path.partition("?")[0]
        if self.server.is_local and not _names_this_host(self.headers.get("Host")):
            self._answer(
                HTTPStatus.MISDIRECTED_REQUEST, b"ciuic: the request must be for localhost or an address\n"
            )
        elif path == "/metrics":
            self._answer(HTTPStatus.OK, self.server.more().encode() + metrics_text(self.server.path))
        elif path == "/":
            self._answer(HTTPStatus.OK, _INDEX)
        else:
            self._answer(HTTPStatus.NOT_FOUND, _INDEX)

    def do_HEAD(self) -> None:
        """Answer as to GET, without the body."""
        self.do_GET()

    def _answer(self, status: HTTPStatus, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", _TEXT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Do nothing: a line for each scrape would fill the journal."""
