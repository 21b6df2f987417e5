"""Services that lie: places of messages that answer without end, and trackers whose ids no snapshot could hold. And core files, which had keys in them."""

from __future__ import annotations

import importlib.util
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.ci import needs
from support.local_servers import MailServer, serving
from support.second_user import MADE_UP
from support.tiny_training import Model

from ciuic import SnapshotManager
from ciuic.daemon.base.alert_hook import NOTIFY_MODULE
from ciuic.daemon.base.notify_process import EXIT_NOT_DELIVERED, NotifyJob
from ciuic.errors import NotFound, NotPermitted
from ciuic.system.child_process import environment, module_command

needs_apprise = pytest.mark.usefixtures("_apprise")


@pytest.fixture
def _apprise() -> None:
    needs("" if importlib.util.find_spec("apprise") else "apprise is not installed")


class Endless(ThreadingHTTPServer):
    """Answers each request without end; `most_sent` bytes at most, that a reader without bound ends some time."""

    daemon_threads = True
    most_sent = 2 << 30

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _EndlessHandler)
        self.asked, self.may_answer = threading.Event(), threading.Event()
        self.sent: list[int] = []


class _EndlessHandler(BaseHTTPRequestHandler):
    server: Endless

    def do_POST(self) -> None:
        self.server.asked.set()
        assert self.server.may_answer.wait(60)
        self.send_response(200)
        self.end_headers()
        sent, piece = 0, b"x" * (1 << 20)
        try:
            while sent < self.server.most_sent:
                sent += self.wfile.write(piece)
        except OSError:
            pass
        self.server.sent.append(sent)

    def log_message(self, *_: object) -> None:
        pass


@needs_apprise
def test_a_place_that_answers_without_end_takes_neither_memory_nor_powers() -> None:
    """Root's message is sent by nobody, who may read, with bounded memory; the message counts as not delivered."""
    with serving(Endless()) as place:
        job = NotifyJob(urls=(f"json://127.0.0.1:{place.server_address[1]}/",), title="t", text="x")
        process = subprocess.Popen(
            module_command(NOTIFY_MODULE),
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(),
            cwd="/",
        )
        with process:
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(job))
            process.stdin.close()
            assert place.asked.wait(60)
            status = Path(f"/proc/{process.pid}/status").read_text()
            place.may_answer.set()
            assert process.wait(60) == EXIT_NOT_DELIVERED
            assert process.stderr is not None
            assert process.stderr.read() == b"notify: alert.notify[0] (json): apprise could not deliver\n"
    assert max(place.sent) < 512 << 20
    uids = re.findall(r"^Uid:\s+(.+)$", status, re.MULTILINE)
    reads_only = f"{1 << 2:016x}"
    assert uids == ["\t".join(["65534"] * 4)]
    assert re.findall(r"^Cap(?:Prm|Eff|Bnd):\s+(.+)$", status, re.MULTILINE) == [reads_only] * 3
    assert re.search(r"^NoNewPrivs:\s+1$", status, re.MULTILINE)


@needs_apprise
@pytest.mark.parametrize("form", ["", "&format=html"])
def test_names_that_users_chose_are_no_html_in_a_mail(form: str) -> None:
    """A mail is plain text, and one that is sent as HTML shows a tag as text."""
    with serving(MailServer()) as mail:
        url = f"mailto://127.0.0.1:{mail.server_address[1]}?from=a@example.org&to=b@example.org&mode=insecure{form}"
        job = NotifyJob(urls=(url,), title="t", text="training <img src=http://example.org/x>")
        done = subprocess.run(
            module_command(NOTIFY_MODULE), input=msgspec.json.encode(job), capture_output=True, check=False,
            env=environment(), cwd="/", timeout=60,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, b"")
    text = b"".join(mail.mails)
    _, is_html, html = text.partition(b"text/html")
    assert bool(is_html) == bool(form)
    assert b"<img" not in html
    assert (b"&lt;img" in html) == bool(form)


