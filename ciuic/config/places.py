"""Check what a configuration names on this machine: can the directories be protected, do they fit together, are a remote's keys there?

Guarantees: nothing is opened, mounted, changed or run, and no remote is reached (`ciuic remote test` reaches it); every objection
is a Problem with its remedy. ``protect`` uses this before it writes, the daemon before it mounts, and ``config check``. What is
said of remotes are warnings, because snapshots are taken without them as well. A directory that a lazy restore has not completed
cannot be protected. The overlap rules are pure functions of paths and mounts; a check that needs the disk takes the mounts as an
argument.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path

from ciuic import STATE_DIR_NAME
from ciuic.config.model import Config, Problem, RemoteConfig, RootConfig
from ciuic.config.owners import check_owners, command_flaw, file_flaw
from ciuic.errors import CiuicError, ConfigError, NotFound, NotPermitted, UsageError
from ciuic.repository.trust import foreign_flaw, hint, refusal
from ciuic.system import mountinfo
from ciuic.system.disk import READ_DIRECTORY
from ciuic.system.mountinfo import LAZY_FS_TYPE, LAZY_RESTORE, Mount


def _objection(
    root: RootConfig, message: str, hint: str = "", error: type[CiuicError] = UsageError
) -> list[Problem]:
    """Return the one problem that keeps a root from being protected."""
    return [Problem("error", message, hint, root.origin, error)]


def _check_lazy_restore(root: RootConfig, mounts: Sequence[Mount]) -> list[Problem]:
    """Return the problem of a root that is, contains or lies in a directory which is being restored lazily."""
    path = os.fsencode(root.path)
    restored = [
        mount.mount_point
        for mount in mounts
        if mount.fs_type == LAZY_FS_TYPE and _meet(path, mount.mount_point)
    ]
    # Not mounted: its process was killed, or the machine was started anew.
    if not restored and os.path.lexists(os.path.join(path, STATE_DIR_NAME, LAZY_RESTORE)):
        restored = [path]
    if not restored:
        return []
    message = f"{os.fsdecode(restored[0])} is being restored lazily, and cannot be protected before it is complete and nobody works in it"
    hint = "ciuic restore --status shows it and who works in it; an interrupted one goes on with the same ciuic restore --lazy"
    return _objection(root, message, hint)


def _meet(one: bytes, other: bytes) -> bool:
    """Return whether one of the paths is the other or lies in it."""
    first, second = (path.rstrip(b"/") + b"/" for path in (one, other))
    return first.startswith(second) or second.startswith(first)


# Bits of the mode that let others than the owner do anything with a key.
_OTHERS = 0o077


def _check_remote(remote: RemoteConfig) -> Iterator[Problem]:
    """Yield why snapshots would not be sent to a remote unattended, or its key be known to others."""
    if remote.key_file is not None:
        yield from _check_key_file(remote)
    elif remote.key_command:
        yield from _check_key_command(remote)
    elif remote.encryption:
        message = f"the remote {remote.name} has neither key_file nor key_command"
        hint = "without one nothing is sent unattended; `ciuic remote keys add` makes a key file"
        yield Problem("warning", message, hint, remote.origin)


def _check_key_file(remote: RemoteConfig) -> Iterator[Problem]:
    path, origin = remote.key_file, remote.origins.get("key_file", remote.origin)
    assert path is not None
    try:
        status = os.stat(path)
    except FileNotFoundError:
        yield Problem("warning", f"remote.key_file: there is no file {path}", origin=origin)
        return
    except OSError:
        # Another user's command may not see it; the process that needs it reports why it cannot be read.
        return
    if not stat.S_ISREG(status.st_mode):
        yield Problem("warning", f"remote.key_file: {path} is not a regular file", origin=origin)
        return
    if status.st_mode & _OTHERS:
        message = f"remote.key_file: {path} has mode {stat.S_IMODE(status.st_mode):04o}, and must be its owner's alone"
        yield Problem("warning", message, f"chmod 600 {path}", origin)
    flaw = file_flaw(path)
    if flaw is not None:
        message = f"remote.key_file: the {flaw.found}"
        yield Problem("warning", message, flaw.remedy, origin)


def _check_key_command(remote: RemoteConfig) -> Iterator[Problem]:
    origin = remote.origins.get("key_command", remote.origin)
    program = remote.key_command[0]
    if not os.access(program, os.X_OK):
        message = f"remote.key_command: {program} is no program that can be run"
        yield Problem("warning", message, origin=origin)
    flaw = command_flaw(remote.key_command)
    if flaw is not None:
        yield Problem("warning", f"remote.key_command: the {flaw.found}", flaw.remedy, origin)


class NoDirectory(NotFound):
    """A directory that is to be protected does not exist."""


CIUIC_FS_TYPE = b"fuse.ciuic"
DEFAULT_REPOSITORY_NAME = ".ciuic_snapshots"
_NAME_IT = 'name another place: path = "…" under [repository]'

# Kernel interfaces in the form of files: nothing in them can be restored.
_PSEUDO_FS_TYPES = frozenset(
    b"autofs binfmt_misc bpf cgroup cgroup2 configfs debugfs devpts devtmpfs efivarfs fusectl mqueue nsfs proc "
    b"pstore rpc_pipefs securityfs selinuxfs sysfs tracefs".split()
)


def check_places(config: Config, mounts: Sequence[Mount] | None = None) -> list[Problem]:
    """Return every problem with the places of ``config``, for the daemon and ``config check``."""
    mounts = mountinfo.read() if mounts is None else mounts
    problems = check_roots(config.roots, mounts)
    for root in config.roots:
        problems += _check_excludes(config, root)
    # A wrong root makes the default place of the repository wrong as well: one message is enough.
    if not any(problem.severity == "error" for problem in problems):
        problems += check_repository(config, mounts)
        problems += _check_sockets(config)
    return [
        *problems,
        *_check_groups(config),
        *check_alert(config),
        *check_owners(config),
        *(problem for remote in config.remotes for problem in _check_remote(remote)),
    ]


def canonical_root(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path, symbolic links resolved, under which a root is protected and listed.

    The root itself is looked at last and only by name, so that a dead overlay on it cannot get in the way.
    """
    absolute = Path(os.path.abspath(path))
    if absolute == Path("/"):
        return absolute
    beside = Path(os.path.realpath(absolute.parent)) / absolute.name
    if is_ciuic_mount(beside, mountinfo.read()):
        # A mount point is no link, and a request to its overlay might wait for an answer for ever.
        return beside
    return Path(os.path.realpath(beside)) if os.path.islink(beside) else beside


