"""Owner, mode, extended attributes, ACLs and times, in the one order in which none of them undoes another.

Guarantee: on the way nobody is let in whom both the old and the new attributes keep out, and where something cannot be set,
nobody whom the recorded ones keep out.

chown clears setuid bits and file capabilities, so it comes first; extended attributes of users need write permission,
so they come before a mode that may forbid it; an ACL rewrites the group bits, so it follows the mode that agrees with
it; security labels follow everything that clears them; times come last.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from contextlib import suppress
from typing import Final, NamedTuple

from ciuic.types import Entry
from ciuic.xattrs import read_xattrs

OWNER: Final = "owner"
"""The one problem that every path has when the caller is not root: reported once."""

_ACCESS = b"system.posix_acl_access"
_ACLS = (_ACCESS, b"system.posix_acl_default")
_USER, _GROUP_OBJ, _GROUP, _MASK, _OTHER = 2, 4, 8, 16, 32
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
_REMOVABLE = (b"user.", b"trusted.", b"system.posix_acl_", b"security.capability")
"""Other attributes are the kernel's or a security module's own: they are set where recorded, never removed."""

Xattrs = tuple[tuple[bytes, bytes], ...]


def apply(
    at: int | bytes, now: os.stat_result, entry: Entry, xattrs: Xattrs, *, times: bool = True
) -> list[str]:
    """Makes the inode at a descriptor (or proc path) what the entry says; sets only what differs.

    Returns what could not be done, in words; `OWNER` among them if it was the owner.
    """
    problems: list[str] = []
    found = read_xattrs(at)
    _close(at, now, entry, found, dict(xattrs))
    owned = _set_owner(at, now, entry, problems)
    _remove_extra(at, found, xattrs, problems)
    late = [pair for pair in xattrs if pair[0] in _ACLS or pair[0].startswith(b"security.")]
    _set_xattrs(at, found, [pair for pair in xattrs if pair not in late], problems)
    acl = next((value for name, value in late if name == _ACCESS), None)
    if acl is not None and found.get(_ACCESS) not in (None, acl):
        _remove_extra(
            at, {_ACCESS: b""}, (), problems
        )  # its mask must not be what the mode's group bits are put into
    _set_mode(at, entry, owned, acl if found.get(_ACCESS) != acl else None, problems)
    # Removing or setting anything above may have changed these, so they are compared with what is there now.
    _set_xattrs(at, read_xattrs(at) if late else {}, sorted(late, key=_acls_first), problems)
    if times:
        set_times(at, entry, problems)
    return problems


def narrow(at: int, now: os.stat_result, entry: Entry, xattrs: Xattrs) -> None:
    """Shuts out of a directory, before anything is restored into it, whom it will shut out when it is done: files that only
    the directory protects come before that.
    """
    with suppress(OSError):  # what cannot be done is found and told by `apply`
        _close(at, now, entry, read_xattrs(at), dict(xattrs))
        if (now.st_uid, now.st_gid) != (entry.uid, entry.gid):
            os.chown(at, entry.uid, entry.gid)
        mode = stat.S_IMODE(os.fstat(at).st_mode)
        if mode & _OTHERS & ~entry.mode:
            os.chmod(at, mode & (entry.mode | ~_OTHERS))


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


class _Owned(NamedTuple):
    """What of the owner is as recorded."""

    user: bool
    group: bool


def _close(
    at: int | bytes, now: os.stat_result, entry: Entry, found: dict[bytes, bytes], wanted: dict[bytes, bytes]
) -> None:
    """Shuts out group and others while owner or ACL change: the old bits would speak of the new group, or without the
    ACL that took back what they give. A new file is closed already.
    """
    changes = (now.st_uid, now.st_gid) != (entry.uid, entry.gid) or found.get(_ACCESS) != wanted.get(_ACCESS)
    if changes and now.st_mode & _OTHERS and not stat.S_ISLNK(now.st_mode):
        with suppress(OSError):  # not ours: then nothing else will be changed either
            os.chmod(at, stat.S_IMODE(now.st_mode) & stat.S_IRWXU)


def _set_owner(at: int | bytes, now: os.stat_result, entry: Entry, problems: list[str]) -> _Owned:
    if (now.st_uid, now.st_gid) == (entry.uid, entry.gid):
        return _Owned(True, True)
    try:
        os.chown(at, entry.uid, entry.gid)
    except PermissionError:
        problems.append(OWNER)
        same_group = now.st_gid == entry.gid
        if not same_group:  # somebody who is not root may still give a file to a group of theirs
            with suppress(PermissionError):
                os.chown(at, -1, entry.gid)
                same_group = True
        return _Owned(False, same_group)
    except OSError as error:
        problems.append(f"owner {entry.uid}:{entry.gid}: {error.strerror}")
        return _Owned(False, False)
    return _Owned(True, True)


def _set_mode(at: int | bytes, entry: Entry, owned: _Owned, acl: bytes | None, problems: list[str]) -> None:
    """``acl`` is an access ACL that is still to be set: until it is, nobody gets what it denies to somebody."""
    if stat.S_ISLNK(entry.mode):
        return
    mode = stat.S_IMODE(entry.mode)
    if not owned.user or not owned.group:
        mode &= ~(stat.S_ISUID | stat.S_ISGID)  # they would lend out the wrong person's rights
    if not owned.group:  # what was for that group is not for another, unless it was for everybody
        mode &= ~stat.S_IRWXG | (mode & stat.S_IRWXO) << 3
    if acl is not None:
        mode &= ~_OTHERS | denied_to_nobody(acl)
    try:
        os.chmod(at, mode)
    except OSError as error:
        problems.append(f"mode {mode:04o}: {error.strerror}")


def denied_to_nobody(acl: bytes) -> int:
    """Group and other bits that give nobody more than this access ACL does, were it not there (acl(5)). 0 if it is none."""
    if len(acl) < 4 or (len(acl) - 4) % 8 or acl[:4] != b"\2\0\0\0":
        return 0
    entries = [(tag, bits) for tag, bits, _ in struct.iter_unpack("<HHI", acl[4:])]
    group = other = mask = 7
    for tag, bits in entries:
        if tag in (_USER, _GROUP):
            group, other = (group & bits if tag == _USER else group), other & bits
        elif tag == _GROUP_OBJ:
            group, other = group & bits, other
        elif tag == _MASK:
            mask = bits
        elif tag == _OTHER:
            other &= bits
    named = any(tag in (_USER, _GROUP) for tag, _ in entries)
    return (group & mask) << 3 | (other & mask if named else other)


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
