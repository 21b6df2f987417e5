"""Special files and attributes, which grant rights of another user and which a restore may leave out.

Special are device nodes, setuid and setgid bits of files, extended attributes of the namespaces `security` and `trusted`
(file capabilities, security labels, integrity hashes), and the names that ciuic reserves for its own state. A repository that
another user may have written can name any owner with any of them, so a restore by root would hand out root's rights.

Not special: pipes, sockets, symbolic links, ACLs, sticky bits, and the setgid bit of directories (Linux gives the group of
the directory to new files there, and sets the bit on none of them whose owner is not in the group).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from typing import Final

import msgspec

from ciuic import STATE_DIR_NAME
from ciuic.restore.files.attributes import Xattrs
from ciuic.restore.files.journal import JOURNAL_NAME
from ciuic.types import Entry

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


def without_special(entry: Entry, xattrs: Xattrs) -> tuple[Entry, Xattrs, str]:
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

    def leaves_out(self, path: bytes, entry: Entry, *, top_of_root: bool) -> bool:
        """Return whether the entry is left out as a whole. What exists under its name stays as it is."""
        # No capture puts the state directory of a root into a snapshot: one in there can only be meant to deceive the daemon.
        is_state = entry.name == STATE_DIR_NAME and top_of_root
        what = kind_of(entry) if is_state or not self._special else ""
        if what:
            self._on_left_out(path, what)
        return bool(what)

    def permitted(self, path: bytes, entry: Entry, xattrs: Xattrs) -> tuple[Entry, Xattrs]:
        """Return the entry and its attributes as they are to be restored."""
        if self._special:
            return entry, xattrs
        entry, xattrs, what = without_special(entry, xattrs)
        if what:
            self._on_left_out(path, what)
        return entry, xattrs
