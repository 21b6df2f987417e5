"""The forking process itself: it has imported a program of ours, and forks one whenever it is asked to.

When a worker dies the job waits for its successor, and most of that wait would be the start of an interpreter
(0.2 s of processor time, more on a busy host). So one process is kept ready for all roots: a fork takes
milliseconds, also of the second worker within a second. Captures, of which a snapshot takes one, are forked
by another such process.

    python -m ciuic.fuse_layer.standby MODULE [LISTENER]     (standard input: a socket on which requests and descriptors come)

Guarantees: it ends when the process that started it closes the socket; its children do not. It is their
parent, so it is asked how they ended. prefork/messages.py has the protocol. With LISTENER, the descriptor of
a listening socket, it is the keeper: it holds sessions too, and outlives the daemon with them
(prefork/keeper.py).
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import os
import socket
import sys
from collections.abc import Sequence

from ciuic.fuse_layer.prefork import messages
from ciuic.fuse_layer.system import takeover_priority
from ciuic.system.child_process import rename_process


def main(module: str, listener_fd: str = "") -> int:
    """Fork processes until the caller closes the connection; return the exit status, in each forked process its own."""
    if module == messages.WORKER:
        # The job waits for a successor of a worker. Captures, which are forked in the same way, must yield to
        # the job.
        takeover_priority.raise_priority()
    # Imported here: a process that only starts this one does not need a worker's modules.
    program = importlib.import_module(module)
    from ciuic.fuse_layer.prefork import service

    # Collectors of the children would write to every object, and each page written is a copy of its own.
    gc.collect()
    gc.freeze()
    if listener_fd:
        child = _keep(int(listener_fd))
    elif service.is_activated():
        child = service.serve()
    else:
        child = service.Forker(None, socket.socket(fileno=os.dup(0))).serve()
    if child is None:
        return 0
    _settle(child.fds)
    if module == messages.WORKER:
        # The first two arguments are "--root PATH".
        rename_process(module, *child.arguments[:2])
    status: int = program.main(child.arguments)
    return status


def _keep(listener_fd: int) -> messages.ForkedChild | None:
    from ciuic.fuse_layer.prefork.keeper import Keeper
    from ciuic.fuse_layer.worker import configure_logs

    configure_logs()
    os.set_inheritable(listener_fd, False)
    return Keeper(socket.socket(fileno=listener_fd), socket.socket(fileno=os.dup(0))).serve()


def _settle(fds: Sequence[int]) -> None:
    """Detach a forked process from its parent's session and input, and give its descriptors the numbers that it expects."""
    # A session of its own: a signal to the process group of the daemon or the keeper does not reach the
    # child.
    os.setsid()
    takeover_priority.take_own_group()
    # Standard input is the connection on which requests come: a child that kept it would keep it open for the
    # daemon after the end of its parent.
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    _renumber(fds, messages.FIRST_PASSED_FD)


def _renumber(fds: Sequence[int], first: int) -> None:
    """Move descriptors to the numbers from ``first`` on, in their order."""
    end = first + len(fds)
    moved = list(fds)
    # Those that have such a number already, in a capture of many roots or a keeper of many sessions, are
    # moved out of the way: dup2(2) would close them before their turn comes.
    for index, fd in enumerate(moved):
        if first <= fd < end:
            moved[index] = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, end)
            os.close(fd)
    for index, fd in enumerate(moved):
        os.dup2(fd, first + index, inheritable=False)
        os.close(fd)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
