"""Noticing that an overlay was unmounted by somebody else, as it happens.

The kernel says by poll(2) on /proc/self/mountinfo that some mount came or went (proc_pid_mountinfo(5)); the file is then read
once. Guarantees: an overlay that is gone is noticed within `SETTLE_SECONDS` and the time of one read; a host that mounts and unmounts
all the time costs one read for each `SETTLE_SECONDS`. Belongs to the trio thread.
"""

from __future__ import annotations

import os
import select
from typing import Final

import trio

from ciuic.fuse_layer import mounts

SETTLE_SECONDS: Final = 0.1
"""Between two reads: container runtimes change tens of mounts at a time, and a thousand mounts take a millisecond to parse."""


async def unmounted(root: str) -> None:
    """Return when no overlay of ours is mounted at ``root`` any more. OSError."""
    with open("/proc/self/mountinfo", "rb") as file, select.epoll() as changes:  # noqa: ASYNC230  no disk is behind it
        # Readiness of an epoll descriptor is what trio can wait for; POLLPRI of the file itself is not.
        changes.register(file.fileno(), select.EPOLLPRI)
        while await trio.to_thread.run_sync(mounts.overlay_at, os.fsencode(root)) is not None:
            await trio.lowlevel.wait_readable(changes.fileno())
            changes.poll(0)
            await trio.sleep(SETTLE_SECONDS)
