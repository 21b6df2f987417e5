"""Extended attributes of a file, ACLs and security labels included (xattr(7))."""

from __future__ import annotations

import errno
import os
from typing import Final

# Errors of a file system that has no extended attributes; ENOTSUP is the same number as EOPNOTSUPP.
_UNSUPPORTED: Final = (errno.EOPNOTSUPP, errno.ENOSYS)
# Errors of an attribute that this process may not read.
_FORBIDDEN: Final = (errno.EACCES, errno.EPERM)


def read_xattrs(
    target: int | bytes, *, follow: bool = True, skip_unreadable: bool = True
) -> dict[bytes, bytes]:
    """Return every attribute of a descriptor or a path; none where the file system has none.

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
        try:
            found[name] = os.getxattr(target, name, **options)
        except OSError as error:
            # ENODATA: removed since it was listed.
            if error.errno not in (errno.ENODATA, *skipped):
                raise
    return found
