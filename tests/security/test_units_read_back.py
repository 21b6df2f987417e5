"""Read the promises of docs/security.md back from the processes of each unit, under a real systemd."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.ci import needs
from support.live import installed
from support.object_servers import free_ports
from support.real_systemd import reason_against
from support.service_host import CODE, CONFIG, ServiceHost, service_host

from ciuic.cli.shared.systemd import unit_text
from ciuic.protocol.control import ControlClient
from ciuic.system import seccomp
from ciuic.system.privileges import OVERLAY_WORKER, permitted

pytestmark = [
    pytest.mark.mount,
    pytest.mark.skipif(not permitted() >= OVERLAY_WORKER, reason="this machine grants fewer capabilities"),
]
_CALLS = "| unit | makes namespaces | opens sockets | sets set-id bits |"
_TABLE = (
    "| process | user | capabilities | own namespaces | devices | calls | writes | secrets | oom | memory |"
)
# Words of the command line of each process in the table.
_COMMANDS = {
    "ciuic.service: daemon": "/ciuic daemon $",
    "receiver": "ciuic.daemon.peer_receiver",
    "capture": "ciuic.daemon.capture.process",
    "upkeep": "ciuic.daemon.jobs upkeep",
    "judge": "ciuic.daemon.jobs verdicts",
    "view": "ciuic.daemon.roots.view_process",
    "ciuic-workers.service: forks": "--workers",
    "worker": "ciuic.fuse_layer.worker",
    "ciuic-web.service: restores": "/ciuic web",
    "front": "ciuic.cli.commands.web.front_process",
    "ciuic-scrub.service": "/ciuic verify",
    "ciuic-upload.service": "/ciuic remote upload",
    "ciuic-drill.service": "/ciuic remote drill",
    "ciuic-exporter.service": "/ciuic exporter",
}
_PLACES = """/etc /usr /home /root /srv /run /run/ciuic /run/lock /var/lib /var/lib/ciuic-upload /var/lib/ciuic-exporter
/var/cache/ciuic-drill /tmp /var/tmp /dev/shm /dev/mqueue /proc/sys /sys"""
_FILES = {
    "/etc/shadow",
    "/etc/shadow-",
    "/etc/gshadow",
    "/etc/gshadow-",
    "/etc/sudoers",
    "/etc/krb5.keytab",
    "/var/lib/systemd/credential.secret",
}
_SECONDS = 60.0
_SYS_RESOURCE = 24
_OOM = -2
# Stops each process as soon as it is what it will be, and examines it. A process that filters its calls has done everything else before.
_PROBE = r"""
import json, os, pwd, signal, sys, time
commands, places, secrets, deadline = *json.loads(sys.argv[1]), time.monotonic() + float(sys.argv[2])
sys.path[:0] = sys.argv[3:]
from ciuic.system.privileges import Capability, become, keep_only

known = {one.value: one.name for one in Capability}

def status(pid):
    return {key: value.strip() for key, _, value in (line.partition(":") for line in open(f"/proc/{pid}/status"))}

def inside(pid, facts):
    # As a child in its control group and its view of the file system, with its user and its capabilities.
    read, write = os.pipe()
    child = os.fork()
    if child:
        os.close(write)
        with open(read) as file:
            found = file.read()
        os.waitpid(child, 0)
        return json.loads(found)
    group = open(f"/proc/{pid}/cgroup").read().splitlines()[-1].split("::")[1]
    own = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY)
    before = {place: os.stat(place) for place in places if os.path.exists(place)}
    open(f"/sys/fs/cgroup{group}/cgroup.procs", "w").write("0")
    # What the control group permits is opened, or has no driver (ENXIO).
    devices = [device for device in ("/dev/fuse", "/dev/of-the-test") if not refused(device)]
    libc = __import__("ctypes").CDLL(None)
    assert libc.setns(own, 0x20000) == 0
    capabilities = {one for one in range(64) if int(facts["CapEff"], 16) >> one & 1}
    become(int(facts["Uid"].split()[0]), int(facts["Gid"].split()[0]))
    keep_only(capabilities)
    writes = []
    for place in places:
        if os.access(place, os.W_OK | os.X_OK, effective_ids=True):
            now = os.stat(place)
            shared = place in before and os.path.samestat(now, before[place])
            writes.append(place if shared or not place.endswith(("tmp", "shm", "mqueue")) else f"own {place}")
    read = [secret for secret in secrets if can(lambda: (os.listdir(secret) or 1 / 0) if os.path.isdir(secret) else open(secret).read(1) or 1 / 0)]
    os.write(write, json.dumps([devices, writes, read]).encode())
    os._exit(0)

def refused(device):
    try:
        os.open(device, os.O_RDWR)
    except PermissionError:
        return True
    except OSError:
        return False
    return False

def can(do):
    try:
        do()
    except (OSError, ZeroDivisionError):
        return False
    return True

def namespaces(pid):
    names = ("net", "mnt", "uts", "ipc", "user", "pid", "cgroup")
    return [name for name in names if os.readlink(f"/proc/{pid}/ns/{name}") != os.readlink(f"/proc/1/ns/{name}")]

