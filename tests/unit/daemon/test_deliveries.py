"""Messages to `alert.notify` and pings to `alert.ping`: mail, Slack's format, a webhook, healthchecks, failures and secrets."""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import uuid
from collections.abc import Awaitable, Callable
from email import message_from_bytes
from email.header import decode_header, make_header
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog
import trio
import trio.testing
from support.ci import needs
from support.local_servers import MailServer, serving
from support.until import until_async

from ciuic.config import AlertConfig, load_config
from ciuic.config.keys import shown
from ciuic.daemon.base.alert_hook import NOTIFY_MODULE, AlertNotice, Deliveries, message_of
from ciuic.daemon.base.events import Alerts, EventBus
from ciuic.daemon.base.notify_process import NotifyJob, ping_url
from ciuic.errors import ConfigError
from ciuic.protocol.control_types import SnapshotState
from ciuic.system.child_process import environment, module_command


class Web(ThreadingHTTPServer):
    """HTTP server that keeps what it gets; the first `failures` requests are refused."""

    daemon_threads = True

    def __init__(self, failures: int = 0, status: int = 500) -> None:
        super().__init__(("127.0.0.1", 0), _WebHandler)
        self.failures, self.status = failures, status
        self.requests: list[tuple[str, bytes]] = []

    @property
    def place(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"


class _WebHandler(BaseHTTPRequestHandler):
    server: Web

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.requests.append((self.path, body))
        fails = len(self.server.requests) <= self.server.failures
        self.send_response(self.server.status if fails else 200)
        self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, format: str, *args: object) -> None:
        pass


def deliver(job: NotifyJob) -> subprocess.CompletedProcess[bytes]:
    """Run the process for a job, without its pauses."""
    quick = msgspec.structs.replace(job, pauses_seconds=(0.0, 0.0))
    return subprocess.run(
        module_command(NOTIFY_MODULE), input=msgspec.json.encode(quick), capture_output=True, check=False,
        env=environment(), cwd="/", timeout=60,
    )  # fmt: skip


def needs_apprise() -> None:
    needs("" if importlib.util.find_spec("apprise") else "apprise is not installed")


NOTICE = AlertNotice(
    event="alert_raised", time="2026-11-26T09:00:00+00:00", host="gpu1", key="space", severity="problem",
    message="the store's file system has 1 GiB free", hint="ciuic prune",
)  # fmt: skip


def test_a_mail_has_what_happened_and_what_to_do() -> None:
    """A real SMTP session carries the message with its hint."""
    needs_apprise()

    with serving(MailServer()) as mail:
        port = mail.server_address[1]
        url = f"mailto://127.0.0.1:{port}?from=ciuic@example.org&to=ops@example.org&mode=insecure&format=text"
        done = deliver(msgspec.structs.replace(message_of(NOTICE), urls=(url,)))
        assert (done.returncode, done.stdout + done.stderr) == (0, b"")
    (data,) = mail.mails
    found = message_from_bytes(data)
    assert (
        str(make_header(decode_header(found["Subject"]))) == "[gpu1] the store's file system has 1 GiB free"
    )
    parts = [part for part in found.walk() if part.get_content_type() == "text/plain"]
    text = parts[0].get_payload(decode=True)
    assert isinstance(text, bytes)
    for expected in (b"has 1 GiB free", b"ciuic prune", b"host gpu1"):
        assert expected in text


def test_a_subject_says_what_happened() -> None:
    """The subject is one line, cut at a word, also for an alert that is over."""
    long = msgspec.structs.replace(NOTICE, message="a\nname " + "word " * 40, event="alert_cleared")
    title = message_of(long).title
    assert title.startswith("[gpu1] over: a\\nname word")
    assert title.endswith("word …")
    assert len(title) < 120
    unbroken = msgspec.structs.replace(NOTICE, message="x" * 500)
    assert message_of(unbroken).title == f"[gpu1] {'x' * 90} …"


def test_a_webhook_and_a_hook_of_slacks_format_get_the_message() -> None:
    """The webhook has title, text and kind; Mattermost's hook, of Slack's format, has the text."""
    needs_apprise()
    with serving(Web()) as web:
        urls = (f"json://{web.place}/hook", f"mmost://{web.place}/abcdef0123456789")
        done = deliver(msgspec.structs.replace(message_of(NOTICE), urls=urls))
        assert (done.returncode, done.stdout + done.stderr) == (0, b"")
    found = {path: json.loads(body) for path, body in web.requests}
    assert (found["/hook"]["title"], found["/hook"]["type"]) == (
        "[gpu1] the store's file system has 1 GiB free",
        "failure",
    )
    assert "has 1 GiB free" in found["/hook"]["message"]
    assert "has 1 GiB free" in found["/hooks/abcdef0123456789"]["text"]


def test_a_place_that_failed_is_tried_again_alone() -> None:
    """Where the second try delivers, the status is 0; a place that has the message gets it once."""
    needs_apprise()
    with serving(Web(failures=1)) as failing, serving(Web()) as sound:
        urls = (f"json://{failing.place}/", f"json://{sound.place}/")
        assert deliver(NotifyJob(urls=urls, title="t", text="x")).returncode == 0
        assert (len(failing.requests), len(sound.requests)) == (2, 1)


