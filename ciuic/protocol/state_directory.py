"""State directory of a root: undo log, saved tracking and repository mark, out of reach of the root's owner.

A root belongs to a user who may rename, replace, link and mount over anything in it, while ciuic writes its state as root. The state
of a root therefore lies beside it: in ``.ciuic-state/<inode number and generation of the root>`` below the nearest ancestor
directory on the same mount in which nobody but root (or the user that runs ciuic) can create or rename entries. It must be the same
mount because the undo log keeps inodes alive by hard links. An ancestor outside of every work tree of a version control system is
preferred, however far above: the tools of those list and delete what they do not know (``git stash -u``, ``git clean -fdx``). In a work
tree, a ``.gitignore`` in ``.ciuic-state`` hides it at least from ``git status``, ``stash -u`` and ``clean -fd``. Where no such ancestor exists (the root is the top of its mount, or its
owner also owns every directory above), the state lies in the root itself, and every level of it is checked.

Invariants:

* Every directory is opened by one name relative to an open descriptor, never through a symbolic link or into another mount, and is
  used only if it belongs to the effective user with mode 0700. The check is made on the descriptor that is used afterwards, so
  renaming the directory later has no effect on an open one.
* The mount is compared before any other system call on the directory: a user's FUSE mount over the name is never called.
* A file or directory in a root that has the reserved name and is not ciuic's is renamed, never used and never deleted.
* Only entries that ciuic creates are ever removed.

References: openat(2), proc_pid_fdinfo(5) (``mnt_id``), ioctl_fsgetxattr (linux/fs.h), fusermount3(1) for mounts by users.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from ciuic import STATE_DIR_NAME
from ciuic.errors import CiuicError
from ciuic.system.disk import NEW_FILE, PIN
from ciuic.system.mountinfo import mount_id

ENTRIES: Final = frozenset(
    {
        *(b"undo", b"open", b"nowhere"),
        *(b"tracking", b"tracking.new", b"succession", b"succession.new"),
        *(b"repository", b"repository.tmp", b"probe"),
    }
)
"""Names that versions up to 7b77f7c create in a state directory."""

_KEPT_OPEN: Final = b"open"
_IGNORE_NAME: Final = b".gitignore"
_WORK_TREES: Final = (b".git", b".hg", b".jj")
"""Names that a directory has if it is the top of a work tree."""

_FLAGS: Final = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# PATH_MAX: an absolute path that can be configured has fewer components.
_MAX_ANCESTORS: Final = 4096
# Attempts against an owner who creates the reserved name again as fast as it is renamed.
_MAX_SET_ASIDE: Final = 8
# Levels below a state directory that removal descends; ciuic creates two.
_MAX_DEPTH: Final = 4
_KEY: Final = re.compile(rb"[0-9]+-[0-9a-f]+")
_FS_IOC_GETVERSION: Final = 0x80087601
_FS_IOC_FSGETXATTR: Final = 0x801C581F
_FS_IOC_FSSETXATTR: Final = 0x401C5820
# struct fsxattr: xflags, extsize, nextents, projid, cowextsize.
_FSXATTR: Final = struct.Struct("=5I8x")
_FS_XFLAG_PROJINHERIT: Final = 0x200
_ACLS: Final = ("system.posix_acl_default", "system.posix_acl_access")


class StateDirectory(NamedTuple):
    """An open state directory."""

    fd: int
    """Descriptor opened with O_RDONLY; the caller closes it."""
    set_aside: tuple[bytes, ...]
    """New names, in the root, of files that had the reserved name and were not made by ciuic."""


def open_state(root_fd: int) -> StateDirectory:
    """Open the state directory of a root; it is created if missing.

    Args:
        root_fd: the backing directory; O_PATH suffices.

    Raises:
        OSError: it cannot be created anywhere (full or read-only file system).
        CiuicError: something that cannot be renamed has the reserved name in the root.
    """
    # First: what a user has put under the reserved name must be neither used nor taken for state.
    set_aside = _set_aside(root_fd)
    fd = find_state(root_fd)
    if fd is None:
        fd = _make_beside(root_fd, in_work_trees=False)
    if fd is None:
        fd = _make_beside(root_fd, in_work_trees=True)
    if fd is None:
        fd, more = _make_inside(root_fd)
        set_aside += more
    with _closing(os.open("..", os.O_RDONLY | _FLAGS, dir_fd=fd)) as container:
        _hide_from_git(container)
    _move_in(root_fd, fd)
    return StateDirectory(fd, set_aside)


def find_state(root_fd: int) -> int | None:
    """Open the state directory of a root if there is one that ciuic made; the caller closes the descriptor."""
    name = _key(root_fd)
    for parent_fd in _parents(root_fd):
        container = _open_own(parent_fd, STATE_DIR_NAME)
        if container is None:
            continue
        with _closing(container):
            state = _open_own(container, name)
        if state is not None:
            return state
    return None


def remove_state(root_fd: int) -> None:
    """Remove the state of a root that is no longer protected. What cannot be removed stays; nothing else is touched."""
    name = _key(root_fd)
    for parent_fd in _parents(root_fd):
        container = _open_own(parent_fd, STATE_DIR_NAME)
        if container is None:
            continue
        with _closing(container), contextlib.suppress(OSError):
            state = _open_own(container, name)
            if state is not None:
                with _closing(state):
                    _empty(state)
                os.rmdir(name, dir_fd=container)
        with contextlib.suppress(OSError):
            _remove_container(parent_fd)


def lies_inside(root_fd: int) -> bool:
    """Return whether the root itself has a state directory of ciuic, which its link count includes."""
    fd = _open_own(root_fd, STATE_DIR_NAME)
    if fd is None:
        return False
    os.close(fd)
    return True


def own_directory(parent_fd: int, name: bytes) -> int:
    """Open the directory ``name`` below a state directory; it is created if missing. The caller closes the descriptor.

    Raises:
        PermissionError: something else has the name.
    """
    # Created, then opened and checked: whether it existed before does not matter, only whose it is.
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=parent_fd)
    fd = _open_own(parent_fd, name)
    if fd is None:
        raise PermissionError(errno.EPERM, "not a directory of ciuic", os.fsdecode(name))
    return fd


# -- finding ---------------------------------------------------------------------------------------------


def _key(root_fd: int) -> bytes:
    """Return the name of the root's state directory: inode number and generation."""
    # With the generation, a new directory that gets the inode number of a removed root does not find that root's state. On a file
    # system without generations it may, so readers allow for stale state: undo logs are emptied, saved tracking only adds to what
    # is compared.
    generation = b""
    with contextlib.suppress(OSError), _closing(os.open(".", os.O_RDONLY | _FLAGS, dir_fd=root_fd)) as fd:
        generation = fcntl.ioctl(fd, _FS_IOC_GETVERSION, bytes(8))[:4]
    return b"%d-%x" % (os.fstat(root_fd).st_ino, int.from_bytes(generation, "little"))


