"""Preemption notices of metadata services, with local servers in their place."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ciuic.system.cloud_notices import CloudNotice, MetadataService, watch

PATIENCE_SECONDS = 20.0
Answer = Callable[[str, str, dict[str, str]], "tuple[int, str, dict[str, str]]"]
"""(method, path, headers) to (status, text, headers)."""


@contextmanager
def service(answer: Answer) -> Iterator[str]:
    """Address of a local server in the place of a metadata service."""

    class Handler(BaseHTTPRequestHandler):
        def handle(self) -> None:
            with suppress(ConnectionError):  # a watcher that ends, or loses patience, waits for no answer
                super().handle()

        def do_GET(self) -> None:
            status, text, headers = answer(
                self.command, self.path, {k.lower(): v for k, v in self.headers.items()}
            )
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        do_PUT = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _notices_of(cloud: str, answer: Answer, number: int = 1) -> list[CloudNotice]:
    notices: queue.Queue[CloudNotice] = queue.Queue()
    with service(answer) as address:
        watch([MetadataService(cloud, address, poll_seconds=0.01)], notices.put, lambda _: None)  # type: ignore[arg-type]
        return [notices.get(timeout=PATIENCE_SECONDS) for _ in range(number)]


def _seconds_from_now(seconds: float) -> datetime:
    return datetime.now(timezone.utc) + timedelta(seconds=seconds)


def test_an_aws_notice_is_reported_once_with_a_renewed_token() -> None:
    """AWS: an expired token is renewed, a notice is reported once, a rebalance recommendation is not certain."""
    tokens: list[str] = []
    when = _seconds_from_now(120).strftime("%Y-%m-%dT%H:%M:%SZ")

    def answer(method: str, path: str, headers: dict[str, str]) -> tuple[int, str, dict[str, str]]:
        if path == "/latest/api/token":
            assert (method, headers["x-aws-ec2-metadata-token-ttl-seconds"]) == ("PUT", "21600")
            tokens.append(f"token-{len(tokens)}")
            return 200, tokens[-1], {}
        if headers.get("x-aws-ec2-metadata-token") != "token-1":
            return 401, "", {}
        if path == "/latest/meta-data/spot/instance-action":
            return 200, json.dumps({"action": "terminate", "time": when}), {}
        assert path == "/latest/meta-data/events/recommendations/rebalance"
        return 200, json.dumps({"noticeTime": when}), {}

    action, rebalance = _notices_of("aws", answer, 2)
    assert action.certain
    assert 100 < action.seconds <= 120
    assert "terminate" in action.text
    assert not rebalance.certain


def test_gcp_is_waited_for_until_it_changes() -> None:
    """GCP: requests wait for a change of the known etag."""
    paths: list[str] = []

    def answer(method: str, path: str, headers: dict[str, str]) -> tuple[int, str, dict[str, str]]:
        assert headers["metadata-flavor"] == "Google"
        if "maintenance-event" in path:
            return 200, "NONE", {"ETag": "m"}
        paths.append(path)
        return 200, "TRUE" if "last_etag=first" in path else "FALSE", {"ETag": "first"}

    (event,) = _notices_of("gcp", answer)
    assert event.seconds == 30
    assert paths[0] == "/computeMetadata/v1/instance/preempted"
    assert paths[1].endswith("?wait_for_change=true&last_etag=first&timeout_sec=60")


def test_azure_events_of_other_machines_are_no_notices() -> None:
    """Azure: events of other machines and harmless events are no notices."""
    events = [
        {"EventId": "1", "EventType": "Preempt", "Resources": ["other"], "NotBefore": ""},
        {"EventId": "2", "EventType": "Freeze", "Resources": ["mine"], "NotBefore": ""},
        {
            "EventId": "3",
            "EventType": "Preempt",
            "Resources": ["mine"],
            "NotBefore": format_datetime(_seconds_from_now(60), usegmt=True),
        },
    ]

    def answer(method: str, path: str, headers: dict[str, str]) -> tuple[int, str, dict[str, str]]:
        assert headers["metadata"] == "true"
        if path.startswith("/metadata/instance/compute/name"):
            return 200, "mine", {}
        assert path == "/metadata/scheduledevents?api-version=2020-07-01"
        return 200, json.dumps({"DocumentIncarnation": 1, "Events": events}), {}

    (event,) = _notices_of("azure", answer)
    assert (event.key, event.text) == ("3", "Azure: Preempt")
    assert 40 < event.seconds <= 60


@pytest.mark.parametrize("cloud", ["aws", "azure", "gcp"])
def test_an_unusable_answer_is_reported_and_the_thread_goes_on(cloud: str) -> None:
    """An unusable answer is reported and does not end the thread."""
    messages: queue.Queue[str] = queue.Queue()

    def answer(method: str, path: str, headers: dict[str, str]) -> tuple[int, str, dict[str, str]]:
        return 500 if cloud == "gcp" else 200, "[[", {}

    def reject(event: CloudNotice) -> None:
        raise AssertionError(event)

    with service(answer) as address:
        watch([MetadataService(cloud, address, 0.01)], reject, messages.put)  # type: ignore[arg-type]
        assert cloud in messages.get(timeout=PATIENCE_SECONDS)


def test_a_cloud_that_is_not_known_is_refused() -> None:
    """An unknown cloud is refused by its name."""
    with pytest.raises(ValueError, match="'ibm'"):
        MetadataService("ibm")  # type: ignore[arg-type]
