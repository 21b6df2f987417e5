"""Tests of dropped privileges, each in a child process, as they would be gone for later tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ciuic.system.privileges import CAPTURE, OVERLAY_WORKER, UPKEEP, Capability, permitted

HEAD = """
import ctypes, os, resource, socket, sys
from ciuic.system import privileges as p
def sets():
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return {name: int(lines[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs")}
def mask(numbers): return sum(1 << n for n in numbers)
"""
root = pytest.mark.skipif(os.geteuid() != 0, reason="who is not root has nothing to give up")


def child(script: str, *arguments: str) -> str:
    """Run code in a child process and return its output."""
    done = subprocess.run(
        [sys.executable, "-c", HEAD + script, *arguments], capture_output=True, text=True, check=False, timeout=60
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@root
def test_dropped_capabilities_are_gone_for_good() -> None:
    """A dropped capability is gone from all five sets, and from programs started later, setuid or not."""
    child("""
had = p.permitted()
kept = p.keep_only({p.Capability.CHOWN})
now, want = sets(), 1 << p.Capability.CHOWN
assert kept == p.permitted() == {p.Capability.CHOWN}
assert (now["CapPrm"], now["CapEff"], now["CapInh"], now["CapAmb"], now["NoNewPrivs"]) == (want, want, 0, 0, 1), now
assert now["CapBnd"] == want or 8 not in had, now  # 8: CAP_SETPCAP
text = os.popen("cat /proc/self/status").read()
assert f"CapPrm:\\t{want:016x}" in text and f"CapEff:\\t{want:016x}" in text, text
libc = ctypes.CDLL(None, use_errno=True)
assert libc.mount(b"none", b"/mnt", b"tmpfs", 0, 0) == -1
os.chown(os.memfd_create("x"), 65534, 65534)
""")


@root
def test_missing_capabilities_are_no_error() -> None:
    """Capabilities that are already missing, as in a container, are no error."""
    child("""
p.keep_only({p.Capability.CHOWN, p.Capability.FOWNER})
assert p.keep_only(p.OVERLAY_WORKER) == {p.Capability.CHOWN, p.Capability.FOWNER}
assert p.limit_worker(captures_trace=False) == {p.Capability.CHOWN, p.Capability.FOWNER}
os.setgroups([]) if 6 in p.permitted() else None
assert p.limit_capture("/nowhere") == {p.Capability.CHOWN, p.Capability.FOWNER}  # not CAP_SYS_PTRACE: nothing more goes
assert p.limit_upkeep("/nowhere") == set()
""")
    child("""
os.setgid(65534); os.setuid(65534)
assert p.limit_worker(captures_trace=False) == p.limit_capture("/") == p.limit_upkeep("/") == set()
assert sets()["NoNewPrivs"] == 1
""")


@root
@pytest.mark.skipif(Capability.SYS_PTRACE not in permitted(), reason="CAP_SYS_PTRACE is missing here")
def test_each_process_keeps_only_its_documented_capabilities(tmp_path: Path) -> None:
    """Worker, capture and upkeep keep exactly what docs/security.md lists, where they had it."""
    own = tmp_path / "own"
    own.mkdir()
    for limit, kept in (
        ("worker(captures_trace=True)", OVERLAY_WORKER),
        ("capture(sys.argv[1])", CAPTURE),
        ("upkeep(sys.argv[1])", UPKEEP),
    ):
        output = child(f"p.limit_{limit}; print(sorted(p.permitted()))", str(own))
        assert output == str(sorted(map(int, kept & permitted()))), limit


@root
@pytest.mark.parametrize("foreign", ["directory", "file", "read-only file"])
def test_a_foreign_repository_takes_one_more(tmp_path: Path, foreign: str) -> None:
    """CAP_DAC_OVERRIDE is kept only for a repository, or a file in it, that is not ours to write."""
    (tmp_path / "lock").touch()
    if foreign == "read-only file":
        (tmp_path / "lock").chmod(0o400)
    else:
        os.chown(tmp_path if foreign == "directory" else tmp_path / "lock", 65534, 65534)
    output = child("p.limit_upkeep(sys.argv[1]); print(sorted(p.permitted()))", str(tmp_path))
    assert output == str(sorted(map(int, (UPKEEP | {Capability.DAC_OVERRIDE}) & permitted())))


@root
@pytest.mark.parametrize("captures_trace", [False, True])
def test_a_worker_is_closed_to_others_where_captures_need_it_not(captures_trace: bool) -> None:
    """A worker is dumpable only if captures have no more privileges than it has, as its parent says.

    The worker need not have CAP_SYS_PTRACE itself.
    """
    output = child(
        "p.keep_only(p.OVERLAY_WORKER);"
        f"p.limit_worker(captures_trace={captures_trace}); print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))"
    )
    assert output == str(int(not captures_trace))


def test_no_core_is_written(tmp_path: Path) -> None:
    """A capture that dies of SIGSEGV leaves no core file, and is not dumpable for a handler either."""
    script = """
os.chdir(sys.argv[1])
resource.setrlimit(resource.RLIMIT_CORE, resource.getrlimit(resource.RLIMIT_CORE)[::-1][:1] * 2)
p.no_core_dumps()
assert ctypes.CDLL(None).prctl(3, 0, 0, 0, 0) == 0  # PR_GET_DUMPABLE
os.kill(os.getpid(), 11)
"""
    done = subprocess.run(
        [sys.executable, "-c", HEAD + script, str(tmp_path)], capture_output=True, check=False
    )
    assert done.returncode == -11, done.stderr
    assert list(tmp_path.iterdir()) == []


@root
def test_a_capture_has_no_network() -> None:
    """A capture has no network interface and no route, so it reaches nothing by IP."""
    child("""
if not p.leave_network():
    try:
        socket.create_connection(("127.0.0.1", 9), timeout=5)
    except OSError as error:
        assert error.errno == 101, error  # ENETUNREACH: not even the loopback interface is up
    else:
        raise SystemExit("connected")
""")
