"""What mount(8) calls for ``mount -t fuse.ciuic DEVICE DIRECTORY -o …``, so that others' test suites can mount an overlay.

    python -m support.mount_helper DEVICE DIRECTORY [-o OPTIONS]

The overlay lies over DIRECTORY itself, as always; DEVICE is only the name that the mount shows, because suites tell
their mounts apart by it. Returns when the mount answers; the worker goes on without us and ends when it is unmounted. Like
the daemon, it starts no worker before the one before it has ended. Lock, log and socket of each DIRECTORY lie in TMPDIR.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import hashlib
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from support.driver import DRIVER

from ciuic.fuse_layer import mounts
from ciuic.readiness import readable

_READY_SECONDS = 60
_MS_RDONLY = 1
_OPTIONS = {
    "suid": ["nosuid"],
    "dev": ["nodev"],
    "exec": ["noexec"],
    "relatime": ["noatime", "strictatime"],
    "diratime": ["nodiratime"],
}


def main() -> int:
    """Mount, or hand a remount to the kernel; 0 when it was done, 32 (mount(8): failed) when not."""
    parser = argparse.ArgumentParser()
    parser.add_argument("device")
    parser.add_argument("directory")
    parser.add_argument("-o", dest="options", default="")
    parser.add_argument("-t", dest="type")
    arguments, _ = parser.parse_known_args()
    options = set(arguments.options.split(","))
    if "remount" in options:
        return subprocess.run(
            ["mount", "-i", "-o", arguments.options, arguments.directory], check=False
        ).returncode
    _set_below(arguments.directory, options)
    return 0 if _started(arguments.device, arguments.directory, "ro" in options) else 32


def _set_below(directory: str, options: set[str]) -> None:
    """An overlay has no options of its own: those of the mount that it lies over count, and it takes them over."""
    wanted = [
        next((option for option in others if option in options), usual) for usual, others in _OPTIONS.items()
    ]
    # Some tests unmount what is below as well; it is then the host's directory, which has its own options.
    subprocess.run(
        ["mount", "-o", ",".join(["remount,bind", *wanted]), directory],
        stderr=subprocess.DEVNULL,
        check=False,
    )


def _started(device: str, directory: str, read_only: bool) -> bool:
    place = Path(tempfile.gettempdir()) / ("mount-" + hashlib.sha1(os.fsencode(directory)).hexdigest()[:10])
    place.mkdir(exist_ok=True)
    lock = os.open(place / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)  # inherited by the worker, and given up by its end
    backing_fd = mounts.open_backing(directory)
    ready, told = os.pipe()
    with open(place / "log", "ab") as log:
        subprocess.Popen(
            [
                *(sys.executable, "-m", "support.mount_helper", "--worker", device, str(int(read_only))),
                *("--root", directory, "--backing-fd", str(backing_fd), "--ready-fd", str(told)),
                *("--control", str(place / "socket"), "--driver", DRIVER),
            ],
            pass_fds=(backing_fd, told, lock),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
        )
    os.close(told)
    return readable(ready, _READY_SECONDS) and os.read(ready, 16) == b"ready\n"


class _NamedMounts:
    """libc whose mount(2) gives our mounts another name, and read-only if so asked."""

    def __init__(self, libc: ctypes.CDLL, name: bytes, flags: int) -> None:
        self._libc, self._name, self._flags = libc, name, flags

    def __getattr__(self, function: str) -> Any:
        return getattr(self._libc, function)

    def mount(self, _name: bytes, target: bytes, kind: bytes, flags: ctypes.c_ulong, options: bytes) -> int:
        wanted = ctypes.c_ulong(flags.value | self._flags)
        result: int = self._libc.mount(self._name, target, kind, wanted, options)
        return result


def _work(device: str, read_only: bool) -> None:
    mounts._libc = _NamedMounts(mounts._libc, device.encode(), _MS_RDONLY if read_only else 0)  # type: ignore[assignment]
    runpy.run_module("ciuic.fuse_layer.worker", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        name, only_reading = sys.argv[2], sys.argv[3] == "1"
        del sys.argv[1:4]
        _work(name, only_reading)
    else:
        sys.exit(main())