def _parents(root_fd: int) -> Iterator[int]:
    """Yield the directories that may hold the state: ancestors on the same mount, nearest first, then the root itself."""
    yield from _ancestors(root_fd)
    yield root_fd


def _ancestors(root_fd: int) -> Iterator[int]:
    """Yield O_PATH descriptors of the directories above, up to the top of the mount; each is valid until the next one."""
    mount, device = mount_id(root_fd), os.fstat(root_fd).st_dev
    below, below_ino = os.dup(root_fd), os.fstat(root_fd).st_ino
    try:
        for _ in range(_MAX_ANCESTORS):
            above = os.open("..", os.O_PATH | _FLAGS, dir_fd=below)
            os.close(below)
            below = above
            if mount_id(above) != mount:
                return
            st = os.fstat(above)
            # Another device: a btrfs subvolume begins here. The same inode: ".." of the process's root directory.
            if st.st_dev != device or st.st_ino == below_ino:
                return
            below_ino = st.st_ino
            yield above
    finally:
        os.close(below)


def _is_trusted(directory_fd: int) -> bool:
    """Return whether no other user can rename or remove ciuic's entries in the directory."""
    st = os.fstat(directory_fd)
    # The group bits of a mode include an ACL's mask (acl(5)).
    ours = st.st_uid in (0, os.geteuid())
    return ours and (not st.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or bool(st.st_mode & stat.S_ISVTX))


def _open_own(parent_fd: int, name: bytes) -> int | None:
    """Open the directory if it is on the parent's mount, ciuic's own, and closed to other users; else return None."""
    try:
        # O_PATH makes no request to a file system that a user may have mounted here.
        found = os.open(name, os.O_PATH | _FLAGS, dir_fd=parent_fd)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES):
            return None
        raise
    with _closing(found):
        # Before fstat(2), which would call a FUSE server that a user has mounted here.
        if mount_id(found) != mount_id(parent_fd):
            return None
        st = os.fstat(found)
        if st.st_uid != os.geteuid() or st.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            return None
        return os.open(".", os.O_RDONLY | _FLAGS, dir_fd=found)


# -- making ----------------------------------------------------------------------------------------------


