"""Status of each host on the remote: one small object an uploader, replaced in place, signed by a key of the host's own.

Guarantees: a status that is read was written by the holder of the key that its name is made from, for this remote. All hosts of
a remote share one master key, and whoever has it can store an object under any name; but nobody can make one that verifies under the
name of another host. What such an attacker can do is to say anything of itself, to destroy the status of another host, which readers
tell (`ReadStatus.flaw`), and to bring an earlier one back, whose time is signed with it. The name of a host is a claim like all else:
two hosts of one name stay two.

Texts, lists and the object itself are limited in size, by the writer and by the reader. Nothing is decided by a status: collections,
retention and restores do not read it.

A report costs one PUT, from a thread of its own: no upload waits for it, and one that fails is left out. Where the store refuses to
replace an object (`ciuic remote serve --append-only`, a host that may not delete on GCS), the status goes to a new name once an hour.

References:
    docs/remote-format.md, section 11; Ed25519: RFC 8032
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Final, Literal, NamedTuple

import msgspec
from blake3 import blake3
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from ciuic.errors import CiuicError
from ciuic.remote.documents import SnapshotName, read_object
from ciuic.remote.errors import DamagedRemote
from ciuic.remote.object_names import (
    MAX_STEP,
    STATUS_PREFIX,
    HexId,
    parse_manifest,
    parse_status,
    status_name,
)
from ciuic.remote.objects.model import NoSuchObject, ObjectInfo, Objects, RemoteRefused
from ciuic.remote.sealing.sealer import Sealer
from ciuic.repository import log as events
from ciuic.structs import decode_json
from ciuic.system.disk import Disk, read_regular
from ciuic.units import human_duration

MAX_STATUS_BYTES: Final = 64 << 10
"""Limit of the object."""
MAX_TEXT: Final = 500
"""Characters of a text in a status."""
MAX_ENTRIES: Final = 32
"""Roots, and trainings, that a status names."""
MAX_HOSTS: Final = 20_000
"""Statuses that a reader reads; more would be an attack, or a fleet that needs several remotes."""
_SIGNED: Final = b"ciuic status v1"
_PUBLIC_BYTES: Final = 32
_SIGNATURE_BYTES: Final = 64
_HEAD_BYTES: Final = _PUBLIC_BYTES + _SIGNATURE_BYTES
_MAX_NS: Final = (1 << 63) - 1

_Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
_Name = Annotated[str, msgspec.Meta(max_length=255)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=_MAX_NS)]
_Seconds = Annotated[int, msgspec.Meta(ge=0, le=10**9)]
_Step = Annotated[int, msgspec.Meta(ge=0, le=MAX_STEP)]


class StatusBehind(msgspec.Struct, frozen=True, kw_only=True):
    """Snapshots that the remote lacks."""

    snapshots: _Count = 0
    size_bytes: _Count = 0
    only_here_ns: _Count = 0
    """Cut of the oldest that is newer than all stored ones: work since then is on this host alone; 0: none."""


class StatusRoot(msgspec.Struct, frozen=True, kw_only=True):
    """Newest local snapshot of a root."""

    path: _Text
    snapshot: SnapshotName
    time_ns: _Count
    verdict: Annotated[str, msgspec.Meta(pattern=r"^[A-Z]{0,16}\Z")] = ""
    """GOOD, TORN or UNKNOWN, of the newest checkpoint in that snapshot; empty where the uploader does not know."""
    reason: _Text = ""


class StatusState(msgspec.Struct, frozen=True, kw_only=True):
    """State of a training."""

    snapshot: SnapshotName
    time_ns: _Count
    epoch: _Step | None = None
    step: _Step | None = None


class StatusTraining(msgspec.Struct, frozen=True, kw_only=True):
    """Newest states of a training: here, and wholly on the remote."""

    name: _Text
    local: StatusState | None = None
    stored: StatusState | None = None


class StatusDrill(msgspec.Struct, frozen=True, kw_only=True):
    """Last restore drill of this host from this remote."""

    time_ns: _Count
    verdict: Literal["good", "damaged", "failed"]
    reason: _Text = ""


class HostStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Statement of an uploader about its host at ``time_ns``, by the clock of that host."""

    time_ns: _Count
    host: _Name
    ciuic: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """Version of the program."""
    repository: HexId
    interval_seconds: _Seconds = 0
    """Longest time to the next status; 0: none is promised, as by `ciuic remote upload --once`."""
    max_lag_seconds: _Seconds | None = None
    """`remote.max_lag` of the host."""
    behind: StatusBehind = StatusBehind()
    newest: StatusState | None = None
    """Newest local snapshot."""
    newest_stored_ns: _Count = 0
    """Cut of the newest snapshot on the remote; 0: none."""
    error: _Text = ""
    """What the upload waits for, or could not read; empty while all is well."""
    roots: Annotated[tuple[StatusRoot, ...], msgspec.Meta(max_length=MAX_ENTRIES)] = ()
    trainings: Annotated[tuple[StatusTraining, ...], msgspec.Meta(max_length=MAX_ENTRIES)] = ()
    drill: StatusDrill | None = None