def test_no_secret_is_printed() -> None:
    """What fails is named by its number and scheme."""
    needs_apprise()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    urls = (f"json://user:s3cret@127.0.0.1:{port}/s3cret", "nothing://s3cret")
    done = deliver(NotifyJob(urls=urls, title="t", text="x"))
    assert done.returncode == 1
    assert b"s3cret" not in done.stdout + done.stderr
    assert b"notify: alert.notify[0] (json): apprise could not deliver" in done.stderr
    assert b"alert.notify[1] (nothing): apprise does not take this URL" in done.stderr
    done = deliver(NotifyJob(ping=f"http://127.0.0.1:{port}/s3cret"))
    assert (done.returncode, done.stderr) == (1, b"notify: alert.ping: Connection refused\n")


def test_the_urls_of_a_check() -> None:
    """State and run id are where healthchecks.io expects them; the run id is that of the snapshot."""
    start, success, fail = (
        ping_url("https://hc/ping/u/?a=b", state, "cs-1") for state in ("start", "success", "fail")
    )
    run = start.partition("rid=")[2]
    assert uuid.UUID(run)
    assert (start, success, fail) == (
        f"https://hc/ping/u/start?a=b&rid={run}",
        f"https://hc/ping/u?a=b&rid={run}",
        f"https://hc/ping/u/fail?a=b&rid={run}",
    )
    assert ping_url("https://hc/u", "start", "cs-2") != ping_url("https://hc/u", "start", "cs-1")


def test_a_redirect_of_a_check_is_not_followed() -> None:
    """The address of a check is a secret; a redirect could lead it elsewhere."""
    with serving(Web(failures=9, status=302)) as web:
        done = deliver(NotifyJob(ping=f"http://{web.place}/u"))
        assert (done.returncode, done.stderr) == (1, b"notify: alert.ping: status 302\n")
        assert {path.partition("?")[0] for path, _ in web.requests} == {"/u"}


def follow(
    settings: AlertConfig, story: Callable[[Alerts, EventBus], Awaitable[None]]
) -> tuple[list[str], list[dict[str, Any]]]:
    """Run deliveries beside a story, and return the keys of the standing alerts and the log."""
    events = EventBus(lambda: 0)
    alerts = Alerts(events, lambda: 0)
    deliveries = Deliveries(lambda: settings, "gpu1", {}, alerts)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(deliveries.run, events)
            await trio.testing.wait_all_tasks_blocked()
            await story(alerts, events)
            nursery.cancel_scope.cancel()

    with structlog.testing.capture_logs() as logs:
        trio.run(main)
    return [alert.key for alert in alerts.standing()], [dict(entry) for entry in logs]


def test_each_snapshot_is_pinged() -> None:
    """A snapshot that is committed and one that failed are a start and an end each."""
    with serving(Web()) as web:

        async def story(alerts: Alerts, events: EventBus) -> None:
            for number, kind in enumerate(("cut", "committed", "cut", "failed")):
                state = SnapshotState(id=f"cs-{number // 2}", state="failed", error="no space", roots=["/r"])
                events.emit(f"snapshot_{kind}", snapshot=state)
            await until_async(lambda: len(web.requests) == 4)

        keys, _ = follow(AlertConfig(ping=f"http://{web.place}/u"), story)
    assert keys == []
    paths = [path.partition("?")[0] for path, _ in web.requests]
    assert paths == ["/u/start", "/u", "/u/start", "/u/fail"]
    runs = [path.partition("rid=")[2] for path, _ in web.requests]
    assert (runs[0] == runs[1], runs[2] == runs[3], runs[0] == runs[2]) == (True, True, False)
    assert web.requests[3][1] == b"cs-1 /r: no space"


def test_a_message_that_is_not_delivered_is_an_alert(monkeypatch: pytest.MonkeyPatch) -> None:
    """The alert stands until the next message is delivered; the URL is in no log."""
    with serving(Web(failures=4, status=404)) as web:

        async def story(alerts: Alerts, events: EventBus) -> None:
            committed = SnapshotState(id="cs-1", state="committed")
            events.emit("snapshot_committed", snapshot=committed)
            await until_async(lambda: "notify:ping" in alerts)
            events.emit("snapshot_committed", snapshot=committed)
            await until_async(lambda: "notify:ping" not in alerts)

        monkeypatch.setattr("ciuic.daemon.base.alert_hook._PAUSES_SECONDS", (0.0, 0.0, 0.0))
        keys, logs = follow(AlertConfig(ping=f"http://{web.place}/s3cret"), story)
    assert keys == []
    assert [entry["event"] for entry in logs] == ["message_not_sent", "message_sent"]
    assert "s3cret" not in str(logs)


def test_configuration_hides_and_checks_the_urls(tmp_path: Path) -> None:
    """Neither `config show` nor an error has a URL."""
    file = tmp_path / "c.toml"
    file.write_text('[alert]\nnotify = ["json://u:s3cret@h"]\nping = "https://h/s3cret"\n')
    rows = {row.key: row.value for row in shown(load_config(file))}
    assert (rows["alert.notify"], rows["alert.ping"]) == ("(set)", "(set)")
    for line in ('notify = "json://s3cret"', 'notify = ["s3cret"]', 'ping = "ftp://s3cret"', "ping = 5"):
        file.write_text(f"[alert]\n{line}\n")
        with pytest.raises(ConfigError) as caught:
            load_config(file)
        assert "s3cret" not in str(caught.value)
