"""Attacker: code that has taken over a worker, a capture or an upkeep, with the system calls left to it.

Each forbidden call has arguments that the kernel would accept or answer otherwise, so that EPERM is the
filter's answer. The processes run as root with all capabilities, less what the profile takes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.live import Live, installed
from support.until import until

from ciuic.daemon.jobs import UpkeepJob
from ciuic.repository import Repository
from ciuic.retention import RetentionPolicy
from ciuic.system import seccomp
from ciuic.system.seccomp import NUMBERS

pytestmark = [
    pytest.mark.mount,
    pytest.mark.skipif(bool(seccomp.offered()), reason="this machine filters no system calls"),
]

_HOLD_LOCK = (
    "import sys; from pathlib import Path; from ciuic.repository import Repository;"
    "r = Repository.open(Path(sys.argv[1])); w = r.writer(wait_seconds=30).__enter__(); print('held', flush=True); sys.stdin.read()"
)
_LOG_ATTEMPTS = 15
_FORBIDDEN = [
    "execve",
    "execveat",
    "fork",
    "ptrace",
    "process_vm_readv",
    "bpf",
    "perf_event_open",
    "init_module",
    "finit_module",
    "kexec_load",
    "io_uring_setup",
    "userfaultfd",
    "keyctl",
    "add_key",
    "setns",
    "unshare",
    "personality",
    "swapon",
    "reboot",
    "open_by_handle_at",
    "chroot",
    "setuid",
    "setgroups",
    "pidfd_open",
    "kill",
    "acct",
]
_CONFINED = """
import ctypes, errno, json, os, socket, sys, threading
from ciuic.system import privileges, seccomp, syscall_profiles as seccomp_profiles
numbers = json.loads(sys.argv[2])
libc = ctypes.CDLL(None, use_errno=True)
def made(number, *arguments):
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *(ctypes.c_long(a) for a in arguments))
    return errno.errorcode.get(ctypes.get_errno(), "") if result == -1 else result
def opened(domain):
    try:
        socket.socket(domain).close()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "opened"
privileges.keep_only(privileges.permitted())
why = seccomp_profiles.limit_calls(getattr(seccomp_profiles, sys.argv[1]))
"""


def confined(profile: str, script: str, *arguments: str) -> str:
    """Run a script in a process confined to a profile; return its output."""
    numbers = {name: NUMBERS[name][0 if seccomp.machine() == "x86_64" else 1] for name in NUMBERS}
    done = subprocess.run(
        [sys.executable, "-c", _CONFINED + script, profile, json.dumps(numbers), *arguments],
        capture_output=True, text=True, check=False, timeout=60, cwd="/",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def live(short_tmp: Path) -> Iterator[Live]:
    with Live(short_tmp) as one:
        yield one


@pytest.fixture
def root(short_tmp: Path) -> Path:
    path = short_tmp / "root"
    path.mkdir()
    return path


@pytest.mark.parametrize("profile", ["WORKER", "CAPTURE", "UPKEEP", "DRILL", "READER", "RECEIVER"])
def test_a_forbidden_call_is_refused_and_the_process_goes_on(profile: str) -> None:
    """A forbidden call (programs, processes, namespaces, networks) ends in EPERM and the process goes on."""
    script = f"""
found = {{name: made(numbers[name], 0, 0, 0, 0, 0, 0) for name in {_FORBIDDEN!r} if numbers[name] is not None}}
found["inet"], found["netlink"] = opened(socket.AF_INET), opened(socket.AF_NETLINK)
if sys.argv[1] != "RECEIVER":
    found["clone of a process"] = made(numbers["clone"], 17, 0, 0, 0, 0)
else:
    found["clone with a namespace"] = made(numbers["clone"], 17 | 0x10000000, 0, 0, 0, 0)
    del found["pidfd_open"]
