"""The process that uploads, under its unit in a real systemd: it reads the repository, and does nothing else to the host."""

from __future__ import annotations

import getpass
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.ci import needs
from support.real_systemd import RealSystemd, reason_against
from support.service_host import CODE, ServiceHost
from support.ssh_server import SshServer
from support.until import until

from ciuic.system.privileges import Capability

pytestmark = [pytest.mark.mount, pytest.mark.slow]
_UNIT = "ciuic-upload.service"
_START_SECONDS = 60.0
# What a taken-over uploader would try. Each attempt is "done" or the name of the error.
_PROBE = r"""
import errno, json, os, socket, sys, time
found = {}
def attempt(name, do):
    try:
        do()
        found[name] = "done"
    except OSError as error:
        found[name] = errno.errorcode[error.errno]
repository, state = "/srv/repository", os.environ["STATE_DIRECTORY"]
attempt("list the repository", lambda: os.listdir(f"{repository}/packs"))
attempt("read its config", lambda: open(f"{repository}/config").read())
attempt("read /etc/passwd", lambda: open("/etc/passwd").read())
attempt("read a secret of the host", lambda: open("/etc/ssh/mine").read())
# What systemd hides is an empty file or directory.
found["content of /etc/shadow"] = open("/etc/shadow").read()
found["names in the store of credentials"] = os.listdir("/etc/credstore")
attempt("write to the repository", lambda: open(f"{repository}/planted", "w"))
attempt("take its lock", lambda: os.open(f"{repository}/lock", os.O_RDWR))
attempt("write beside it", lambda: open("/srv/planted", "w"))
attempt("write to /etc", lambda: open("/etc/planted", "w"))
attempt("signal init", lambda: os.kill(1, 0))
attempt("become root", lambda: os.setuid(0))
attempt("mount", lambda: os.unshare(0x00020000) if hasattr(os, "unshare") else (_ for _ in ()).throw(OSError(errno.EPERM, "")))
attempt("open a socket to a network", lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM).close())
attempt("open a raw socket", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1).close())
attempt("open a packet socket", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW).close())
attempt("write to its state", lambda: open(f"{state}/mine", "w").write("x"))
attempt("read pressure", lambda: open("/proc/pressure/io").read())
for line in open("/proc/self/status"):
    if line.startswith(("Cap", "Uid", "NoNewPrivs", "Seccomp:")):
        key, _, value = line.partition(":")
        found[key] = value.split()[0]
found["credential"] = open(os.environ["CREDENTIALS_DIRECTORY"] + "/ciuic.remote-key").read()
found["aws"] = os.path.exists(os.environ["AWS_SHARED_CREDENTIALS_FILE"])
found["nice"] = os.nice(0)
# The libraries of the uploader load under this filter and without writable code.
sys.path[:0] = sys.argv[1:]
try:
    import blake3, obstore
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    AESGCM(bytes(32)).encrypt(bytes(12), b"x", b"")
    obstore.put(obstore.store.MemoryStore(), "a", b"x")
    found["libraries"] = blake3.blake3(b"x").hexdigest()[:4]
except ModuleNotFoundError as error:
    found["libraries"] = f"absent: {error.name}"
os.mkdir(f"{state}/nas")
with open(f"{state}/nas/stored", "w") as file:
    json.dump({"repository": "ab" * 16, "stored": ["cs-000001"], "tail_ns": 1, "seen_ns": time.time_ns()}, file)
with open(f"{state}/found", "w") as file:
    json.dump(found, file)
"""
_READ = """
import sys
import time
sys.path[:0] = sys.argv[1:]
from ciuic.protocol.stored_remotely import RemotePlace, remotes_done
print(sorted(remotes_done([RemotePlace("nas", "file:///nas")], "ab" * 16, now_ns=time.time_ns()).done["nas"]))
"""


