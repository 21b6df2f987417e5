"""Records of verdicts: what was found in a snapshot, in a file of the repository beside it, so that nothing is judged twice.

``verdicts/<id>`` is a `VerdictRecord` as JSON and, in a second line, its BLAKE2b in hexadecimal under a key of this host. It is a cache:
a record that is missing, damaged, of other rules, other patterns of checkpoints or another key is none, and the snapshot is judged anew.

Who can write a record could call a torn checkpoint GOOD, and a repository may come with records from elsewhere: a disk of another host,
a copy, a directory of another user. So a record counts only if it was made here: the key lies outside of every repository (`KEY_PATH`),
belongs to root or to the user that reads it, and nobody else may read it. A record is bound to the trees of its snapshot, and in a
repository of another user none counts for root. Records are neither copied nor uploaded.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Final, Protocol, TypeVar

import msgspec

from ciuic.repository import Repository
from ciuic.repository.snapshots import VERDICTS_DIR, SnapshotStore
from ciuic.repository.trust import foreign_flaw
from ciuic.structs import decode_json
from ciuic.system.disk import READ_FILE, Disk, read_regular
from ciuic.types import Snapshot
from ciuic.verdicts.model import DEFECT, RULES, Checkpoint, Verdict

KEY_PATH: Final = "/var/lib/ciuic/verdict-key"
"""File with the key of this host, which the daemon makes."""
KEY_VARIABLE: Final = "CIUIC_VERDICT_KEY"
"""Environment variable with another path of it."""
MAX_RECORD_BYTES: Final = 16 << 20
"""Limit of one record: some 40,000 checkpoints. A snapshot with more is judged whenever it is looked at."""
_KEY_BYTES: Final = 32
_MAC_BYTES: Final = 16
_VERSION: Final = 1
_DIGITS: Final = re.compile(rb"(\d+)")
_NAME: Final = re.compile(r"cs-[0-9a-f]{6,32}\Z")


class DatedCheckpoint(msgspec.Struct, frozen=True, array_like=True):
    """A checkpoint with the latest change of one of its files."""

    checkpoint: Checkpoint
    mtime_ns: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class VerdictSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a record that a list of snapshots shows."""

    version: int = _VERSION
    rules: int = RULES
    repository: str
    """Id of the repository."""
    snapshot: str
    """Id of the snapshot: a record says nothing of another one, whatever its file is called."""
    content: str
    """`snapshot_digest` of the snapshot."""
    newest: DatedCheckpoint | None = None
    """The newest checkpoint of all roots."""
    patterns: tuple[str, ...] = ()
    """The user's patterns of what is one checkpoint, which were in force."""
    is_complete: bool = True
    """False if a part of the snapshot could not be read, which may have a newer checkpoint."""


class VerdictRecord(VerdictSummary, frozen=True, kw_only=True):
    """All checkpoints of one snapshot."""

    roots: tuple[tuple[bytes, tuple[DatedCheckpoint, ...]], ...] = ()
    """(Path of a root, its checkpoints), in the order in which `ciuic.history.checkpoints` yields them."""
    before: tuple[tuple[bytes, str], ...] = ()
    """(Path of a root, id of the snapshot of it that was the one before when this one was judged; empty for none)."""
    files: dict[str, Verdict] = {}
    """Verdicts on files by `ciuic.verdicts.verdict.file_key`, for the snapshots to come."""


_Record = TypeVar("_Record", bound=VerdictSummary)


class _Dated(Protocol):
    @property
    def checkpoint(self) -> Checkpoint: ...
    @property
    def mtime_ns(self) -> int: ...


_AnyDated = TypeVar("_AnyDated", bound=_Dated)


def newest_of(found: Iterable[_AnyDated]) -> _AnyDated | None:
    """Return the checkpoint with the latest change of a file; of several at one time the last by name.

    What nothing can be said of, a cache or data of the program perhaps, counts only where there are no others.
    """
    everything = list(found)
    known = [one for one in everything if not one.checkpoint.verdict.is_foreign]
    return max(known or everything, key=age_of, default=None)


