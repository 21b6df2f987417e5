"""Shortage of memory on the host, for which background work waits.

References:
    proc_meminfo(5); Documentation/accounting/psi.rst of the kernel
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

_LEAST_SHARE: Final = 0.1
"""Part of the memory that has to be available."""
_MOST_WAITING: Final = 10.0
"""Per cent of the last ten seconds in which tasks waited for memory."""


def is_memory_short(proc: Path = Path("/proc")) -> bool:
    """Return whether little memory is available, or tasks wait for it. False for what the kernel does not tell."""
    with suppress(OSError, ValueError, KeyError):
        lines = (proc / "meminfo").read_text().splitlines()
        sizes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
        if sizes["MemAvailable"] < _LEAST_SHARE * sizes["MemTotal"]:
            return True
    # EOPNOTSUPP where pressure is disabled (psi=0 on the kernel's command line).
    with suppress(OSError, ValueError):
        # "some avg10=0.00 avg60=…"
        some = (proc / "pressure/memory").read_text().partition("\n")[0]
        return float(some.partition("avg10=")[2].partition(" ")[0]) > _MOST_WAITING
    return False