def user(facts):
    uid = int(facts["Uid"].split()[0])
    assert len(set(facts["Uid"].split())) == 1
    return "of its own" if 61184 <= uid <= 65519 else pwd.getpwuid(uid).pw_name

def examined(pid, facts):
    names = namespaces(pid)
    # A network of its own leads nowhere.
    assert "net" not in names or not open(f"/proc/{pid}/net/route").readlines()[1:]
    limits = {line[:26].strip(): line[26:].split()[:2] for line in open(f"/proc/{pid}/limits")}
    assert (facts["NoNewPrivs"], facts["Seccomp"], limits["Max core file size"]) == ("1", "2", ["0", "0"])
    effective, bounding, first = int(facts["CapEff"], 16), int(facts["CapBnd"], 16), above(pid, facts)
    # No process has a right that its unit does not give.
    assert effective == int(facts["CapPrm"], 16) and not effective & ~bounding and not bounding & ~int(first["CapBnd"], 16)
    opened, writes, read = inside(pid, facts)
    own = facts["Seccomp_filters"] != first["Seccomp_filters"]
    data = limits["Max data size"][1]
    cells = [
        user(facts),
        " ".join(known.get(bit, str(bit)) for bit in range(64) if effective >> bit & 1),
        " ".join(names),
        {0: "none", 1: "/dev/fuse", 2: "all"}[len(opened)],
        "unit, own" if own else "unit",
        "by its filter" if own else "all" if "/etc" in writes else " ".join(writes),
        "yes" if read == secrets else " ".join(read) or "no",
        open(f"/proc/{pid}/oom_score_adj").read().strip(),
        "" if data == "unlimited" else f"{int(data) >> 20} MiB",
    ]
    return cells

def above(pid, facts):
    # The process that started it; of one that systemd or nobody did the first of its service.
    if facts["PPid"] != "1":
        return status(facts["PPid"])
    group = open(f"/proc/{pid}/cgroup").read().rpartition("::")[2].strip()
    every = (status(one) for one in open(f"/sys/fs/cgroup{group}/cgroup.procs").read().split())
    return min(every, key=lambda one: int(one["Seccomp_filters"]))

def settled(name, pid, facts):
    # A child of a service limits itself; the main process is what systemd has made.
    if "service" in name:
        return facts["PPid"] == "1"
    return facts["Seccomp_filters"] != above(pid, facts)["Seccomp_filters"]

def python(pid):
    return "python" in os.readlink(f"/proc/{pid}/exe")

found = {}
print("looking", flush=True)
while commands.keys() - found.keys() and time.monotonic() < deadline:
    # The command line of this one has them all.
    for pid in {pid for pid in os.listdir("/proc") if pid.isdigit()} - {str(os.getpid())}:
        try:
            words = open(f"/proc/{pid}/cmdline").read().replace("\0", " ") + "$"
            name = next((name for name, command in commands.items() if name not in found and command in words), "")
            if not name or not python(pid) or not settled(name, pid, status(pid)):
                continue
            os.kill(int(pid), signal.SIGSTOP)
            try:
                while (facts := status(pid))["State"][0] not in "TZX":
                    time.sleep(0.001)
                # It may have ended before it was stopped.
                if facts["State"][0] == "T":
                    found[name] = examined(pid, facts)
            finally:
                os.kill(int(pid), signal.SIGCONT)
        except (FileNotFoundError, ProcessLookupError):
            continue
print(json.dumps(found))
"""

# What code in the unit tries before its main process, which gets the same filter.
_ATTEMPTS = r"""
import ctypes, json, mmap, os, socket, sys
libc = ctypes.CDLL(None)
def done(do):
    try:
        do()
    except OSError:
        return False
    return True
def made(flag):
    child = os.fork()
    if not child:
        os._exit(libc.unshare(flag) != 0)
    return os.waitpid(child, 0)[1] == 0