def _make_beside(root_fd: int, *, in_work_trees: bool) -> int | None:
    """Create a state directory below the nearest trusted ancestor that allows it and hard links into it; None without one.

    Args:
        root_fd: the backing directory.
        in_work_trees: False leaves out ancestors that lie in a work tree.
    """
    first = 0 if in_work_trees else _levels_in_work_trees(root_fd)
    for level, parent_fd in enumerate(_ancestors(root_fd)):
        if level < first or not _is_trusted(parent_fd):
            continue
        try:
            fd = _make(parent_fd, root_fd)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE):
                raise
            # An immutable directory, for example.
            continue
        # The name is taken. The directory is trusted, so this is not the root owner's doing, and not ciuic's to rename.
        if fd is None:
            continue
        _join_project(root_fd, fd)
        if _takes_links(root_fd, fd):
            return fd
        os.close(fd)
        with contextlib.suppress(OSError):
            container = own_directory(parent_fd, STATE_DIR_NAME)
            with _closing(container):
                os.rmdir(_key(root_fd), dir_fd=container)
            _remove_container(parent_fd)
    return None


def _levels_in_work_trees(root_fd: int) -> int:
    """Return the number of ancestors up to the top of the outermost work tree that the root lies in; 0 if in none."""
    tops = [
        level
        for level, fd in enumerate(_ancestors(root_fd), 1)
        if any(_has(fd, name) for name in _WORK_TREES)
    ]
    return max(tops, default=0)


def _has(directory_fd: int, name: bytes) -> bool:
    try:
        # O_PATH: no request to a file system that a user may have mounted here.
        os.close(os.open(name, PIN, dir_fd=directory_fd))
    except OSError:
        return False
    return True


def _make_inside(root_fd: int) -> tuple[int, tuple[bytes, ...]]:
    set_aside: tuple[bytes, ...] = ()
    for _ in range(_MAX_SET_ASIDE):
        fd = _make(root_fd, root_fd)
        if fd is not None:
            return fd, set_aside
        set_aside += _set_aside(root_fd)
    raise CiuicError(
        f"{os.fsdecode(STATE_DIR_NAME)} in the root is created again and again by another process",
        hint="find the process that creates it, or protect a directory whose parent belongs to root",
    )


def _make(parent_fd: int, root_fd: int) -> int | None:
    """Create container and state directory below ``parent_fd``; None when something else has the reserved name."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(STATE_DIR_NAME, 0o700, dir_fd=parent_fd)
    container = _open_own(parent_fd, STATE_DIR_NAME)
    if container is None:
        return None
    with _closing(container):
        _drop_acls(container)
        fd = own_directory(container, _key(root_fd))
    _drop_acls(fd)
    return fd


def _hide_from_git(container_fd: int) -> None:
    """Write the .gitignore that names everything beside it, itself too."""
    # Best effort: without it the directory only shows in `git status`.
    with (
        contextlib.suppress(OSError),
        _closing(os.open(_IGNORE_NAME, NEW_FILE, 0o600, dir_fd=container_fd)) as fd,
    ):
        os.write(fd, b"*\n")


def _remove_container(parent_fd: int) -> None:
    """Remove the directory of states unless it has states of other roots. OSError."""
    container = _open_own(parent_fd, STATE_DIR_NAME)
    if container is None:
        return
    with _closing(container):
        if set(map(os.fsencode, os.listdir(container))) <= {_IGNORE_NAME}:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(_IGNORE_NAME, dir_fd=container)
    os.rmdir(STATE_DIR_NAME, dir_fd=parent_fd)


def _drop_acls(fd: int) -> None:
    """Remove the ACL that a new directory has from its parent's default ACL."""
    # Its mask gives no rights now, but a later chmod could raise the mask.
    for name in _ACLS:
        # OSError: there is none, or the file system has no ACLs.
        with contextlib.suppress(OSError):
            os.removexattr(fd, name)
    os.fchmod(fd, 0o700)


def _join_project(root_fd: int, state_fd: int) -> None:
    """Put the state directory into the root's quota project: ext4 and XFS refuse links between projects (EXDEV)."""
    try:
        with _closing(os.open(".", os.O_RDONLY | _FLAGS, dir_fd=root_fd)) as readable:
            wanted = _FSXATTR.unpack(fcntl.ioctl(readable, _FS_IOC_FSGETXATTR, bytes(_FSXATTR.size)))
        has = _FSXATTR.unpack(fcntl.ioctl(state_fd, _FS_IOC_FSGETXATTR, bytes(_FSXATTR.size)))
        inherit = wanted[0] & _FS_XFLAG_PROJINHERIT
        if (wanted[3], inherit) != (has[3], has[0] & _FS_XFLAG_PROJINHERIT):
            flags = has[0] & ~_FS_XFLAG_PROJINHERIT | inherit
            fcntl.ioctl(state_fd, _FS_IOC_FSSETXATTR, _FSXATTR.pack(flags, *has[1:3], wanted[3], has[4]))
    except OSError:
        # A file system without project quotas. Where links between projects are refused, `_takes_links` notices it.
        return