@pytest.fixture
def host(short_tmp: Path) -> Iterator[ServiceHost]:
    """Install the units on a host with a repository of root and some secrets, and start none of them."""
    needs(reason_against())
    with RealSystemd(short_tmp, [CODE]) as systemd:
        # `ciuic remote upload` may have been run on this machine, whose files the host sees.
        systemd.run(["rm", "-rf", "/var/lib/ciuic-upload", "/var/lib/private/ciuic-upload"])
        mounted = systemd.run(["mount", "-t", "tmpfs", "tmpfs", "/srv"])
        assert mounted.returncode == 0, mounted.stderr
        # As systemd itself does where it boots a machine: credentials are mounts that must reach the host.
        shared = systemd.run(["mount", "--make-rshared", "/"])
        assert shared.returncode == 0, shared.stderr
        one = ServiceHost(systemd, "/srv")
        one(
            "sh",
            "-c",
            "mkdir -p -m 700 /srv/repository/packs && umask 077 && echo {} > /srv/repository/config",
        )
        one(
            "sh",
            "-c",
            "umask 077; echo > /srv/repository/lock; mkdir -p /etc/ssh; echo secret > /etc/ssh/mine",
        )
        one.write("/etc/credstore/ciuic.remote-key", "the key")
        one.ciuic("--config", "/etc/mine.toml", "service", "install", "--no-start")
        yield one


def _libraries() -> list[str]:
    """Return the directories of the imports that the probe needs; none where the unit hides them (PrivateTmp=)."""
    found = (importlib.util.find_spec(name) for name in ("obstore", "blake3", "cryptography"))
    places = sorted({str(Path(spec.origin).parents[1]) for spec in found if spec and spec.origin})
    return [] if any(place.startswith(("/tmp/", "/var/tmp/")) for place in places) else places


def _run(host: ServiceHost, *command: str) -> None:
    words = " ".join(f'"{word}"' for word in command)
    host.drop_in(_UNIT, f"[Service]\nExecStart=\nExecStart={words}\n")
    host("systemctl", "reset-failed", _UNIT, expect=None)
    host("systemctl", "start", _UNIT)


def _ended(host: ServiceHost) -> dict[str, Any]:
    """Wait until the process has ended; return what systemd says of the unit."""

    def shown() -> dict[str, str]:
        names = "ActiveState,SubState,Result,NRestarts,ExecMainStatus"
        # One answer: the unit may end between two.
        lines = host("systemctl", "show", f"--property={names}", _UNIT).splitlines()
        facts = dict(line.split("=", 1) for line in lines)
        return facts if facts["SubState"] in ("dead", "failed", "auto-restart") else {}

    return dict(until("its end", shown, _START_SECONDS))


