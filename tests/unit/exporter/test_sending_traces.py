"""Tests of the exporter's traces: what a receiver gets, and what a receiver that is away, slow or refuses does."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.otlp import Receiver, attributes, receiver
from support.until import until

from ciuic import __version__
from ciuic.errors import NotFound, UsageError
from ciuic.exporter import traces
from ciuic.exporter.traces import SpanSender, open_sender, read_headers
from ciuic.protocol.span_spool import SPANS_NAME, Span, append_spans, span_id, trace_id


def span(number: int, error: str = "") -> Span:
    return Span(
        repository="0f",
        snapshot=f"s{number}",
        start_ns=number,
        end_ns=number + 5,
        error=error,
        attributes={"ciuic.snapshot.files": 3, "ciuic.snapshot.roots": ["/a", "/b"]},
    )


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    return tmp_path / SPANS_NAME


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "_POLL_SECONDS", 0.02)
    monkeypatch.setattr(traces, "_MIN_PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(traces, "_REQUEST_SECONDS", 0.5)


class Running:
    """A sender in its thread, until the block ends."""

    def __init__(self, spool: Path, url: str, headers: dict[str, str] | None = None) -> None:
        send, self._end = open_sender(url, headers or {})
        self.sender = SpanSender(spool, spool.parent / "state", send)
        self._thread = threading.Thread(target=self.sender.run)

    def __enter__(self) -> SpanSender:
        self._thread.start()
        return self.sender

    def __exit__(self, *_: object) -> None:
        self.sender.stop()
        self._end()
        self._thread.join()


def snapshots(server: Receiver) -> list[str]:
    return [attributes(one)["ciuic.snapshot.id"] for one in server.spans]


def test_a_receiver_gets_the_spans(spool: Path) -> None:
    """Ids, times, status, attributes, resource and headers arrive, in protobuf."""
    append_spans(spool, [span(1), span(2, error="no space")])
    with receiver() as server, Running(spool, server.url, {"X-Token": "t"}) as sender:
        until("both spans", lambda: sender.sent == 2)
    first, second = server.spans
    assert first.trace_id == trace_id("0f", "s1").to_bytes(16, "big")
    assert first.span_id == span_id(span(1)).to_bytes(8, "big")
    assert (first.name, first.parent_span_id) == ("snapshot", b"")
    assert (first.start_time_unix_nano, first.end_time_unix_nano) == (1, 6)
    assert attributes(first)["ciuic.snapshot.roots"] == ["/a", "/b"]
    assert (first.status.code, second.status.code, second.status.message) == (0, 2, "no space")
    assert server.resources[0]["service.name"] == "ciuic"
    assert server.resources[0]["service.version"] == __version__
    assert server.headers[0]["X-Token"] == "t"


def test_a_restart_sends_nothing_twice(spool: Path) -> None:
    """What a receiver has taken is not sent again by the next process."""
    append_spans(spool, [span(1)])
    with receiver() as server:
        with Running(spool, server.url) as sender:
            until("the span", lambda: sender.sent == 1)
        append_spans(spool, [span(2)])
        with Running(spool, server.url) as sender:
            until("the next span", lambda: sender.sent == 1)
        assert snapshots(server) == ["s1", "s2"]


def test_a_process_that_dies_before_the_answer_sends_again(spool: Path) -> None:
    """A request that was taken while the process died is sent again, with the same ids: at least once."""
    append_spans(spool, [span(1)])
    with receiver() as server:
        send, end = open_sender(server.url, {})

        class Killed(BaseException):
            """Stands for SIGKILL after the receiver has the spans."""

        def killed(spans: Sequence[Span]) -> bool:
            send(spans)
            raise Killed

        with pytest.raises(Killed):
            SpanSender(spool, spool.parent / "state", killed).run()
        end()
        with Running(spool, server.url) as sender:
            until("the span", lambda: sender.sent == 1)
        first, again = server.spans
        assert first == again


@pytest.mark.parametrize("how", ["away", "503", "401", "silent", "redirects"])
def test_a_receiver_that_does_not_take_them_gets_them_later(spool: Path, how: str) -> None:
    """Spans wait in the spool, and reach a receiver that is itself again, once each and in order."""
    append_spans(spool, [span(1)])
    with receiver() as first:
        port = first.server_port
    with receiver() as elsewhere:
        if how == "away":
            running = Running(spool, f"http://127.0.0.1:{port}")
            with running as sender:
                until("a failure", lambda: sender.failed > 0)
                append_spans(spool, [span(2)])
                with receiver(port) as server:
                    until("both", lambda: sender.sent == 2)
                assert snapshots(server) == ["s1", "s2"]
            return
        with receiver() as server:
            if how == "silent":
                server.answers.clear()
            elif how == "redirects":
                server.status, server.location = 307, f"{elsewhere.url}/v1/traces"
            else:
                server.status = int(how)
            with Running(spool, server.url, {"X-Token": "t"}) as sender:
                until("a failure", lambda: sender.failed > 0)
                append_spans(spool, [span(2)])
                assert sender.sent == 0
                server.status = 200
                server.answers.set()
                until("both", lambda: sender.sent == 2)
            # Those that timed out may have been taken: at least once.
            assert list(dict.fromkeys(snapshots(server))) == ["s1", "s2"]
            assert elsewhere.headers == []


def test_what_is_never_taken_is_dropped_and_counted(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the time for one request, and beyond the spool's size, spans are dropped; the metrics count them."""
    monkeypatch.setattr(traces, "_GIVE_UP_SECONDS", 0.0)
    append_spans(spool, [span(1)])
    taken: list[str] = []

    def refuse_first(spans: Sequence[Span]) -> bool:
        if not taken and spans[0].snapshot == "s1":
            for number in range(2, 100):
                append_spans(spool, [span(number)], max_bytes=2000)
            taken.append("refused")
            return False
        taken.extend(one.snapshot for one in spans)
        return True

    sender = SpanSender(spool, spool.parent / "state", refuse_first)
    thread = threading.Thread(target=sender.run)
    thread.start()
    until("the newest", lambda: sender.sent + sender.dropped == 99)
    sender.stop()
    thread.join()
    assert taken[-1] == "s99"
    assert "s1" not in taken
    assert sender.dropped > 50
    assert f"\nciuic_exporter_spans_dropped_total {sender.dropped}\n" in sender.metrics_text()


def test_headers_come_from_a_file_or_a_credential(tmp_path: Path) -> None:
    """The unit's credential goes before the file; a line that is no header is named by its number and not shown."""
    own, unit = tmp_path / "own", tmp_path / "unit"
    own.write_text("# of the collector\nAuthorization: Bearer one\n\nX-Scope:two three \n")
    assert read_headers(own, {}) == {"Authorization": "Bearer one", "X-Scope": "two three"}
    unit.mkdir()
    (unit / "ciuic.otlp-headers").write_text("Authorization: Bearer two\n")
    assert read_headers(own, {"CREDENTIALS_DIRECTORY": str(unit)}) == {"Authorization": "Bearer two"}
    assert read_headers(None, {}) == {}
    with pytest.raises(NotFound, match="absent"):
        read_headers(tmp_path / "absent", {})
    own.write_text("X: y\nBearer-secret\n")
    with pytest.raises(UsageError, match="line 2") as caught:
        read_headers(own, {})
    assert "secret" not in str(caught.value)