def limited(text: str) -> str:
    """Return the text as a status may have it: cut, and without what is no Unicode."""
    clean = text.encode("utf-8", "replace").decode("utf-8")
    return clean if len(clean) <= MAX_TEXT else clean[: MAX_TEXT - 1] + "…"


def reporter_id(public: bytes) -> str:
    """Return the name that a public key proves: 128 bits of its BLAKE3, in hexadecimal digits."""
    return blake3(public).hexdigest()[:32]


class StatusKey:
    """Key by which a host signs its status. It appears in no repr."""

    def __init__(self, secret: bytes) -> None:
        """Take the 32 secret bytes of an Ed25519 key."""
        self._secret = secret
        self._key = Ed25519PrivateKey.from_private_bytes(secret)
        self.public: bytes = self._key.public_key().public_bytes_raw()
        self.reporter = reporter_id(self.public)
        """The name that it proves."""

    def __repr__(self) -> str:
        return f"StatusKey(reporter={self.reporter!r})"

    def encode(self, sealer: Sealer, name: str, status: HostStatus) -> bytes:
        """Return the bytes of the object ``name``. ValueError for a status that could not be read back."""
        content = msgspec.json.encode(status)
        try:
            decode_json(content, HostStatus)
        except msgspec.DecodeError as error:
            raise ValueError(f"the status could not be read back: {error}") from None
        data = self.seal(sealer, name, content)
        if len(data) > MAX_STATUS_BYTES:
            raise ValueError(f"the status would have {len(data)} bytes; {MAX_STATUS_BYTES} are the limit")
        return data

    def seal(self, sealer: Sealer, name: str, content: bytes) -> bytes:
        """Return the signed and sealed bytes of an object with this JSON."""
        signature = self._key.sign(_SIGNED + sealer.remote_id + content)
        return sealer.seal(name, self.public + signature + content)


class _StoredKey(msgspec.Struct, frozen=True, kw_only=True):
    key: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    log: HexId


def own_key(path: str, log: str, own_logs: Collection[str], disk: Disk | None = None) -> StatusKey:
    """Return the key of this host, made if there is none; durable on return.

    A key goes with the log that this host wrote when it made the key: where the disk was cloned, the host that takes a new log
    takes a new key.

    Args:
        path: File in a directory that only this process may enter.
        log: Name of the log that this host writes.
        own_logs: Names of all logs in which this host alone has written.
        disk: For tests.

    Raises:
        OSError: the file cannot be written.
    """
    known: _StoredKey | None = None
    try:
        known = decode_json(read_regular(path, 1024), _StoredKey)
    except (OSError, msgspec.DecodeError):
        # Lost or unreadable: a new one is always allowed, and the status of the old one falls silent.
        known = None
    if known is not None and known.log in own_logs:
        stored = known if known.log == log else _StoredKey(key=known.key, log=log)
    else:
        stored = _StoredKey(key=os.urandom(32).hex(), log=log)
    if stored != known:
        (disk or Disk()).replace_file(path, msgspec.json.encode(stored))
    return StatusKey(bytes.fromhex(stored.key))


