"""Mount of a view of snapshots: at a directory, for as long as the process serves it.

Root mounts by mount(2), others by fusermount3(1), which is set-user-ID. `read_only`, `nosuid` and `nodev` hold in both cases.

References:
    fusermount3(1); libfuse, lib/mount.c (``_FUSE_COMMFD``); unix(7) (``SCM_RIGHTS``)

A program in a mount namespace of its own, in which the roots of a snapshot are as they were.

Below a scratch directory lie the view of the snapshot, and for each root what the program writes there: overlayfs shows both as one at the
root's path. Nothing outside the namespace sees that, and nothing that the program writes there lasts. The namespace ends with its processes.
This process stays outside: it serves the view, and whatever it reads or imports must not lead there.

References:
    unshare(2), mount_namespaces(7); Documentation/filesystems/overlayfs.rst
"""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from ciuic.errors import CiuicError, NotPermitted
from ciuic.fuse_layer.kernel.session import negotiate
from ciuic.fuse_layer.system import mounts
from ciuic.maintenance.drill import scratch_directory
from ciuic.printable import one_line
from ciuic.restore.destination import open_way
from ciuic.system.child_process import as_user, environment, find_program, leave_keyring, without_secrets
from ciuic.system.disk import PIN_DIRECTORY
from ciuic.system.unix_sockets import receive
from ciuic.types import Entry, Snapshot
from ciuic.view.filesystem import ViewFilesystem
from ciuic.view.tree import ViewTree

_VIEW: Final = "view"
# The mounts are made by a process of its own: one that serves a view must not wait for it. $1 is the scratch directory, $2
# mount(8), $3 the number of roots, then the roots, the directory to begin in, another where that is not there, and the program.
_SCRIPT: Final = """
scratch=$1 mount=$2 roots=$3; shift 3
number=0
while [ $number -lt $roots ]; do
    "$mount" --bind -- "$scratch/view$1" "$scratch/lower-$number" || exit 125
    layers="lowerdir=$scratch/lower-$number,upperdir=$scratch/upper-$number,workdir=$scratch/work-$number"
    # On the directory itself, not on what a name leads to by now: whoever owns the directory above may replace the root by a link.
    cd -P -- "$1" || exit 125
    [ "$(pwd -P; echo .)" = "$1
." ] || exit 125
    "$mount" --no-canonicalize -t overlay -o "$layers" -- ciuic-snapshot . || exit 125
    shift; number=$((number + 1))
done
cd -- "$1" 2> /dev/null || cd -- "$2" || exit 125
shift 2
: > "$scratch/begun"
exec "$@"
"""
_BEGUN: Final = "begun"


def run_at(
    tree: ViewTree,
    snapshot: Snapshot,
    roots: Sequence[bytes],
    command: Sequence[str],
    begin_in: bytes,
    problem: Callable[[str], None],
    scratch: Path | None = None,
    *,
    user: tuple[int, int] | None,
    may_wait: bool = False,
    stdout: int | None = None,
) -> int:
    """Run a program for which these roots are as in the snapshot, and return its exit status, or 128 and the signal that ended it.

    Args:
        tree: View of this snapshot alone.
        snapshot: The snapshot.
        roots: Paths of those of its roots that are shown.
        command: Program and arguments.
        begin_in: Its working directory; the first root where the snapshot does not have it.
        problem: Told in words what of the snapshot cannot be read.
        scratch: Directory for what the program writes; None: TMPDIR, or /var/tmp.
        user: Uid and gid whose rights the program has; None: the owner of the first root. Uid 0 keeps root's rights.
        may_wait: As of `MountedView`.
        stdout: Descriptor to which the program prints; None: as of this process.

    Raises:
        KeyboardInterrupt: SIGINT or SIGQUIT came, after the end of the program, where its output is not this process's own: what it
            then returns is no answer.
        NotPermitted: this user may not.
        CiuicError: a root's path is no directory now, or the file systems cannot be mounted.
    """
    if os.geteuid() != 0:
        raise NotPermitted(
            "only root can show a snapshot in place of a directory", hint="ciuic mount shows it beside"
        )
    for root in roots:
        if os.path.realpath(root) != root:
            raise CiuicError(
                f"{one_line(root)} leads through a symbolic link now, so that nothing is shown there",
                hint="ciuic mount shows the snapshot beside",
            )
        if not os.path.isdir(root):
            raise CiuicError(
                f"{one_line(root)} is no directory now, so that nothing can be shown there",
                hint="make an empty directory there, or look into it by ciuic mount",
            )
    user = user or _owner_of(snapshot, roots[0])
    parent = (scratch or Path(os.environ.get("TMPDIR") or "/var/tmp")).resolve()
    with scratch_directory(parent, "ciuic-shell-", _unmount_view) as place:
        if set(str(place)) & set(",:\\"):
            raise CiuicError(
                f"{one_line(str(place))} cannot be used: overlayfs takes no path with a comma, colon or backslash",
                hint="--scratch names another directory",
            )
        (place / _VIEW).mkdir()
        for number in range(len(roots)):
            for name in ("lower", "upper", "work"):
                (place / f"{name}-{number}").mkdir()
            # The root's own attributes come from the upper layer.
            _copy_attributes(snapshot, roots[number], place / f"upper-{number}")
        view = MountedView(tree, os.fsencode(place / _VIEW), problem, for_others=True, may_wait=may_wait)
        try:
            return _run(place, snapshot, roots, command, begin_in, user, stdout)
        finally:
            view.close()