spaces = {"net": 0x40000000, "mnt": 0x20000, "uts": 0x4000000, "ipc": 0x8000000, "user": 0x10000000, "pid": 0x20000000, "cgroup": 0x2000000}
kinds = {"unix": (1, 2), "inet": (2, 2), "netlink": (16, 3), "packet": (17, 3)}
nobody = [
    done(lambda: mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)),
    done(lambda: os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))),
    libc.personality(0x0040000) != -1,
]
assert not any(nobody), nobody
namespaces = " ".join(name for name, flag in spaces.items() if made(flag))
sockets = " ".join(name for name, kind in kinds.items() if done(lambda: socket.socket(*kind).close()))
set_ids = done(lambda: os.fchmod(os.memfd_create("x"), 0o4700))
print("tried", json.dumps([sys.argv[1], namespaces, sockets, "yes" if set_ids else "no"]), flush=True)
"""


@pytest.fixture
def host(short_tmp: Path) -> Iterator[ServiceHost]:
    needs(reason_against() or seccomp.offered())
    with service_host(short_tmp) as one:
        # As systemd itself does where it boots a machine: credentials are mounts that must reach the host.
        one("mount", "--make-rshared", "/")
        # The user of the exporter has no capability: it runs what every user may.
        closed = [*Path(sys.executable).resolve().parents, *CODE.parents]
        one("chmod", "o+x", *(str(path) for path in closed if not path.stat().st_mode & 1))
        one("mknod", "/dev/of-the-test", "b", "7", "200")
        one("mkdir", "-p", f"{one.top}/remote", "/dev/mqueue")
        one("mount", "-t", "mqueue", "mqueue", "/dev/mqueue")
        for secret in _secrets():
            one.write(secret if secret in _FILES else f"{secret}/of-the-test", "secret")
            one("chmod", "go=", secret)
        yield one


def _secrets() -> list[str]:
    lines = (line.partition("=")[::2] for line in unit_text("ciuic-upload.service").splitlines())
    return [
        path.removeprefix("-") for key, value in lines if key == "InaccessiblePaths" for path in value.split()
    ]


def _promised(header: str) -> dict[str, list[str]]:
    """Return the rows of a table in docs/security.md, by their first cells."""
    _, _, below = (CODE / "docs/security.md").read_text().partition(f"{header}\n")
    lines = (line.strip("|").split("|") for line in below.partition("\n\n")[0].splitlines()[1:])
    return {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in lines}


def _found(host: ServiceHost) -> dict[str, list[str]]:
    """Return the cells of each process of the table, from the start of all units on."""
    packages = [str(CODE), *(path for path in sys.path if path.endswith("site-packages"))]
    words = json.dumps([_COMMANDS, _PLACES.split(), _secrets()])
    looking = subprocess.Popen(
        [*host.systemd.prefix(), str(installed("python")), "-c", _PROBE, words, str(_SECONDS), *packages],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert looking.stdout is not None
    with looking:
        try:
            assert looking.stdout.readline() == "looking\n"
            host.ciuic("--config", CONFIG, "service", "install")
            host.mounted()
            host("sh", "-c", f"head -c 32M /dev/urandom > {host.top}/root/file.pt")
            host.ciuic("snapshot", "--wait")
            with ControlClient(host.systemd.files / "run/ciuic/control.sock") as client:
                # Its process lives for a moment, which a busy machine may not look at.
                for _ in range(5):
                    client.prune()
            host("systemctl", "start", "--no-block", "ciuic-web", "ciuic-scrub", "ciuic-drill")
            return dict(json.loads(looking.stdout.read()))
        finally:
            looking.kill()


def test_each_process_is_what_the_page_says(host: ServiceHost) -> None:
    """Users, capabilities, namespaces, devices, filters, writable places, hidden secrets and limits are those of the table in docs/security.md."""
    port, closed = free_ports(2)
    remote = f"url = 's3://of-the-test/remote'\nregion = 'x'\nendpoint = 'http://127.0.0.1:{closed}'\n"
    root = f"path = '{host.top}/root'\nsnapshots_dir = true\n"
    host.write(
        CONFIG,
        f"[repository]\npath = '{host.top}/repository'\n[[root]]\n{root}[[remote]]\nname = 'far'\n{remote}"
        f"[exporter]\nlisten = '127.0.0.1:{port}'\n",
    )
    host.write(f"{host.top}/attempts.py", _ATTEMPTS)
    for unit in _promised(_CALLS):
        attempt = f"{installed('python')} {host.top}/attempts.py {unit}"
        host.drop_in(unit, f"[Service]\nExecStartPre={attempt}\n")
    found, expected = _found(host), _promised(_TABLE)
    if _SYS_RESOURCE not in permitted():
        # As in a container: systemd cannot lower the score.
        for cells in expected.values():
            cells[_OOM] = cells[_OOM] if int(cells[_OOM]) >= 0 else "0"
    assert found == expected
    lines = host("cat", f"{host.top}/log").splitlines()
    tried = [json.loads(line.removeprefix("tried ")) for line in lines if line.startswith("tried ")]
    assert {unit: cells for unit, *cells in tried} == _promised(_CALLS)


def test_a_drill_of_a_directory_of_roots_is_noted(host: ServiceHost) -> None:
    """Where a remote is a directory of root's, the unit of the drill runs as root, and notes its outcome without a capability for that."""
    remote = f"[[remote]]\nname = 'near'\nurl = 'file://{host.top}/remote/here'\n"
    root = f"[[root]]\npath = '{host.top}/root'\n"
    host.write(CONFIG, f"[repository]\npath = '{host.top}/repository'\n{root}{remote}")
    host.ciuic("remote", "init", f"file://{host.top}/remote/here")
    host("rm", "-rf", "/var/lib/ciuic-upload", "/var/lib/private/ciuic-upload")
    host.ciuic("--config", CONFIG, "service", "install", "--no-start")
    host("systemctl", "start", "ciuic-drill", expect=None)
    (status,) = json.loads(host.ciuic("remote", "status", "--json"))["remotes"]
    # There is nothing to restore yet.
    assert status["last_drill"]["verdict"] == "failed", host("cat", f"{host.top}/log")