def decode_status(sealer: Sealer, name: str, data: bytes) -> HostStatus:
    """Return the status in the object ``name``.

    Raises:
        DamagedRemote: it does not open, another key than that of its name signed it, or it is no status.
        UnsupportedFormat: a later version of ciuic wrote it.
    """
    parsed = parse_status(name)
    if parsed is None:
        raise DamagedRemote(name, "this is not the name of a status")
    if len(data) > MAX_STATUS_BYTES:
        raise DamagedRemote(name, f"it has more than {MAX_STATUS_BYTES} bytes")
    opened = sealer.open(name, data)
    public, signature = opened[:_PUBLIC_BYTES], opened[_PUBLIC_BYTES:_HEAD_BYTES]
    content = opened[_HEAD_BYTES:]
    if reporter_id(public) != parsed.reporter:
        raise DamagedRemote(name, "the key in it is not that of its name: another host wrote it")
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, _SIGNED + sealer.remote_id + content)
    except (InvalidSignature, ValueError):
        raise DamagedRemote(name, "its signature does not verify: another host wrote it") from None
    try:
        return decode_json(content, HostStatus)
    except msgspec.DecodeError as error:
        raise DamagedRemote(name, str(error)) from None


# Time between two statuses because something changed: a host that snapshots each second reports once a minute.
_LEAST_SECONDS: Final = 60.0
_HOUR_SECONDS: Final = 3600


