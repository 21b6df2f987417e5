"""Python programs that are forked from a process that has imported what they need.

Importing a framework takes seconds of processor time, more than most of these programs take for the rest. `WarmPython` imports once;
each program is a process of its own, with its own environment, directory and output, and ends as any interpreter ends.
A program is a child of this process, which adopts it (PR_SET_CHILD_SUBREAPER).
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import random
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

_MAX_BYTES = 1 << 20
_PR_SET_CHILD_SUBREAPER = 36


class Program:
    """A running program, with the part of `subprocess.Popen` that tests use."""

    def __init__(self, pid: int, out: int, err: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._printed = {out: bytearray(), err: bytearray()}
        # The pid is not reused before it is waited for.
        self._life = os.pidfd_open(pid)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for the end of the program, and of all processes that have its output; return what was printed to stdout and stderr.

        A program that is late is killed.
        """
        deadline = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            for fd in self._printed:
                selector.register(fd, selectors.EVENT_READ)
            while selector.get_map() and (ready := selector.select(max(0.0, deadline - time.monotonic()))):
                for key, _ in ready:
                    data = os.read(key.fd, 1 << 16)
                    self._printed[key.fd] += data
                    if not data:
                        selector.unregister(key.fd)
            late = bool(selector.get_map())
        if late:
            self.kill()
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        for fd in (*self._printed, self._life):
            os.close(fd)
        out, err = (printed.decode(errors="replace") for printed in self._printed.values())
        if late:
            raise subprocess.TimeoutExpired(f"{out}\n{err}"[-4000:], timeout)
        return out, err

    def kill(self) -> None:
        """Send SIGKILL."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._life, signal.SIGKILL)


class WarmPython:
    """A process that has imported modules, as a context manager; programs that run outlive it."""

    def __init__(self, *modules: str) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        # Several threads may ask for programs.
        self._asking = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            for end in (self._socket, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MAX_BYTES)
            self._server = subprocess.Popen(
                [sys.executable, "-W", "ignore", __file__, str(theirs.fileno()), *modules],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "HF_HUB_OFFLINE": "1"},
            )

    def __enter__(self) -> WarmPython:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._server.wait(60)

    def start(
        self,
        command: Sequence[object],
        *,
        env: Mapping[str, str] | None = None,
        cwd: object = None,
        stdin: bytes = b"",
    ) -> Program:
        """Start a program.

        Args:
            command: arguments of the interpreter: a script, or -c or -m with what follows, after any -W.
            env: environment; None for this process's.
            cwd: directory; None for this process's.
            stdin: what is read from standard input.
        """
        in_of_program = os.memfd_create("stdin")
        os.pwrite(in_of_program, stdin, 0)
        (out, out_of_program), (err, err_of_program) = os.pipe(), os.pipe()
        wanted = {
            "command": [os.fspath(one) if isinstance(one, os.PathLike) else str(one) for one in command],
            "env": dict(os.environ if env is None else env),
            "cwd": str(os.getcwd() if cwd is None else cwd),
        }
        fds_of_program = (in_of_program, out_of_program, err_of_program)
        with self._asking:
            socket.send_fds(self._socket, [json.dumps(wanted).encode()], fds_of_program)
            answer = self._socket.recv(100)
        for fd in fds_of_program:
            os.close(fd)
        assert answer, f"the imports failed with status {self._server.wait(60)}"
        return Program(int(answer), out, err)

    def run(
        self,
        command: Sequence[object],
        *,
        timeout: float,
        env: Mapping[str, str] | None = None,
        cwd: object = None,
        stdin: bytes = b"",
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end; the arguments are those of `start`."""
        program = self.start(command, env=env, cwd=cwd, stdin=stdin)
        out, err = program.communicate(timeout)
        assert program.returncode is not None
        return subprocess.CompletedProcess([str(one) for one in command], program.returncode, out, err)


def _serve(fd: int, modules: Sequence[str]) -> Sequence[str]:
    """Import modules and fork programs; return in each program, with its command line."""
    for module in modules:
        importlib.import_module(module)
    # Keeps the imported objects out of every program's garbage collection.
    gc.freeze()
    requests = socket.socket(fileno=fd)
    while True:
        data, fds, _, _ = socket.recv_fds(requests, _MAX_BYTES, 3)
        if not data:
            _end(0)
        reading, writing = os.pipe()
        between = os.fork()
        if not between:
            program = os.fork()
            if not program:
                os.close(reading)
                os.close(writing)
                requests.close()
                return _become(json.loads(data), fds)
            os.write(writing, str(program).encode())
            _end(0)
        # The program has been adopted by the one who asked for it when the process between them has ended.
        os.waitpid(between, 0)
        requests.send(os.read(reading, 100))
        for one in (reading, writing, *fds):
            os.close(one)


def _end(status: int) -> NoReturn:
    os._exit(status)


def _become(wanted: Mapping[str, Any], fds: Sequence[int]) -> Sequence[str]:
    for target, fd in enumerate(fds):
        os.dup2(fd, target)
        os.close(fd)
    # Those of this process know of what was there before whether it can be sought.
    sys.stdin = open(0, closefd=False)
    sys.stdout = open(1, "w", closefd=False)
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    os.chdir(wanted["cwd"])
    os.environ.clear()
    os.environ.update(wanted["env"])
    sys.path[0:1] = [one for one in wanted["env"].get("PYTHONPATH", "").split(":") if one]
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules and "OMP_NUM_THREADS" in os.environ:
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    command: list[str] = wanted["command"]
    if command[0] == "-W":
        warnings.simplefilter(command[1])  # type: ignore[arg-type]
        return command[2:]
    warnings.resetwarnings()
    return command


def _program(command: Sequence[str]) -> tuple[types.CodeType, dict[str, Any]]:
    """Return the code of a program and the names of its module, which is __main__ from now on."""
    main = types.ModuleType("__main__")
    kind, *arguments = command
    if kind == "-c":
        source, file = arguments[0], "<string>"
        sys.argv = ["-c", *arguments[1:]]
        sys.path.insert(0, "")
    elif kind == "-m":
        sys.argv = arguments
        sys.path.insert(0, os.getcwd())
        main.__dict__.update(run_module=runpy.run_module)
        source, file = f"run_module({arguments[0]!r}, run_name='__main__', alter_sys=True)", "<module>"
    else:
        with open(kind, encoding="utf-8") as script:
            source = script.read()
        file = main.__file__ = kind
        sys.argv = [kind, *arguments]
        sys.path.insert(0, os.path.dirname(os.path.abspath(kind)))
    sys.modules["__main__"] = main
    return compile(source, file, "exec"), main.__dict__


if __name__ == "__main__":
    # At the top of the program, so that the interpreter ends with it as after any other.
    exec(*_program(_serve(int(sys.argv[1]), sys.argv[2:])))
