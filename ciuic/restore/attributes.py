"""Set owner, mode, extended attributes, ACLs and times, in the one order in which none of them undoes another.

Guarantees: in between, no user gets access whom both the old and the new attributes deny it. Where something cannot be set, no
user gets access whom the recorded attributes deny it. Special attributes are set only where the request allows them.

chown(2) clears setuid bits and file capabilities, so it comes first. Extended attributes of users need write permission, so
they come before a mode that may take it. An ACL rewrites the group bits, so it follows the mode that agrees with it. Security
labels follow everything that clears them. Times come last.

Special are device nodes, setuid and setgid bits of files, extended attributes of the namespaces `security` and `trusted`
(file capabilities, security labels, integrity hashes), and the names that ciuic reserves for its own state. A repository that
another user may have written can name any owner with any of them, so a restore by root would hand out root's rights.
Not special: pipes, sockets, symbolic links, ACLs, sticky bits, and the setgid bit of directories (Linux gives the group of
the directory to new files there, and sets the bit on none of them whose owner is not in the group).

References:
    chown(2), acl(5), xattr(7)
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final

import msgspec

from ciuic import STATE_DIR_NAME
from ciuic.restore.journal import JOURNAL_NAME
from ciuic.system.disk import read_xattrs
from ciuic.types import Entry, recorded_time

OWNER: Final = "owner"
"""Problem that every path has when the caller is not root; reported once."""
TIMES: Final = "times"
"""Problem that most paths have on a file system that holds fewer times or coarser ones; reported once."""

_ACCESS = b"system.posix_acl_access"
_ACLS = (_ACCESS, b"system.posix_acl_default")
# Tags of ACL entries in the kernel's format, <linux/posix_acl_xattr.h>.
_USER, _GROUP_OBJ, _GROUP, _MASK, _OTHER = 2, 4, 8, 16, 32
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
# Other attributes belong to the kernel or a security module: they are set where recorded, never removed.
REMOVABLE: Final = (b"user.", b"trusted.", b"system.posix_acl_", b"security.capability")

Xattrs = tuple[tuple[bytes, bytes], ...]


def apply(
    at: int | bytes, now: os.stat_result, entry: Entry, xattrs: Xattrs, *, times: bool = True
) -> list[str]:
    """Give the inode the attributes of the entry; sets only what differs.

    Args:
        at: descriptor of the inode, or its path in /proc/self/fd.
        now: its present status.
        entry: owner, mode and times to set.
        xattrs: extended attributes to set, ACLs included.
        times: set the times, too.

    Returns:
        What could not be done, in words; `OWNER` among them if it was the owner, `TIMES` if the file system
        did not keep the times.
    """
    problems: list[str] = []
    found = read_xattrs(at)
    if not found and not xattrs:
        # Most files have none. What follows for the others would change nothing here: one step after the other of it.
        _shut_out_others(at, now, entry, found, {})
        _set_mode(at, entry, _set_owner(at, now, entry, problems), None, problems)
        if times:
            set_times(at, entry, problems)
        return problems
    _shut_out_others(at, now, entry, found, dict(xattrs))
    # chown(2) clears setuid bits and security.capability, so it precedes both.
    owned = _set_owner(at, now, entry, problems)
    _remove_extra(at, found, xattrs, problems)
    late = [pair for pair in xattrs if pair[0] in _ACLS or pair[0].startswith(b"security.")]
    # Before the mode: user.* attributes can be set only by a user who may write the file (xattr(7)).
    room = _set_xattrs(at, found, [pair for pair in xattrs if pair not in late], problems)
    acl = next((value for name, value in late if name == _ACCESS), None)
    if acl is not None and found.get(_ACCESS) not in (None, acl):
        # With an ACL in place chmod(2) changes its mask instead of the group bits, so the old ACL goes first.
        _remove_extra(at, {_ACCESS: b""}, (), problems)
    _set_mode(at, entry, owned, acl if found.get(_ACCESS) != acl else None, problems)
    # Removing or setting anything above may have changed these, so they are compared with what exists now.
    if late:
        room &= _set_xattrs(at, read_xattrs(at), sorted(late, key=_acls_first), problems)
    if not room:
        _fit_xattrs(at, xattrs, problems)
    if times:
        set_times(at, entry, problems)
    return problems


def narrow(at: int, now: os.stat_result, entry: Entry, xattrs: Xattrs) -> None:
    """Take access to a directory from every user who will have none when it is done.

    Called before anything is restored into it, because some files are protected by nothing but their directory.
    """
    # What cannot be done is found again and reported by `apply`.
    with suppress(OSError):
        _shut_out_others(at, now, entry, read_xattrs(at), dict(xattrs))
        if (now.st_uid, now.st_gid) != (entry.uid, entry.gid):
            os.chown(at, entry.uid, entry.gid)
        mode = stat.S_IMODE(os.fstat(at).st_mode)
        if mode & _OTHERS & ~entry.mode:
            os.chmod(at, mode & (entry.mode | ~_OTHERS))


def set_times(at: int | bytes, entry: Entry, problems: list[str]) -> None:
    """Set access and modification time; what could not be set or was not kept is added to ``problems``."""
    try:
        os.utime(at, ns=(entry.atime_ns, entry.mtime_ns))
        # utimensat(2) reports no time that the file system rounds or cuts to what it holds.
        if os.stat(at).st_mtime_ns != entry.mtime_ns:
            problems.append(TIMES)
    except OSError as error:
        problems.append(f"times: {error.strerror}")


def differ(at: int | bytes, now: os.stat_result, entry: Entry, xattrs: Xattrs) -> bool:
    """Return whether `apply` would change something visible other than the access time."""
    if (now.st_uid, now.st_gid, recorded_time(now.st_mtime_ns)) != (entry.uid, entry.gid, entry.mtime_ns):
        return True
    if not stat.S_ISLNK(entry.mode) and stat.S_IMODE(now.st_mode) != stat.S_IMODE(entry.mode):
        return True
    found, wanted = read_xattrs(at), dict(xattrs)
    return any(found.get(name) != value for name, value in xattrs) or any(
        name not in wanted and name.startswith(REMOVABLE) for name in found
    )


class _Owned(msgspec.Struct, frozen=True):
    """Parts of the owner that are as recorded."""

    user: bool
    group: bool


def _shut_out_others(
    at: int | bytes, now: os.stat_result, entry: Entry, found: dict[bytes, bytes], wanted: dict[bytes, bytes]
) -> None:
    """Take the rights of group and others while owner or ACL change.

    The old bits would otherwise apply to the new group, or apply without the ACL that restricts them. A new file has none of
    these rights.
    """
    changes = (now.st_uid, now.st_gid) != (entry.uid, entry.gid) or found.get(_ACCESS) != wanted.get(_ACCESS)
    if changes and now.st_mode & _OTHERS and not stat.S_ISLNK(now.st_mode):
        # Refused for an inode of another owner; nothing else will be changed on that one either.
        with suppress(OSError):
            os.chmod(at, stat.S_IMODE(now.st_mode) & stat.S_IRWXU)


def _set_owner(at: int | bytes, now: os.stat_result, entry: Entry, problems: list[str]) -> _Owned:
    if (now.st_uid, now.st_gid) == (entry.uid, entry.gid):
        return _Owned(True, True)
    try:
        os.chown(at, entry.uid, entry.gid)
    except PermissionError:
        problems.append(OWNER)
        same_group = now.st_gid == entry.gid
        # chown(2): an owner who is not root may still give a file to a group of their own.
        if not same_group:
            with suppress(PermissionError):
                os.chown(at, -1, entry.gid)
                same_group = True
        return _Owned(False, same_group)
    except OSError as error:
        problems.append(f"owner {entry.uid}:{entry.gid}: {error.strerror}")
        return _Owned(False, False)
    return _Owned(True, True)


def _set_mode(at: int | bytes, entry: Entry, owned: _Owned, acl: bytes | None, problems: list[str]) -> None:
    """Set the mode. Until ``acl``, an access ACL still to be set, is there, no right is given that it denies to any user."""
    if stat.S_ISLNK(entry.mode):
        return
    mode = stat.S_IMODE(entry.mode)
    # With another owner the setuid and setgid bits would lend out the rights of the wrong user.
    if not owned.user or not owned.group:
        mode &= ~(stat.S_ISUID | stat.S_ISGID)
    # The recorded group's rights are not for another group, unless everybody has them.
    if not owned.group:
        mode &= ~stat.S_IRWXG | (mode & stat.S_IRWXO) << 3
    if acl is not None:
        mode &= ~_OTHERS | denied_to_nobody(acl)
    try:
        os.chmod(at, mode)
    except OSError as error:
        problems.append(f"mode {mode:04o}: {error.strerror}")


def denied_to_nobody(acl: bytes) -> int:
    """Return the group and other bits that, without the access ACL, give no user more than the ACL does.

    Returns 0 for anything that is not an access ACL in the kernel's format. See acl(5).
    """
    # A header with version 2, then entries of 8 bytes: tag, permissions, id.
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
    # acl(5): the mask limits named users and groups. Without the ACL they fall under the other bits, which are masked for that.
    named = any(tag in (_USER, _GROUP) for tag, _ in entries)
    return (group & mask) << 3 | (other & mask if named else other)


def _remove_extra(at: int | bytes, found: dict[bytes, bytes], wanted: Xattrs, problems: list[str]) -> None:
    names = {name for name, _ in wanted}
    for name in found:
        if name not in names and name.startswith(REMOVABLE):
            try:
                os.removexattr(at, name)
            except OSError as error:
                # ENODATA: it is gone already, for instance because chown(2) cleared it.
                if error.errno != errno.ENODATA:
                    problems.append(f"attribute {_text(name)} could not be removed: {error.strerror}")


def _set_xattrs(
    at: int | bytes, found: dict[bytes, bytes], wanted: Iterable[tuple[bytes, bytes]], problems: list[str]
) -> bool:
    """Set what differs; return whether the inode had room for all. A lack of room is not added to ``problems``."""
    room = True
    for name, value in wanted:
        if found.get(name) == value:
            continue
        try:
            os.setxattr(at, name, value)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                room = False
            else:
                problems.append(f"attribute {_text(name)}: {error.strerror}")
    return room


def _fit_xattrs(at: int | bytes, wanted: Xattrs, problems: list[str]) -> None:
    """Set attributes again, the largest first: ext4 fills the few kilobytes of an inode in the order of setting.

    An access ACL and labels that are there stay: without them others could have more rights for a moment.
    """
    for name, value in read_xattrs(at).items():
        if (name, value) in wanted and name != _ACCESS and not name.startswith(b"security."):
            with suppress(OSError):
                os.removexattr(at, name)
    found = read_xattrs(at)
    largest_first = sorted(wanted, key=lambda pair: len(pair[1]), reverse=True)
    if not _set_xattrs(at, found, largest_first, problems):
        found = read_xattrs(at)
        problems += [
            f"attribute {_text(name)}: {os.strerror(errno.ENOSPC)}"
            for name, value in wanted
            if found.get(name) != value
        ]


def _acls_first(pair: tuple[bytes, bytes]) -> tuple[bool, bytes]:
    return pair[0] not in _ACLS, pair[0]


def _text(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")


_RESERVED: Final = (STATE_DIR_NAME, JOURNAL_NAME)
# xattr(7): only the kernel, security modules and CAP_SYS_ADMIN may set attributes of these namespaces.
_NAMESPACES: Final = (b"security.", b"trusted.")
_DEVICES: Final = {stat.S_IFCHR: "character device", stat.S_IFBLK: "block device"}


def kind_of(entry: Entry) -> str:
    """Return why the entry as a whole is special, such as "block device 8:0"; empty if it is not."""
    # Restored over a protected root, such a name would be believed to be state that the daemon or a restore
    # had left.
    if entry.name in _RESERVED:
        return "name reserved for ciuic"
    device = _DEVICES.get(stat.S_IFMT(entry.mode))
    return f"{device} {os.major(entry.rdev)}:{os.minor(entry.rdev)}" if device else ""


def _without_special(entry: Entry, xattrs: Xattrs) -> tuple[Entry, Xattrs, str]:
    """Return the entry and its attributes without what is special, and a description of that ("setuid bit, …"; or empty)."""
    found = []
    if entry.is_file and entry.mode & (stat.S_ISUID | stat.S_ISGID):
        bits = ((stat.S_ISUID, "setuid bit"), (stat.S_ISGID, "setgid bit"))
        found += [text for bit, text in bits if entry.mode & bit]
        entry = msgspec.structs.replace(entry, mode=entry.mode & ~(stat.S_ISUID | stat.S_ISGID))
    plain = tuple(pair for pair in xattrs if not pair[0].startswith(_NAMESPACES))
    if len(plain) != len(xattrs):
        special = [name for name, _ in xattrs if name.startswith(_NAMESPACES)]
        found += [f"attribute {name.decode('utf-8', 'backslashreplace')}" for name in special]
    return entry, plain, ", ".join(found)


class SpecialFilter:
    """Decides for one restore which parts of each entry are restored."""

    def __init__(self, special: bool, on_left_out: Callable[[bytes, str], None]) -> None:
        self._special = special
        self._on_left_out = on_left_out
        """Function called with path and description of everything that is left out."""

    def leaves_out(self, path: bytes, entry: Entry, *, is_state: bool) -> bool:
        """Return whether the entry is left out as a whole. What exists under its name stays as it is.

        ``is_state``: it has the name and the place of a root's state directory.
        """
        # No capture puts the state directory of a root into a snapshot: one in there can only be meant to deceive the daemon.
        what = kind_of(entry) if is_state or not self._special else ""
        if what:
            self._on_left_out(path, what)
        return bool(what)

    def permitted(self, path: bytes, entry: Entry, xattrs: Xattrs) -> tuple[Entry, Xattrs]:
        """Return the entry and its attributes as they are to be restored."""
        if self._special:
            return entry, xattrs
        entry, xattrs, what = _without_special(entry, xattrs)
        if what:
            self._on_left_out(path, what)
        return entry, xattrs
