"""I/O scheduling class of a process (ioprio_set(2), which Python does not wrap), and its notation in the configuration.

The idle class has no effect under the `none` scheduler that NVMe disks use.
"""

from __future__ import annotations

import ctypes
import os
import platform
from typing import NamedTuple

_CLASS_SHIFT = 13
_WHO_PROCESS = 1
BEST_EFFORT = 2
IDLE = 3
_CLASSES = {"none": 0, "best-effort": BEST_EFFORT, "idle": IDLE}
# glibc has no wrapper (ioprio_set(2)), and the number is another one on each architecture.
_SYSCALLS = {"x86_64": 251, "aarch64": 30, "riscv64": 30, "ppc64le": 273, "s390x": 282}


class IoPriority(NamedTuple):
    """Class and level. `io_class` is 0 none, 2 best effort or 3 idle; `level` (0 highest to 7) matters to best effort alone."""

    io_class: int
    level: int

    @classmethod
    def parse(cls, text: str) -> IoPriority:
        """Parse `idle`, `best-effort`, `best-effort:N` (N 0 to 7) or `none`; ValueError for anything else."""
        name, colon, level = text.strip().lower().partition(":")
        if name not in _CLASSES or (colon and (name != "best-effort" or level not in tuple("01234567"))):
            raise ValueError(f"{text!r} is no I/O priority: idle, best-effort:0 to best-effort:7, or none")
        # 4 is the kernel's level for a process that has set none (ioprio_set(2)).
        return cls(_CLASSES[name], int(level) if level else 4 if name == "best-effort" else 0)


def set_io_priority(priority: IoPriority, pid: int = 0) -> None:
    """Set the I/O priority of a process (0: the calling thread and the threads that it starts later).

    Does nothing on a machine whose system call number is not known here.

    Raises:
        OSError: the kernel refuses.
    """
    number = _SYSCALLS.get(platform.machine())
    if number is None:
        return
    value = priority.io_class << _CLASS_SHIFT | priority.level
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(number), _WHO_PROCESS, pid, value) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
