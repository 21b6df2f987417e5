"""Sender of the spans of snapshots to a tracing system, by OTLP over HTTP, with the OpenTelemetry SDK.

Guarantees: a span is sent at least once unless it is dropped: where it stands is noted after the receiver has taken it, and a process
that is killed in between sends the last request again, with the same ids. At most `_BATCH` spans are in memory; the rest waits in the
bounded spool (`ciuic.protocol.span_spool`). A receiver that is away, slow or refuses keeps nothing but this thread waiting. What
leaves the spool unsent, and a request that was refused for `_GIVE_UP_SECONDS`, is dropped and counted. Answers are not read, and
redirections not followed: the headers may have a token.

References: OpenTelemetry Protocol 1.x (OTLP/HTTP, binary protobuf, ``/v1/traces``); semantic conventions of resources.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ciuic import __version__
from ciuic.errors import CiuicError, NotFound, UsageError, pip_install
from ciuic.protocol.span_spool import Span, SpoolPosition, read_spans, span_id, trace_id
from ciuic.structs import decode_json
from ciuic.system.disk import Disk
from ciuic.system.state_home import state_home

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

_BATCH: Final = 256
_POLL_SECONDS: Final = 2.0
# Of one call of the SDK, which tries again within it.
_REQUEST_SECONDS: Final = 10.0
# Between two calls: doubled from the first to the last.
_MIN_PAUSE_SECONDS: Final = 2.0
_MAX_PAUSE_SECONDS: Final = 60.0
_GIVE_UP_SECONDS: Final = 3600.0
_POSITIONS_NAME: Final = "sent-spans"
_MAX_HEADERS_BYTES: Final = 64 << 10
_CREDENTIAL: Final = "ciuic.otlp-headers"
_HEADER: Final = re.compile(
    r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\x21-\x7e](?:[\t\x20-\x7e]*[\x21-\x7e])?)[ \t]*\Z"
)

Send = Callable[[Sequence[Span]], bool]
log = logging.getLogger(__name__)


def state_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Return the directory in which the exporter notes what was sent, which may not exist.

    Args:
        environ: environment; None for that of the process.
    """
    own = (os.environ if environ is None else environ).get("STATE_DIRECTORY", "")
    return Path(own) if own else state_home("exporter", environ)


