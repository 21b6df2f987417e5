"""Attacker: an ordinary user who is root of a user namespace, as in a rootless container.

Through the overlay that user may do exactly what a plain directory allows.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support.overlay import Overlay
from support.second_user import _BECOME, MADE_UP

pytestmark = pytest.mark.mount
_FIRST_SUBORDINATE = 200_000
_SCRIPT = r"""
import ctypes, os, struct, sys
top = sys.argv[1]
libc = ctypes.CDLL(None, use_errno=True)
def p(name): return os.path.join(top, name)
def owner(name): return os.stat(p(name)).st_uid, os.stat(p(name)).st_gid, oct(os.stat(p(name)).st_mode)
def mount():
    if libc.mount(b"none", p("d").encode(), b"tmpfs", 0, None):
        raise OSError(ctypes.get_errno(), "")
def attempt(what, do):
    try:
        print(what, repr(do()))
    except OSError as error:
        print(what, "errno", error.errno)
mine = 0xFFFFFFFF
ACL = struct.pack("<I", 2) + b"".join(
    struct.pack("<HHI", *entry) for entry in ((1, 7, mine), (2, 7, 7), (4, 5, mine), (16, 7, mine), (32, 0, mine)))
CAPABILITY = struct.pack("<IIIII", 0x02000001, 1 << 21, 0, 0, 0)
attempt("create", lambda: open(p("f"), "x").close())
attempt("owner", lambda: owner("f"))
attempt("chown to an id of the namespace", lambda: os.chown(p("f"), 5, 5))
attempt("chown to an id outside of it", lambda: os.chown(p("f"), 70000, 5))
attempt("set-id bits", lambda: os.chmod(p("f"), 0o6755))
attempt("owner", lambda: owner("f"))
attempt("device", lambda: os.mknod(p("n"), 0o060600, os.makedev(8, 0)))
attempt("pipe", lambda: os.mkfifo(p("pipe")))
attempt("trusted attribute", lambda: os.setxattr(p("f"), "trusted.x", b"1"))
attempt("user attribute", lambda: os.setxattr(p("f"), "user.x", b"1"))
attempt("capability", lambda: os.setxattr(p("f"), "security.capability", CAPABILITY))
attempt("capability is", lambda: os.getxattr(p("f"), "security.capability").hex())
attempt("acl", lambda: os.setxattr(p("f"), "system.posix_acl_access", ACL))
attempt("acl is", lambda: os.getxattr(p("f"), "system.posix_acl_access").hex())
attempt("read root's", lambda: open(p("roots")).read())
attempt("chown root's", lambda: os.chown(p("roots"), 0, 0))
attempt("chmod root's", lambda: os.chmod(p("roots"), 0o777))
attempt("link root's", lambda: os.link(p("roots"), p("link")))
attempt("unlink in a sticky directory", lambda: os.unlink(p("sticky/roots")))
attempt("rename root's", lambda: os.rename(p("roots"), p("renamed")))
attempt("mkdir", lambda: os.mkdir(p("d")))
attempt("mount", mount)
attempt("write in the mount", lambda: open(p("d/x"), "x").close())
attempt("listing", lambda: sorted(os.listdir(top)))
"""
_ENTER = r"""
import ctypes, struct
become(*json.loads(sys.stdin.readline()))
CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000
if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUSER | CLONE_NEWNS):
    raise OSError(ctypes.get_errno(), "unshare")
print("made", flush=True)
sys.stdin.readline()
become(0, 0, [])
"""


def _results(directory: Path) -> str:
    """Return the script's results in a new namespace.

    The id maps are written from outside, as newuidmap(1) does.
    """
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", _BECOME + _ENTER + _SCRIPT, os.fspath(directory)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/",
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps([MADE_UP.uid, MADE_UP.gid, []]) + "\n")
    process.stdin.flush()
    assert process.stdout.readline() == "made\n"
    for name, own in (("uid_map", MADE_UP.uid), ("gid_map", MADE_UP.gid)):
        Path(f"/proc/{process.pid}/{name}").write_text(f"0 {own} 1\n1 {_FIRST_SUBORDINATE} 65536\n")
    return process.communicate("\n", timeout=60)[0]


def _furnished(directory: Path) -> Path:
    directory.mkdir()
    (directory / "roots").write_text("secret")
    (directory / "roots").chmod(0o600)
    (directory / "sticky").mkdir()
    (directory / "sticky").chmod(0o1777)
    (directory / "sticky/roots").write_text("root's")
    os.chown(directory, MADE_UP.uid, MADE_UP.gid)
    return directory


def test_root_of_a_user_namespace_may_no_more_than_in_a_plain_directory() -> None:
    """Results and effects of every call of a namespace's root are those of the plain directory."""
    top = Path(tempfile.mkdtemp(prefix="ciuic-userns-", dir="/tmp"))
    try:
        top.chmod(0o755)
        plain = _results(_furnished(top / "plain"))
        # The namespace was entered, and refuses what it should.
        assert plain.count("errno") >= 8
        root = _furnished(top / "root")
        with Overlay(root, top / "w.sock"):
            assert _results(root) == plain
    finally:
        shutil.rmtree(top)
