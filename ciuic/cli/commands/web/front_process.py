"""The process that faces browsers: `python -m ciuic.cli.commands.web.front_process`.

Standard input: one `FrontJob` as a line of JSON; the sockets that it serves are inherited. Started by root, it becomes another user who
can read everything and write nothing before it hears the first request: what a browser sends is parsed here. It ends at the end of its
standard input, and so with the process that started it.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
from functools import partial
from typing import Final

import msgspec
import trio

from ciuic.cli.commands.web.access import Access, HandedListener
from ciuic.cli.commands.web.confinement import confine
from ciuic.cli.commands.web.front import Front
from ciuic.cli.commands.web.jobs import FrontJob
from ciuic.cli.commands.web.live import Live, SocketClient
from ciuic.cli.commands.web.reading import Readers
from ciuic.errors import CiuicError, NotPermitted
from ciuic.protocol.http_server import serve_http
from ciuic.structs import decode_json
from ciuic.system import logs
from ciuic.system.syscall_profiles import PAGE

_MAX_JOB_BYTES: Final = 1 << 20
_SEND_SECONDS: Final = 60.0
"""Longest wait for a browser to take 64 KiB: one that takes nothing occupies a connection."""


async def _until_input_ends() -> None:
    """Return when standard input has ended: the process that started this one is gone, or wants its end."""
    stream = trio.lowlevel.FdStream(os.dup(0))
    async with stream:
        while await stream.receive_some(1024):
            pass


async def _serve(job: FrontJob) -> None:
    access = Access(hosts=job.hosts, user_header=job.user_header)
    broker, live = SocketClient(job.broker), Live()
    readers = Readers(job.session, bytes.fromhex(job.verdict_key))
    front = Front(
        access,
        readers,
        broker,
        live,
        admission=job.admission,
        may_act=job.may_act,
        host=job.host,
        links=job.links,
        remote=job.remote,
    )
    ended = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(live.follow, broker)
        serve = partial(serve_http, send_seconds=_SEND_SECONDS, strangers_yield=True)
        for fd in job.sockets:
            await nursery.start(serve, front, socket.socket(fileno=fd), ended.wait)
        if job.connections >= 0:
            await nursery.start(serve, front, HandedListener(job.connections, access), ended.wait)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await _until_input_ends()
        nursery.cancel_scope.cancel()


def _confine(job: FrontJob) -> None:
    """Give up what serving the page takes no privilege for; call before threads are started."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Connections to all sockets at once, with what reading takes.
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    for missing in confine(job, PAGE):
        sys.stderr.write(f"web: {missing}\n")


def main() -> int:
    """Run the process and return its exit status."""
    # Ctrl-C in a terminal reaches both processes: the other one ends this.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logs.configure()
    try:
        job = decode_json(sys.stdin.buffer.readline(_MAX_JOB_BYTES), FrontJob)
        _confine(job)
        trio.run(_serve, job)
    except NotPermitted as error:
        # The whole service ends with it: a protection that fails is not one less.
        sys.stderr.write(f"web: {error}\n")
        return error.exit_code
    except (CiuicError, OSError, msgspec.DecodeError) as error:
        sys.stderr.write(f"web: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Reader threads that a store holds up must not keep the process.
    os._exit(code)
