"""Directory stream as C programs have it: opendir, readdir, telldir, seekdir and rewinddir of libc."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

_libc = ctypes.CDLL(None, use_errno=True)


class _Dirent(ctypes.Structure):
    _fields_ = (
        ("ino", ctypes.c_uint64),
        ("off", ctypes.c_int64),
        ("record_bytes", ctypes.c_uint16),
        ("type", ctypes.c_uint8),
        ("name", ctypes.c_char * 256),
    )


_libc.opendir.argtypes, _libc.opendir.restype = (ctypes.c_char_p,), ctypes.c_void_p
_libc.readdir.argtypes, _libc.readdir.restype = (ctypes.c_void_p,), ctypes.POINTER(_Dirent)
_libc.telldir.argtypes, _libc.telldir.restype = (ctypes.c_void_p,), ctypes.c_long
_libc.seekdir.argtypes = (ctypes.c_void_p, ctypes.c_long)
_libc.rewinddir.argtypes = (ctypes.c_void_p,)
_libc.closedir.argtypes = (ctypes.c_void_p,)


class Listed(NamedTuple):
    """Directory entry; ``kind`` is the file type bits of st_mode, as d_type reports them."""

    name: str
    ino: int
    kind: int


class Listing:
    """An open directory stream."""

    def __init__(self, path: Path) -> None:
        self._stream = _libc.opendir(os.fsencode(path))
        if not self._stream:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), os.fspath(path))

    def read(self) -> Listed | None:
        """Return the next entry, or None at the end."""
        ctypes.set_errno(0)
        found = _libc.readdir(self._stream)
        if found:
            entry = found.contents
            return Listed(os.fsdecode(entry.name), entry.ino, entry.type << 12)
        code = ctypes.get_errno()
        if code:
            raise OSError(code, os.strerror(code))
        return None

    def tell(self) -> int:
        at: int = _libc.telldir(self._stream)
        return at

    def seek(self, at: int) -> None:
        _libc.seekdir(self._stream, at)

    def rewind(self) -> None:
        _libc.rewinddir(self._stream)

    def __enter__(self) -> Listing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        _libc.closedir(self._stream)
