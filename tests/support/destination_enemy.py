"""Unprivileged owner of the destination of a restore by root: a real process that takes one step per request.

Between two system calls of the restore it does what the kernel lets that user do, never with root's rights.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

UID = GID = 47_613
"""User and group id, which need not be in /etc/passwd."""

_PROGRAM = """
import ctypes, errno, json, os, stat, sys
uid, gid = map(int, sys.argv[1:])
os.setgroups([]); os.setresgid(gid, gid, gid); os.setresuid(uid, uid, uid)
libc = ctypes.CDLL(None, use_errno=True)

def temporaries(top):
    found = []
    for folder, folders, files in os.walk(top):
        found += [os.path.join(folder, name) for name in (*folders, *files) if name.startswith(".ciuic-restore-")]
    return found

def exchange(one, other):
    return libc.renameat2(-100, os.fsencode(one), -100, os.fsencode(other), 2) == 0

def replace_pipes(top, by):
    for path in temporaries(top):
        if stat.S_ISFIFO(os.lstat(path).st_mode) and exchange(path, by):
            return True
    return False

def replace_directories(top, by):
    for path in temporaries(top):
        if stat.S_ISDIR(os.lstat(path).st_mode) and exchange(path, by):
            return True
    return False

held = []
def open_unfinished(top):
    for path in temporaries(top):
        try:
            held.append(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW))
        except OSError:
            pass
    return len(held)

def move(old, new):
    try:
        os.rename(old, new)
        return True
    except OSError:
        return False

def link_over(target, name):
    try:
        os.rename(name, name + ".aside")
        os.symlink(target, name)
        return True
    except OSError:
        return False

def reads(path):
    try:
        with open(path, "rb") as file:
            return file.read().decode("latin-1")
    except OSError as error:
        return errno.errorcode[error.errno]

print("ready", flush=True)
for line in sys.stdin:
    name, arguments = json.loads(line)
    try:
        answer = globals()[name](*arguments)
    except OSError as error:
        answer = str(error)
    print(json.dumps(answer), flush=True)
"""


class DestinationEnemy:
    """Client of the living process; context manager."""

    def __init__(self, uid: int = UID) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", _PROGRAM, str(uid), str(uid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def do(self, step: str, *arguments: Path | str) -> Any:
        """Run one of the program's functions with these arguments as that user."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([step, [str(argument) for argument in arguments]]) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def __enter__(self) -> DestinationEnemy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate(timeout=30)