def is_ciuic_mount(path: str | os.PathLike[str], mounts: Sequence[Mount]) -> bool:
    """Return whether an overlay of ciuic is mounted exactly at ``path``, alive or dead."""
    wanted = os.fsencode(path)
    return any(mount.mount_point == wanted and mount.fs_type == CIUIC_FS_TYPE for mount in mounts)


def mount_holding(path: str | os.PathLike[str], mounts: Sequence[Mount]) -> Mount | None:
    """Return the mount that holds the real files of ``path``, looking through overlays of ciuic."""
    wanted = os.fsencode(path)
    best: Mount | None = None
    for mount in mounts:
        # An overlay has no files of its own: what it shows lies on the mount below.
        if mount.fs_type == CIUIC_FS_TYPE or not _within(wanted, mount.mount_point):
            continue
        # Of two mounts at one point the later one covers the earlier.
        if best is None or len(mount.mount_point) >= len(best.mount_point):
            best = mount
    return best


# --- roots


def check_roots(
    roots: Sequence[RootConfig], mounts: Sequence[Mount], new: Sequence[RootConfig] | None = None
) -> list[Problem]:
    """Return what keeps roots from being protected, for each root the first reason.

    Args:
        roots: All roots of the configuration.
        mounts: What is mounted.
        new: The roots to check; None for all.
    """
    problems = []
    for position, root in enumerate(roots):
        if new is not None and root not in new:
            continue
        found = check_root(root, mounts)
        if not found:
            found = [problem for other in roots[:position] for problem in _overlap(root, other, mounts)][:1]
        problems += found
    return problems


def check_overlaps(roots: Sequence[RootConfig], mounts: Sequence[Mount] = ()) -> list[Problem]:
    """Return roots named twice or inside one another, by path and, with ``mounts``, by the real directory."""
    pairs = ((root, other) for at, root in enumerate(roots) for other in roots[:at])
    return [problem for root, other in pairs for problem in _overlap(root, other, mounts)]


