"""An overlay worker of one's own: a real process that serves a real mount over a directory."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from ciuic.fuse_layer import mounts
from ciuic.fuse_layer.control_client import ControlClient

DRIVER = os.environ.get("CIUIC_TEST_DRIVER", "kernel")
"""What serves the mounts of these tests."""
_READY_SECONDS = 60
_STOP_SECONDS = 60


class Overlay:
    """A mounted root. ``client`` speaks to its worker; ``backing`` is the directory under the mount."""

    def __init__(
        self, root: Path, control: Path, *, block_size: int = 4096, extra: Sequence[str] = ()
    ) -> None:
        self.root = root
        self.backing_fd = mounts.open_backing(os.fspath(root))
        self.log_path = control.with_suffix(".log")
        ready, told = os.pipe()
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "ciuic.fuse_layer.worker", "--root", os.fspath(root)),
                    *("--backing-fd", str(self.backing_fd), "--control", os.fspath(control)),
                    *("--block-size", str(block_size), "--ready-fd", str(told), "--driver", DRIVER, *extra),
                ],
                pass_fds=(self.backing_fd, told),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        os.close(told)
        readable, _, _ = select.select([ready], [], [], _READY_SECONDS)
        answer = os.read(ready, 16) if readable else b"(nothing)"
        os.close(ready)
        self.client = ControlClient(control)
        if answer != b"ready\n":
            self.kill()
            raise AssertionError(f"the worker did not come up ({answer!r}): {self.log()}")

    @property
    def backing(self) -> Path:
        """The directory under the mount, by way of its descriptor."""
        return Path(f"/proc/self/fd/{self.backing_fd}")

    def log(self) -> str:
        """What the worker has written to its log so far."""
        return self.log_path.read_text(errors="replace")

    def stop(self, grace_seconds: float = 20) -> int:
        """End the worker as the daemon does; its exit status."""
        self.client.stop(grace_seconds)
        status = self.process.wait(_STOP_SECONDS)
        self._let_go()
        return status

    def kill(self) -> None:
        """End the worker as a disaster does, and take the dead mount off."""
        self.process.kill()
        self.process.wait(_STOP_SECONDS)
        if mounts.overlay_at(os.fspath(self.root)) is not None:
            mounts.detach(os.fspath(self.root))
        self._let_go()

    def _let_go(self) -> None:
        self.client.close()
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
def overlay_over(root: Path, control: Path, *, block_size: int = 4096) -> Iterator[Overlay]:
    """A mounted overlay, and after it a log without a single unexpected failure."""
    with Overlay(root, control, block_size=block_size) as overlay:
        yield overlay
    log = overlay.log()
    assert "Traceback" not in log, log
    assert "_failed" not in log, log