found["code"] = made(numbers["mmap"], 0, 4096, 7, 0x22, -1, 0)
found["newer call"] = made(5000)
thread = threading.Thread(target=found.setdefault, args=("thread", "ran")); thread.start(); thread.join()
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
found["mode"] = status["Seccomp"].strip()
print(json.dumps([why, found]))
"""
    why, found = json.loads(confined(profile, script))
    assert why == ""
    assert (found.pop("newer call"), found.pop("thread"), found.pop("mode")) == ("ENOSYS", "ran", "2")
    assert len(found) > 20
    assert set(found.values()) == {"EPERM"}, found


def test_a_reader_opens_nothing_to_write(tmp_path: Path) -> None:
    """A process that judges checkpoints reads files, and neither makes, changes nor removes one."""
    (tmp_path / "file").write_text("content")
    script = """
def refused(what):
    try:
        what()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "done"
path = sys.argv[3]
assert open(path + "/file").read() == "content"
os.listdir(path)
print(json.dumps([
    refused(lambda: open(path + "/file", "r+")), refused(lambda: open(path + "/new", "x")),
    refused(lambda: os.open(path, os.O_TMPFILE | os.O_RDWR)), refused(lambda: os.truncate(path + "/file", 0)),
    refused(lambda: os.unlink(path + "/file")), refused(lambda: os.mkdir(path + "/d")),
    refused(lambda: os.rename(path + "/file", path + "/f")), refused(lambda: os.chmod(path + "/file", 0)),
    refused(lambda: os.link(path + "/file", path + "/l")), refused(lambda: os.symlink("a", path + "/s")),
]))
"""
    assert set(json.loads(confined("READER", script, str(tmp_path)))) == {"EPERM"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_receiver_takes_messages_and_changes_nothing() -> None:
    """A receiver can receive, examine, send and close descriptors, and has no files or sockets in reach."""
    script = """
ours, theirs = left
socket.send_fds(ours, [b"hello"], [0, 1])
data, fds, _, _ = socket.recv_fds(theirs, 100, 10)
kinds = [os.fstat(fd).st_mode for fd in fds]
os.set_inheritable(fds[0], False); os.set_blocking(fds[1], True)
socket.send_fds(theirs, [data], fds)
for fd in fds: os.close(fd)
import select
waiting = select.poll()
waiting.register(ours, select.POLLIN)
assert waiting.poll(5000)
assert ours.recv(100) == b"hello"
theirs.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
def refused(what):
    try:
        what()
    except PermissionError:
        return True