def age_of(found: _Dated) -> tuple[int, list[tuple[int, bytes]]]:
    """Return the sort key for checkpoints, oldest first: of equal times the last path is the newest, as step-10 is after step-9."""
    # A number by its length first, without leading zeros: of any length in a hostile name.
    parts = (part.lstrip(b"0") if part.isdigit() else part for part in _DIGITS.split(found.checkpoint.path))
    return found.mtime_ns, [(len(part) * (number % 2), part) for number, part in enumerate(parts)]


def snapshot_digest(snapshot: Snapshot) -> str:
    """Return a digest of what a verdict takes from a snapshot: its time, its kind, and its roots with the ids of their trees."""
    facts = msgspec.msgpack.encode(
        (str(snapshot.id), snapshot.time_ns, snapshot.host, snapshot.is_state, snapshot.roots)
    )
    return hashlib.blake2b(facts, digest_size=_MAC_BYTES).hexdigest()


Before = Callable[[bytes, int], str]
"""Returns the id of the newest snapshot of a root of this host before a time in nanoseconds; empty for none."""


def may_carry(
    record: VerdictRecord, other: Snapshot, snapshot: Snapshot, path: bytes, before: Before
) -> bool:
    """Return whether what has the same tree in two snapshots of a root has the verdicts of the record of ``other``."""
    # Older versions, over which a file may have been written in place, are looked for in the snapshots before, by time. So nothing may
    # lie between the two, nor have come in before the other one since it was judged, as a snapshot does that was committed late.
    earlier, later = sorted((snapshot, other), key=lambda one: one.time_ns)
    judged_behind = dict(record.before).get(path)
    if before(path, later.time_ns) != earlier.id or before(path, other.time_ns) != judged_behind:
        return False
    if not record.is_complete or snapshot.host != other.host:
        return False
    # It may be that of a moment in which memory was short.
    if any(DEFECT in one.checkpoint.verdict.reason for _, found in record.roots for one in found):
        return False

    def facts(one: Snapshot) -> tuple[object, ...]:
        root = next(root for root in one.roots if root.path == path)
        # A file of several names is in the table of links, wherever its names are.
        return root.mode, root.links, one.not_held is None, one.is_state

    return facts(snapshot) == facts(other)


def encode_record(record: VerdictRecord, key: bytes) -> bytes:
    """Return the bytes that `decode_record` reads as ``record``."""
    body = msgspec.json.encode(record)
    return b"%b\n%b\n" % (body, _mac(body, key))


def decode_record(data: bytes, key: bytes, kind: type[_Record]) -> _Record | None:
    """Return the record, or its summary; None for what is damaged, was made under other rules or with another key."""
    body, newline, end = data.partition(b"\n")
    # No comparison in constant time: who can measure here can read the file.
    if not key or not newline or end != _mac(body, key) + b"\n":
        return None
    try:
        record = decode_json(body, kind)
    except msgspec.DecodeError:
        return None
    return record if (record.version, record.rules) == (_VERSION, RULES) else None


def _mac(body: bytes, key: bytes) -> bytes:
    return hashlib.blake2b(body, key=key, digest_size=_MAC_BYTES).hexdigest().encode()


def key_path(environ: Mapping[str, str] | None = None) -> str:
    """Return the path of this host's key."""
    return (os.environ if environ is None else environ).get(KEY_VARIABLE) or KEY_PATH


def read_key(path: str | None = None) -> bytes:
    """Return the key of this host; empty if there is none that this process may read and others may not."""
    try:
        fd = os.open(path or key_path(), READ_FILE)
    except OSError:
        return b""
    with os.fdopen(fd, "rb") as file:
        facts = os.fstat(fd)
        if (
            not stat.S_ISREG(facts.st_mode)
            or facts.st_uid not in (0, os.geteuid())
            or stat.S_IMODE(facts.st_mode) & 0o077
        ):
            return b""
        key = file.read(_KEY_BYTES + 1)
    return key if len(key) == _KEY_BYTES else b""


