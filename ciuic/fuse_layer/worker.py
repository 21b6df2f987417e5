"""The overlay worker: the process that serves one root's overlay, and nothing else.

    python -m ciuic.fuse_layer.worker --root PATH --backing-fd N --control SOCKET [--ready-fd N] ...

Guarantees: ``ready`` is written when the mount answers; SIGTERM, SIGINT, a ``stop`` request and an umount by
another process all end it the same way (detach, serve open handles until they close or the grace is over,
save the tracking, exit 0); it never opens a path below its own mount, on which it would wait for itself.
After SIGKILL a successor goes on with the session, or the dead mount is detached before the next worker
starts (mounts.py).

Exit status: 0 after a clean end; 1 when it could not start (the log says why); 75 when another worker serves
the session that it was to go on with.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import resource
import secrets
import signal
import sys
from collections.abc import Sequence
from typing import TextIO, cast

import structlog

from ciuic.fuse_layer.core.overlay_core import OverlayCore, UntrackedCore
from ciuic.fuse_layer.driver_choice import DriverChoice, ask_kernel, choose
from ciuic.fuse_layer.journal.inherited_session import InheritedSession
from ciuic.fuse_layer.journal.journal_writer import JournalWriter
from ciuic.fuse_layer.journal.succession import SERVED_ELSEWHERE, SessionServed
from ciuic.fuse_layer.kernel.worker import KernelWorker
from ciuic.fuse_layer.state.open_rules import OpenRules
from ciuic.fuse_layer.system import mounts, syscalls, takeover_priority
from ciuic.fuse_layer.worker_lifecycle import STOP_SIGNALS, WorkerContext
from ciuic.protocol.passthrough_names import DEFAULT_MAPPED_NAMES, DEFAULT_TRACKED_NAMES
from ciuic.system import privileges, syscall_profiles
from ciuic.system.logs import LogStream

log = structlog.get_logger(__name__)

_SWITCH_SECONDS = 0.0005
"""Switch interval of the interpreter: a thread that has copied a megabyte must not keep others waiting for
the usual 5 ms."""
_OOM_SCORE_ADJ = -800
"""OOM score: a worker that is killed for memory takes the job's directory with it for a moment, so others go
first."""
_PR_SET_NAME = 15


class _ToStructlog(logging.Handler):
    """Handler that writes log records of libraries as events of ours."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        message = record.getMessage()
        if "fuse_reply_" in message and message.endswith(os.strerror(2)):
            # The caller was interrupted and waits for no reply, which is no error.
            return
        log.log(record.levelno, "library_message", library=record.name, message=message)


def configure_logs() -> None:
    """Write JSON lines to standard error, from structlog and from libraries."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(file=cast(TextIO, LogStream(sys.stderr))),
    )
    logging.basicConfig(level=logging.WARNING, handlers=[_ToStructlog()])


def _exit_on(number: int, frame: object) -> None:
    """End the process by an exception, so that a mount made just now is detached again."""
    # Until the session or the event loop takes signals.
    raise SystemExit(128 + number)


def _prepare_process(root: str, *, captures_trace: bool) -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, _exit_on)
    # A lease of passthrough_writers.py that another process breaks sends it.
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    # The current directory may lie below the mount, which would keep it busy.
    os.chdir("/")
    # The core applies each caller's umask.
    os.umask(0)
    # This and a lower OOM score take CAP_SYS_RESOURCE, which `limit_worker` drops below.
    _raise_descriptor_limit()
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write(str(_OOM_SCORE_ADJ))
    except PermissionError:
        log.info("oom_score_not_lowered")
    # The kernel keeps 15 bytes of a thread's name (PR_SET_NAME), of which the prefix takes six.
    name = b"ciuic:" + os.path.basename(os.fsencode(root))[:9]
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name, 0, 0, 0)
    sys.setswitchinterval(_SWITCH_SECONDS)
    if not captures_trace:
        syscalls.stay_dumpable()
    try:
        privileges.limit_worker(captures_trace=captures_trace)
    except OSError as error:
        # A container's filter of system calls forbids it. The worker serves all the same.
        log.warning("privileges_not_dropped", error=str(error))


def _filter_calls() -> bool:
    """Refuse system calls that a worker has no use for; return whether that is in force.

    To be called before the first thread, and before any file of a job is read. Not earlier: importing trio,
    which pyfuse3 does, looks for a library by starting ldconfig (ctypes.util.find_library).
    """
    unfiltered = syscall_profiles.limit_calls(syscall_profiles.WORKER)
    if unfiltered:
        log.warning("system_calls_not_filtered", reason=unfiltered)
    return not unfiltered


def _raise_descriptor_limit() -> None:
    """Raise the limit of descriptors to the kernel's with CAP_SYS_RESOURCE, otherwise to the hard limit."""
    # Each file that any process of the job has open is a descriptor here: the usual limit of one process must
    # not hold for all of them together.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open("/proc/sys/fs/nr_open") as file:
        most = int(file.read())
    for limit in (max(most, hard), hard):
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        except (ValueError, PermissionError):
            # Above the hard limit without CAP_SYS_RESOURCE.
            continue
        log.info("descriptor_limit", limit=limit)
        return


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="ciuic.fuse_layer.worker", description=__doc__.partition("\n")[0])
    parser.add_argument("--root", required=True, help="absolute path of the protected directory")
    parser.add_argument(
        "--backing-fd", type=int, help="O_PATH descriptor of it; opened from --root if not given"
    )
    parser.add_argument("--control", required=True, help="path of the control socket to listen on")
    parser.add_argument("--driver", choices=["auto", "kernel", "pyfuse3"], default="auto")
    parser.add_argument(
        "--session-fd", type=int, help="with the kernel driver: the connection of a predecessor to go on with"
    )
    parser.add_argument("--plain", action="store_true", help="serve, and track nothing: no snapshots")
    parser.add_argument("--block-size", type=int, default=256 << 10, help="bytes; a power of two")
    parser.add_argument("--undo-limit", type=int, default=64 << 30, help="bytes of undo log at most")
    parser.add_argument(
        "--tracked-names", type=_names, default=DEFAULT_TRACKED_NAMES, help="patterns, divided by '/'"
    )
    parser.add_argument(
        "--mapped-names", type=_names, default=DEFAULT_MAPPED_NAMES, help="patterns, divided by '/'"
    )
    parser.add_argument("--ready-fd", type=int, help="where to write 'ready' once the mount answers")
    parser.add_argument(
        "--captures-trace",
        action="store_true",
        help="captures have CAP_SYS_PTRACE, this process need not have it",
    )
    return parser.parse_args(argv)


