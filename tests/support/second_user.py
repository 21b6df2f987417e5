"""Another user of the machine, as a real process: which paths it can open, and programs run as it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, TypeVar

_BECOME = """
import json, os, socket, stat, sys
def become(uid, gid, groups):
    os.setgroups(groups); os.setresgid(gid, gid, gid); os.setresuid(uid, uid, uid)
"""
_REACH = """
def reached(path):
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return ""
    try:
        if stat.S_ISDIR(mode):
            os.listdir(path)
        elif stat.S_ISSOCK(mode):
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(path)
        elif stat.S_ISREG(mode):
            os.close(os.open(path, os.O_RDONLY))
        else:
            return ""
        return "r"
    except OSError:
        pass
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return ""
    return "w"
uid, gid, groups, paths = json.load(sys.stdin)
become(uid, gid, groups)
json.dump([path for path in paths if reached(os.fsencode(path))], sys.stdout)
"""


_WATCH = """
uid, gid, groups = json.loads(sys.stdin.readline())
become(uid, gid, groups)
print("ready", flush=True)
for line in sys.stdin:
    opened = []
    for path in json.loads(line):
        try:
            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW))
            opened.append(path)
        except OSError:
            pass
    print(json.dumps(opened), flush=True)
"""


class User(NamedTuple):
    """User by numbers, which need not be in /etc/passwd."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()


NOBODY = User(65534, 65534)
MADE_UP = User(54321, 54321)


def reach(user: User, paths: Iterable[Path | str]) -> set[str]:
    """Return which of these the user can list, open for reading or writing, or connect to."""
    question = json.dumps([user.uid, user.gid, list(user.groups), [os.fspath(path) for path in paths]])
    done = subprocess.run(
        [sys.executable, "-c", _BECOME + _REACH], input=question, capture_output=True, text=True, check=True, timeout=60
    )  # fmt: skip
    return set(json.loads(done.stdout))


_Program = TypeVar("_Program", bound="LivingProgram")


class LivingProgram:
    """Python program that answers each line of JSON with one line, and ends with its input; a context manager."""

    def __init__(self, program: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
        )

    def ask(self, question: object) -> str:
        """Send one line, and return the next one of the program."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()

    def close(self) -> None:
        self._process.communicate(timeout=30)

    def __enter__(self: _Program) -> _Program:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Watcher(LivingProgram):
    """Living process of the user that reports, on request, which of some paths it can open for reading."""

    def __init__(self, user: User) -> None:
        super().__init__(_BECOME + _WATCH)
        self.user = user
        self.ask([user.uid, user.gid, list(user.groups)])

    def opens(self, paths: Iterable[str]) -> set[str]:
        return set(json.loads(self.ask(list(paths))))


def run_as(user: User, script: str, *arguments: str, imports: str = "") -> subprocess.CompletedProcess[str]:
    """Run a Python program as that user, with no capability.

    ``imports`` run before the change of user, who may be unable to read our modules.
    """
    become = f"become({user.uid}, {user.gid}, {list(user.groups)})\n"
    return subprocess.run(
        [sys.executable, "-c", _BECOME + imports + "\n" + become + script, *arguments],
        capture_output=True, text=True, check=False, timeout=120, cwd="/",
    )  # fmt: skip


def everything_below(*tops: Path) -> list[str]:
    """Return every path, the tops included, as root sees them; mounts are entered."""
    found = [str(top) for top in tops]
    for top in tops:
        for folder, folders, files in os.walk(top):
            found += [os.path.join(folder, name) for name in (*folders, *files)]
    return found
