"""Owner, mode, extended attributes, ACLs and times, in the one order in which none of them undoes another.

chown clears setuid bits and file capabilities, so it comes first; extended attributes of users need write permission,
so they come before a mode that may forbid it; an ACL rewrites the group bits, so it follows the mode that agrees with
it; security labels follow everything that clears them; times come last.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Final

from ciuic.types import Entry

OWNER: Final = "owner"
"""The one problem that every path has when the caller is not root: reported once."""

_ACLS = (b"system.posix_acl_access", b"system.posix_acl_default")
_REMOVABLE = (b"user.", b"trusted.", b"system.posix_acl_", b"security.capability")
"""Other attributes are the kernel's or a security module's own: they are set where recorded, never removed."""
_NO_XATTRS = (errno.EOPNOTSUPP, errno.ENOSYS)

Xattrs = tuple[tuple[bytes, bytes], ...]


def apply(
    at: int | bytes, now: os.stat_result, entry: Entry, xattrs: Xattrs, *, times: bool = True
) -> list[str]:
    """Makes the inode at a descriptor (or proc path) what the entry says; sets only what differs.

    Returns what could not be done, in words; `OWNER` among them if it was the owner.
    """
    problems: list[str] = []
    owned = _set_owner(at, now, entry, problems)
    found = read_xattrs(at)
    _remove_extra(at, found, xattrs, problems)
    late = [pair for pair in xattrs if pair[0] in _ACLS or pair[0].startswith(b"security.")]
    _set_xattrs(at, found, [pair for pair in xattrs if pair not in late], problems)
    _set_mode(at, entry, owned, problems)
    # Removing or setting anything above may have changed these, so they are compared with what is there now.
    _set_xattrs(at, read_xattrs(at) if late else {}, sorted(late, key=_acls_first), problems)
    if times:
        set_times(at, entry, problems)
    return problems


def set_times(at: int | bytes, entry: Entry, problems: list[str]) -> None:
    try:
        os.utime(at, ns=(entry.atime_ns, entry.mtime_ns))
    except OSError as error:
        problems.append(f"times: {error.strerror}")


def differ(at: int | bytes, now: os.stat_result, entry: Entry, xattrs: Xattrs) -> bool:
    """Whether `apply` would change something that can be seen (access times aside)."""
    if (now.st_uid, now.st_gid, now.st_mtime_ns) != (entry.uid, entry.gid, entry.mtime_ns):
        return True
    if not stat.S_ISLNK(entry.mode) and stat.S_IMODE(now.st_mode) != stat.S_IMODE(entry.mode):
        return True
    found, wanted = read_xattrs(at), dict(xattrs)
    return any(found.get(name) != value for name, value in xattrs) or any(
        name not in wanted and name.startswith(_REMOVABLE) for name in found
    )


def read_xattrs(at: int | bytes) -> dict[bytes, bytes]:
    """All that can be listed and read; none where the file system has none."""
    try:
        names = os.listxattr(at)
    except OSError as error:
        if error.errno in _NO_XATTRS:
            return {}
        raise
    found = {}
    for name in map(os.fsencode, names):
        try:
            found[name] = os.getxattr(at, name)
        except OSError as error:
            if error.errno not in (errno.ENODATA, errno.EACCES, errno.EPERM, *_NO_XATTRS):
                raise
    return found


def _set_owner(at: int | bytes, now: os.stat_result, entry: Entry, problems: list[str]) -> bool:
    if (now.st_uid, now.st_gid) == (entry.uid, entry.gid):
        return True
    try:
        os.chown(at, entry.uid, entry.gid)
    except PermissionError:
        problems.append(OWNER)
        if now.st_gid != entry.gid:  # somebody who is not root may still give a file to a group of theirs
            try:
                os.chown(at, -1, entry.gid)
            except PermissionError:
                return False
        return False
    except OSError as error:
        problems.append(f"owner {entry.uid}:{entry.gid}: {error.strerror}")
        return False
    return True


def _set_mode(at: int | bytes, entry: Entry, owned: bool, problems: list[str]) -> None:
    if stat.S_ISLNK(entry.mode):
        return
    mode = stat.S_IMODE(entry.mode)
    if not owned:
        mode &= ~(stat.S_ISUID | stat.S_ISGID)  # they would lend out the wrong person's rights
    try:
        os.chmod(at, mode)
    except OSError as error:
        problems.append(f"mode {mode:04o}: {error.strerror}")


def _remove_extra(at: int | bytes, found: dict[bytes, bytes], wanted: Xattrs, problems: list[str]) -> None:
    names = {name for name, _ in wanted}
    for name in found:
        if name not in names and name.startswith(_REMOVABLE):
            try:
                os.removexattr(at, name)
            except OSError as error:
                if error.errno != errno.ENODATA:
                    problems.append(f"attribute {_text(name)} could not be removed: {error.strerror}")


def _set_xattrs(
    at: int | bytes, found: dict[bytes, bytes], wanted: list[tuple[bytes, bytes]], problems: list[str]
) -> None:
    for name, value in wanted:
        if found.get(name) == value:
            continue
        try:
            os.setxattr(at, name, value)
        except OSError as error:
            problems.append(f"attribute {_text(name)}: {error.strerror}")


def _acls_first(pair: tuple[bytes, bytes]) -> tuple[bool, bytes]:
    return pair[0] not in _ACLS, pair[0]


def _text(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")