def _takes_links(root_fd: int, state_fd: int) -> bool:
    """Return whether a file of the root can be linked into the state directory; True where that cannot be tried."""
    try:
        probe = os.open(".", os.O_TMPFILE | os.O_WRONLY, 0o600, dir_fd=root_fd)
    except OSError:
        return True
    with _closing(probe):
        try:
            os.link(b"/proc/self/fd/%d" % probe, b"probe", dst_dir_fd=state_fd, follow_symlinks=True)
        except OSError as error:
            return error.errno != errno.EXDEV
        os.unlink(b"probe", dir_fd=state_fd)
    return True


def _set_aside(root_fd: int) -> tuple[bytes, ...]:
    """Rename a file or directory in the root that has the reserved name and is not ciuic's; return its new name."""
    try:
        os.close(os.open(STATE_DIR_NAME, PIN, dir_fd=root_fd))
    except FileNotFoundError:
        return ()
    container = _open_own(root_fd, STATE_DIR_NAME)
    if container is not None:
        with _closing(container):
            names = set(map(os.fsencode, os.listdir(container))) - {_IGNORE_NAME}
            if all(map(_KEY.fullmatch, names)) or _is_earlier(container):
                return ()
    # A random suffix, so that the owner of the root cannot occupy the new name beforehand.
    new_name = b"%b.set-aside-%b" % (STATE_DIR_NAME, secrets.token_hex(4).encode())
    try:
        os.rename(STATE_DIR_NAME, new_name, src_dir_fd=root_fd, dst_dir_fd=root_fd)
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise CiuicError(
            f"{os.fsdecode(STATE_DIR_NAME)} in the root is not ciuic's and cannot be renamed: {error.strerror}",
            hint="the name is reserved; unmount or rename what has it, then protect the directory again",
        ) from error
    return (new_name,)


def _is_earlier(container_fd: int) -> bool:
    """Return whether a directory of ciuic in the root is the state of a version up to 7b77f7c, which always kept it there."""
    names = {name for name in map(os.fsencode, os.listdir(container_fd)) if not _KEY.fullmatch(name)}
    names.discard(_IGNORE_NAME)
    undo = _open_own(container_fd, b"undo") if names and names <= ENTRIES else None
    if undo is None:
        return False
    with _closing(undo):
        hold = _open_own(undo, b"hold")
    if hold is not None:
        os.close(hold)
    return hold is not None


def _move_in(root_fd: int, state_fd: int) -> None:
    """Move what a version up to 7b77f7c left in the root itself: removed files that programs have open (hidden_links.py).

    The successor of its worker opens them again. Everything else of it is removed: the owner of the root may have put an older
    directory of ciuic in place of the newest, so its tracking cannot be trusted.
    """
    earlier = _open_own(root_fd, STATE_DIR_NAME)
    if earlier is None:
        return
    # After an OSError the files that were open and removed are lost, and the session goes on.
    with _closing(earlier), contextlib.suppress(OSError):
        if not _is_earlier(earlier):
            return
        kept = _open_own(earlier, _KEPT_OPEN)
        if kept is not None:
            with _closing(kept), _closing(own_directory(state_fd, _KEPT_OPEN)) as target:
                for name in filter(str.isdecimal, os.listdir(kept)):
                    os.rename(name, name, src_dir_fd=kept, dst_dir_fd=target)
        _empty(earlier)
    # Not empty if it has the state of this version.
    with contextlib.suppress(OSError):
        _remove_container(root_fd)


# -- removing --------------------------------------------------------------------------------------------


def _empty(directory_fd: int) -> None:
    """Remove the entries that ciuic creates, and everything below them."""
    for name in ENTRIES:
        with contextlib.suppress(OSError):
            _remove(directory_fd, name, _MAX_DEPTH)


def _remove(parent_fd: int, name: bytes, depth: int) -> None:
    try:
        os.unlink(name, dir_fd=parent_fd)
        return
    except IsADirectoryError:
        pass
    # Only directories of ciuic are descended into, one name at a time from a descriptor, so that no link leads out.
    fd = _open_own(parent_fd, name)
    if fd is None or not depth:
        return
    with _closing(fd):
        for entry in os.listdir(fd):
            _remove(fd, os.fsencode(entry), depth - 1)
    os.rmdir(name, dir_fd=parent_fd)


@contextlib.contextmanager
def _closing(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)
