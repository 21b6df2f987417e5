"""A container's capabilities, Docker's defaults and CAP_SYS_ADMIN for the mount: everything works."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from support.live import Live, installed
from support.second_user import User, run_as
from support.trees import assert_same, manifest
from support.until import until

pytestmark = pytest.mark.mount
_CONTAINER = (
    "chown", "dac_override", "fowner", "fsetid", "kill", "setgid", "setuid", "setpcap", "net_bind_service", "net_raw",
    "sys_chroot", "mknod", "audit_write", "setfcap", "sys_admin",
)  # fmt: skip
_HOLD_LOCK = (
    "import sys; from pathlib import Path; from ciuic.repository import Repository;"
    "r = Repository.open(Path(sys.argv[1])); w = r.writer(wait_seconds=60).__enter__(); print('held', flush=True); sys.stdin.read()"
)
_JOB = """
os.chdir(sys.argv[1])
os.rename("folder/inner", "elsewhere")
os.mkdir("folder/inner")
with open("elsewhere/deep/file", "r+b") as file:
    file.write(b"changed by an ordinary user")
os.unlink("elsewhere/deep/gone")
os.rename("elsewhere/deep", "folder/inner/deeper")
open("mine", "w").write("his")
"""


def test_a_container_without_ptrace(live: Live, root: Path) -> None:
    """Directories that a user moves while a snapshot waits are unchanged in it, without CAP_SYS_PTRACE.

    The capture cannot read the worker's descriptors by privilege there; the user's files stay the user's.
    """
    job = User(1234, 1234)
    for path in (live.top.parent, live.top):
        path.chmod(0o755)
    (root / "folder/inner/deep").mkdir(parents=True)
    for name in ("folder/inner/deep/file", "folder/inner/deep/gone", "folder/inner/top"):
        (root / name).write_bytes(os.urandom(500_000))
    for folder, _, files in os.walk(root):
        for path in (folder, *(os.path.join(folder, name) for name in files)):
            os.chown(path, job.uid, job.gid)
    live.run("protect", str(root))
    few = live.top / "few"
    few.write_text(
        f'#!/bin/sh\nexec setpriv --bounding-set=-all,{",".join("+" + name for name in _CONTAINER)} {installed()} "$@"\n'
    )
    few.chmod(0o755)
    _start(live, few, root)
    until("the first snapshot", live.list)
    holder = subprocess.Popen([str(installed("python")), "-c", _HOLD_LOCK, str(live.repository)],
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        # The capture must find its way through all of these directories.
        for name in ("deep/file", "deep/gone", "top"):
            with open(root / "folder/inner" / name, "ab") as file:
                file.write(b"more")
        before = manifest(root)
        snapshot = live.run("snapshot").stdout.decode().split()[0]
        run_as(job, _JOB, str(root)).check_returncode()
        assert (root / "mine").stat().st_uid == job.uid
    finally:
        holder.communicate(timeout=30)
    until("the snapshot", lambda: snapshot in [listed.id for listed in live.list()])
    live.run("restore", "-s", snapshot, "-p", str(root), "-d", str(live.top / "out"))
    assert_same(before, manifest(live.top / "out/root"))
    shutil.rmtree(live.top / "out")


def _start(live: Live, program: Path, root: Path) -> None:
    with open(live.daemon_log, "ab") as log:
        live.daemon = subprocess.Popen(
            [str(program), "daemon"], env=live.env, cwd="/", stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
    live.wait_mounted(root)