def _owner_of(snapshot: Snapshot, root: bytes) -> tuple[int, int]:
    """Return uid and gid of a directory; CiuicError if its path was replaced, as the owner of its parent can do at any time."""
    fd = os.open(root, PIN_DIRECTORY)
    try:
        if os.readlink(f"/proc/self/fd/{fd}") != os.fsdecode(root):
            raise CiuicError(f"{one_line(root)} was exchanged for another directory", hint="run it again")
        owner = os.fstat(fd)
    finally:
        os.close(fd)
    recorded = _entry_of(snapshot, root)
    # Another directory may have the path, such as one of root, with whose rights the owner's programs would run.
    if owner.st_uid != recorded.uid:
        raise CiuicError(
            f"{one_line(root)} belongs to user {owner.st_uid} now, and to user {recorded.uid} in {snapshot.id}",
            hint="--user says with whose rights the command runs",
        )
    return owner.st_uid, owner.st_gid


def _unmount_view(place: Path) -> None:
    """Detach the view of a process that was killed."""
    # EINVAL: nothing is mounted there.
    with suppress(OSError):
        mounts.detach(os.fsencode(place / _VIEW), FS_TYPE)


def _entry_of(snapshot: Snapshot, root: bytes) -> Entry:
    return next(one.entry for one in snapshot.roots if one.path == root)


def _copy_attributes(snapshot: Snapshot, path: bytes, directory: Path) -> None:
    entry = _entry_of(snapshot, path)
    os.chown(directory, entry.uid, entry.gid)
    os.chmod(directory, entry.mode & 0o7777)


def _run(
    place: Path,
    snapshot: Snapshot,
    roots: Sequence[bytes],
    command: Sequence[str],
    begin_in: bytes,
    user: tuple[int, int],
    stdout: int | None,
) -> int:
    env = {**without_secrets(os.environ), "CIUIC_SNAPSHOT": str(snapshot.id)}
    has_terminal, is_another = stdout is None and os.isatty(0) and os.isatty(1), user[0] != 0
    if is_another:
        command, env = as_user(command, env, *user)
        if has_terminal:
            # One of its own: into root's it could type commands (TIOCSTI in ioctl_tty(2)).
            line = shlex.join(command)
            command = [find_program("script"), "--quiet", "--return", "--command", line, "/dev/null"]
    # An interrupt is for the program. Functions, unlike SIG_IGN, are not inherited.
    interrupts: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def interrupted(number: int, _: object) -> None:
        interrupts.append(number)
        if is_another and not has_terminal and process is not None:
            os.killpg(process.pid, number)

    mount = find_program("mount")
    # Slave: what is mounted there must not appear outside, where / is shared; and an overlay that a daemon mounts outside meanwhile
    # covers its root there, too, where its absence would let programs write past it (ciuic/system/bypass.py).
    unshare = (find_program("unshare"), "--mount", "--propagation", "slave", "--")
    before = {number: signal.signal(number, interrupted) for number in (signal.SIGINT, signal.SIGQUIT)}
    try:
        process = subprocess.Popen(
            [
                *unshare,
                "/bin/sh",
                "-c",
                _SCRIPT,
                "sh",
                str(place),
                mount,
                str(len(roots)),
                *roots,
                begin_in,
                roots[0],
                *command,
            ],
            env=env,
            cwd="/",
            stdout=stdout,
            # Without a terminal there is none to type into.
            start_new_session=is_another and not has_terminal,
            preexec_fn=leave_keyring() if is_another else None,
        )
        status = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if interrupts and stdout is not None:
        raise KeyboardInterrupt
    if not (place / _BEGUN).exists():
        raise CiuicError(
            "the snapshot cannot be shown in place of its directories",
            hint="ciuic mount shows it beside them",
        )
    return status if status >= 0 else 128 - status