def _overlap(root: RootConfig, other: RootConfig, mounts: Sequence[Mount]) -> list[Problem]:
    inner, outer = os.fsencode(root.path), os.fsencode(other.path)
    if inner == outer:
        message = f"the root {root.path} is named twice"
    elif _within(inner, outer):
        message = f"the root {root.path} lies inside the root {other.path}, which protects it already"
    elif _within(outer, inner):
        message = f"the root {root.path} contains the root {other.path}"
    else:
        message = _overlap_by_mounts(root, other, mounts)
    return _objection(root, message, "keep one of the two") if message else []


def _overlap_by_mounts(root: RootConfig, other: RootConfig, mounts: Sequence[Mount]) -> str:
    """Return how two roots with unrelated names are one directory, or nested; empty where they are not."""
    # A bind mount of a protected root leads to its overlay, any other one to the file system below.
    for place_of in (_overlay_place, _real_place):
        here, there = place_of(os.fsencode(root.path), mounts), place_of(os.fsencode(other.path), mounts)
        if here is None or there is None or here[0] != there[0]:
            continue
        if here[1] == there[1]:
            return f"the root {root.path} is the root {other.path} by another name (a bind mount)"
        if _within(here[1], there[1]):
            return (
                f"the root {root.path} lies inside the root {other.path} (a bind mount), "
                "which protects it already"
            )
        if _within(there[1], here[1]):
            return f"the root {root.path} contains the root {other.path} (a bind mount)"
    return ""


def _overlay_place(path: bytes, mounts: Sequence[Mount]) -> tuple[tuple[int, int], bytes] | None:
    """Return device and directory of the overlay at a path, or of a bind mount of one."""
    found = [mount for mount in mounts if mount.fs_type == CIUIC_FS_TYPE and mount.mount_point == path]
    # The last of several mounts at one point covers the others.
    return (found[-1].device, found[-1].root) if found else None


def _real_place(path: bytes, mounts: Sequence[Mount]) -> tuple[tuple[int, int], bytes] | None:
    """Return the device that holds ``path`` and where in it, the same for every bind mount."""
    mount = mount_holding(os.fsdecode(path), mounts)
    if mount is None:
        return None
    relative = os.path.relpath(path, mount.mount_point)
    return mount.device, mount.root if relative == b"." else os.path.join(mount.root, relative)


def check_root(root: RootConfig, mounts: Sequence[Mount]) -> list[Problem]:
    """Return what keeps ``root`` from being protected; an overlay mounted exactly there is no problem."""
    path = root.path
    # First what names alone decide: nothing of it waits for a file system that does not answer.
    refused = _refuse_place(root, mounts)
    # Where an overlay stands already, the directory passed these checks; a dead one would fail the lstat below.
    if refused or is_ciuic_mount(path, mounts):
        return refused
    try:
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return _objection(root, f"the root {path} does not exist", "make the directory first", NoDirectory)
    except PermissionError:
        return _objection(root, f"no permission to look at the root {path}", "run as root", NotPermitted)
    except OSError as error:
        return _objection(root, f"the root {path} cannot be looked at: {error.strerror}", error=ConfigError)
    if stat.S_ISLNK(status.st_mode) or canonical_root(path) != path:
        hint = f"name the directory itself: {canonical_root(path)}"
        return _objection(root, f"the root {path} leads through a symbolic link", hint)
    if not stat.S_ISDIR(status.st_mode):
        return _objection(root, f"the root {path} is not a directory", "name the directory that holds it")
    return _check_lazy_restore(root, mounts) or _check_file_system(root, mounts)


def _refuse_place(root: RootConfig, mounts: Sequence[Mount]) -> list[Problem]:
    path = os.fsencode(root.path)
    if path == b"/":
        hint = "name the directories that matter"
        return _objection(root, "the root / cannot be protected: the system runs on it", hint)
    if STATE_DIR_NAME in path.split(b"/"):
        return _objection(root, f"the root {root.path} lies in a state directory of ciuic")
    for mount in mounts:
        if mount.fs_type != CIUIC_FS_TYPE or mount.mount_point == path:
            continue
        protected = os.fsdecode(mount.mount_point)
        if _within(path, mount.mount_point):
            message = f"the root {root.path} lies inside {protected}, which is protected already"
            return _objection(root, message, "nothing needs to be done for it")
        if _within(mount.mount_point, path):
            message = f"the root {root.path} contains {protected}, which is protected already"
            return _objection(root, message, f"unprotect {protected} first")
    return []


