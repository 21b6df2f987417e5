"""Record of what a remote has stored: written by the process that uploads, read by those that prune.

The record is ``<state directory>/<name of the remote>/stored``, JSON:

    {"repository": "<id>", "stored": ["cs-…", …], "passed_over": ["cs-…", …], "tail_ns": 1760000000000000000,
     "url": "s3://bucket/prefix", "remote": "<id>", "seen_ns": 1760000000000000000, "doubt": ""}

``stored`` has the local snapshots that the remote has committed, ``passed_over`` those that it does not want
(its schedule or its own retention leaves them out). A snapshot in neither waits for the remote, and prune keeps
it (ciuic.retention). ``tail_ns`` is the cut of the newest snapshot that the remote has ever stored; 0: none.
``doubt`` says why the remote is not what it was: it went back to an older state, was replaced, or cannot be read. From then
on nothing counts as stored there, until it was read again (`doubt_record`). ``seen_ns`` is when the remote was last seen to be
what the record says. Nothing is removed for an older look than `MAX_UNSEEN_SECONDS`: meanwhile the remote may have gone back
to an older state, or be gone (`remotes_done`).

A record is of the remote at ``url``. Where the configuration has another URL under this name, nothing is known of that one.

A check of the remote notes in ``damaged``, beside the record, which snapshots cannot be read whole there: these do not count as stored
until a check finds them whole (`note_damaged`).

Guarantees: the writer replaces the record atomically and durably. The reader takes it for hostile, because the
process that uploads has no privileges and talks to a network: it follows no link below the state directory,
waits for no pipe, reads a limited number of bytes, and a record that cannot be read never lets a snapshot go.

The lag of a remote behind its repository follows from the record, so these figures need no network.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Final, NamedTuple, Protocol

import msgspec

from ciuic.errors import Damaged
from ciuic.structs import decode_json
from ciuic.system.disk import PIN_DIRECTORY, READ_DIRECTORY, READ_FILE, Disk
from ciuic.units import human_duration

STATE_VARIABLE: Final = "CIUIC_UPLOAD_STATE"
DEFAULT_STATE_DIR: Final = Path("/var/lib/ciuic-upload")
"""State directory of ciuic-upload.service."""
_NAME: Final = "stored"
_DAMAGED_NAME: Final = "damaged"
_MAX_NAMED: Final = 5
# An id has 9 to 35 characters: room for 100,000 snapshots at least, and little memory.
MAX_RECORD_BYTES: Final = 4 << 20
LOOK_EVERY_SECONDS: Final = 300.0
"""Time between two looks of a process that uploads: a LIST and a GET each, about a cent a month."""
MAX_UNSEEN_SECONDS: Final = 900
"""Age of a look on which something may be removed. The daemon, which has no way to a remote, removes only what it could spare
where the remote was as recorded within a quarter of an hour: three looks, so that a request that is tried again costs nothing."""


class StoredRecordDamaged(Damaged):
    """The record of a remote cannot be read."""


class StoredRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Snapshots of one repository that a remote has stored."""

    repository: str
    """Id of the repository."""
    stored: frozenset[str] = frozenset()
    passed_over: frozenset[str] = frozenset()
    tail_ns: Annotated[int, msgspec.Meta(ge=0)] = 0
    url: str = ""
    """URL of the remote; empty if it was not noted."""
    remote: str = ""
    """Id of the remote; empty if it was not noted."""
    seen_ns: Annotated[int, msgspec.Meta(ge=0)] = 0
    """When the remote was last seen to be as it was left, UTC; 0: not noted."""
    doubt: str = ""
    """Why the remote is not what it was, in words; then nothing is stored or passed over. Empty while all is well."""

    def is_of(self, remote: ConfiguredRemote) -> bool:
        """Return whether the record is of the remote that the configuration has under this name now."""
        return self.url in ("", remote.url)