class StatusReporter:
    """Thread that keeps the status of one host on a remote.

    Args:
        objects: The remote, not the space of a repository in it.
        sealer: Its seals.
        key: Key of this host.
        facts: Returns the status of now, whose ``interval_seconds`` is the caller's; may raise CiuicError or OSError.
        every_seconds: Longest time between two statuses.
        clock: Monotonic time.
        now_ns: The clock, UTC.
    """

    def __init__(
        self,
        objects: Objects,
        sealer: Sealer,
        key: StatusKey,
        facts: Callable[[], HostStatus],
        every_seconds: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._objects = objects
        self._sealer = sealer
        self._key = key
        self._facts = facts
        self._every_seconds = every_seconds
        self._clock = clock
        self._now_ns = now_ns
        self._wake = threading.Event()
        self._end = threading.Event()
        self._least_seconds = min(_LEAST_SECONDS, every_seconds)
        self._sent: HostStatus | None = None
        self._sent_at: float | None = None
        self._replaces = True
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to report; the first status goes out at once."""
        self._wake.set()
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)
        self._thread.start()

    def changed(self) -> None:
        """Note that something may have changed; returns at once."""
        self._wake.set()

    def close(self) -> None:
        """End the thread; a request that is under way ends first."""
        self._end.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            self._wake.wait(max(0.0, self._every_seconds - self._least_seconds))
            self._wake.clear()
            if self._end.is_set():
                return
            self.report()
            # What changes meanwhile is told after the pause.
            if self._end.wait(self._least_seconds):
                return

    def report(self) -> bool:
        """Store the status if it changed or is due; False if it did not, or could not be stored."""
        try:
            status = self._facts()
            # The chance after this one may come too late for what was promised.
            early_seconds = self._every_seconds - self._least_seconds
            is_due = self._sent_at is None or self._clock() - self._sent_at >= early_seconds
            if not is_due and self._sent == msgspec.structs.replace(status, time_ns=0):
                return False
            if not self._store(status):
                return False
        except (CiuicError, OSError, ValueError) as error:
            # The next one says it all again.
            events.warning("host_status_not_stored", error=str(error))
            return False
        self._sent = msgspec.structs.replace(status, time_ns=0)
        self._sent_at = self._clock()
        return True

    def _store(self, status: HostStatus) -> bool:
        if self._replaces:
            name = status_name(self._key.reporter)
            try:
                self._objects.put(name, [self._key.encode(self._sealer, name, status)])
                return True
            except RemoteRefused as error:
                events.warning("host_status_not_replaced", error=error.message)
        hourly = msgspec.structs.replace(
            status,
            interval_seconds=max(status.interval_seconds, _HOUR_SECONDS) if status.interval_seconds else 0,
        )
        name = status_name(self._key.reporter, self._now_ns() // (_HOUR_SECONDS * 10**9))
        # False: this hour has one.
        is_new = self._objects.create(name, self._key.encode(self._sealer, name, hourly))
        # Not before: credentials that expired refuse everything, and are renewed.
        self._replaces = False
        return is_new


class ReadStatus(NamedTuple):
    """Status of one host, as it was read."""

    reporter: str
    """Name that the key of the host proves."""
    modified_ns: int
    """Time at which it was stored, by the store's clock."""
    status: HostStatus | None
    """None if none of it verifies."""
    flaw: str = ""
    """Why an object under the name does not verify: somebody else wrote it, or it decayed."""

    @property
    def told_ns(self) -> int:
        """Time of the status: an old one that was stored again is old, and so is one whose host has a clock that is fast."""
        return min(self.modified_ns, self.modified_ns if self.status is None else self.status.time_ns)


# Requests at the same time; a GET takes 10 to 50 ms.
_THREADS: Final = 32
# Objects of one name that are tried: two hours and the one that is replaced in place.
_TRIED: Final = 3


def read_statuses(
    objects: Objects, sealer: Sealer, *, threads: int = _THREADS
) -> tuple[list[ReadStatus], int]:
    """Return the statuses of all hosts, and the number of those that are too many to read.

    It costs a LIST for each thousand objects and a GET for each host.

    Raises:
        RemoteUnreachable: the store did not answer.
    """
    found: dict[str, list[ObjectInfo]] = {}
    left_out = 0
    for info in objects.list(STATUS_PREFIX):
        parsed = parse_status(info.name)
        if parsed is None:
            continue
        if parsed.reporter not in found and len(found) >= MAX_HOSTS:
            left_out += 1
            continue
        # The newest last: the one that is replaced in place is the first by name. Memory is limited.
        found.setdefault(parsed.reporter, []).append(info)
        del found[parsed.reporter][:-_TRIED]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda item: _read(objects, sealer, *item), found.items())), left_out


def _read(objects: Objects, sealer: Sealer, reporter: str, infos: Iterable[ObjectInfo]) -> ReadStatus:
    best: ReadStatus | None = None
    flaw, modified_ns = "", 0
    for info in infos:
        modified_ns = max(modified_ns, info.modified_ns)
        try:
            status = decode_status(sealer, info.name, read_object(objects, info.name, MAX_STATUS_BYTES))
        except NoSuchObject:
            continue
        except CiuicError as error:
            if not isinstance(error, DamagedRemote):
                raise
            flaw = f"its status does not verify: {error.reason}"
            continue
        if best is None or best.status is None or status.time_ns > best.status.time_ns:
            best = ReadStatus(reporter, info.modified_ns, status)
    return (best or ReadStatus(reporter, modified_ns, None))._replace(flaw=flaw)


_DAY_SECONDS: Final = 86_400
_SILENT_INTERVALS: Final = 3
# A snapshot that is on its way for a day is late on any line; `ciuic doctor` has the same limit.
_DEFAULT_MAX_LAG_SECONDS: Final = _DAY_SECONDS
ProblemKind = Literal["forged", "silent", "error", "drill", "behind"]


