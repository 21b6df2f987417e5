"""Receiver of traces: takes OTLP over HTTP as a collector does, and keeps the spans decoded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Receiver(ThreadingHTTPServer):
    """Server at `url`."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.status = 200
        self.location = ""
        self.answers = threading.Event()
        """Cleared: requests are taken and not answered."""
        self.answers.set()
        self.asked = threading.Semaphore(0)
        """Released by each request."""
        self.spans: list[Span] = []
        """Spans of requests that were answered with 200."""
        self.resources: list[dict[str, Any]] = []
        self.headers: list[Message] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def of(self, snapshot: str) -> list[Span]:
        """Return the spans of a snapshot."""
        return [span for span in self.spans if attributes(span)["ciuic.snapshot.id"] == snapshot]


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.path == "/v1/traces"
        assert self.headers["Content-Type"] == "application/x-protobuf"
        self.server.asked.release()
        self.server.headers.append(self.headers)
        self.server.answers.wait()
        if self.server.status == 200:
            for group in ExportTraceServiceRequest.FromString(body).resource_spans:
                self.server.resources.append(attributes(group.resource))
                for scope in group.scope_spans:
                    self.server.spans += scope.spans
        self.send_response(self.server.status)
        if self.server.location:
            self.send_header("Location", self.server.location)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Do nothing."""


def attributes(of: Any) -> dict[str, Any]:
    """Return the attributes of a span or a resource."""
    return {one.key: _value(one.value) for one in of.attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return (
        [_value(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)
    )


@contextmanager
def receiver(port: int = 0) -> Iterator[Receiver]:
    """Serve until the block ends."""
    server = Receiver(port)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.answers.set()
        server.shutdown()
        thread.join()
        server.server_close()
