"""Choose files that must not be written past the worker, although the kernel could carry their data (kernel/driver.py).

Two kinds of files are worth a request for each write, because their content at a cut matters and no program
closes them:

* **tracked**: logs that are created and kept open for life (a RocksDB MANIFEST, TensorBoard events, JSON
  lines). Their writers open them write-only, and nearly all of a checkpoint's writers do the same; names tell
  the two apart.
* **mapped**: databases that programs write through a shared mapping (LMDB). Their first opener must not be a
  reader by passthrough, because all later ones have to join it. A database that is large and was not written
  lately is a data set: its readers keep the speed of the disk.

Names come from the configuration. Two things are learned and kept beside the root, for successors and later
sessions: names that stayed open over snapshots although no rule had them, and files of which a read-write
open had to join readers.

Guarantee: a rule decides about speed and exactness of later opens alone; no open fails for what is in the
file.
"""

from __future__ import annotations

import fnmatch
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from typing import Final, TypeVar

import msgspec
import structlog

from ciuic.protocol.passthrough_names import DEFAULT_MAPPED_NAMES, DEFAULT_TRACKED_NAMES
from ciuic.structs import decode_msgpack
from ciuic.system.disk import Disk, read_regular

log = structlog.get_logger(__name__)
_T = TypeVar("_T")

MAX_CACHED_BYTES: Final = 64 << 20
"""Length up to which a database goes through the kernel's cache whatever its age, which costs 20 ms once."""
WRITTEN_LATELY_SECONDS: Final = 3600
"""Age up to which a longer database does so: the default interval between two snapshots."""
STAYS_SECONDS: Final = 60.0
"""Time from which on a file that is open at two cuts is no checkpoint: its name is tracked from its next open
on."""
MAX_LEARNED_NAMES: Final = 256
"""Limit of learned names, of which the newest are kept: with the inodes 100 kB on disk, however many files a
job makes."""
MAX_LEARNED_INODES: Final = 4096
"""Limit of learned inodes."""
_MAX_FILE_BYTES: Final = 1 << 20
_FILE: Final = b"opens"
_DIGITS: Final = re.compile(rb"\d+")


class OpenPreference(Enum):
    """Preferred way of an open's data, where its family is not decided yet."""

    ANY = 0
    TRACKED = 1
    CACHED = 2


class _Learned(msgspec.Struct, array_like=True):
    names: list[bytes]
    """Learned names with digits replaced by ``#``: the next file of the kind has another number."""
    inodes: list[int]


class OpenRules:
    """The rules of one root. Thread-safe."""

    def __init__(
        self,
        tracked_names: Sequence[str] = DEFAULT_TRACKED_NAMES,
        mapped_names: Sequence[str] = DEFAULT_MAPPED_NAMES,
    ) -> None:
        self._tracked = _matcher(tracked_names)
        self._mapped = _matcher(mapped_names)
        # Dictionaries, for their order: the oldest goes first.
        self._names: dict[bytes, None] = {}
        self._inodes: dict[int, None] = {}
        # Requests and cuts learn names and inodes in threads of their own.
        self._lock = threading.Lock()
        self._unsaved = False

    def preference(
        self, name: bytes, ino: int, flags: int, attributes: Callable[[], os.stat_result], *, fresh: bool
    ) -> OpenPreference:
        """Return the preference for an open with ``flags``; ``attributes`` is called where the name does not decide."""
        # Learned before: a read-write open of it had to join readers, and stores through its mapping were not
        # seen.
        if ino in self._inodes:
            return OpenPreference.CACHED
        if self._mapped(name):
            return OpenPreference.CACHED if fresh or _is_live(attributes) else OpenPreference.ANY
        # Other opens have one way in any case (kernel/driver.py); only a new file can be a checkpoint or a
        # log.
        if not fresh or flags & os.O_ACCMODE != os.O_WRONLY:
            return OpenPreference.ANY
        if self._tracked(name) or (self._names and _kind_of(name) in self._names):
            return OpenPreference.TRACKED
        return OpenPreference.ANY

    def note_stayed(self, name: bytes) -> None:
        """Learn the name of a file that is written past the worker for longer than a checkpoint takes."""
        self._learn(self._names, _kind_of(name), MAX_LEARNED_NAMES)

    def note_joined(self, ino: int) -> None:
        """Learn a file whose read-write open had to join readers by passthrough, so that its mappings are not seen."""
        self._learn(self._inodes, ino, MAX_LEARNED_INODES)

    def _learn(self, known: dict[_T, None], what: _T, limit: int) -> None:
        if what in known:
            return
        with self._lock:
            known[what] = None
            while len(known) > limit:
                del known[next(iter(known))]
            self._unsaved = True

    # -- across sessions ------------------------------------------------------------------------------

    def load(self, state_fd: int) -> None:
        """Take up what earlier workers learned. A file that cannot be read or understood counts as none."""
        with suppress(OSError, msgspec.DecodeError):
            learned = decode_msgpack(read_regular(_FILE, _MAX_FILE_BYTES, dir_fd=state_fd), _Learned)
            self._names = dict.fromkeys(learned.names[-MAX_LEARNED_NAMES:])
            self._inodes = dict.fromkeys(learned.inodes[-MAX_LEARNED_INODES:])

    def save(self, state_fd: int) -> None:
        """Keep what was learned since the last time.

        Not synced: a machine that fails loses a hint. Never raises.
        """
        if not self._unsaved:
            return
        with self._lock:
            self._unsaved = False
            data = msgspec.msgpack.encode(_Learned(list(self._names), list(self._inodes)))
        try:
            Disk().replace_file(_FILE, data, dir_fd=state_fd, durable=False)
        except OSError as error:
            log.warning("open_rules_not_saved", error=str(error))


def _matcher(patterns: Sequence[str]) -> Callable[[bytes], object]:
    """Return a test whether a name matches any of the shell patterns, as bytes."""
    if not patterns:
        return lambda name: None
    # latin-1 maps each byte to one character and back, so that names that are no UTF-8 match as well.
    joined = "|".join(fnmatch.translate(os.fsencode(pattern).decode("latin-1")) for pattern in patterns)
    return re.compile(joined.encode("latin-1")).match


def _kind_of(name: bytes) -> bytes:
    return _DIGITS.sub(b"#", name)


def _is_live(attributes: Callable[[], os.stat_result]) -> bool:
    """Return whether a database is one that is written to, and no data set."""
    try:
        st = attributes()
    except OSError:
        return False
    return st.st_size <= MAX_CACHED_BYTES or time.time() - st.st_mtime < WRITTEN_LATELY_SECONDS
