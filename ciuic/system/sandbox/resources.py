"""Limits of what a process may use up while it reads content that another user made."""

from __future__ import annotations

import resource


def limit_resources(memory_bytes: int, processor_seconds: int) -> None:
    """Limit the private memory and the processor time of the calling process, and of processes that it starts, for good.

    Past the first an allocation fails; past the second SIGXCPU ends the process, without a core file.

    Args:
        memory_bytes: Private writable memory. Address space would be the wrong measure: libraries reserve far more than they use.
        processor_seconds: Processor time of each process, all threads together.
    """
    _lower(resource.RLIMIT_DATA, memory_bytes)
    # At the hard limit the kernel kills, at the soft one it says why.
    _lower(resource.RLIMIT_CPU, processor_seconds, 1)
    _lower(resource.RLIMIT_CORE, 0)


def _lower(kind: int, limit: int, reserve: int = 0) -> None:
    """Set both limits, the hard one to ``reserve`` more; limits that are lower already stay."""
    _, hard = resource.getrlimit(kind)
    upper = limit + reserve if hard == resource.RLIM_INFINITY else min(limit + reserve, hard)
    resource.setrlimit(kind, (max(0, upper - reserve), upper))
