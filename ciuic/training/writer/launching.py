"""Start of the writer process, and the processes that no client waits for any more."""

from __future__ import annotations

import socket
import subprocess

from ciuic.system.child_process import environment, module_command
from ciuic.training.remote.uploads import store_variables

_detached_writers: list[subprocess.Popen[bytes]] = []
"""Processes that finish what they were given while no client waits for them; polled so that they do not stay
zombies.
"""


def start_writer(theirs: socket.socket, trainer_pid: int) -> subprocess.Popen[bytes]:
    """Start a writer process on its end of the socket pair.

    Raises:
        OSError: the process could not be started.
    """
    arguments = str(theirs.fileno()), str(trainer_pid)
    return subprocess.Popen(
        module_command("ciuic.training.writer_process", *arguments),
        # With the credentials of stores, for the process that uploads, which the writer starts.
        env={**environment(of_trainer=True), **store_variables()},
        stdin=subprocess.DEVNULL,
        # stderr is inherited: with the trainer gone it is the only place left for messages.
        stdout=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        # A session of its own: a signal to the trainer's process group (Ctrl-C, kill -PGID) must not
        # end the writer.
        start_new_session=True,
        # The writer may outlive the job and must not keep its working directory busy.
        cwd="/",
    )


def detach(process: subprocess.Popen[bytes]) -> None:
    """Stop waiting for a process, and reap those detached earlier that have ended."""
    _detached_writers.append(process)
    # poll() reaps: an ended process stays a zombie until its parent asks.
    _detached_writers[:] = [one for one in _detached_writers if one.poll() is None]
