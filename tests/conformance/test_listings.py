"""Directories that are listed while they change: positions stay valid, unchanged names are listed once.

Streams are read as C programs do: opendir, readdir, telldir, seekdir and rewinddir of libc.
"""

from __future__ import annotations

import ctypes
import os
import stat
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.overlay import Overlay

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

    def close(self) -> None:
        if self._stream:
            _libc.closedir(self._stream)
            self._stream = None

    def __enter__(self) -> Listing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


pytestmark = pytest.mark.mount

NAMES = 250
"""More names than one reply of the kernel and one buffer of libc hold, at these lengths."""
OPS = st.lists(
    st.one_of(
        st.tuples(st.just("read"), st.integers(1, 120)),
        st.tuples(st.just("read"), st.integers(1, 5)),
        st.tuples(st.just("mark"), st.just(0)),
        st.tuples(st.just("seek"), st.integers(0, 5)),
        st.tuples(st.just("rewind"), st.just(0)),
        st.tuples(st.just("remove"), st.integers(0, NAMES - 1)),
        st.tuples(st.just("replace"), st.integers(0, NAMES - 1)),
        st.tuples(st.just("rename"), st.integers(0, NAMES - 1)),
        st.tuples(st.just("create"), st.integers(0, 50)),
        st.tuples(st.sampled_from(("list", "turn", "reopen", "press")), st.just(0)),
    ),
    min_size=3,
    max_size=40,
)

REMOVALS = [("remove", number) for number in range(0, 200, 5)]
"""Removals of names most of which libc has read at its first request already."""


_case = iter(range(1 << 30))


def _name(number: int) -> str:
    return f"{number:04}-" + "n" * (number % 60 * 4)


class Reader:
    """A directory stream and the entries expected from it."""

    def __init__(self, listing: Listing, present: set[str]) -> None:
        self._listing = listing
        self.stayed = set(present)
        """There when the stream began, and untouched since."""
        self._ever = set(present)
        self.seen: dict[str, Listed] = {}
        self._marks: list[tuple[int, dict[str, Listed]]] = []
        self._at_end = False

    def close(self) -> None:
        self._listing.close()

    def changed(self, *names: str) -> None:
        self.stayed.difference_update(names)
        self._ever.update(names)

    def read(self, count: int) -> None:
        for _ in range(count):
            entry = self._listing.read()
            if entry is None:
                self._at_end = True
                missing = self.stayed - self.seen.keys()
                assert not missing, f"lost: {sorted(missing)[:5]}"
                return
            if entry.name in (".", ".."):
                continue
            assert entry.name in self._ever, f"never was there: {entry.name}"
            assert entry.name not in self.seen or entry.name not in self.stayed, f"twice: {entry.name}"
            self.seen[entry.name] = entry

    def mark(self) -> None:
        self._marks.append((self._listing.tell(), dict(self.seen)))

    def seek(self, which: int) -> None:
        if self._marks:
            at, seen = self._marks[which % len(self._marks)]
            self._listing.seek(at)
            self.seen = dict(seen)

    def rewind(self, present: set[str]) -> None:
        self._listing.rewind()
        self.stayed, self._ever = set(present), set(present)
        self.seen.clear()
        self._marks.clear()


@example(ops=[("list", 0), ("read", 5), *REMOVALS, ("list", 0), ("read", 1)])
@example(ops=[("list", 0), ("read", 5), *REMOVALS, ("press", 0), ("read", 1)])
@example(ops=[("list", 0), ("read", 5), ("turn", 0), *REMOVALS, ("read", 400), ("turn", 0), ("read", 1)])
@given(ops=OPS)
def test_positions_and_entries_while_the_directory_changes(
    overlay: Overlay, ops: list[tuple[str, int]]
) -> None:
    """A directory read, marked, sought and rewound by two streams, while names change and others list it, lists unchanged names once.

    From every marked position, with its inode number and type; a name that never existed is never listed.
    """
    _list_while_changing(overlay.root, ops)


@settings(max_examples=3)
@given(ops=OPS)
def test_a_plain_directory_keeps_as_much(run_dir: Path, ops: list[tuple[str, int]]) -> None:
    """The backing file system passes the same test: no more is asked of the mount than of it."""
    _list_while_changing(run_dir / "listings-plain", ops)


def _list_while_changing(top: Path, ops: list[tuple[str, int]]) -> None:
    folder = top / str(next(_case))
    folder.mkdir(parents=True)
    for number in range(NAMES):
        (folder / _name(number)).mkdir() if number % 20 == 0 else (folder / _name(number)).touch()
    present = set(os.listdir(folder))
    with ExitStack() as opened:

        def open_stream() -> Reader:
            return Reader(opened.enter_context(Listing(folder)), present)

        reader, other = open_stream(), None
        for step, (what, how) in enumerate(ops):
            if what == "read":
                reader.read(how)
            elif what == "list":
                # The kernel may keep a copy, from which others read on.
                assert set(os.listdir(folder)) == present
            elif what == "press":
                _drop_copy(folder)
            elif what == "turn":
                reader, other = other or open_stream(), reader
            elif what == "reopen":
                reader.close()
                reader = open_stream()
            elif what == "mark":
                reader.mark()
            elif what == "seek":
                reader.seek(how)
            elif what == "rewind":
                reader.rewind(present)
            else:
                names = _change(folder, what, how, step, present)
                for one in filter(None, (reader, other)):
                    one.changed(*names)
        reader.read(1 << 20)
        if other is not None:
            other.read(1 << 20)
        for name in reader.stayed:
            found = (folder / name).lstat()
            entry = reader.seen[name]
            assert (entry.ino, entry.kind) == (found.st_ino, stat.S_IFMT(found.st_mode)), name
        reader.rewind(present)
        reader.read(1 << 20)
        assert reader.seen.keys() == present


def _drop_copy(folder: Path) -> None:
    """Have the kernel drop its copy of the listing, as it does where memory is short."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _change(folder: Path, what: str, how: int, step: int, present: set[str]) -> list[str]:
    """Change one name; return the names that did not stay."""
    name, new = _name(how), f"new-{how}-{step}"
    path = folder / name
    if what == "create":
        (folder / new).touch()
        present.add(new)
        return [new]
    if name not in present:
        return []
    if what == "rename":
        path.rename(folder / new)
        present.remove(name)
        present.add(new)
        return [name, new]
    path.rmdir() if path.is_dir() else path.unlink()
    present.remove(name)
    if what == "replace":
        path.touch()
        present.add(name)
    return [name]
