"""Descriptors of the backing directories of mounted roots, for use in threads."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from ciuic.daemon.roots.supervisor import RootSupervisor


@contextmanager
def backing_descriptors(supervisors: Iterable[RootSupervisor]) -> Iterator[list[int]]:
    """Yield duplicates of the backing descriptors of mounted roots, for use in a thread."""
    # Duplicates: a worker that ends closes its own at any time.
    with ExitStack() as stack:
        fds = []
        for supervisor in supervisors:
            if supervisor.worker is not None:
                fds.append(os.dup(supervisor.worker.backing_fd))
                stack.callback(os.close, fds[-1])
        yield fds
