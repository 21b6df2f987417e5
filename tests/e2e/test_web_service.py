"""The page as a service under a real systemd: who is let in over its socket, and a restore through the overlay."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.ci import needs
from support.real_systemd import reason_against
from support.service_host import CONFIG, ServiceHost, service_host
from support.until import until

pytestmark = [pytest.mark.mount, pytest.mark.slow]
_ASK = """
import http.client, re, socket, sys
class Unix(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX); self.sock.settimeout(30); self.sock.connect("/run/ciuic-web/web.sock")
def ask(target, body=None, **headers):
    one = Unix("localhost")
    one.request("GET" if body is None else "POST", target, body, headers)
    answer = one.getresponse()
    return answer.status, answer.getheader("location"), answer.read().decode()
"""


@pytest.fixture
def host(short_tmp: Path) -> Iterator[ServiceHost]:
    needs(reason_against())
    with service_host(short_tmp) as one:
        yield one


def ask(host: ServiceHost, script: str, *, user: int = 0) -> str:
    become = f"import os, email.parser\nos.setgroups([]); os.setresgid({user}, {user}, {user}); os.setresuid({user}, {user}, {user})\n"
    return host("python3", "-c", _ASK + become + script)


@pytest.mark.parametrize("forbids", ["RestrictNamespaces=yes", "SystemCallFilter=~seccomp"])
def test_a_unit_that_forbids_the_protection_starts_no_page(host: ServiceHost, forbids: str) -> None:
    """Where the front cannot give up the network or filter its system calls, the service ends; it is not started again."""
    host.write(CONFIG, f'[repository]\npath = "{host.top}/repository"\n')
    host.write("/etc/systemd/system/ciuic-web.service.d/no.conf", f"[Service]\n{forbids}\n")
    host("systemctl", "daemon-reload")
    host("systemctl", "start", "ciuic-web")
    state = ("systemctl", "show", "-p", "ActiveState,ExecMainStatus", "--value", "ciuic-web")
    until("its end", lambda: host(*state).split() in (["failed", "7"], ["7", "failed"]))


def test_the_page_restores_through_the_overlay(host: ServiceHost) -> None:
    """Root is let in over the socket and restores; another user is not let in; a proxy's user is who the proxy says."""
    text = f'[repository]\npath = "{host.top}/repository"\n[[root]]\npath = "{host.top}/root"\n'
    host.write(CONFIG, f'{text}[web]\nactions = true\nproxy_user = "nobody"\nlook_group = "nogroup"\n')
    host("sh", "-c", "echo first > /srv/root/file")
    id_ = str(json.loads(host(str(host.program), "--config", CONFIG, "snapshot", "--wait", "--json"))["id"])
    host("sh", "-c", "echo second > /srv/root/file")
    host("systemctl", "start", "ciuic-web")
    until(
        "an answer",
        lambda: "200" in host("python3", "-c", _ASK + 'print(ask("/alerts")[0])', expect=None),
    )
    script = f"""
status, _, page = ask("/")
csrf = re.search(r'name="csrf" value="([0-9a-f]+)"', page).group(1)
status, where, page = ask("/act?s={id_}&p=/srv/root/file", f"csrf={{csrf}}&kind=restore&typed=file", **{{"Content-Type": "application/x-www-form-urlencoded"}})
assert status == 303, page
while "data-action" in (page := ask(where)[2]):
    pass
print("is done" in page)
"""
    assert ask(host, script).split() == ["True"]
    assert host("cat", "/srv/root/file") == "first\n"
    assert ask(host, 'print(ask("/snapshots")[0])', user=12345).split() == ["401"]
    proxied = 'print(ask("/snapshots")[0], "anna" in ask("/snapshots", **{"X-Remote-User": "anna"})[2])'
    assert ask(host, proxied, user=65534).split() == ["401", "True"]
    assert ask(host, 'print("anna" in ask("/snapshots", **{"X-Remote-User": "anna"})[2])').split() == [
        "False"
    ]
    logged = json.loads(host(str(host.program), "log", "--json"))["actions"]
    assert [(one["who"], one["outcome"]) for one in logged] == [("root", "done"), ("root", "begun")]
