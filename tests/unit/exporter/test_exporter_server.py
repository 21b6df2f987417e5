"""Tests of the exporter: what a scrape answers, and what callers cannot do to it."""

from __future__ import annotations

import os
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from ciuic.errors import Busy
from ciuic.exporter import server as exporter
from ciuic.exporter.server import ExporterServer, metrics_text
from ciuic.protocol import metrics_file
from ciuic.protocol.metrics_file import MAX_AGE_SECONDS, METRICS_NAME, read_metrics, write_metrics

TEXT = b"# TYPE ciuic_store_bytes gauge\nciuic_store_bytes 7.0\n"


@pytest.fixture
def metrics_path(tmp_path: Path) -> Path:
    path = tmp_path / METRICS_NAME
    write_metrics(path, TEXT)
    return path


@pytest.fixture
def port(metrics_path: Path) -> Iterator[int]:
    with ExporterServer("127.0.0.1:0", metrics_path) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def get(port: int, target: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{target}", timeout=10) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_a_scrape_has_the_metrics_of_the_daemon(port: int) -> None:
    """The answer has what the daemon wrote, and says that the daemon is up."""
    status, body = get(port, "/metrics")
    assert status == 200
    assert body.endswith(TEXT)
    assert b"\nciuic_up 1\n" in body


def test_nothing_else_is_there(port: int) -> None:
    """Other paths are not found, and other methods do nothing."""
    assert get(port, "/")[0] == 200
    assert get(port, "/v1/stop")[0] == 404
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", data=b"x", method="POST")
    with pytest.raises(urllib.error.HTTPError, match="501"):
        urllib.request.urlopen(request, timeout=10)


@pytest.mark.parametrize("how", ["absent", "old", "foreign", "link"])
def test_a_daemon_that_is_gone_leaves_no_figures(
    metrics_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a present document of the daemon the answer is `ciuic_up 0`, without figures of the past."""
    if how == "old":
        later = time.clock_gettime(time.CLOCK_BOOTTIME) + MAX_AGE_SECONDS + 1
        monkeypatch.setattr(metrics_file, "_boot_seconds", lambda: later)
    elif how == "foreign":
        metrics_path.write_bytes(TEXT)
    else:
        metrics_path.unlink()
        if how == "link":
            (metrics_path.parent / "elsewhere").write_bytes(TEXT)
            metrics_path.symlink_to("elsewhere")
    body = metrics_text(metrics_path)
    assert b"\nciuic_up 0\n" in body
    assert b"ciuic_store_bytes" not in body


def test_readers_see_a_whole_document_or_none(metrics_path: Path) -> None:
    """While the file is replaced, a reader sees one of its versions whole."""
    texts = [b"a 1\n" * 5000, b"b 2\n" * 20000]
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            for text in texts:
                write_metrics(metrics_path, text)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = {read_metrics(metrics_path).text for _ in range(300)}
    finally:
        stop.set()
        writer.join()
    assert seen <= {TEXT, *texts}
    assert os.stat(metrics_path).st_mode & 0o777 == 0o644


def test_callers_that_say_nothing_do_not_keep_others_out(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers that say nothing are cut off after their time."""
    monkeypatch.setattr(exporter, "_CALLER_SECONDS", 0.5)
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(exporter.MAX_CALLERS)]
    try:
        # The server cuts each of them off by itself.
        for caller in silent:
            caller.settimeout(30)
            assert caller.recv(1) == b""
    finally:
        for caller in silent:
            caller.close()
    assert get(port, "/metrics")[0] == 200


def test_more_callers_than_it_serves_are_closed(port: int) -> None:
    """The server holds a limited number of connections; a further one takes the place of the oldest."""
    callers = [socket.create_connection(("127.0.0.1", port)) for _ in range(exporter.MAX_CALLERS + 1)]
    try:
        callers[0].settimeout(30)
        assert callers[0].recv(1) == b""
    finally:
        for caller in callers:
            caller.close()


def test_slow_callers_lose_no_scrape(port: int) -> None:
    """Every scrape is answered while far more callers than there is room for have begun a request each."""
    callers = []
    try:
        for number in range(200):
            callers.append(socket.create_connection(("127.0.0.1", port)))
            callers[-1].sendall(b"GET /metrics HTTP/1.1\r\nX: ")
            if number % 40 == 39:
                assert get(port, "/metrics")[0] == 200
    finally:
        for caller in callers:
            caller.close()


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *((host, 200) for host in ("localhost", "LocalHost:9847", "127.0.0.1:9847", "[::1]:9847", "[::1]")),
        *((host, 421) for host in ("rebound.example", "rebound.example:9847", "localhost.example", "")),
    ],
)
def test_a_name_of_the_web_gets_no_metrics(port: int, host: str, status: int) -> None:
    """At a loopback address a request for any other name, as of a page whose name was led here, is refused."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Host": host})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            found, body = answer.status, answer.read()
    except urllib.error.HTTPError as error:
        found, body = error.code, error.read()
    assert (found, b"ciuic_up" in body) == (status, status == 200)


def test_an_address_in_use_is_named(metrics_path: Path) -> None:
    """The error for an address at which another process listens names it."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        place = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(Busy, match=place):
            ExporterServer(place, metrics_path)