class ConfiguredRemote(Protocol):
    """Remote as the configuration names it; `ciuic.config.RemoteConfig` does."""

    @property
    def name(self) -> str:
        """Name of the remote."""

    @property
    def url(self) -> str:
        """Its URL."""


class RemotePlace(NamedTuple):
    """Name and URL of a remote."""

    name: str
    url: str


class _DamagedThere(msgspec.Struct, frozen=True, kw_only=True):
    """Snapshots that a check could not read whole on the remote at this URL."""

    url: str
    listed: frozenset[str] = frozenset()
    """Found without reading all data: a manifest, pack or chunk is missing."""
    read: frozenset[str] = frozenset()
    """Found by reading all data; no other check refutes it."""


class RemotesDone(NamedTuple):
    """Snapshots that each remote needs no more, as `ciuic.retention.plan_retention` takes it."""

    done: dict[str, Collection[str] | None]
    """Snapshots stored or passed over, by the remote's name; None: it has never stored any."""
    flaws: list[str]
    """Sentences about records that cannot be read, and remotes that are not what they were."""


def upload_state_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Return the state directory of the process that uploads.

    Args:
        environ: environment; None for that of the process.
    """
    value = (os.environ if environ is None else environ).get(STATE_VARIABLE, "")
    return Path(value) if value else DEFAULT_STATE_DIR


def decode_record(data: bytes) -> StoredRecord:
    """Return the record in ``data``. StoredRecordDamaged for anything else."""
    if len(data) > MAX_RECORD_BYTES:
        raise StoredRecordDamaged(f"it has more than {MAX_RECORD_BYTES} bytes")
    try:
        return decode_json(data, StoredRecord)
    except msgspec.DecodeError as error:
        raise StoredRecordDamaged(f"it is no such record: {error}") from error


def encode_record(record: StoredRecord) -> bytes:
    """Return the bytes that `decode_record` reads as ``record``."""
    document = msgspec.to_builtins(record)
    # Sorted, so that equal records are equal files.
    return msgspec.json.encode(
        {**document, "stored": sorted(record.stored), "passed_over": sorted(record.passed_over)}
    )


def read_record(name: str, state_dir: Path | None = None) -> StoredRecord | None:
    """Return the record of the remote ``name``; None if there is none.

    Raises:
        StoredRecordDamaged: the record cannot be read, or is none.
    """
    place = upload_state_dir() if state_dir is None else state_dir
    try:
        return decode_record(read_state_file(place, name, _NAME, MAX_RECORD_BYTES + 1))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoredRecordDamaged(f"{error.strerror}") from error


def remotes_done(
    remotes: Iterable[ConfiguredRemote],
    repository: str,
    *,
    now_ns: int,
    is_theirs: bool = True,
    looks: Mapping[str, str] = MappingProxyType({}),
    state_dir: Path | None = None,
) -> RemotesDone:
    """Return what the remotes of a configuration need no more of a repository.

    A remote whose record cannot be read needs everything, and so does one that was not looked at for `MAX_UNSEEN_SECONDS`: neither
    is a reason to delete.

    Args:
        remotes: the remotes.
        repository: id of the repository.
        now_ns: the clock, UTC.
        is_theirs: the configuration that has the remotes names this repository as well. Otherwise a remote
            counts only if it has a record of this repository.
        looks: remotes that the caller has looked at just now, by name: why they may lack what is recorded, empty if they have it.
        state_dir: state directory; None: `upload_state_dir`.
    """
    result = RemotesDone({}, [])
    for remote in remotes:
        name = remote.name
        known = _known(remote, repository, state_dir)
        if known.record is None and not is_theirs:
            continue
        done = known.stored | known.passed_over
        flaw = known.flaw if known.is_doubted else ""
        if done:
            flaw = looks[name] if name in looks else _unseen(known.record, now_ns)
        done = frozenset() if flaw else done
        result.flaws.extend(f"remote {name}: {text}" for text in (flaw, known.damage) if text)
        result.done[name] = done if known.tail_ns or known.is_doubted else None
    return result


def _unseen(record: StoredRecord | None, now_ns: int) -> str:
    """Return why a record is too old to remove anything for it; empty if it is not."""
    seen_ns = 0 if record is None else record.seen_ns
    # A clock that was set back makes no look young.
    seconds = abs(now_ns - seen_ns) / 1e9
    if seconds <= MAX_UNSEEN_SECONDS:
        return ""
    ago = f"for {human_duration(seconds)}" if seen_ns else "since it was recorded"
    return f"nothing is removed because it is stored there: no upload has looked at the remote {ago}"


class _Known(NamedTuple):
    """Content of a remote as far as it may be relied on."""

    record: StoredRecord | None
    """Record of the repository; None for none, or none that can be read."""
    flaw: str = ""
    """Why nothing counts as stored; empty while all is well."""
    is_doubted: bool = False
    """True if the remote may have had something."""
    damaged: frozenset[str] = frozenset()
    """Snapshots that a check could not read whole there."""

    @property
    def stored(self) -> frozenset[str]:
        return frozenset() if self.record is None or self.flaw else self.record.stored - self.damaged

    @property
    def damage(self) -> str:
        """Sentence about what is stored and damaged; empty for nothing."""
        lost = [] if self.record is None or self.flaw else sorted(self.record.stored & self.damaged)
        if not lost:
            return ""
        named = ", ".join(lost[:_MAX_NAMED])
        more = f" and {len(lost) - _MAX_NAMED} more" if len(lost) > _MAX_NAMED else ""
        return f"what is there cannot be read whole of {named}{more}: ciuic check --remote --repair"

    @property
    def passed_over(self) -> frozenset[str]:
        return frozenset() if self.record is None or self.flaw else self.record.passed_over

    @property
    def tail_ns(self) -> int:
        return 0 if self.record is None else self.record.tail_ns


def _known(remote: ConfiguredRemote, repository: str, state_dir: Path | None) -> _Known:
    """Return what a remote has of a repository: the one place that decides it, for retention, status and metrics."""
    try:
        record = read_record(remote.name, state_dir)
    except StoredRecordDamaged as error:
        return _Known(None, f"what the remote has stored cannot be read: {error}", True)
    if record is None:
        return _Known(None, "nothing was ever uploaded from this host")
    if record.repository != repository:
        return _Known(None, "nothing was ever uploaded from this repository")
    if not record.is_of(remote):
        return _Known(None, f"nothing is known of it yet: the last upload went to {record.url}")
    if record.doubt:
        return _Known(
            record, f"nothing counts as stored until the remote was read again: {record.doubt}", True
        )
    try:
        return _Known(record, damaged=_damaged_there(remote, state_dir))
    except StoredRecordDamaged as error:
        return _Known(record, f"what a check found there cannot be read: {error}", True)


def _damaged_there(remote: ConfiguredRemote, state_dir: Path | None) -> frozenset[str]:
    noted = _read_damaged(remote, state_dir)
    return noted.listed | noted.read


def _read_damaged(remote: ConfiguredRemote, state_dir: Path | None) -> _DamagedThere:
    nothing = _DamagedThere(url=remote.url)
    place = upload_state_dir() if state_dir is None else state_dir
    try:
        data = read_state_file(place, remote.name, _DAMAGED_NAME, MAX_RECORD_BYTES)
        noted = decode_json(data, _DamagedThere)
    except FileNotFoundError:
        return nothing
    except (OSError, msgspec.DecodeError) as error:
        raise StoredRecordDamaged(f"{error}") from error
    return noted if noted.url == remote.url else nothing


def note_damaged(
    remote: ConfiguredRemote, snapshots: Iterable[str], *, data_read: bool, state_dir: Path | None = None
) -> None:
    """Have these snapshots, and no others that the same check could find, not count as stored on a remote; durable on return.

    Args:
        remote: The remote that was checked.
        snapshots: Those that cannot be read whole.
        data_read: The check read all data. Otherwise what an earlier one found by that stands.
        state_dir: State directory; None: `upload_state_dir`.

    Raises:
        OSError: it cannot be written.
    """
    found = frozenset(snapshots)
    try:
        before = _read_damaged(remote, state_dir)
    except StoredRecordDamaged:
        before = _DamagedThere(url=remote.url)
    after = (
        _DamagedThere(url=remote.url, read=found)
        if data_read
        else msgspec.structs.replace(before, listed=found)
    )
    if after != before:
        place = upload_state_dir() if state_dir is None else state_dir
        document = {"url": after.url, "listed": sorted(after.listed), "read": sorted(after.read)}
        write_state_file(place, remote.name, _DAMAGED_NAME, msgspec.json.encode(document))


def note_stored_again(remote: ConfiguredRemote, snapshot: str, state_dir: Path | None = None) -> None:
    """Have a snapshot count as stored of which a check missed something; durable on return. What was found by reading all data stands.

    Raises:
        OSError: it cannot be written.
    """
    # What cannot be read is replaced by the next check.
    with suppress(StoredRecordDamaged):
        listed = _read_damaged(remote, state_dir).listed
        if snapshot in listed:
            note_damaged(remote, listed - {snapshot}, data_read=False, state_dir=state_dir)


def is_doubted(remote: ConfiguredRemote, state_dir: Path | None = None) -> bool:
    """Return whether nothing counts as stored on a remote, whatever else this host remembers of it."""
    try:
        record = read_record(remote.name, state_dir)
    except StoredRecordDamaged:
        return True
    return record is not None and (bool(record.doubt) or not record.is_of(remote))


def doubt_record(
    remote: ConfiguredRemote, repository: str, reason: str, state_dir: Path | None = None
) -> None:
    """Have nothing of a repository count as stored on a remote until `write_record` says so again; durable on return.

    A remote that has never stored anything, or whose record cannot be read, has nothing already.

    Raises:
        OSError: the record cannot be written.
    """
    record = _known(remote, repository, state_dir).record
    if record is not None and record.doubt != reason:
        nothing: frozenset[str] = frozenset()
        doubted = msgspec.structs.replace(record, stored=nothing, passed_over=nothing, doubt=reason)
        write_record(remote.name, doubted, state_dir)


def write_record(name: str, record: StoredRecord, state_dir: Path | None = None) -> None:
    """Replace the record of the remote ``name``, durably on return.

    The state directory must exist; one process writes at a time.

    Raises:
        OSError: the record cannot be written.
    """
    # An older record would be safe where it has fewer snapshots, and not where the remote has lost some since.
    write_state_file(
        upload_state_dir() if state_dir is None else state_dir, name, _NAME, encode_record(record)
    )


def write_state_file(place: Path, name: str, file_name: str, data: bytes, *, durable: bool = True) -> None:
    """Replace a file in the directory of the remote ``name``, which is made if need be; durable on return if asked to be.

    Args:
        place: State directory, which must exist.
        name: Name of the remote; ``.`` for the state directory itself.
        file_name: Name of the file, which one process writes at a time.
        data: Its content, which all users may read who can enter the directory.
        durable: Write it through to the disk; otherwise a power cut may leave none or an empty one.

    Raises:
        OSError: the file cannot be written.
    """
    owner = os.stat(place)
    # Not by pathlib, which takes the dot away: the directory itself may be reached through a link of root's.
    path = f"{place}/{name}"
    made = False
    with suppress(FileExistsError):
        os.mkdir(path, 0o755)
        made = True
    directory = os.open(path, READ_DIRECTORY)
    try:
        # Nothing to change in a directory of root's; the unit of an upload to one, which is root's then, forbids the call.
        if made and os.geteuid() == 0 and owner.st_uid != 0:
            # The process that uploads, which is not root as a service, writes here as well.
            os.fchown(directory, owner.st_uid, owner.st_gid)
        Disk().replace_file(file_name, data, mode=0o644, dir_fd=directory, durable=durable)
    finally:
        os.close(directory)


def read_state_file(place: Path, name: str, file_name: str, limit_bytes: int) -> bytes:
    """Return the first bytes of a file in the directory of a remote, which may be hostile: no link below ``place`` is followed.

    Args:
        place: State directory.
        name: Name of the remote; ``.`` for the state directory itself.
        file_name: Name of the file.
        limit_bytes: Number of bytes to read.

    Raises:
        StoredRecordDamaged: it is not a regular file.
        OSError: it cannot be read.
    """
    # The state directory may be reached through a link of root's: /var/lib/ciuic-upload is one under
    # DynamicUser=. What lies in it belongs to the process that uploads, which could plant any.
    state = os.open(place, os.O_PATH | os.O_DIRECTORY)
    try:
        directory = os.open(name, PIN_DIRECTORY, dir_fd=state)
    finally:
        os.close(state)
    try:
        # O_NONBLOCK: the open of a pipe without a writer would wait for one (fifo(7)).
        with open(os.open(file_name, READ_FILE, dir_fd=directory), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise StoredRecordDamaged("it is not a regular file")
            return file.read(limit_bytes)
    finally:
        os.close(directory)


class LaggingSnapshot(Protocol):
    """Facts about a snapshot; `ciuic.repository.SnapshotInfo` has it."""

    @property
    def id(self) -> str:
        """Id of the snapshot."""

    @property
    def time_ns(self) -> int:
        """Cut, ns since 1970."""

    @property
    def order_ns(self) -> int:
        """Place in the order of commits."""

    @property
    def new_bytes(self) -> int:
        """Bytes by which the snapshot let the packs grow."""


class RemoteLag(NamedTuple):
    """Snapshots of a repository that a remote lacks."""

    snapshots: int = 0
    """Snapshots that wait for the remote."""
    size_bytes: int = 0
    """Bytes by which these let the packs grow: about what is to be sent."""
    seconds: float = 0.0
    """Age of the oldest waiting snapshot that is newer than all stored ones: work that only this host has."""
    stored: int = 0
    """Snapshots of the repository that the remote has."""
    newest: str = ""
    """Newest of these; empty for none."""
    newest_ns: int = 0
    """Its cut."""
    flaw: str = ""
    """Why all that is recorded, or some of it, does not count as stored; empty if all is well."""


def remote_lag(
    remote: ConfiguredRemote,
    repository: str,
    snapshots: Iterable[LaggingSnapshot],
    *,
    now_ns: int,
    look: str = "",
    state_dir: Path | None = None,
) -> RemoteLag:
    """Return how far a remote is behind.

    Args:
        remote: The remote.
        repository: Id of the repository.
        snapshots: All its snapshots.
        now_ns: The clock, UTC.
        look: Why the remote may lack what is recorded, where the caller has just looked; empty for nothing.
        state_dir: State directory of the process that uploads; None: the usual one.
    """
    known = _known(remote, repository, state_dir)
    if look and not known.flaw:
        known = known._replace(flaw=look, is_doubted=True)
    stored, passed_over = known.stored, known.passed_over
    everything = list(snapshots)
    there = max((one for one in everything if one.id in stored), key=lambda one: one.order_ns, default=None)
    newest_ns = 0 if there is None else there.time_ns
    stored_to_ns = 0 if there is None else there.order_ns
    waiting = [one for one in everything if one.id not in stored and one.id not in passed_over]
    at_risk = min((one.time_ns for one in waiting if one.order_ns > stored_to_ns), default=None)
    return RemoteLag(
        snapshots=len(waiting),
        size_bytes=sum(one.new_bytes for one in waiting),
        seconds=0.0 if at_risk is None else max(0.0, (now_ns - at_risk) / 1e9),
        stored=sum(one.id in stored for one in everything),
        newest="" if there is None else str(there.id),
        newest_ns=newest_ns,
        flaw=known.flaw or known.damage,
    )
