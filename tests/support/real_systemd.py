"""Real systemd as the first process of its own namespaces, over a copy-on-write view of this machine's root.

It has its own mounts, process ids, host name, IPC and control groups, and a tmpfs for all its writes; it
starts in two seconds. Directories bound into it are shared with the test; all other changes vanish with it.
Needs root, overlayfs, a version 2 control group hierarchy, systemd and dbus-daemon.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_SYSTEMD = "/lib/systemd/systemd"
_START_SECONDS = 60.0
_TARGET = "ciuic-test.target"
_BOOT = r"""
set -eu
base=$1; shift
mount --make-rslave /
mount -t tmpfs none "$base"
mkdir "$base/up" "$base/work" "$base/root"
mount -t overlay none -o "lowerdir=/,upperdir=$base/up,workdir=$base/work" "$base/root"
root=$base/root
mount -t tmpfs tmpfs "$root/run"
mount -t tmpfs tmpfs "$root/tmp"
mount -t tmpfs tmpfs "$root/dev"
for device in null zero full random urandom tty fuse; do
    [ -e "/dev/$device" ] || continue
    touch "$root/dev/$device"; mount --bind "/dev/$device" "$root/dev/$device"
done
mkdir "$root/dev/shm" "$root/dev/pts"
mount -t tmpfs tmpfs "$root/dev/shm"
mount -t devpts devpts -o newinstance,ptmxmode=0666 "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"  # PrivateDevices= fails without
# Other file systems than the root's are not in an overlay of it: those that the caller names are bound.
for path in "$@"; do mkdir -p "$root$path"; mount --bind "$path" "$root$path"; done
mount -t proc proc "$root/proc"
mount -t sysfs sys "$root/sys"
mount -t cgroup2 none "$root/sys/fs/cgroup"
mkdir -p "$root/old-root"
cd "$root"
pivot_root . old-root
umount -l /old-root
[ "$(stat -f -c %T /)" = overlayfs ]  # what follows is done to the copy alone
# None of this machine's own services, and nothing that tidies up: only what a transient service needs.
rm -rf /etc/systemd/system/*.wants /etc/systemd/system/*.requires /lib/systemd/system/*.wants
mkdir -p /etc/systemd/system
printf '[Unit]\nRequires=dbus.service\nAfter=dbus.service\nAllowIsolate=yes\n' > /etc/systemd/system/@TARGET@
exec env -i container=test PATH=/usr/sbin:/usr/bin:/sbin:/bin @SYSTEMD@ --system --unit=@TARGET@ \
    --log-target=console --show-status=0
"""


def reason_against() -> str:
    """Return why this machine cannot run it; empty where it can."""
    if os.geteuid() != 0:
        return "needs root"
    for program in (_SYSTEMD, "dbus-daemon", "systemd-run", "unshare", "nsenter"):
        if shutil.which(program) is None:
            return f"there is no {program}"
    return "" if _hierarchy() is not None else "there is no version 2 control group hierarchy to write to"


def _hierarchy() -> Path | None:
    for path in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")):
        if (path / "cgroup.procs").exists() and os.access(path / "cgroup.procs", os.W_OK):
            return path
    return None


class RealSystemd:
    """Context manager of one systemd. ``shared``: directories of this machine that are the same inside."""

    def __init__(self, place: Path, shared: Sequence[Path] = ()) -> None:
        self._base = place / "systemd"
        self._shared = [str(path) for path in shared]
        self._process: subprocess.Popen[bytes] | None = None
        self._pid = 0
        hierarchy = _hierarchy()
        assert hierarchy is not None
        self._group = hierarchy / f"ciuic-test-{os.getpid()}-{os.urandom(3).hex()}"
        self.log = place / "systemd.log"

    def __enter__(self) -> RealSystemd:
        self._base.mkdir()
        self._group.mkdir()
        text = _BOOT.replace("@TARGET@", _TARGET).replace("@SYSTEMD@", _SYSTEMD)
        # Enter its control group before there is a namespace of them, whose root this group then is.
        join = f'echo $$ > {self._group}/cgroup.procs && exec unshare -mpuiC --fork --kill-child=KILL bash -c "$0" boot "$@"'
        try:
            with open(self.log, "wb") as log:
                self._process = subprocess.Popen(
                    ["bash", "-c", join, text, str(self._base), *self._shared],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                )  # fmt: skip
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _wait(self) -> None:
        """Wait until its bus answers."""
        deadline = time.monotonic() + _START_SECONDS
        while True:
            assert self._process is not None
            assert self._process.poll() is None, self.log.read_text(errors="replace")[-3000:]
            assert time.monotonic() < deadline, self.log.read_text(errors="replace")[-3000:]
            self._pid = self._pid or self._first_process()
            if self._pid:
                done = self.run(["systemctl", "is-active", "--quiet", _TARGET, "dbus.service"])
                if done.returncode == 0:
                    return
            time.sleep(0.1)

    def _first_process(self) -> int:
        """Return its pid on this machine: the child of unshare, once it has become systemd."""
        assert self._process is not None
        # The process has not got that far.
        with suppress(OSError, LookupError):
            children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text()
            pid = int(children.split()[0])
            if os.readlink(f"/proc/{pid}/exe").endswith("/systemd"):
                return pid
        return 0

    def run(self, command: Sequence[str], **how: Any) -> subprocess.CompletedProcess[str]:
        """Run a command inside, as root."""
        return subprocess.run(
            [*self.prefix(), *command],
            capture_output=True, text=True, check=False, timeout=60, **how,
        )  # fmt: skip

    @property
    def files(self) -> Path:
        """Return the root directory inside."""
        return Path(f"/proc/{self._pid}/root")

    def python(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a program of this interpreter's inside; its imports must be shared or on the root."""
        return self.run([sys.executable, "-c", program, *arguments])

    def prefix(self) -> list[str]:
        """Return the prefix of a command that runs inside."""
        return ["nsenter", "-t", str(self._pid), "-m", "-p", "-u", "-i", "-C", "--"]

    def __exit__(self, *_: object) -> None:
        if self._pid:
            with suppress(ProcessLookupError):
                # All processes of its namespace end with it.
                os.kill(self._pid, signal.SIGKILL)
        if self._process is not None:
            self._process.kill()
            self._process.wait(30)
        deadline = time.monotonic() + 20
        while self._group.exists() and time.monotonic() < deadline:
            for folder, _folders, _files in os.walk(self._group, topdown=False):
                # A process in the control group is still ending.
                with suppress(OSError):
                    os.rmdir(folder)
            time.sleep(0.05)