def _check_file_system(root: RootConfig, mounts: Sequence[Mount]) -> list[Problem]:
    mount = mount_holding(root.path, mounts)
    if mount is None:
        return []
    kind = os.fsdecode(mount.fs_type)
    if mount.fs_type in _PSEUDO_FS_TYPES:
        message = f"the root {root.path} lies on {kind}, which holds no files of its own"
        hint = "name a directory on a disk or in memory (tmpfs)"
        return _objection(root, message, hint)
    # Both lists: a mount may be read-only, or the whole file system behind it.
    if b"ro" in mount.options.split(b",") + mount.super_options.split(b","):
        message = f"the root {root.path} lies on a file system that is mounted read-only"
        return _objection(root, message, "nothing can change there; it needs no protection")
    if mount.fs_type == b"overlay" and _has_layers_apart(root.path):
        message = f"the root {root.path} lies on an overlayfs with layers on different file systems, whose files no snapshot would have"
        hint = "name the directory of the upper layer, or one on a disk; where a container engine made it: a volume"
        return _objection(root, message, hint)
    return []


def _has_layers_apart(path: Path) -> bool:
    """Return whether files on this overlayfs have the device of their layer: their numbers may then be those of other files.

    References:
        Documentation/filesystems/overlayfs.rst, "Inode properties"
    """
    try:
        directory = os.open(path, READ_DIRECTORY)
        try:
            # A file without a name, as all of the upper layer; those of the others differ just so.
            file = os.open(".", os.O_TMPFILE | os.O_RDWR, 0o600, dir_fd=directory)
            try:
                return os.fstat(file).st_dev != os.fstat(directory).st_dev
            finally:
                os.close(file)
        finally:
            os.close(directory)
    except OSError:
        # Nothing can be made there now: snapshots tell of files that they lack.
        return False


def _check_excludes(config: Config, root: RootConfig) -> list[Problem]:
    """Warn of a pattern that would exclude the whole of ``root``; what it matches below is still excluded."""
    pattern = config.exclude_matcher(root).covering_pattern()
    if pattern is None:
        return []
    message = f"the pattern {pattern} covers the root {root.path} itself, which is protected nevertheless"
    return [Problem("warning", message, "make the pattern narrower", config.origin("exclude"))]


# --- the repository


def repository_path(config: Config, mounts: Sequence[Mount] | None = None) -> Path:
    """Return the configured repository, else the default at the top of the first root's file system.

    Raises:
        ConfigError: neither says where: no roots, or the first root is itself the top of its file system.
    """
    if config.repository.path is not None:
        return config.repository.path
    if not config.roots:
        raise ConfigError(
            "no repository is named, and no root from which to derive one",
            hint="protect a directory first, or give --repo DIR",
        )
    mounts = mountinfo.read() if mounts is None else mounts
    return default_repository_path(config.roots[0].path, mounts)


def default_repository_path(first_root: Path, mounts: Sequence[Mount]) -> Path:
    """Return ``.ciuic_snapshots`` at the top of the file system that holds ``first_root``.

    There the repository can share extents with the root. ConfigError when that would be inside the root.
    """
    mount = mount_holding(first_root, mounts)
    top = Path(os.fsdecode(mount.mount_point)) if mount is not None else Path("/")
    if _within(os.fsencode(top), os.fsencode(first_root)):
        raise ConfigError(
            f"the root {first_root} is all of its file system, so no repository fits beside it", hint=_NAME_IT
        )
    return top / DEFAULT_REPOSITORY_NAME


def check_repository(config: Config, mounts: Sequence[Mount]) -> list[Problem]:
    """Return what is wrong with the place of the repository, alone and beside the roots."""
    try:
        repository = repository_path(config, mounts)
    except ConfigError as error:
        # With neither root nor repository there is nothing to do yet, and nothing wrong.
        return [Problem("error", error.message, error.hint)] if config.roots else []
    origin = config.origin("repository.path")
    problems = []
    if os.path.lexists(repository) and not os.path.isdir(repository):
        problems.append(Problem("error", f"the repository {repository} is not a directory", _NAME_IT, origin))
    for root in config.roots:
        problems += check_repository_beside(config, root, repository)
    flaw = None if config.trusts_repository else foreign_flaw(repository)
    if flaw is not None:
        # Only a warning: the roots are served without snapshots, and an alert says so.
        problems.append(Problem("warning", refusal(repository, flaw), hint(flaw), origin))
    return problems


