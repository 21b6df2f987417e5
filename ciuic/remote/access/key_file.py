"""Key files of hosts."""

from __future__ import annotations

import os
from contextlib import suppress

from ciuic.errors import NotFound, NotPermitted, UsageError
from ciuic.remote.sealing.slot_secret import SlotSecret, new_key_text, read_key_file
from ciuic.repository.disk.operations import Disk


def make_key_file(path: str, *, disk: Disk | None = None) -> SlotSecret:
    """Write a new random key into a file of mode 0600, and return it; durable on return.

    Args:
        path: Absolute path of the file, which must not exist.
        disk: Durable operations; None for the real disk.

    Raises:
        UsageError: there is a file already; it is never replaced, because it may hold the only key of a remote.
        NotFound: there is no such directory.
        NotPermitted: the file cannot be written.
    """
    disk = disk or Disk()
    temporary = f"{path}.{os.urandom(4).hex()}.new"
    try:
        disk.replace_file(temporary, new_key_text())
        try:
            # link(2) makes a whole file appear, or none, and never takes the place of another.
            os.link(temporary, path)
        finally:
            # Makes the new name durable as well: it is in the same directory.
            disk.remove_file(temporary)
    except FileExistsError:
        raise UsageError(
            f"there is a file {path} already, and a key is never overwritten",
            hint="name another file with --key-file, or move this one away if no remote needs it",
        ) from None
    except FileNotFoundError:
        raise NotFound(
            f"there is no directory {os.path.dirname(path)} for the key file", hint="make it first"
        ) from None
    except OSError as error:
        with suppress(OSError):
            os.unlink(temporary)
        raise NotPermitted(
            f"the key file {path} cannot be written: {error.strerror}", hint="run it as root"
        ) from None
    # Read as the uploader will read it: a file that it would refuse must not be the only key.
    return read_key_file(path)
