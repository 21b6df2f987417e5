"""The units under systemd: a daemon that was taken over has few rights, and no job loses any by it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.ci import needs
from support.live import installed
from support.real_systemd import reason_against
from support.service_host import ServiceHost, service_host
from support.until import until

from ciuic.system.privileges import OVERLAY_WORKER, Capability, permitted

pytestmark = [pytest.mark.mount, pytest.mark.slow]
_DAEMON = {
    Capability[name]
    for name in ("SYS_ADMIN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "SYS_PTRACE", "CHOWN")
}
_JOB = """
import ctypes, os, stat, sys
os.chdir("/srv/root"); os.chmod(".", 0o777)
def job():
    os.setgroups([]); os.setresgid(1234, 1234, 1234); os.setresuid(1234, 1234, 1234)
    os.umask(0o022)
    open("his", "w").write("his")
    os.mkdir("folder"); os.mkfifo("folder/fifo"); os.symlink("his", "folder/link")
    os.chmod("his", 0o4755)
pid = os.fork()
if pid == 0:
    job(); os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
facts = os.stat("his")
assert (facts.st_uid, facts.st_gid, stat.S_IMODE(facts.st_mode)) == (1234, 1234, 0o4755), facts
os.mknod("device", stat.S_IFCHR | 0o600, os.makedev(1, 3))
assert stat.S_ISCHR(os.stat("device").st_mode)
os.mknod("disk", stat.S_IFBLK | 0o600, os.makedev(7, 200))
os.mknod("other", stat.S_IFCHR | 0o600, os.makedev(240, 1))
assert os.stat("disk").st_rdev == os.makedev(7, 200)
open("program", "w").write("x"); os.chmod("program", 0o6755); os.chown("program", 4321, 4321); os.chmod("program", 0o6755)
assert stat.S_IMODE(os.stat("program").st_mode) == 0o6755
os.setxattr("program", "trusted.mine", b"1")
os.setxattr("program", "security.capability", bytes.fromhex("0100000200040000" + "00" * 12))
print("done")
"""
_HOLDER = """
import os, sys
file = open("/srv/root/held", "w+b", buffering=0)
print("open", flush=True)
for line in sys.stdin:
    file.write(line.encode()); file.seek(0); print(len(file.read()), flush=True); file.seek(0, 2)
