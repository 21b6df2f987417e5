"""Extended attributes of a file, ACLs and security labels included (xattr(7))."""

from __future__ import annotations

import errno
import os
from typing import Final

_NONE_THERE: Final = (errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of a file system that has no extended attributes; ENOTSUP is the same number as EOPNOTSUPP."""
_NOT_FOR_US: Final = (errno.EACCES, errno.EPERM)
"""Errors of an attribute that this process may not read."""


def read_xattrs(
    target: int | bytes, *, follow: bool = True, skip_unreadable: bool = True
) -> dict[bytes, bytes]:
    """Return every attribute of a descriptor or a path; none where the file system has none.

    Args:
        skip_unreadable: leave out an attribute whose value this process may not read, instead of raising PermissionError.

    Raises:
        PermissionError: the attributes may not be listed, or a value may not be read and is not to be skipped.
        OSError: they cannot be read for another reason.
    """
    options = {} if isinstance(target, int) else {"follow_symlinks": follow}
    skipped = (*_NONE_THERE, *_NOT_FOR_US) if skip_unreadable else _NONE_THERE
    try:
        names = os.listxattr(target, **options)
    except OSError as error:
        if error.errno in _NONE_THERE:
            return {}
        raise
    found = {}
    for name in map(os.fsencode, names):
        try:
            found[name] = os.getxattr(target, name, **options)
        except OSError as error:
            if error.errno not in (errno.ENODATA, *skipped):  # ENODATA: removed since it was listed
                raise
    return found