FS_TYPE: Final = "fuse.ciuic-view"
_SUBTYPE: Final = "ciuic-view"
_COMMAND_FD: Final = "_FUSE_COMMFD"


def is_view(path: bytes) -> bool:
    """Return whether a view is mounted at a path, also one whose process has ended."""
    found = mounts.mount_at(os.fsdecode(path))
    return found is not None and found.fs_type == FS_TYPE


class MountedView:
    """View that is mounted. `wait` serves it; `close` takes it away."""

    def __init__(
        self,
        tree: ViewTree,
        directory: bytes,
        problem: Callable[[str], None],
        *,
        for_others: bool,
        may_wait: bool = False,
    ) -> None:
        """Mount; on return the view answers.

        Args:
            tree: What to show.
            directory: Absolute path of an empty directory.
            problem: Told in words what cannot be read, from threads that serve requests.
            may_wait: Reading may take long, as from a remote: programs that wait may be interrupted.
            for_others: Other users may read what modes and ACLs of the snapshots permit them.

        Raises:
            NotPermitted: this user may not mount there, or not for others.
            CiuicError: it is no directory, or has something in it.
        """
        self.directory: Final = directory
        self._by_user = os.geteuid() != 0
        try:
            with os.scandir(directory) as entries:
                if next(entries, None) is not None:
                    raise CiuicError(
                        f"{one_line(directory)} is not empty",
                        hint="name a directory that is empty, or a new one",
                    )
        except OSError as error:
            hint = ""
            if error.errno == errno.ENOTCONN:
                hint = f"what was mounted there is dead; take it away: umount -l {one_line(directory)}"
            raise CiuicError(f"cannot mount at {one_line(directory)}: {error.strerror}", hint=hint) from None
        before = mounts.mounts_of(FS_TYPE)
        self._fuse_fd = (_mount_by_user if self._by_user else _mount_by_root)(directory, for_others)
        self._mount = mounts.new_mount(FS_TYPE, before, directory)
        try:
            negotiate(self._fuse_fd, passthrough=False)
            self._filesystem = ViewFilesystem(tree, self._fuse_fd, problem, may_wait=may_wait)
            self._filesystem.session.begin()
        except BaseException:
            self.close()
            raise

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until the view is unmounted; return False after the timeout."""
        return self._filesystem.session.wait(timeout_seconds)

    def close(self) -> None:
        """Detach the view; programs that have files open in it get errors. Harmless where it is unmounted already."""
        # EINVAL: nothing of ours is mounted there any more.
        with suppress(OSError, CiuicError):
            if self._by_user:
                _fusermount("-u", "-z", "-q", "--", os.fsdecode(self.directory))
            elif self._mount is not None:
                mounts.detach_mount(self._mount)
        with suppress(OSError):
            os.close(self._fuse_fd)
        self._fuse_fd = -1


def _mount_by_root(directory: bytes, for_others: bool) -> int:
    fd = open_way(directory)
    try:
        return mounts.mount_fuse(fd, FS_TYPE, read_only=True, for_others=for_others)
    except OSError as error:
        raise NotPermitted(f"cannot mount at {one_line(directory)}: {error.strerror}") from None
    finally:
        os.close(fd)


def _mount_by_user(directory: bytes, for_others: bool) -> int:
    options = f"ro,nosuid,nodev,default_permissions,fsname=ciuic,subtype={_SUBTYPE}"
    if for_others:
        options += ",allow_other"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        _fusermount(
            "-o",
            options,
            "--",
            os.fsdecode(directory),
            pass_fds=(theirs.fileno(),),
            more={_COMMAND_FD: str(theirs.fileno())},
        )
        theirs.close()
        _, fds, _ = receive(ours, 1, 1)
    if not fds:
        raise NotPermitted(f"cannot mount at {one_line(directory)}: fusermount3 gave no connection")
    return fds[0]


def _fusermount(*arguments: str, pass_fds: tuple[int, ...] = (), more: dict[str, str] | None = None) -> None:
    program = shutil.which("fusermount3")
    if program is None:
        raise NotPermitted(
            "only root can mount here: fusermount3 is not installed",
            hint="install the package fuse3, or ask root",
        )
    done = subprocess.run(
        [program, *arguments],
        env={**environment(), **(more or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        pass_fds=pass_fds,
        cwd="/",
        check=False,
    )
    if done.returncode:
        reason = one_line(done.stderr.decode(errors="replace").strip().removeprefix("fusermount3: "))
        raise NotPermitted(f"cannot mount: {reason or 'fusermount3 refused'}")
