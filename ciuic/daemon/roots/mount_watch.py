"""Detect that another process unmounted an overlay.

poll(2) on /proc/self/mountinfo reports that some mount came or went (proc_pid_mountinfo(5)); the file is then
read once. Guarantees: an overlay that is gone is detected within `SETTLE_SECONDS` and the time of one read; a
host that mounts and unmounts all the time costs one read for each `SETTLE_SECONDS`. Belongs to the trio
thread.
"""

from __future__ import annotations

import os
import select
from typing import Final

import trio

from ciuic.fuse_layer.system import mounts

# Pause between two reads: container runtimes change tens of mounts at a time, and a thousand mounts take a
# millisecond to parse.
SETTLE_SECONDS: Final = 0.1


async def unmounted(root: str) -> None:
    """Wait until no overlay of ciuic is mounted at `root`.

    Raises:
        OSError: the process is out of descriptors.
    """
    with open("/proc/self/mountinfo", "rb") as file, select.epoll() as changes:  # noqa: ASYNC230  no disk is behind it
        # trio waits for readability only. The file itself reports POLLPRI, so it is watched through an epoll
        # descriptor.
        changes.register(file.fileno(), select.EPOLLPRI)
        while await trio.to_thread.run_sync(mounts.overlay_at, os.fsencode(root)) is not None:
            await trio.lowlevel.wait_readable(changes.fileno())
            changes.poll(0)
            await trio.sleep(SETTLE_SECONDS)
