"""Extended attributes of a file, ACLs and security labels included (xattr(7))."""

from __future__ import annotations

import errno
import os
from typing import Final

# Errors of a file system that has no extended attributes; ENOTSUP is the same number as EOPNOTSUPP.
_UNSUPPORTED: Final = (errno.EOPNOTSUPP, errno.ENOSYS)
_ACL_DUPLICATES: Final = frozenset({b"trusted.SGI_ACL_FILE", b"trusted.SGI_ACL_DEFAULT"})
"""Attributes as which XFS shows its POSIX ACLs a second time. On another file system they are ordinary ones, which an ACL
that is changed or removed later does not reach: carried back to XFS, they would set the older ACL."""
# Errors of an attribute that this process may not read.
_FORBIDDEN: Final = (errno.EACCES, errno.EPERM)


def read_xattrs(
    target: int | bytes, *, follow: bool = True, skip_unreadable: bool = True
) -> dict[bytes, bytes]:
    """Return every attribute of a descriptor or a path, but `is_acl_duplicate`; none where the file system has none.

    Args:
        target: descriptor or path.
        follow: follow a symbolic link at the end of a path.
        skip_unreadable: leave out an attribute whose value this process may not read, instead of raising PermissionError.

    Raises:
        PermissionError: the attributes may not be listed, or a value may not be read and is not to be skipped.
        OSError: they cannot be read for another reason.
    """
    # Python raises ValueError for follow_symlinks=False beside a descriptor.
    options = {} if isinstance(target, int) else {"follow_symlinks": follow}
    skipped = (*_UNSUPPORTED, *_FORBIDDEN) if skip_unreadable else _UNSUPPORTED
    try:
        names = os.listxattr(target, **options)
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return {}
        raise
    found = {}
    for name in map(os.fsencode, names):
        if is_acl_duplicate(name):
            continue
        try:
            found[name] = os.getxattr(target, name, **options)
        except OSError as error:
            # ENODATA: removed since it was listed.
            if error.errno not in (errno.ENODATA, *skipped):
                raise
    return found


def is_acl_duplicate(name: bytes) -> bool:
    """Return whether an attribute says what the POSIX ACL attributes say, in a file system's own way."""
    return name in _ACL_DUPLICATES