class _Liar:
    """Tracker whose service gave it these ids."""

    name = "liar"

    def __init__(self, ids: Mapping[str, str]) -> None:
        self._ids = ids
        self.asked = threading.Event()

    def run(self) -> Mapping[str, str]:
        return self._ids

    def log(self, save: object) -> None:
        self.asked.set()
        raise ConnectionError("\x1b[31mno\n" + "x" * 1_000_000)


@pytest.mark.parametrize(
    "ids",
    [
        {"run": "r" * 3_000_000},
        {"run": "\ud800"},
        {"run": "r"} | {f"k{number}": "v" for number in range(1000)},
    ],
    ids=["long", "surrogate", "many"],
)
def test_ids_that_no_snapshot_could_hold_cost_no_save(ids: dict[str, str], tmp_path: Path) -> None:
    """The save is made, without the tracker."""
    with SnapshotManager(tmp_path / "snapshots") as manager:
        manager.track(_Liar(ids))
        assert manager.save_snapshot(Model(), wait=True)
        (saved,) = manager.list_snapshots()
    assert saved.facts.trackers == {}


def test_what_a_tracker_quotes_of_its_server_is_short_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has one line of printable characters of it."""
    liar = _Liar({"run": "r"})
    with SnapshotManager(tmp_path / "snapshots") as manager:
        manager.track(liar)
        manager.save_snapshot(Model(), wait=True)
        assert liar.asked.wait(60)
    assert "ConnectionError: \\x1b[31mno\\nxxx" in caplog.text
    assert max(map(len, caplog.messages)) < 1000


@pytest.mark.parametrize("place", ["relative", "s3://bucket/x", "/nul\0", "/absent/\x1b[31m"])
def test_a_repository_that_only_a_server_names_is_one_of_this_user(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`latest` opens no path that is not absolute, nor another user's repository."""
    tracking: Any = pytest.importorskip("ciuic.integrations.mlflow")
    named = {"ciuic.repository": place}

    class Client:
        def __init__(self, _: object) -> None:
            pass

        def get_run(self, _: str) -> Any:
            return type("Run", (), {"data": type("Data", (), {"tags": named})})

    monkeypatch.setattr(tracking.mlflow, "MlflowClient", Client)
    with pytest.raises(NotFound) as refused:
        tracking.latest("r")
    assert str(refused.value).isprintable()
    SnapshotManager(tmp_path / "snapshots").close()
    os.chown(tmp_path / "snapshots", MADE_UP.uid, MADE_UP.gid)
    named["ciuic.repository"] = str(tmp_path / "snapshots")
    with pytest.raises(NotPermitted, match="another user"):
        tracking.latest("r")


def _unlimited() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def test_a_command_that_holds_keys_leaves_no_core_file(tmp_path: Path) -> None:
    """Neither a file nor a handler of dumps gets its memory; a program that is started from it can raise the limit."""
    script = (
        "import os, resource, signal\n"
        "from ciuic.system.privileges import no_core_files\n"
        "no_core_files()\n"
        "assert resource.getrlimit(resource.RLIMIT_CORE) == (1, resource.RLIM_INFINITY)\n"
        "os.kill(os.getpid(), signal.SIGABRT)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        check=False,
        timeout=60,
        preexec_fn=_unlimited,
    )
    assert done.returncode == -signal.SIGABRT
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("module", ["fleet", "remote"])
def test_commands_for_remotes_and_fleets_limit_core_files(module: str) -> None:
    """They do so before they read a key."""
    code = (
        "import resource\n"
        f"from ciuic.cli.commands.{module} import command\n"
        "try:\n    command(['status', '--help'])\n"
        "except BaseException:\n    print(resource.getrlimit(resource.RLIMIT_CORE)[0])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=False, timeout=60, cwd="/",
        preexec_fn=_unlimited,
    )  # fmt: skip
    assert done.stdout.split()[-1:] == [b"1"], done
