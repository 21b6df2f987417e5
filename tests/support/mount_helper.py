"""Helper of mount(8) for ``mount -t fuse.ciuic DEVICE DIRECTORY -o …``, for other projects' test suites.

    python -m support.mount_helper DEVICE DIRECTORY [-o OPTIONS]

The overlay lies over DIRECTORY itself, as always; DEVICE is only the name that the mount shows, because
suites tell their mounts apart by it. A DEVICE that is mounted elsewhere already is mounted there once more, as one
disk shows one file system wherever it is mounted. Returns when the mount answers; a process of its own holds the
session as the daemon does, and ends when it is unmounted. Like the daemon, it starts no worker before the previous one
has ended. Lock, log and socket of each DIRECTORY lie in TMPDIR.

CIUIC_WORKER_KILLS is the mean number of seconds after which a worker is killed and succeeded; without it none is killed.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import hashlib
import os
import random
import runpy
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from support.overlay import Overlay

from ciuic.fuse_layer.system import mounts
from ciuic.system import mountinfo
from ciuic.system.poll import readable

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
    """Mount, or pass a remount to the kernel; return 0 on success and 32 (mount(8): failed) otherwise."""
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
    elsewhere = _place_of(arguments.device)
    if elsewhere not in (None, os.path.realpath(arguments.directory)):
        return subprocess.run(["mount", "--bind", elsewhere, arguments.directory], check=False).returncode
    _set_below(arguments.directory, options)
    return 0 if _started(arguments.device, arguments.directory, "ro" in options) else 32


def _set_below(directory: str, options: set[str]) -> None:
    """Set the options of the mount below, which the overlay takes over, as it has none of its own."""
    wanted = [
        next((option for option in others if option in options), usual) for usual, others in _OPTIONS.items()
    ]
    # Some tests also unmount the file system below; the host's directory then has its own options.
    subprocess.run(
        ["mount", "-o", ",".join(["remount,bind", *wanted]), directory],
        stderr=subprocess.DEVNULL,
        check=False,
    )


def _place_of(device: str) -> str | None:
    """Return where the overlay of this device name is mounted; None if nowhere."""
    places = [
        mount.mount_point
        for mount in mountinfo.read()
        if mount.fs_type == os.fsencode(mounts.FS_TYPE) and mount.source == os.fsencode(device)
    ]
    return os.fsdecode(places[0]) if places else None


def _started(device: str, directory: str, read_only: bool) -> bool:
    place = Path(tempfile.gettempdir()) / ("mount-" + hashlib.sha1(os.fsencode(directory)).hexdigest()[:10])
    place.mkdir(exist_ok=True)
    lock = os.open(place / "lock", os.O_RDWR | os.O_CREAT)
    # The process that holds the session inherits the lock, and its end releases it.
    fcntl.flock(lock, fcntl.LOCK_EX)
    ready_read, ready_write = os.pipe()
    if not os.fork():
        try:
            os.close(ready_read)
            _hold(device, directory, read_only, place, ready_write)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(ready_write)
    return readable(ready_read, _READY_SECONDS) and os.read(ready_read, 16) == b"ready\n"


def _hold(device: str, directory: str, read_only: bool, place: Path, ready: int) -> None:
    """Hold the session of a mount until it is unmounted, as the daemon does: a worker that is killed has a successor."""
    os.setsid()
    os.chdir("/")
    log = os.open(place / "held.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    for number, fd in enumerate((null, log, log)):
        os.dup2(fd, number)
    worker = (sys.executable, "-m", "support.mount_helper", "--worker", device, str(int(read_only)))
    overlay = Overlay(Path(directory), place / "worker.socket", interpreter=worker)
    mean_seconds = float(os.environ.get("CIUIC_WORKER_KILLS", 0))
    overlay.keep_session()
    os.write(ready, b"ready\n")
    os.close(ready)
    while True:
        try:
            overlay.process.wait(random.uniform(0, 2 * mean_seconds) if mean_seconds else None)
        except subprocess.TimeoutExpired:
            overlay.process.kill()
            overlay.process.wait()
        if overlay.process.returncode == 0 or mounts.overlay_over(overlay.backing_fd) is None:
            return
        overlay.succeed()
        os.write(1, b"succeeded\n")


class _NamedMounts:
    """Wrapper of libc whose mount(2) gives our mounts another name, and makes them read-only on request."""

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
        # Also "-m" and the module, which `Overlay` names.
        del sys.argv[1:6]
        _work(name, only_reading)
    else:
        sys.exit(main())
