"""The page behind nginx and Caddy, with the configurations that etc/web has: who calls, forms, and events as they come."""

from __future__ import annotations

import base64
import http.client
import os
import pwd
import shutil
import signal
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.site import CHECKOUT, Site, site_in
from support.until import until
from support.web_page import WebPage, web_page

pytestmark = pytest.mark.mount
_HOST = "gpu07.example.org"


class ProxiedSite(Site):
    """Site whose page has a proxy before it."""

    user = "nobody"

    def write_config(self) -> None:
        super().write_config()
        with open(self.config, "a") as config:
            config.write(
                f'[web]\nhosts = ["{_HOST}"]\nproxy_user = "{self.user}"\nactions = true\ndecide_group = "nogroup"\n'
            )


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _nginx(top: Path, page: WebPage, port: int) -> list[str]:
    """Return the command of nginx with the shipped virtual host."""
    text = (CHECKOUT / "etc/web/nginx.conf").read_text()
    for old, new in (
        ("/run/ciuic-web/web.sock", str(page.socket)),
        ("listen 443 ssl;", f"listen 127.0.0.1:{port} ssl;"),
        ("/etc/ssl/certs/gpu07.example.org.pem", str(top / "cert.pem")),
        ("/etc/ssl/private/gpu07.example.org.key", str(top / "key.pem")),
        ("/etc/nginx/ciuic.users", str(top / "users")),
    ):
        assert old in text
        text = text.replace(old, new)
    hashed = subprocess.run(
        ["openssl", "passwd", "-apr1", "secret"], capture_output=True, text=True, check=True
    ).stdout.strip()
    (top / "users").write_text(f"anna:{hashed}\n")
    paths = "".join(
        f"{name}_temp_path {top}/{name};\n" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (top / "nginx.conf").write_text(
        f"user nobody nogroup; daemon off; pid {top}/nginx.pid; error_log {top}/error.log; events {{}}\n"
        f"http {{ access_log off; {paths} {text} }}\n"
    )
    return ["nginx", "-c", str(top / "nginx.conf"), "-e", str(top / "error.log")]


def _caddy(top: Path, page: WebPage, port: int) -> list[str]:
    """Return the command of Caddy with the shipped site."""
    text = (CHECKOUT / "etc/web/Caddyfile").read_text()
    hashed = subprocess.run(
        ["caddy", "hash-password", "--plaintext", "secret"], capture_output=True, text=True, check=True,
        env={**os.environ, "HOME": str(top)},
    ).stdout.strip()  # fmt: skip
    for old, new in (
        ("/run/ciuic-web/web.sock", str(page.socket)),
        (f"{_HOST} {{", f"https://{_HOST}:{port} {{\n\tbind 127.0.0.1\n\ttls {top}/cert.pem {top}/key.pem"),
        ("$2a$14$REPLACE.WITH.THE.OUTPUT.OF.caddy.hash-password", hashed),
    ):
        assert old in text
        text = text.replace(old, new)
    (top / "Caddyfile").write_text(f"{{\n\tadmin off\n\tauto_https disable_redirects\n}}\n{text}")
    for name in ("Caddyfile", "key.pem"):
        os.chown(top / name, pwd.getpwnam("nobody").pw_uid, -1)
    become = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"]
    return [*become, "caddy", "run", "--config", str(top / "Caddyfile"), "--adapter", "caddyfile"]


@pytest.fixture(params=[_nginx, _caddy], ids=["nginx", "caddy"])
def proxied(request: pytest.FixtureRequest, short_tmp: Path) -> Iterator[tuple[WebPage, int]]:
    command: Callable[[Path, WebPage, int], list[str]] = request.param
    name = command.__name__[1:]
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    for directory in (short_tmp, short_tmp.parent):
        directory.chmod(0o755)
    made = ProxiedSite(short_tmp)
    with site_in(short_tmp):
        made.root("data")
        made.start()
        # Otherwise it may come between ours, or between two writes.
        until("the first snapshot", made.has_first)
        try:
            made.snapshot()
            top = short_tmp / "proxy"
            top.mkdir()
            shutil.chown(top, "nobody")
            subprocess.run(
                [
                    *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
                    *("-nodes", "-subj", f"/CN={_HOST}", "-keyout", top / "key.pem", "-out", top / "cert.pem"),
                ],
                check=True, capture_output=True,
            )  # fmt: skip
            with web_page(made) as page:
                port = _free_port()
                with open(top / "log", "wb") as log:
                    proxy = subprocess.Popen(
                        command(top, page, port), stdout=log, stderr=log, cwd=top,
                        env={**os.environ, "HOME": str(top)},
                    )  # fmt: skip
                try:
                    until("the proxy", lambda: proxy.poll() is not None or _listens(port))
                    assert proxy.poll() is None, (top / "log").read_text()
                    yield page, port
                finally:
                    proxy.send_signal(signal.SIGTERM)
                    proxy.wait(30)
        finally:
            made.stop()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def _asked(
    port: int, target: str, body: str | None = None, *, user: str = "anna", **headers: str
) -> Iterator[http.client.HTTPResponse]:
    """Ask through the proxy, and yield the answer."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    sent = {"Host": f"{_HOST}:{port}", **headers}
    if user:
        sent["Authorization"] = "Basic " + base64.b64encode(f"{user}:secret".encode()).decode()
    with (
        socket.create_connection(("127.0.0.1", port), timeout=60) as plain,
        context.wrap_socket(plain, server_hostname=_HOST) as sealed,
    ):
        connection = http.client.HTTPSConnection(_HOST)
        connection.sock = sealed
        connection.request("GET" if body is None else "POST", target, body, sent)
        with connection.getresponse() as answer:
            yield answer


def _ask(
    port: int, target: str, body: str | None = None, *, user: str = "anna", **headers: str
) -> tuple[int, str]:
    with _asked(port, target, body, user=user, **headers) as answer:
        return answer.status, answer.read().decode()


def test_who_calls_is_whom_the_proxy_knows(proxied: tuple[WebPage, int]) -> None:
    """Without an account the proxy answers; with one, the page knows the name, whatever header the browser sends; forms and events work."""
    page, port = proxied
    assert _ask(port, "/snapshots", user="")[0] == 401
    assert _ask(port, "/snapshots", user="eve")[0] == 401
    status, text = _ask(port, "/", **{"X-Remote-User": "root", "x-remote-user": "root"})
    assert status == 200
    assert "anna" in text
    assert "root</p>" not in text
    csrf = text.partition('name="csrf" value="')[2].partition('"')[0]
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    foreign = _ask(port, "/act", f"csrf={csrf}&kind=snapshot", **form, Origin="https://evil.example")
    assert foreign[0] == 403
    done = _ask(port, "/act", f"csrf={csrf}&kind=snapshot", **form, Origin=f"https://{_HOST}:{port}")
    assert done[0] == 303, done[1]
    assert page.run("log", "--json").stdout.count('"anna"')
    # The head comes before the first event, and the event at once: nothing waits for a buffer to fill.
    with _asked(port, "/events") as answer:
        assert b"event: hello" in b"".join(answer.readline() for _ in range(3))
        id_ = page.site.snapshot()
        while id_.encode() not in answer.readline():
            pass
