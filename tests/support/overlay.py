"""Private overlay worker: a real process that serves a real mount over a directory.

The driver of the mounts is that of CIUIC_TEST_DRIVER: ``kernel``, ``pyfuse3`` or ``kernel-cached``. The last is the kernel driver as
on a kernel without passthrough: all data goes through the kernel's write cache.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from ciuic import STATE_DIR_NAME
from ciuic.fuse_layer.driver_choice import WITHOUT_PASSTHROUGH
from ciuic.fuse_layer.system import mounts
from ciuic.protocol.worker_client import WorkerControlClient
from ciuic.system.poll import readable

ASKED_FOR = os.environ.get("CIUIC_TEST_DRIVER", "kernel")
DRIVER = "kernel" if ASKED_FOR == "kernel-cached" else ASKED_FOR
"""Driver name, as workers and the configuration use it."""
PASSES = ASKED_FOR == "kernel"
"""True if data may bypass the worker (passthrough)."""

if ASKED_FOR == "kernel-cached":
    # Every worker inherits it, whichever process starts it.
    os.environ[WITHOUT_PASSTHROUGH] = "1"


_READY_SECONDS = 60
_STOP_SECONDS = 60


class Overlay:
    """A mounted root. ``client`` is connected to its worker; ``backing`` is the directory under the mount."""

    def __init__(
        self,
        root: Path,
        control: Path,
        *,
        block_size: int = 4096,
        driver: str = DRIVER,
        extra: Sequence[str] = (),
        interpreter: Sequence[str] = (sys.executable,),
    ) -> None:
        self.root = root
        self.backing_fd = mounts.open_backing(os.fspath(root))
        self.log_path = control.with_suffix(".log")
        self._control, self._block_size, self._driver, self._extra = control, block_size, driver, extra
        self._interpreter = interpreter
        self.session_fd = -1
        self.client = WorkerControlClient(control)
        self._start()

    def _start(self, *more: str) -> None:
        control, extra = self._control, (*self._extra, *more)
        ready_read, ready_write = os.pipe()
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(*self._interpreter, "-m", "ciuic.fuse_layer.worker", "--root", os.fspath(self.root)),
                    *("--backing-fd", str(self.backing_fd), "--control", os.fspath(control)),
                    *(
                        "--block-size",
                        str(self._block_size),
                        "--ready-fd",
                        str(ready_write),
                        "--driver",
                        self._driver,
                        *extra,
                    ),
                ],
                pass_fds=(
                    self.backing_fd,
                    ready_write,
                    *((self.session_fd,) if self.session_fd >= 0 else ()),
                ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        os.close(ready_write)
        answer = os.read(ready_read, 16) if readable(ready_read, _READY_SECONDS) else b"(nothing)"
        os.close(ready_read)
        if answer != b"ready\n":
            self.kill()
            raise AssertionError(f"the worker did not come up ({answer!r}): {self.log()}")

    @property
    def backing(self) -> Path:
        """Return the directory under the mount, by way of its descriptor."""
        return Path(f"/proc/self/fd/{self.backing_fd}")

    def log(self) -> str:
        """Return what the worker has written to its log so far."""
        return self.log_path.read_text(errors="replace")

    def stop(self, grace_seconds: float = 20) -> int:
        """End the worker as the daemon does; return its exit status."""
        self.client.stop(grace_seconds)
        status = self.process.wait(_STOP_SECONDS)
        self._let_go()
        return status

    def kill(self) -> None:
        """Kill the worker and unmount the dead mount."""
        self.process.kill()
        self.process.wait(_STOP_SECONDS)
        if mounts.overlay_at(os.fspath(self.root)) is not None:
            mounts.detach(os.fspath(self.root))
        self._let_go()

    def keep_session(self) -> None:
        """Hold the connection, as the daemon does, so that a successor can continue."""
        self.session_fd = self.client.session_fd()

    def succeed(self) -> None:
        """Start a worker that continues the session of the one that ended.

        The caller must have no file open below the root: the new process would wait for itself when it closes
        its copies.
        """
        self.process.wait(_STOP_SECONDS)
        self.client.close()
        self._start("--session-fd", str(self.session_fd))

    def _let_go(self) -> None:
        self.client.close()
        if self.session_fd >= 0:
            os.close(self.session_fd)
            self.session_fd = -1
        if self.backing_fd >= 0:
            os.close(self.backing_fd)
            self.backing_fd = -1

    def __enter__(self) -> Overlay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            try:
                self.stop(0)
            except BaseException:
                self.kill()
                raise
        self._let_go()


@contextlib.contextmanager
def plain_and_overlay(run_dir: Path, name: str) -> Iterator[tuple[Path, Overlay]]:
    """Provide a plain directory and a mounted overlay that every user can reach, for comparisons."""
    run_dir.chmod(0o711)
    plain, root = run_dir / f"{name}-plain", run_dir / name
    plain.mkdir()
    root.mkdir()
    with overlay_over(root, run_dir / f"{name}.sock") as overlay:
        yield plain, overlay


@contextlib.contextmanager
def overlay_over(root: Path, control: Path, *, block_size: int = 4096) -> Iterator[Overlay]:
    """Provide a mounted overlay, and check at the end that its log has no unexpected failure."""
    with Overlay(root, control, block_size=block_size) as overlay:
        yield overlay
    log = overlay.log()
    assert "Traceback" not in log, log
    assert "_failed" not in log, log


def state_of(root: Path) -> Path:
    """Return the state directory of ``root``, mounted or not: beside it, by inode number, or the only one."""
    container = root.parent / os.fsdecode(STATE_DIR_NAME)
    found = [path for path in container.iterdir() if path.is_dir()] if container.exists() else []
    numbered = [path for path in found if path.name.startswith(f"{root.stat().st_ino}-")]
    if len(numbered) == 1:
        return numbered[0]
    return found[0] if len(found) == 1 else container / "none"