assert refused(lambda: os.open("/dev/null", os.O_WRONLY))
assert refused(lambda: os.open("/tmp", os.O_TMPFILE | os.O_RDWR))
assert refused(lambda: socket.socket(socket.AF_UNIX))
assert refused(lambda: os.unlink("/nothing"))
assert refused(lambda: os.kill(os.getpid(), 0))
print("done", len(kinds))
"""
    script = script.replace("ours, theirs = left", "")
    head = "ours, theirs = socket.socketpair()\n"
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import os, socket, sys\nfrom ciuic.system import privileges\nfrom ciuic.system.syscall_profiles import limit_receiver\n"
            f"{head}privileges.keep_only(())\nassert limit_receiver() == ''\n{script}",
        ],
        capture_output=True, text=True, check=False, timeout=60, cwd="/",
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, "done 2"), done.stderr


def _seccomp(pid: int) -> str:
    lines = (line.partition(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return next(value.strip() for key, _, value in lines if key == "Seccomp")


def _pids(live: Live, module: str) -> list[int]:
    return [pid for pid, command in live.processes().items() if f"-m {module} " in f"{command} "]


@contextmanager
def _lock_held(live: Live) -> Iterator[None]:
    """Lock the repository for the block: a capture or an upkeep waits, filtered already."""
    holder = subprocess.Popen(
        [str(installed("python")), "-c", _HOLD_LOCK, str(live.repository)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        yield
    finally:
        holder.communicate(timeout=30)


@pytest.mark.parametrize("driver", ["kernel", "pyfuse3"])
def test_living_workers_and_captures_are_filtered(live: Live, root: Path, driver: str) -> None:
    """The worker of either driver and a capture at work are in filter mode, and status says so."""
    pytest.importorskip("pyfuse3") if driver == "pyfuse3" else None
    live.config.write_text(f'{live.config.read_text()}\n[[root]]\npath = "{root}"\ndriver = "{driver}"\n')
    live.start(root)
    until("the first snapshot", live.list)
    (root / "file").write_text("x")
    with _lock_held(live):
        snapshot = live.run("snapshot").stdout.decode().split()[0]
        until("the capture", lambda: _pids(live, "ciuic.daemon.capture.process"))
        (capture,) = _pids(live, "ciuic.daemon.capture.process")
        until("the filter of the capture", lambda: _seccomp(capture) == "2")
        (worker,) = _pids(live, "ciuic.fuse_layer.worker")
        assert _seccomp(worker) == "2"
    until("the snapshot", lambda: snapshot in [listed.id for listed in live.list()])
    status = live.status()
    assert status is not None
    assert [(one["driver"], one["filtered"]) for one in status["roots"]] == [(driver, True)]
    assert "system_calls_not_filtered" not in live.daemon_log.read_text()


def test_a_living_upkeep_is_filtered(live: Live) -> None:
    """The process that removes snapshots is in filter mode before it waits for the repository."""
    Repository.create(live.repository).close()
    job = UpkeepJob(repository=str(live.repository), policy=RetentionPolicy())
    import msgspec

    with _lock_held(live):
        upkeep = subprocess.Popen(
            [sys.executable, "-m", "ciuic.daemon.jobs", "upkeep"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd="/",
        )  # fmt: skip
        assert upkeep.stdin is not None
        upkeep.stdin.write(msgspec.json.encode(job))
        upkeep.stdin.close()
        upkeep.stdin = None
        until("the filter of upkeep", lambda: _seccomp(upkeep.pid) == "2")
    out, err = upkeep.communicate(timeout=60)
    assert (upkeep.returncode, err) == (0, b"")
    assert json.loads(out)["removed"] == []


def test_roots_are_served_and_captured_without_seccomp(live: Live, root: Path) -> None:
    """Roots are served and captured where seccomp(2) itself is refused, as in some containers.

    Log, status and doctor report it.
    """
    live.config.write_text(f'{live.config.read_text()}\n[[root]]\npath = "{root}"\n')
    number = NUMBERS["seccomp"][0 if seccomp.machine() == "x86_64" else 1]
    refusing = live.top / "refusing"
    refusing.write_text(
        f"#!{installed('python')}\n"
        "import os, sys\n"
        "from ciuic.system import privileges, seccomp\n"
        "from ciuic.system.seccomp import NUMBERS\n"
        f"profile = seccomp.Profile('no seccomp', frozenset(NUMBERS) - {{'seccomp'}})\n"
        "privileges.keep_only(privileges.permitted())\n"
        "seccomp.install(profile)\n"
        f"os.execv({str(installed())!r}, ['ciuic', *sys.argv[1:]])\n"
    )
    refusing.chmod(0o755)
    assert number is not None
    with open(live.daemon_log, "ab") as log:
        live.daemon = subprocess.Popen(
            [str(refusing), "daemon"], env=live.env, cwd="/", stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
    live.wait_mounted(root)
    until("the first snapshot", live.list)
    (root / "file").write_text("served")
    live.snapshot()
    assert "system_calls_not_filtered" in live.daemon_log.read_text()
    status = live.status()
    assert status is not None
    assert [one["filtered"] for one in status["roots"]] == [False]
    assert "not filtered" in live.run("status").stdout.decode()
    findings = live.json("doctor", expect=None)["findings"]
    assert any(one["check"] == "system calls" and one["level"] == "warning" for one in findings)


def test_refusals_of_the_filter_are_logged() -> None:
    """The kernel's log names process and call of a refusal, so that a profile that is too narrow shows."""
    number = NUMBERS["ptrace"][0 if os.uname().machine == "x86_64" else 1]
    for _ in range(_LOG_ATTEMPTS):
        pid = confined("CAPTURE", "made(numbers['ptrace'], 0, 0, 0, 0); print(os.getpid())")
        try:
            log = subprocess.run(["dmesg"], capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("the kernel's log cannot be read here")
        if "type=1326" not in log:
            pytest.skip("this kernel keeps no audit records (no CONFIG_AUDIT, or an audit daemon takes them)")
        if any(f"pid={pid} " in line and f"syscall={number} " in line for line in log.splitlines()):
            return
        # The kernel drops lines when there are more than ten within five seconds.
        time.sleep(1)
    pytest.fail("the kernel's log does not name the refused call")
