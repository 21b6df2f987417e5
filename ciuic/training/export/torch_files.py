"""Files of `torch.save` that `torch.load(weights_only=True)` opens, with a record for ciuic where one is wanted."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import IO, Any, Final

from ciuic.training.export.destination import new_file
from ciuic.training.export.plain_values import as_plain

# Below the folder that torch.save gives all members: its reader looks at names there alone.
_RECORD: Final = "archive/ciuic.json"
_MAX_RECORD_BYTES: Final = 4096
_ZIP: Final = b"PK\x03\x04"


def write_torch(path: Path, state: Any, *, overwrite: bool, record: bytes = b"") -> int:
    """Write a state as plain values and tensors, durably on return.

    Args:
        path: Destination.
        state: The state; `plain_values` says what becomes of values that are no tensors.
        overwrite: Whether to replace a file that is there.
        record: Content of an extra member of the archive, for `read_record`; torch does not look at it.

    Returns:
        The size of the file.

    Raises:
        DestinationExists: There is a file at ``path`` that may not be replaced.
        TypeError: A value is of a class that is not known.
    """
    import torch  # type: ignore[import-not-found, unused-ignore]

    plain = as_plain(state)
    with new_file(path, overwrite=overwrite) as file:
        torch.save(plain, file)
        if record:
            # A member appended by zipfile: torch reads the directory at the end of the archive.
            with zipfile.ZipFile(file, "a") as archive:
                archive.writestr(_RECORD, record)
        file.seek(0, 2)
        return file.tell()


def read_record(file: IO[bytes]) -> bytes | None:
    """Return the record of a file that `write_torch` wrote with one; None for any other file."""
    # Other files are read no further: they may be of any size.
    if file.read(len(_ZIP)) != _ZIP:
        return None
    try:
        with zipfile.ZipFile(file) as archive:
            found = archive.getinfo(_RECORD)
            return archive.read(found) if found.file_size <= _MAX_RECORD_BYTES else None
    # What zipfile raises for an archive that is none, is encrypted, or is compressed in a way it does not know.
    except (OSError, ValueError, KeyError, RuntimeError, EOFError, zipfile.BadZipFile, zlib.error):
        return None