"""


@pytest.fixture
def host(short_tmp: Path) -> Iterator[ServiceHost]:
    needs(reason_against())
    with service_host(short_tmp) as one:
        yield one


def _open_devices(host: ServiceHost, *, closed: str, given: str) -> None:
    """Open devices in the workers' control group: /dev/fuse opens, a device node of a job's does not."""
    host("mknod", closed, "b", "7", "200")
    group = f"/sys/fs/cgroup{host.shown('ciuic-workers.service', 'ControlGroup')}/cgroup.procs"
    opened = 'echo $$ > "$0"; exec 3<"$1"'
    host("sh", "-c", opened, group, given)
    host("sh", "-c", opened, group, closed, expect=2)


def _mask(capabilities: set[Capability]) -> int:
    return sum(1 << number for number in capabilities)


@pytest.mark.skipif(not permitted() >= OVERLAY_WORKER, reason="this machine grants fewer capabilities")
def test_the_service_does_everything_with_less(host: ServiceHost) -> None:
    """Users, devices, set-id programs, attributes, snapshots and restarts work as without hardening.

    Also the death of a worker.
    """
    root = host.mounted()
    assert root["filtered"] is True

    daemon, workers = host.process("ciuic.service"), host.process("ciuic-workers.service")
    assert int(daemon["CapBnd"], 16) == _mask(_DAEMON)
    assert int(workers["CapBnd"], 16) & _mask(set(OVERLAY_WORKER)) == _mask(set(OVERLAY_WORKER))
    assert int(workers["CapBnd"], 16) & ~_mask(set(OVERLAY_WORKER)) == 0
    assert (daemon["Seccomp"], daemon["NoNewPrivs"]) == ("2", "1")
    worker = str(root["worker_pid"])
    assert "ciuic-workers.service" in host("cat", f"/proc/{worker}/cgroup")
    spaces = host(
        "readlink", *(f"/proc/{pid}/ns/mnt" for pid in ("1", daemon["Pid"], workers["Pid"], worker))
    )
    # Jobs see the overlay, and the daemon sees what jobs see.
    assert len(set(spaces.split())) == 1
    # Root without CAP_SYS_PTRACE, which captures have, cannot look into a worker.
    host("setpriv", "--bounding-set=-sys_ptrace", "readlink", f"/proc/{workers['Pid']}/fd/1")
    host("setpriv", "--bounding-set=-sys_ptrace", "readlink", f"/proc/{worker}/fd/1", expect=1)
    _open_devices(host, closed="/dev/ciuic-disk", given="/dev/fuse")

    job = host.systemd.python(_JOB)
    assert job.stdout == "done\n", job.stderr
    snapshot = host.ciuic("snapshot", "--wait").strip()
    assert snapshot in host.ciuic("list")
    # The descriptor store of systemd has the root's directory open, and no request bypasses the overlay by
    # it.
    assert host.root()["bypassing"] == []
    host.ciuic("restore", "-s", snapshot, "-p", "/srv/root", "-d", "/srv/out")
    assert host("stat", "-c", "%u %g %a", "/srv/out/root/program").split() == ["4321", "4321", "6755"]
    assert host.ciuic("prune", "--dry-run", expect=None) is not None

    holder = subprocess.Popen(
        [*host.systemd.prefix(), str(installed("python")), "-c", _HOLDER],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
    )  # fmt: skip
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == "open\n"

        def writes() -> int:
            assert holder.stdin is not None
            assert holder.stdout is not None
            holder.stdin.write("x\n")
            return int(holder.stdout.readline())

        assert writes() == 2
        if root["driver"] == "kernel":
            host("kill", "-KILL", worker)
            # A successor, from the service, continues the session.
            assert writes() == 4
            assert host.mounted()["worker_pid"] != int(worker)
        before = writes()
        host("systemctl", "restart", "ciuic.service")
        assert writes() == before + 2
        assert host.mounted()["filtered"] is True
        assert writes() == before + 4
        host("systemctl", "restart", "ciuic-workers.service")
        assert writes() == before + 6
        host.ciuic("snapshot", "--wait")
    finally:
        holder.communicate(timeout=30)
    host.ciuic("service", "uninstall")
    assert "fuse.ciuic" not in host("cat", "/proc/1/mountinfo")
    assert host("ls", "/srv/root").split() == ["device", "disk", "folder", "held", "his", "other", "program"]
    assert not os.path.exists("/run/ciuic-workers.sock")


def test_without_the_workers_service_no_worker_is_made_of_the_daemon(host: ServiceHost) -> None:
    """The daemon starts no worker without the workers' service, and the root stays plain with an alert.

    A worker of the daemon's would lack capabilities, and files would belong to root.
    """
    host("systemctl", "stop", "ciuic.service")
    broken = "/run/systemd/system/ciuic-workers.service.d"
    host("mkdir", "-p", broken)
    host(
        "sh",
        "-c",
        f"printf '[Service]\\nRestart=no\\nExecStart=\\nExecStart=/bin/false\\n' > {broken}/broken.conf",
    )
    host("systemctl", "daemon-reload")
    host("systemctl", "start", "--no-block", "ciuic.service")
    found = until("the refusal", lambda: host.root().get("error") or "")
    assert "ciuic-workers" in found
    assert "fuse.ciuic" not in host("cat", "/proc/1/mountinfo")
    host("rm", "-r", broken)
    host("systemctl", "daemon-reload")
    host("systemctl", "reset-failed")
    host("systemctl", "restart", "ciuic-workers.socket")
    assert host.mounted()["filtered"] is True