def _names(text: str) -> tuple[str, ...]:
    """Split a list of patterns at '/', which no file name contains."""
    return tuple(filter(None, text.split("/")))


def _choose(arguments: argparse.Namespace, backing_fd: int) -> DriverChoice:
    offer = ask_kernel(backing_fd)
    choice = choose(arguments.driver, offer)
    log.info(
        "driver_chosen", root=arguments.root, wanted=arguments.driver, driver=choice.driver, why=choice.why
    )
    return choice


def _serve(arguments: argparse.Namespace) -> None:
    """Serve the root with the driver that is asked for, or go on with the session of a predecessor."""
    backing_fd = arguments.backing_fd
    if backing_fd is None:
        backing_fd = mounts.open_backing(arguments.root)
    os.set_inheritable(backing_fd, False)
    context = WorkerContext(arguments.root, backing_fd, arguments.control, arguments.ready_fd)

    def make_core(
        *,
        kernel_keeps_times: bool,
        journal: JournalWriter | None = None,
        inherited: InheritedSession | None = None,
    ) -> OverlayCore:
        # Whatever killed the workers before: without tracking there is less that could.
        core = UntrackedCore if arguments.plain else OverlayCore
        return core(
            backing_fd,
            session=secrets.token_hex(16),
            block_size=arguments.block_size,
            undo_limit_bytes=arguments.undo_limit,
            kernel_keeps_times=kernel_keeps_times,
            journal=journal,
            inherited=inherited,
            rules=OpenRules(arguments.tracked_names, arguments.mapped_names),
        )

    if arguments.session_fd is not None:
        os.set_inheritable(arguments.session_fd, False)
        context.driver_why = "it goes on with the session of a worker that ended"
        context.filtered = _filter_calls()
        KernelWorker(context, make_core, session_fd=arguments.session_fd).run()
        return
    choice = _choose(arguments, backing_fd)
    context.driver_why = choice.why
    if choice.driver == "pyfuse3":
        # Imported here: a successor, which the job waits for, needs neither libfuse nor an event loop.
        from ciuic.fuse_layer.pyfuse3_driver import Pyfuse3Worker

        context.filtered = _filter_calls()
        Pyfuse3Worker(make_core(kernel_keeps_times=True), context).run()
    else:
        context.filtered = _filter_calls()
        depth = choice.offer.stack_depth
        KernelWorker(context, make_core, passthrough=choice.offer.passthrough, stack_depth=depth).run()


def main(argv: Sequence[str] | None = None) -> int:
    """Serve one root until stopped; return the exit status."""
    arguments = _arguments(sys.argv[1:] if argv is None else argv)
    if arguments.session_fd is None:
        # No program waits for a root that is mounted for the first time.
        takeover_priority.lower_priority()
    configure_logs()
    # A worker that is started by hand has the privileges of its captures.
    _prepare_process(arguments.root, captures_trace=arguments.captures_trace or privileges.may_trace())
    try:
        _serve(arguments)
    except SessionServed as error:
        # Daemon and keeper have each started a successor.
        log.warning("session_served_already", root=arguments.root, reason=str(error))
        return SERVED_ELSEWHERE
    except Exception:
        log.exception("overlay_failed", root=arguments.root)
        return 1
    log.info("overlay_stopped", root=arguments.root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
