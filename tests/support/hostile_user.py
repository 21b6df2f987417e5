"""Living process of an ordinary user that carries out one system call at a time, and keeps descriptors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import TracebackType

from support.second_user import _BECOME, User

_ACT = """
uid, gid, groups = json.loads(sys.stdin.readline())
become(uid, gid, groups)
os.umask(0)
kept = {}
def place(path):
    name, slash, rest = path.partition("/")
    return f"/proc/self/fd/{kept.get(name[1:], -1)}{slash}{rest}" if name.startswith("@") else path
def act(what, arguments):
    paths = [place(argument) if isinstance(argument, str) else argument for argument in arguments]
    if what == "keep":
        kept[arguments[1]] = os.open(paths[0], os.O_PATH)
    elif what == "symlink":
        os.symlink(arguments[0], paths[1])
    elif what == "write":
        with open(paths[0], "wb") as file:
            file.write(arguments[1].encode())
    elif what == "overwrite":
        with open(paths[0], "r+b", buffering=0) as file:
            file.write(arguments[1].encode())
    elif what == "read":
        with open(paths[0], "rb") as file:
            return file.read().decode("latin-1")
    elif what == "listdir":
        return os.listdir(paths[0])
    else:
        return getattr(os, what)(*paths)
print("ready", flush=True)
for line in sys.stdin:
    what, *arguments = json.loads(line)
    try:
        result = act(what, arguments)
        print(json.dumps([0, result if isinstance(result, (str, list)) else None]), flush=True)
    except OSError as error:
        print(json.dumps([error.errno, None]), flush=True)
"""


class HostileUser:
    """Process of ``user``. A path that begins with ``@name`` is below the descriptor kept under that name."""

    def __init__(self, user: User) -> None:
        self.user = user
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", _BECOME + _ACT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
        )
        self._request([user.uid, user.gid, list(user.groups)])

    def __call__(self, what: str, *arguments: object) -> int:
        """Carry out ``os.<what>`` or one of keep, write, overwrite, read, listdir; return 0 or the errno."""
        number: int = json.loads(self._request([what, *map(_plain, arguments)]))[0]
        return number

    def read(self, path: os.PathLike[str] | str) -> str | None:
        """Return the content of a file as the user sees it, or None if it may not be read."""
        number, text = json.loads(self._request(["read", os.fspath(path)]))
        return None if number else text

    def _request(self, what: object) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()

    def __enter__(self) -> HostileUser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate(timeout=30)


def _plain(argument: object) -> object:
    return os.fspath(argument) if isinstance(argument, os.PathLike) else argument