def check_repository_beside(config: Config, root: RootConfig, repository: Path) -> list[Problem]:
    """Check that repository and root lie apart, unless the repository is excluded from capture.

    A bind mount that leads to the same directory under another name is recognised.
    """
    origin = config.origin("repository.path")
    if _lies_in(root.path, repository) is not None:
        message = f"the root {root.path} lies inside the repository {repository}"
        return [Problem("error", message, _NAME_IT, origin)]
    inside = _lies_in(repository, root.path)
    if inside is None:
        return []
    if inside and config.exclude_matcher(root).match(inside, True):
        message = (
            f"the repository {repository} is written through the overlay of {root.path}, which costs speed"
        )
        return [Problem("warning", message, "a place outside every root is better", origin)]
    message = (
        f"the repository {repository} lies inside the root {root.path} and would be captured into itself"
    )
    return [Problem("error", message, f"{_NAME_IT}, or exclude it", origin)]


def _check_sockets(config: Config) -> Iterator[Problem]:
    """Check that no root has the daemon's sockets in it: a worker would wait for itself, in the kernel, and so would all who look there."""
    for name, place in (
        ("daemon.runtime_dir", config.runtime_dir),
        ("control.socket", config.control.socket.parent),
    ):
        for root in config.roots:
            if _lies_in(place, root.path) is not None:
                message = (
                    f"{name}: {place} lies inside the root {root.path}, whose worker would wait for itself"
                )
                yield Problem("error", message, "name a place outside every root", config.origin(name))
                break


def _lies_in(path: Path, directory: Path) -> bytes | None:
    """Return the path inside a directory, empty for the directory itself; None for one outside."""
    inner, outer = os.fsencode(path), os.fsencode(directory)
    if _within(inner, outer):
        return os.path.relpath(inner, outer) if inner != outer else b""
    mounts = mountinfo.read()
    if is_ciuic_mount(directory, mounts):
        # Compare by name only: a dead or hanging overlay may not answer a stat.
        return None
    try:
        wanted = os.stat(directory)
    except OSError:
        # A missing directory (or a dead overlay) can only be compared by name.
        return None
    # A mount point is no symbolic link, and its overlay may not answer: its parent tells as much.
    covered = is_ciuic_mount(path, mounts)
    real = inner if covered else os.path.realpath(inner)
    current = os.path.dirname(inner) if covered else real
    # Upwards, comparing device and inode: a bind mount gives one directory several names.
    while True:
        try:
            found = os.stat(current)
        except OSError:
            # Not made yet: its parents decide.
            found = None
        if found is not None and (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
            return os.path.relpath(real, current) if current != inner else b""
        if current == b"/":
            return None
        current = os.path.dirname(current)


# --- the rest


def check_alert(config: Config) -> list[Problem]:
    """Return why the alert command could not be run, only as warnings.

    A daemon without alerts is better than none.
    """
    problems = []
    command, user = config.alert.command, config.alert.user
    if command and not os.access(command[0], os.X_OK):
        origin = config.origin("alert.command")
        problems.append(
            Problem("warning", f"alert.command: {command[0]} is no program that can be run", origin=origin)
        )
    if user is not None:
        try:
            pwd.getpwnam(user)
        except KeyError:
            origin = config.origin("alert.user")
            problems.append(Problem("warning", f"alert.user: there is no user {user}", origin=origin))
    return problems


def _check_groups(config: Config) -> list[Problem]:
    """Return an error for each group of the control socket or the page that does not exist."""
    problems = []
    for key in ("control.group", "web.look_group", "web.restore_group", "web.decide_group"):
        group = attrgetter(key)(config)
        try:
            if group is not None:
                grp.getgrnam(group)
        except KeyError:
            hint = f"groupadd --system {group}"
            problems.append(Problem("error", f"there is no group {group}", hint, config.origin(key)))
    return problems


def _within(inner: bytes, outer: bytes) -> bool:
    return inner == outer or outer == b"/" or inner.startswith(outer + b"/")