def read_headers(path: Path | None, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the headers of each request; the unit's credential ``ciuic.otlp-headers`` goes before the file.

    Args:
        path: file with one ``NAME: VALUE`` a line; None: none is configured.
        environ: environment; None for that of the process.

    Raises:
        NotFound: the file cannot be read.
        UsageError: a line is no header. It is not shown.
    """
    directory = (os.environ if environ is None else environ).get("CREDENTIALS_DIRECTORY", "")
    credential = Path(directory) / _CREDENTIAL
    if directory and credential.exists():
        path = credential
    if path is None:
        return {}
    try:
        with open(path, "rb") as stream:
            text = stream.read(_MAX_HEADERS_BYTES).decode("ascii", "replace")
    except OSError as error:
        raise NotFound(
            f"the headers in {path} cannot be read: {error.strerror}",
            hint=f"the exporter must be able to read the file, or gets it as the credential {_CREDENTIAL}",
        ) from error
    headers = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _HEADER.match(line)
        if match is None:
            raise UsageError(
                f"{path}, line {number}: expected NAME: VALUE, as in Authorization: Bearer TOKEN"
            )
        headers[match[1]] = match[2]
    return headers


class SpanSender:
    """Sends what the spool has until `stop`; `run` is for a thread of its own."""

    def __init__(self, path: Path, state: Path, send: Send) -> None:
        """Take the spool, the directory for the position, and what sends a batch and returns whether it was taken."""
        self._path = path
        self._state = state
        self._send = send
        self._positions = self._read_positions()
        self._stop = threading.Event()
        self.sent = 0
        self.dropped = 0
        self.failed = 0
        """Calls that ended without the receiver having taken the spans."""

    def metrics_text(self) -> str:
        """Return the counters in Prometheus text format."""
        rows = (
            ("sent", self.sent, "Spans that the receiver of traces has taken"),
            ("dropped", self.dropped, "Spans that were dropped unsent"),
            ("send_failures", self.failed, "Attempts to send spans that failed"),
        )
        return "".join(
            f"# HELP ciuic_exporter_spans_{name}_total {text}\n# TYPE ciuic_exporter_spans_{name}_total counter\n"
            f"ciuic_exporter_spans_{name}_total {number}\n"
            for name, number, text in rows
        )

    def stop(self) -> None:
        """End `run` soon."""
        self._stop.set()

    def run(self) -> None:
        """Send until stopped."""
        while not self._stop.is_set():
            if not self._send_some():
                self._stop.wait(_POLL_SECONDS)

    def _send_some(self) -> bool:
        """Send the next spans of the spool; return whether there were any."""
        before = self._positions.get(str(self._path), SpoolPosition())
        part = read_spans(self._path, before, _BATCH)
        if part.position == before:
            return False
        if part.spans and not self._deliver(part.spans):
            return True
        self.dropped += part.missed
        self._positions[str(self._path)] = part.position
        self._write_positions()
        return True

    def _deliver(self, spans: Sequence[Span]) -> bool:
        """Send until taken or given up; return False where it was stopped before."""
        give_up_at = time.monotonic() + _GIVE_UP_SECONDS
        pause_seconds = _MIN_PAUSE_SECONDS
        while not self._send(spans):
            if self._stop.is_set():
                return False
            if not self.failed:
                # Once, not with each attempt: the metrics have the rest.
                log.warning("the receiver of traces does not take them; they are tried again")
            self.failed += 1
            if time.monotonic() > give_up_at:
                self.dropped += len(spans)
                return True
            if self._stop.wait(pause_seconds):
                return False
            pause_seconds = min(2 * pause_seconds, _MAX_PAUSE_SECONDS)
        self.sent += len(spans)
        return True

    def _read_positions(self) -> dict[str, SpoolPosition]:
        try:
            with open(self._state / _POSITIONS_NAME, "rb") as stream:
                return decode_json(stream.read(_MAX_HEADERS_BYTES), dict[str, SpoolPosition])
        except (OSError, msgspec.DecodeError):
            return {}

    def _write_positions(self) -> None:
        try:
            self._state.mkdir(mode=0o700, parents=True, exist_ok=True)
            Disk().replace_file(
                self._state / _POSITIONS_NAME, msgspec.json.encode(self._positions), durable=False
            )
        except OSError as error:
            # What was sent is sent again after a restart, with the same ids.
            log.debug("positions not written: %s", error)


def open_sender(url: str, headers: Mapping[str, str]) -> tuple[Send, Callable[[], None]]:
    """Return what sends spans to a receiver, and what ends a wait of it.

    Args:
        url: URL of the receiver, without ``/v1/traces``.
        headers: headers of each request.

    Raises:
        NotFound: the SDK is not installed.
    """
    try:
        import requests
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace.export import SpanExportResult
    except ImportError as error:
        raise NotFound(
            f"traces need the OpenTelemetry SDK, of which {error.name} is not installed",
            hint=pip_install("ciuic[otlp]"),
        ) from error
    # It would repeat for each attempt what the metrics say.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    session = requests.Session()
    # The status is all that is wanted of an answer, whose length is the receiver's choice.
    session.stream = True
    session.hooks["response"] = [_check_response]
    exporter = OTLPSpanExporter(
        endpoint=f"{url}/v1/traces", headers=dict(headers), timeout=_REQUEST_SECONDS, session=session
    )
    resource = Resource.create(
        {"service.name": "ciuic", "service.version": __version__, "host.name": socket.gethostname()}
    )

    def send(spans: Sequence[Span]) -> bool:
        try:
            done = exporter.export([_readable(span, resource) for span in spans])
        except CiuicError:
            # Older versions of the SDK let it through.
            return False
        return done is SpanExportResult.SUCCESS

    return send, exporter.shutdown


def _check_response(response: Any, *_: object, **__: object) -> Any:
    """Close an answer unread, and refuse a redirection, which the SDK would take for success."""
    response.close()
    if 300 <= response.status_code < 400:
        raise CiuicError("the receiver redirects")
    return response


def _readable(span: Span, resource: Any) -> ReadableSpan:
    """Return a span as the SDK has it."""
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

    trace = trace_id(span.repository, span.snapshot)
    attributes: dict[str, Any] = {
        "ciuic.repository.id": span.repository,
        "ciuic.snapshot.id": span.snapshot,
        **span.attributes,
    }
    return ReadableSpan(
        name="snapshot",
        context=SpanContext(
            trace, span_id(span), is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED)
        ),
        resource=resource,
        attributes=attributes,
        kind=SpanKind.INTERNAL,
        status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
        start_time=span.start_ns,
        end_time=span.end_ns,
        instrumentation_scope=InstrumentationScope("ciuic", __version__),
    )
