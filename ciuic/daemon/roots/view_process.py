"""Process that shows the snapshots of one root at `.snapshots` in it: `python -m ciuic.daemon.roots.view_process`.

Standard input: one `ViewJob` as a line of JSON. Standard output: `ready` when it is mounted. It ends when it is unmounted, and so
serves on while a daemon restarts: the next one takes its mount away and mounts its own. The job's requests never reach it: the overlay
worker answers them, and does not wait for this process.

Mounting takes privileges. Afterwards the process can read and write nothing but its connection with the kernel, as the one that judges
checkpoints; owners, modes and ACLs of the snapshots are enforced by the kernel.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from ciuic import SNAPSHOTS_DIR_NAME
from ciuic.errors import CiuicError
from ciuic.structs import decode_json

NAME_TAKEN: Final = 3
"""Exit status where the root's owner has something of that name."""
UNSUPPORTED: Final = 4
"""Exit status where the worker has no such directory: another driver, or an older version."""
_MAX_MEMORY_BYTES: Final = 1 << 30
# It serves for as long as the root is protected; a limit ends a process that loops.
_MAX_PROCESSOR_SECONDS: Final = 7 * 86_400
_MAX_TOLD: Final = 100
_CONTROL_TIMEOUT_SECONDS: Final = 30.0
_DIRECTORY: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class ViewJob(msgspec.Struct, kw_only=True, frozen=True):
    """Root whose snapshots are shown."""

    repository: str
    root: str
    socket: str
    """Control socket of the root's worker."""
    io_priority: str = "idle"


class NameTaken(CiuicError):
    """The root's owner has something under the name."""


def mount_view(root: str, socket: str) -> int:
    """Mount a view on `.snapshots` of a root, in place of an earlier one, and return its connection with the kernel.

    Raises:
        NameTaken: something of the root's owner has the name.
        WorkerRefused: with EOPNOTSUPP where the worker has no such directory.
        CiuicError, OSError: it cannot be mounted now.
    """
    from ciuic.fuse_layer.state.node_table import SNAPSHOTS_ID
    from ciuic.fuse_layer.system import mounts
    from ciuic.protocol.worker_client import WorkerControlClient
    from ciuic.system.mountinfo import mount_id

    mounts.detach_view(root)
    with WorkerControlClient(socket, timeout_seconds=_CONTROL_TIMEOUT_SECONDS) as client:
        fuse_fd: int | None = client.snapshots_directory(threading.get_native_id())
    fds = []
    try:
        fds.append(root_fd := os.open(root, _DIRECTORY))
        entry = mounts.mount_of(root_fd)
        if entry is None or (entry.fs_type, entry.mount_point) != (mounts.FS_TYPE, os.fsencode(root)):
            raise CiuicError(f"{root} has no overlay just now")
        # link(2) of a directory makes nothing. Like mkdir(2) it has the kernel ask for the name also where that was free before,
        # and the worker shows it to this thread.
        with suppress(OSError):
            os.link(
                b"/proc/self/fd/%d" % root_fd, SNAPSHOTS_DIR_NAME, dst_dir_fd=root_fd, follow_symlinks=True
            )
        try:
            fds.append(directory_fd := os.open(SNAPSHOTS_DIR_NAME, _DIRECTORY, dir_fd=root_fd))
        except NotADirectoryError:
            raise NameTaken(f"{root} has a file {os.fsdecode(SNAPSHOTS_DIR_NAME)} of its owner") from None
        # Another user's file system may be mounted there, which chooses its numbers.
        if mount_id(directory_fd) != entry.mount_id or os.fstat(directory_fd).st_ino != SNAPSHOTS_ID:
            raise NameTaken(f"{root} has a directory {os.fsdecode(SNAPSHOTS_DIR_NAME)} of its owner")
        taken, fuse_fd = fuse_fd, None
        return mounts.mount_fuse(directory_fd, mounts.SNAPSHOTS_FS_TYPE, read_only=True, fuse_fd=taken)
    finally:
        if fuse_fd is not None:
            fds.append(fuse_fd)
        for fd in fds:
            os.close(fd)


class _Teller:
    """Writes what cannot be read to standard error, each problem once."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def __call__(self, problem: str) -> None:
        if problem not in self._told and len(self._told) < _MAX_TOLD:
            self._told.add(problem)
            sys.stderr.write(f"view: {problem}\n")


def main() -> int:
    """Run the process and return its exit status."""
    from ciuic.daemon.base.child_processes import EXPENDABLE_OOM_SCORE_ADJ, JobInput
    from ciuic.fuse_layer.kernel.session import negotiate
    from ciuic.protocol.worker_client import WorkerRefused
    from ciuic.repository import Repository
    from ciuic.system import syscall_profiles
    from ciuic.system.io_throttle import yield_to_others
    from ciuic.system.privileges import limit_reader, limit_resources
    from ciuic.view.filesystem import ViewFilesystem
    from ciuic.view.tree import ViewTree

    # The current directory may lie below the root.
    os.chdir("/")
    try:
        job = decode_json(JobInput(0).first_line(), ViewJob)
        yield_to_others(job.io_priority)
        limit_resources(_MAX_MEMORY_BYTES, _MAX_PROCESSOR_SECONDS)
        # Where it cannot be written, the process runs without it.
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(EXPENDABLE_OOM_SCORE_ADJ)
        with Repository.open(job.repository) as repository:
            tree = ViewTree(repository.snapshots, lambda snapshot: repository, of_root=os.fsencode(job.root))
            fuse_fd = mount_view(job.root, job.socket)
            # A filter of system calls may forbid it, as that of a container.
            with suppress(OSError):
                limit_reader()
            unfiltered = syscall_profiles.limit_calls(syscall_profiles.READER)
            if unfiltered:
                sys.stderr.write(f"view: system calls are not filtered: {unfiltered}\n")
            negotiate(fuse_fd, passthrough=False)
            session = ViewFilesystem(tree, fuse_fd, _Teller(), may_wait=False).session
            session.begin()
            sys.stdout.write("ready\n")
            sys.stdout.flush()
            session.wait()
    except NameTaken:
        return NAME_TAKEN
    except WorkerRefused as error:
        sys.stderr.write(f"view: {error}\n")
        return UNSUPPORTED
    except (CiuicError, OSError, msgspec.DecodeError) as error:
        sys.stderr.write(f"view: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
