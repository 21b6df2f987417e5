"""The page of `ciuic web` in front of a private daemon, and a client that does what a browser does with it."""

from __future__ import annotations

import html
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote_from_bytes, urlencode

from support.live import Commands
from support.site import CHECKOUT, Site
from support.until import until


class Answer(NamedTuple):
    """Answer of the page."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        """Body as text."""
        return self.body.decode()

    @property
    def csrf(self) -> str:
        """Token of the forms on the page."""
        found = re.search(r'name="csrf" value="([0-9a-f]+)"', self.text)
        assert found is not None, self.text
        return found.group(1)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=60)
        self._path = path

    def connect(self) -> None:
        """Connect to the Unix socket."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(60)
        self.sock.connect(os.fspath(self._path))


class WebPage:
    """A page that runs."""

    def __init__(self, site: Site, options: list[str], global_options: list[str]) -> None:
        self.site = site
        self._global_options = global_options
        self.socket = site.top / f"run-web{'-remote' * bool(global_options)}/web.sock"
        self.log = site.top / "web.log"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(CHECKOUT),
            "XDG_STATE_HOME": str(site.top / "state"),
        }
        self.ciuic = [sys.executable, "-m", "ciuic", "--config", str(site.config)]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [*self.ciuic, *global_options, "web", "--listen", f"127.0.0.1:{self.port}", *options],
                env=self.environment, cwd=site.top, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        self.cookie = ""

    def wait(self) -> None:
        """Wait until it answers."""

        def answers() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            try:
                return self.ask("/static/page.css").status == 200
            except OSError:
                return False

        until("an answer of the page", answers)

    def front(self) -> int:
        """Return the process that faces browsers."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        children = [pid for task in tasks for pid in task.read_text().split()]
        return next(
            int(pid) for pid in children if b"front_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run ciuic on the host."""
        return Commands.run(
            "--config", str(self.site.config), *words, env=self.environment, cwd=self.site.top
        )

    def ask(
        self,
        target: str,
        form: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        over_unix: bool = False,
        method: str | None = None,
    ) -> Answer:
        """Ask as a browser would; ``headers`` replace its own."""
        connection = (
            _UnixConnection(self.socket)
            if over_unix
            else http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        )
        sent = {"Host": f"127.0.0.1:{self.port}", "Cookie": self.cookie}
        body = None
        if form is not None:
            body = urlencode(form)
            sent |= {
                "Content-Type": "application/x-www-form-urlencoded",
                "Origin": f"http://127.0.0.1:{self.port}",
                "Sec-Fetch-Site": "same-origin",
                "Sec-Fetch-Mode": "navigate",
            }
        sent |= headers or {}
        try:
            connection.request(
                method or ("GET" if form is None else "POST"),
                target,
                body,
                {k: v for k, v in sent.items() if v},
            )
            answer = connection.getresponse()
            return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def link(self) -> str:
        """Return a login link's address on the page."""
        made = self.run(*self._global_options, "web", "--login")
        assert made.returncode == 0, made.stderr
        return made.stdout.strip().removeprefix(f"http://127.0.0.1:{self.port}")

    def log_in(self) -> None:
        """Log in by a link, as a browser does."""
        link = self.link()
        assert "Log in" in self.ask(link).text
        answer = self.ask("/login", {"token": link.rpartition("=")[2]})
        assert answer.status == 303, answer.text
        self.cookie = answer.headers["set-cookie"].partition(";")[0]

    def act(self, kind: str, query: str = "", **fields: str) -> Answer:
        """Send the form of an action, and return the page of its end; to undo, the id is typed."""
        if kind == "undo":
            fields["typed"] = query.removeprefix("s=").partition("&")[0]
        csrf = self.ask("/snapshots").csrf
        answer = self.ask(f"/act?{query}", {"csrf": csrf, "kind": kind, **fields})
        return answer if answer.status != 303 else self.follow(answer)

    def follow(self, answer: Answer) -> Answer:
        """Return the page that an answer leads to, when the action on it has ended."""
        assert answer.status == 303, answer.text
        found: list[Answer] = []

        def done() -> bool:
            found.append(self.ask(answer.headers["location"]))
            return "data-action" not in found[-1].text

        until("the end of the action", done)
        return found[-1]


def place(path: Path | bytes, snapshot: str = "latest") -> str:
    """Return the query of a path."""
    return f"s={snapshot}&p={quote_from_bytes(os.fsencode(path))}"


@contextmanager
def web_page(site: Site, *options: str, global_options: tuple[str, ...] = ()) -> Iterator[WebPage]:
    """Yield a page that does not outlive the block."""
    page = WebPage(site, list(options), list(global_options))
    try:
        page.wait()
        yield page
    finally:
        page.process.send_signal(signal.SIGTERM)
        try:
            page.process.wait(60)
        except subprocess.TimeoutExpired:
            page.process.kill()
            page.process.wait()


@contextmanager
def open_page(site: Site, *options: str) -> Iterator[WebPage]:
    """Yield a page with a session."""
    with web_page(site, *options) as page:
        page.log_in()
        yield page


def href(text: str, path: str) -> str:
    """Return the first link on a page that leads to the path."""
    return _first(text, "href", path)


def action(text: str, path: str) -> str:
    """Return the first target of a form on a page that is the path."""
    return _first(text, "action", path)


def _first(text: str, attribute: str, path: str) -> str:
    found = re.search(rf'{attribute}="({path}\?[^"]*)"', text)
    assert found is not None, text
    return html.unescape(found.group(1))