def own_key(path: str | None = None) -> bytes:
    """Return the key of this host, made if there is none; empty if it cannot be made.

    Blocks on the disk. Not synced: a key that is lost makes every record one that is made anew.
    """
    path = path or key_path()
    key = read_key(path)
    if key:
        return key
    with suppress(OSError):
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
        Disk().replace_file(path, os.urandom(_KEY_BYTES), durable=False, shared=True)
    return read_key(path)


class VerdictRecords:
    """Records of one repository. Reading them needs no lock; one process writes them, the daemon.

    Args:
        repository: The repository. One that is not a directory of this host has no records.
        key: Key of this host; None to read it. Without one there are no records.
        patterns: The user's patterns of what is one checkpoint: what was judged by others is none.
    """

    def __init__(
        self, repository: Repository, key: bytes | None = None, patterns: Sequence[str] = ()
    ) -> None:
        self._directory = f"{repository.path}/{VERDICTS_DIR}"
        self._repository_id = repository.id
        self.patterns = tuple(patterns)
        counts = isinstance(repository.snapshots, SnapshotStore) and foreign_flaw(repository.path) is None
        self.key = b"" if not counts else read_key() if key is None else key

    def names(self) -> set[str]:
        """Return the ids of the snapshots with a file here, whatever is in it."""
        if not self.key:
            return set()
        try:
            return set(filter(_NAME.match, os.listdir(self._directory)))
        except OSError:
            return set()

    def record(self, snapshot: Snapshot) -> VerdictRecord | None:
        """Return the record of a snapshot; None if there is none that counts."""
        record = self._read(snapshot.id, VerdictRecord)
        return record if record is not None and record.content == snapshot_digest(snapshot) else None

    def summary(self, id_: str) -> VerdictSummary | None:
        """Return the summary of a snapshot; None if there is none that counts."""
        return self._read(id_, VerdictSummary)

    def carried(self, other: Snapshot, snapshot: Snapshot, before: Before) -> VerdictRecord | None:
        """Return the record of ``other`` for a snapshot in which nothing is different; None where something is."""
        ours, theirs = ({root.path: root.entry.content for root in one.roots} for one in (snapshot, other))
        # First: of most snapshots something is different, and a record may be large.
        record = self.record(other) if ours == theirs else None
        if record is None or not all(may_carry(record, other, snapshot, path, before) for path in ours):
            return None
        return msgspec.structs.replace(
            record,
            snapshot=str(snapshot.id),
            content=snapshot_digest(snapshot),
            before=tuple((path, before(path, snapshot.time_ns)) for path in ours),
        )

    def _read(self, id_: str, kind: type[_Record]) -> _Record | None:
        if not self.key:
            return None
        try:
            data = read_regular(f"{self._directory}/{id_}", MAX_RECORD_BYTES)
        except OSError:
            return None
        record = decode_record(data, self.key, kind)
        wanted = (self._repository_id, id_, self.patterns)
        if record is None or (record.repository, record.snapshot, record.patterns) != wanted:
            return None
        return record

    def write(self, record: VerdictRecord, disk: Disk | None = None) -> bool:
        """Replace the record of a snapshot, durably on return, and return whether it can be read back.

        Raises:
            OSError: the disk failed.
        """
        data = encode_record(record, self.key)
        if not self.key or not _NAME.match(record.snapshot) or len(data) > MAX_RECORD_BYTES:
            return False
        with suppress(FileExistsError):
            os.mkdir(self._directory, 0o700)
        (disk or Disk()).replace_file(f"{self._directory}/{record.snapshot}", data)
        return True

    def remove_all_but(self, ids: Iterable[str]) -> None:
        """Remove the records of all snapshots but these. Not synced: one that comes back is removed again."""
        for name in self.names().difference(ids):
            with suppress(OSError):
                os.unlink(f"{self._directory}/{name}")
