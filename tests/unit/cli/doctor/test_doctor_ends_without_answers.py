"""Tests that doctor ends although a root, and the daemon, do not answer."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.live import installed

from ciuic.cli.probes import Finding, NoAnswer, Probes, in_time, ok
from ciuic.errors import CiuicError
from ciuic.fuse_layer.kernel.session import negotiate
from ciuic.system.poll import readable


def _hang() -> list[Finding]:
    time.sleep(600)
    return []


def _fail(error: BaseException) -> list[Finding]:
    raise error


def test_silent_directory_is_asked_once() -> None:
    """A question that takes too long is given up, and the directory is not asked again; others are."""
    probes = Probes(0.1)
    with pytest.raises(NoAnswer, match="/data did not answer within"):
        probes.findings("/data", _hang)
    with pytest.raises(NoAnswer):
        probes.findings("/data", lambda: [ok("x", "y")])
    assert not probes.answers("/data")
    assert Probes(30).findings("/other", lambda: [ok("x", "\udcff" * 100_000)]) == [
        ok("x", "\udcff" * 100_000)
    ]


def test_errors_are_those_of_the_question() -> None:
    """Errors of the child are raised in the parent; a child that is killed is an error, too."""
    with pytest.raises(FileNotFoundError, match="No such file"):
        in_time(lambda: os.stat("/nowhere at all"), 30)
    with pytest.raises(CiuicError) as caught:
        in_time(lambda: _fail(CiuicError("a", hint="b")), 30)
    assert (caught.value.message, caught.value.hint) == ("a", "b")
    with pytest.raises(CiuicError, match="ValueError: odd"):
        in_time(lambda: _fail(ValueError("odd")), 30)
    with pytest.raises(CiuicError, match="without an answer"):
        in_time(lambda: os.kill(os.getpid(), signal.SIGKILL), 30)


def test_child_holds_nothing_open() -> None:
    """A child that may hang for ever keeps no pipe open: a reader of doctor's output sees its end."""
    read_end, write_end = os.pipe()
    held = in_time(lambda: [os.readlink(f"/proc/self/fd/{fd}") for fd in range(max(read_end, write_end) + 1)
                            if os.path.exists(f"/proc/self/fd/{fd}")], 30)  # fmt: skip
    os.close(read_end)
    os.close(write_end)
    assert held[:3] == [os.devnull] * 3
    assert all(name.startswith("pipe:") for name in held[3:])
    assert len(held) <= 4


@pytest.fixture
def hanging_root(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of our kind whose server reads all requests and answers none but the first."""
    root = tmp_path / "root"
    root.mkdir()
    fd = os.open("/dev/fuse", os.O_RDWR | os.O_NONBLOCK)
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0".encode()
    if libc.mount(b"hanging", os.fsencode(root), b"fuse.ciuic", 0, options):
        raise OSError(ctypes.get_errno(), "mount")
    end = threading.Event()

    def serve() -> None:
        while not end.is_set():
            # A request that was read is waited for in a way that no signal interrupts.
            if readable(fd, 0.05):
                os.read(fd, 1 << 21)

    server = threading.Thread(target=serve)
    try:
        assert readable(fd, 30)
        negotiate(fd, passthrough=False)
        server.start()
        yield root
    finally:
        end.set()
        if server.ident is not None:
            server.join()
        # Callers that still wait get an error when the connection ends.
        os.close(fd)
        subprocess.run(["umount", "-l", root], check=True, timeout=30)


@pytest.mark.mount
def test_doctor_ends_although_a_root_hangs(hanging_root: Path, tmp_path: Path) -> None:
    """Without a daemon, every check of a root that hangs says so, the others are made, and doctor ends."""
    file = tmp_path / "c.toml"
    file.write_text(
        f'[repository]\npath = "{tmp_path}/repository"\n[control]\nsocket = "{tmp_path}/s"\n'
        f'[[root]]\npath = "{hanging_root}"\n'
    )
    done = subprocess.run(
        [str(installed()), "--config", str(file), "doctor", "--json", str(hanging_root / "sub")],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    findings = [Finding(**finding) for finding in json.loads(done.stdout)["findings"]]
    silent = {finding.check: finding.level for finding in findings if "not answer" in finding.message}
    assert silent.items() >= {
        "driver": "warning", "roots": "problem", "free space": "warning", "coverage": "warning",
    }.items()  # fmt: skip
    assert {"clock", "file system", "repository"} <= {finding.check for finding in findings}