def test_the_process_reads_the_repository_and_can_do_no_harm(host: ServiceHost) -> None:
    """It reads root's repository and its own credentials, writes its state alone, and has one capability.

    What it says about a remote is read by root, through the link that systemd makes for its state directory.
    """
    host.write("/srv/probe.py", _PROBE)
    # By way of env: this interpreter may lie where only root can go, and the capability counts from the first exec on.
    _run(host, "/usr/bin/env", os.path.realpath(sys.executable), "/srv/probe.py", *_libraries())
    ended = _ended(host)
    assert (ended["Result"], ended["ExecMainStatus"]) == ("success", "0"), host("cat", "/srv/log")
    found = json.loads(host("cat", "/var/lib/ciuic-upload/found"))
    expected = {
        "list the repository": "done",
        "read its config": "done",
        "read /etc/passwd": "done",
        "read a secret of the host": "ENOENT",
        "content of /etc/shadow": "",
        "names in the store of credentials": [],
        "write to the repository": "EROFS",
        "take its lock": "EACCES",
        "write beside it": "EROFS",
        "write to /etc": "EROFS",
        "signal init": "EPERM",
        "become root": "EPERM",
        "mount": "EPERM",
        "open a socket to a network": "done",
        "open a raw socket": "EPERM",
        "open a packet socket": "EAFNOSUPPORT",
        "write to its state": "done",
        "read pressure": "done",
        "credential": "the key",
        "aws": False,
        "nice": 19,
        "NoNewPrivs": "1",
        "Seccomp": "2",
    }
    assert {name: found.get(name) for name in expected} == expected
    only = 1 << Capability.DAC_READ_SEARCH.value
    assert {int(found[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {only}
    assert int(found["Uid"]) != 0
    if _libraries():
        assert not found["libraries"].startswith("absent"), found["libraries"]
    assert host("stat", "-c", "%a %U", "/var/lib/private/ciuic-upload").split()[0] == "700"
    assert host("stat", "-c", "%F", "/var/lib/ciuic-upload").strip() == "symbolic link"
    packages = sorted({str(CODE), *(path for path in sys.path if path.endswith("site-packages"))})
    read = host.systemd.python(_READ, *packages)
    assert read.stdout == "['cs-000001']\n", read.stderr


def test_only_a_failure_is_tried_again(host: ServiceHost) -> None:
    """Without a remote the unit ends as a success and stays so, with an invalid configuration it fails; else it is started again."""
    _run(host, "/bin/sh", "-c", "exit 3")
    ended = _ended(host)
    assert (ended["ActiveState"], ended["Result"], ended["NRestarts"]) == ("inactive", "success", "0")
    _run(host, "/bin/sh", "-c", "exit 2")
    ended = _ended(host)
    assert (ended["ActiveState"], ended["Result"], ended["NRestarts"]) == ("failed", "exit-code", "0")
    for end in ("exit 0", "exit 1", "kill -KILL $$$$"):
        _run(host, "/bin/sh", "-c", end)
        assert _ended(host)["SubState"] == "auto-restart", end
        host("systemctl", "stop", _UNIT)


def test_an_upload_by_hand_before_the_installation(host: ServiceHost) -> None:
    """A state directory that root's own upload has left is the service's after an installation."""
    host("sh", "-c", "mkdir -p /var/lib/ciuic-upload/nas && echo {} > /var/lib/ciuic-upload/nas/stored")
    host.ciuic("--config", "/etc/mine.toml", "service", "install", "--no-start")
    _run(host, "/bin/sh", "-c", "cat /var/lib/ciuic-upload/nas/stored > /var/lib/ciuic-upload/read; exit 3")
    ended = _ended(host)
    assert (ended["ActiveState"], ended["Result"]) == ("inactive", "success")
    assert host("cat", "/var/lib/private/ciuic-upload/read") == "{}\n"


def test_status_and_uninstall_know_the_unit(host: ServiceHost) -> None:
    """`service status` has the unit beside the daemon's, and `uninstall` leaves nothing of it."""
    facts = json.loads(host.ciuic("service", "status", "--json"))
    assert facts["upload"]["installed"]
    assert facts["upload"]["enabled"] == "enabled"
    assert "ciuic-upload.service: inactive, enabled" in host.ciuic("service", "status")
    host.ciuic("service", "uninstall")
    assert "ciuic-upload" not in host(
        "ls", "/etc/systemd/system", "/etc/systemd/system/multi-user.target.wants", expect=None
    )


def test_the_process_reaches_another_machine_by_ssh(host: ServiceHost, ssh_server: SshServer) -> None:
    """With key and host key as credentials, and the command of the manual, the confined process speaks to ciuic elsewhere."""
    host.write("/etc/credstore/ciuic.ssh-key", (ssh_server.place / "user_key").read_text())
    host.write("/etc/credstore/ciuic.ssh-known-hosts", (ssh_server.place / "known_hosts").read_text())
    manual = (Path(__file__).parents[2] / "docs" / "remote.md").read_text()
    (command,) = re.findall(r'^ssh_command = "(ssh [^"]*)"$', manual, re.MULTILINE)
    directory = ssh_server.place / "confined"
    reach = f"{command} -o HostKeyAlias=ciuic-test -o BatchMode=yes -p {ssh_server.port} -l {getpass.getuser()} 127.0.0.1"
    serve = f"{ssh_server.program} remote serve --stdio {directory} < /dev/null"
    host.write("/srv/reach", f"#!/bin/sh\n{reach} '{serve}' > $STATE_DIRECTORY/hello\n")
    _run(host, "/bin/sh", "/srv/reach")
    facts = _ended(host)
    assert (facts["Result"], facts["ExecMainStatus"]) == ("success", "0"), host(
        "journalctl", "-u", _UNIT, expect=None
    )
    assert "ciuic-objects" in host("cat", "/var/lib/private/ciuic-upload/hello")