class HostProblem(NamedTuple):
    """Reason why a person should look at a host."""

    kind: ProblemKind
    text: str


def host_problems(
    read: ReadStatus, *, now_ns: int, silent_after_seconds: int | None = None
) -> list[HostProblem]:
    """Return why a person should look at a host, the worst first; nothing for one that is well.

    Args:
        read: Its status.
        now_ns: The clock of the reader, UTC.
        silent_after_seconds: Age from which a status is silence; None: three times the interval that the host promised, and
            no age where it promised none.
    """
    found = [HostProblem("forged", read.flaw)] if read.flaw else []
    status = read.status
    if status is None:
        return found
    age_seconds = (now_ns - read.told_ns) / 1e9
    limit = silent_after_seconds
    if limit is None and status.interval_seconds:
        limit = _SILENT_INTERVALS * status.interval_seconds
    if limit is not None and age_seconds > limit:
        found.append(HostProblem("silent", f"silent for {human_duration(age_seconds)}"))
    if status.error:
        found.append(HostProblem("error", status.error))
    drill = status.drill
    if drill is not None and drill.verdict != "good":
        reason = f": {drill.reason}" if drill.reason else ""
        found.append(HostProblem("drill", f"the last drill was {drill.verdict}{reason}"))
    max_lag = status.max_lag_seconds or _DEFAULT_MAX_LAG_SECONDS
    only_here_ns = status.behind.only_here_ns
    if only_here_ns and (now_ns - only_here_ns) / 1e9 > max_lag:
        late = human_duration((now_ns - only_here_ns) / 1e9)
        found.append(HostProblem("behind", f"behind by {late}, more than {human_duration(max_lag)}"))
    return found


_SHOWN_DIGITS: Final = 8


def host_names(statuses: Collection[ReadStatus]) -> dict[str, str]:
    """Return the name by which to show each host, by its reporter: its own, with digits of its key where another claims the same."""
    claims = Counter(one.status.host for one in statuses if one.status is not None)
    names = {}
    for one in statuses:
        digits = one.reporter[:_SHOWN_DIGITS]
        claim = "" if one.status is None else one.status.host
        names[one.reporter] = claim if claims[claim] == 1 else f"{claim}~{digits}"
    return names


class StoredByHost(NamedTuple):
    """Snapshots of one host on a remote, as a listing shows them."""

    snapshots: int
    newest_ns: int
    """Time at which the newest was stored, by the store's clock."""


def stored_by_host(listed: Iterable[ObjectInfo]) -> dict[str, StoredByHost]:
    """Return the snapshots of each host by its label; manifests of snapshots that were removed since may be among them.

    Args:
        listed: All objects below ``manifests/``. None of them is read.
    """
    found: dict[str, StoredByHost] = {}
    for info in listed:
        name = parse_manifest(info.name)
        if name is not None:
            before = found.get(name.host, StoredByHost(0, 0))
            found[name.host] = StoredByHost(before.snapshots + 1, max(before.newest_ns, info.modified_ns))
    return found


_EXPIRES_NS: Final = 30 * 86_400 * 10**9


def expired_statuses(listed: Iterable[ObjectInfo]) -> list[str]:
    """Return the names of the statuses that a collector deletes: those 30 days older than the newest, and those of hours that no reader tries.

    Args:
        listed: All objects below ``status/``. Their times are the store's, so that no clock of a host counts.
    """
    found: dict[str, list[ObjectInfo]] = {}
    for info in listed:
        parsed = parse_status(info.name)
        if parsed is not None:
            found.setdefault(parsed.reporter, []).append(info)
    newest_ns = max((info.modified_ns for infos in found.values() for info in infos), default=0)
    return [
        info.name
        for infos in found.values()
        for number, info in enumerate(infos, 1)
        if newest_ns - info.modified_ns > _EXPIRES_NS or number <= len(infos) - _TRIED
    ]
