"""Read a remote from all versions of its objects: also what was deleted or overwritten since it was stored.

Guarantees: of several versions of a name, only one that verifies is used: by its seal in a sealed remote; in one in clear the
oldest that is well-formed, because names are written once. Memory and the number of versions that are tried are bounded
with any content of the bucket. Nothing is written.

Versions are tried oldest first. Every name of a remote is written once, and the names of packs and manifests are random: an
attacker who forges one comes later, and 10,000 forged versions cost pages of a listing and nothing else. With a key the
answer whether an object is the one of its name is sure. Without one it says that the bytes are well-formed, which anybody
can make them.

A remote that was deleted, or whose remote.json and key slots were replaced, opens as well (`open_remote_versions`): with a
key the pair of remote.json and key slot that it authenticates is found, in any of their versions. Without one the oldest
remote.json counts.
"""

from __future__ import annotations

import heapq
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import Final, NamedTuple, TypeVar

from ciuic.errors import Damaged, NotFound, UsageError
from ciuic.remote.access import Remote, opened_remote
from ciuic.remote.documents import (
    MAX_DOCUMENT_BYTES,
    MAX_REMOTE_JSON_BYTES,
    decode_log_entry,
    decode_manifest,
    decode_round,
    is_sealed,
    open_remote,
    read_remote_id,
)
from ciuic.remote.errors import DamagedRemote, PacksElsewhere, WrongKey
from ciuic.remote.object_names import (
    KEYS_PREFIX,
    LOGS_PREFIX,
    REMOTE_JSON,
    ROUNDS_PREFIX,
    parse_log_entry,
    parse_manifest,
    parse_pack,
    parse_round,
    parse_slot,
    slot_name,
)
from ciuic.remote.objects.model import (
    MAX_OBJECT_BYTES,
    NameVersions,
    NoSuchObject,
    ObjectInfo,
    ObjectVersions,
    RemoteRefused,
    TooLargeObject,
    Version,
    group_versions,
    is_name,
    merge_ranges,
    slices_of,
)
from ciuic.remote.pack import RemotePackReader, TableSource
from ciuic.remote.sealing.key_slots import (
    MAX_PASSPHRASE_WORK_KIB,
    MAX_SLOT_BYTES,
    KeySlot,
    SlotSecret,
    decode_slot,
    digits_of,
    own_digits,
    unwrap_master_key,
    work_kib,
)
from ciuic.remote.sealing.sealer import MasterKey, Sealer
from ciuic.repository import log as events
from ciuic.repository.errors import UnsupportedFormat
from ciuic.repository.identity import Bytes

_SPACE: Final = re.compile(r"repositories/([0-9a-f]{32})/(.*)\Z", re.DOTALL)


class _VersionCheck:
    """Verifies objects of one remote and of all spaces in it.

    Args:
        remote_id: Id of the remote, 16 bytes.
        master: Master key; None for a remote in clear.
    """

    def __init__(self, remote_id: bytes, master: MasterKey | None) -> None:
        self._remote_id = remote_id
        self._master = master

    def flaw(self, name: str, data: bytes) -> str:
        """Return what is wrong with the whole object; an empty text for a sound one, or a name that is not ours."""
        space, rest = self._space(name)
        return _flaw(lambda: self._check(space, rest, data))

    def flaw_of_table(self, name: str, objects: TableSource) -> str:
        """Return what is wrong with the table of a pack, which ``objects`` reads by its name in the space."""
        space, rest = self._space(name)
        ref = parse_pack(rest)
        assert ref is not None
        pack = RemotePackReader(Sealer(space, self._master), ref)
        return _flaw(lambda: pack.read_table_once(objects))

    def sealer_of(self, name: str) -> Sealer:
        """Return the seals of the space that a name belongs to."""
        return Sealer(self._space(name)[0], self._master)

    def _space(self, name: str) -> tuple[bytes, str]:
        return split_space(name, self._remote_id)

    def _check(self, space: bytes, name: str, data: bytes) -> None:
        sealer = Sealer(space, self._master)
        if name == REMOTE_JSON:
            open_remote(data, self._master, expected_id=space)
        elif slot := parse_slot(name):
            decode_slot(slot, data)
        elif entry := parse_log_entry(name):
            decode_log_entry(sealer, entry.writer, entry.number, data)
        elif round_ := parse_round(name):
            decode_round(sealer, round_.round, round_.part, data)
        elif parse_manifest(name) is not None:
            decode_manifest(sealer, name, data)
        elif ref := parse_pack(name):
            RemotePackReader(sealer, ref).check(data)


def split_space(name: str, remote_id: bytes) -> tuple[bytes, str]:
    """Return the id of the space that an object belongs to, 16 bytes, and its name there."""
    found = _SPACE.match(name)
    return (bytes.fromhex(found[1]), found[2]) if found else (remote_id, name)


def _flaw(check: Callable[[], object]) -> str:
    try:
        check()
    # A version number is not sealed: anybody can write a later one. Nor is anything in clear.
    except (Damaged, UnsupportedFormat, PacksElsewhere, WrongKey, UsageError, ValueError) as error:
        return str(error) or type(error).__name__
    return ""


# Names whose versions or choice are remembered: 30 MiB at most. Others are listed once more.
_MAX_REMEMBERED: Final = 1 << 16
# Small documents are read again right after they were verified.
_MAX_KEPT_BYTES: Final = 16 << 20
_MAX_KEPT_OBJECT_BYTES: Final = 1 << 16

_T = TypeVar("_T")


class SoundObjects:
    """`Objects` that are only read. May be used from several threads.

    Rounds of collections are left out: to those who read they say nothing, and what they deleted is there still.

    Args:
        versions: All versions.
        verification: Tells a sound version.
        before_ns: Leave out what was stored at this time or later; None for nothing.
        slot: Name and content of the key slot that opened the remote; empty for one in clear.
    """

    def __init__(
        self,
        versions: ObjectVersions,
        verification: _VersionCheck,
        before_ns: int | None = None,
        *,
        slot: tuple[str, bytes] = ("", b""),
    ) -> None:
        self.versions: Final = versions
        self.slot: Final = slot
        self.sealer_of: Final = verification.sealer_of
        """Returns the seals of the space that a name belongs to."""
        self.flaw_of: Final = verification.flaw
        """Returns what is wrong with an object, by its name and content."""
        self._verification = verification
        self._before_ns = before_ns
        self._lock = threading.Lock()
        # Guarded by the lock.
        self._known: OrderedDict[str, NameVersions] = OrderedDict()
        self._chosen: OrderedDict[str, Version] = OrderedDict()
        self._kept: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self._kept_bytes = 0
        self._warned: set[str] = set()

    @property
    def url(self) -> str:
        """URL of the prefix."""
        return self.versions.url

    def get(self, name: str) -> bytes:
        """Return the whole object, every byte of which was verified if there are several versions.

        Raises:
            NoSuchObject: nothing was ever stored under this name.
            DamagedRemote: no version verifies.
            TooLargeObject: it has more than MAX_OBJECT_BYTES.
        """
        found = self._find(name)
        if len(found.versions) == 1:
            return self._whole(found.versions[0])
        return self.sound_version(found)[1]

    def sound_version(self, found: NameVersions) -> tuple[Version, bytes]:
        """Return the version of which every byte verifies, and its content.

        Raises:
            DamagedRemote: none does.
        """
        reason = ""
        for version in found.versions:
            try:
                data = self._whole(version)
            except (NoSuchObject, TooLargeObject) as error:
                reason = error.message
                continue
            reason = self._verification.flaw(found.name, data)
            if not reason:
                self._remember(self._chosen, found.name, version)
                return version, data
        raise _none_sound(found, reason)

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> Sequence[Bytes]:
        """Return the bytes of each (offset, length), cut at the end of the object."""
        version = self.choose(name)
        merged = merge_ranges(ranges)
        bodies = [memoryview(self._read(version, offset, length)) for offset, length in merged]
        return slices_of(merged, bodies, ranges)

    def tail(self, name: str, length: int) -> tuple[int, bytes]:
        """Return the size of the object and its last ``length`` bytes."""
        version = self.choose(name)
        start = max(0, version.size_bytes - length)
        return version.size_bytes, bytes(self._read(version, start, length))

    def info(self, name: str) -> ObjectInfo | None:
        """Return size and time of an object; None if nothing was ever stored under this name, and for rounds, as in listings."""
        if split_space(name, b"")[1].startswith(ROUNDS_PREFIX):
            return None
        try:
            return _info(self.choose(name))
        except NoSuchObject:
            return None

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects whose names begin with ``prefix``, ascending.

        Sizes and times are those of the oldest versions. A log ends with its last sound entry, and there are no rounds.
        """
        for (space, writer), several in groupby(self._listed(prefix, after), key=log_of):
            if writer:
                yield from self._sound_log(several)
                continue
            for found in several:
                name = found.name.removeprefix(space)
                if name.startswith(ROUNDS_PREFIX) or (space and name == REMOTE_JSON and self._flaw(found)):
                    continue
                yield _info(found.versions[0])

    def _sound_log(self, several: Iterable[NameVersions]) -> Iterator[ObjectInfo]:
        """Yield the entries of a log without those at its end of which no version is sound: no writer committed them."""
        entries = [(found.name, _info(found.versions[0])) for found in several]
        while entries and (reason := self._flaw(self._find(entries[-1][0]))):
            name, _ = entries.pop()
            if name not in self._warned and len(self._warned) < _MAX_REMEMBERED:
                self._warned.add(name)
                events.warning("remote_log_entry_left_out", name=name, reason=reason)
        yield from (info for _, info in entries)

    def all_versions(self, prefix: str = "") -> Iterator[NameVersions]:
        """Yield every name that anything was stored under, rounds as well, with its versions."""
        return self._listed(prefix, "")

    def choose(self, name: str) -> Version:
        """Return the version that is read.

        Of a pack its table is verified, of anything else every byte; a name with a single version is left to its
        readers, who verify all that they use.

        Raises:
            NoSuchObject: nothing was ever stored under this name.
            DamagedRemote: no version verifies.
        """
        with self._lock:
            version = self._chosen.get(name)
        if version is not None:
            return version
        found = self._find(name)
        if len(found.versions) == 1:
            version = found.versions[0]
        elif parse_pack(split_space(name, b"")[1]) is None:
            version = self.sound_version(found)[0]
        else:
            version = self._by_table(found)
        self._remember(self._chosen, name, version)
        return version

    def _by_table(self, found: NameVersions) -> Version:
        reason = ""
        for version in found.versions:
            reason = self._verification.flaw_of_table(found.name, _OneVersion(version, self._read))
            if not reason:
                return version
        raise _none_sound(found, reason)

    def _flaw(self, found: NameVersions) -> str:
        """Return why no version of a small object is sound; an empty text if one is."""
        try:
            self.sound_version(found)
        except DamagedRemote as error:
            return error.message
        return ""

    def put(self, name: str, data: Sequence[Bytes]) -> None:
        """Raise RemoteRefused: versions are only read."""
        raise _read_only(self.url)

    def create(self, name: str, data: bytes) -> bool:
        """Raise RemoteRefused: versions are only read."""
        raise _read_only(self.url)

    def delete(self, names: Iterable[str]) -> None:
        """Raise RemoteRefused: versions are only read."""
        raise _read_only(self.url)

    def reconnect(self) -> None:
        """Do nothing: what is chosen was verified, and is not read again."""

    def close(self) -> None:
        """Close connections."""
        self.versions.close()

    def _listed(self, prefix: str, after: str) -> Iterator[NameVersions]:
        for found in group_versions(self.versions.list(prefix, after=after), self._before_ns):
            # Names are chosen by every user who may write there.
            if found.versions and is_name(found.name):
                self._remember(self._known, found.name, found)
                yield found

    def _find(self, name: str) -> NameVersions:
        with self._lock:
            found = self._known.get(name)
        if found is not None:
            return found
        for found in group_versions(self.versions.list(name), self._before_ns):
            if found.name == name and found.versions:
                self._remember(self._known, name, found)
                return found
            # Ascending: a directory of this name would be another object's.
            if found.name != name:
                break
        raise NoSuchObject(name)

    def _remember(self, into: OrderedDict[str, _T], name: str, value: _T) -> None:
        with self._lock:
            into[name] = value
            into.move_to_end(name)
            if len(into) > _MAX_REMEMBERED:
                into.popitem(last=False)

    def _whole(self, version: Version) -> bytes:
        is_pack = parse_pack(split_space(version.name, b"")[1]) is not None
        if version.size_bytes > (MAX_OBJECT_BYTES if is_pack else MAX_DOCUMENT_BYTES):
            raise TooLargeObject(version.name, version.size_bytes)
        return bytes(self._read(version, 0, version.size_bytes))

    def _read(self, version: Version, offset: int, length: int) -> Bytes:
        key = (version.name, version.id)
        with self._lock:
            kept = self._kept.get(key)
        if kept is not None:
            return kept[offset : offset + length]
        data = self.versions.read(version, offset, length)
        if not offset and len(data) == version.size_bytes <= _MAX_KEPT_OBJECT_BYTES:
            with self._lock:
                if key not in self._kept:
                    self._kept[key] = bytes(data)
                    self._kept_bytes += len(data)
                while self._kept_bytes > _MAX_KEPT_BYTES:
                    self._kept_bytes -= len(self._kept.popitem(last=False)[1])
        return data


class _OneVersion:
    """The one version of a pack, as far as `RemotePackReader.read_table_once` asks for it."""

    def __init__(self, version: Version, read: Callable[[Version, int, int], Bytes]) -> None:
        self._version = version
        self._read = read

    def tail(self, name: str, length: int) -> tuple[int, bytes]:
        """Return the size of the version and its last ``length`` bytes."""
        size_bytes = self._version.size_bytes
        return size_bytes, bytes(self._read(self._version, max(0, size_bytes - length), length))

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> Sequence[Bytes]:
        """Return the bytes of each (offset, length)."""
        return [self._read(self._version, offset, length) for offset, length in ranges]


def log_of(found: NameVersions) -> tuple[str, str]:
    """Return the prefix of the space that a name belongs to, and the log; empty for none."""
    rest = split_space(found.name, b"")[1]
    space = found.name[: len(found.name) - len(rest)]
    position = parse_log_entry(rest) if rest.startswith(LOGS_PREFIX) else None
    return space, "" if position is None else position.writer


def _info(version: Version) -> ObjectInfo:
    return ObjectInfo(version.name, version.size_bytes, version.modified_ns)


def _none_sound(found: NameVersions, reason: str) -> DamagedRemote:
    if found.total == 1:
        return DamagedRemote(found.name, f"it has one version, which does not verify: {reason}")
    tried = f"none of {found.total} versions verifies"
    if len(found.versions) < found.total:
        tried += f" ({len(found.versions)} different ones were tried)"
    return DamagedRemote(found.name, f"{tried}: {reason}")


def _read_only(url: str) -> RemoteRefused:
    return RemoteRefused(f"{url} is read behind deletions, and nothing is written to it")


_SLOT_THREADS: Final = 16
_SLOT_BATCH: Final = 256
# The oldest versions of slots: an attacker may make up any number.
_MAX_SLOT_VERSIONS: Final = 1 << 16


class _RemoteVersions(NamedTuple):
    """Remote that was opened from all versions, and what it was opened from."""

    remote: Remote
    objects: SoundObjects
    """Its objects; ``slot`` is the key slot that opened it."""


def open_remote_versions(
    versions: ObjectVersions, secrets: Sequence[SlotSecret], *, before_ns: int | None = None
) -> _RemoteVersions:
    """Open the remote from the versions that verify.

    Args:
        versions: All versions of the remote's objects.
        secrets: Passphrases and keys; none for a remote in clear.
        before_ns: Leave out what was stored at this time or later (ns since 1970); None for nothing.

    Raises:
        NotFound: nothing was ever stored as remote.json.
        WrongKey: no secret fits any version, or one is needed.
        DamagedRemote: no version is as it was stored.
        PacksElsewhere: its packs lie in another place than its log.
    """
    candidates = _remote_jsons(versions, before_ns)
    if not candidates:
        raise NotFound(
            f"there was never a remote at {versions.url}, as far as its versions tell",
            hint="check the URL, and that the bucket keeps versions",
        )
    if not secrets:
        # The oldest: the name is created once, and a replacement comes later.
        data, master, slot = candidates[0], None, ("", b"")
        if is_sealed(data):
            raise WrongKey(
                f"the remote at {versions.url} is sealed: a passphrase or key is needed",
                hint="set CIUIC_REMOTE_PASSPHRASE or CIUIC_REMOTE_KEY_FILE, or key_file under [remote]",
            )
    else:
        data, master, slot = _unlocked(versions, candidates, secrets, before_ns)
    verification = _VersionCheck(read_remote_id(data), master)
    objects = SoundObjects(versions, verification, before_ns, slot=slot)
    return _RemoteVersions(opened_remote(objects, data, master), objects)


def _remote_jsons(versions: ObjectVersions, before_ns: int | None) -> list[bytes]:
    """Return all different contents of remote.json that are well-formed, the oldest first."""
    found = []
    for data in _contents(versions, REMOTE_JSON, MAX_REMOTE_JSON_BYTES, before_ns):
        try:
            is_sealed(data)
        except (Damaged, UnsupportedFormat):
            continue
        found.append(data)
    return found


def _unlocked(
    versions: ObjectVersions,
    candidates: Sequence[bytes],
    secrets: Sequence[SlotSecret],
    before_ns: int | None,
) -> tuple[bytes, MasterKey, tuple[str, bytes]]:
    """Return the remote.json that a secret authenticates, by any version of a slot, and that slot: name and content."""
    sealed = [data for data in candidates if is_sealed(data)]
    ids = [read_remote_id(data) for data in sealed]
    own = {own_digits(id_, secret) for id_ in ids for secret in secrets if secret.kind != "passphrase"}
    spent_kib = 0
    tried = 0
    for slot, content in _slots(versions, before_ns, own):
        for secret in secrets:
            if slot.kind != secret.kind:
                continue
            tried += 1
            for data, remote_id in zip(sealed, ids, strict=True):
                spent_kib += work_kib(slot)
                if spent_kib > MAX_PASSPHRASE_WORK_KIB:
                    raise WrongKey(
                        f"the passphrase was tried for about a minute, with {tried - 1} versions of key slots: there are too many versions",
                        hint="use the recovery key or a key file, or leave out later versions with --stored-before",
                    )
                try:
                    master = unwrap_master_key(slot, remote_id, secret)
                    open_remote(data, master)
                except (WrongKey, Damaged):
                    continue
                return data, master, (slot_name(slot.slot), content)
    if not sealed:
        raise WrongKey(
            f"remote.json of {versions.url} says in all versions that the remote is not sealed, but a key was given"
        )
    raise WrongKey(
        f"no key opens any of {tried} versions of key slots at {versions.url} that are of its kind"
    )


def _slots(
    versions: ObjectVersions, before_ns: int | None, own: Collection[str]
) -> Iterator[tuple[KeySlot, bytes]]:
    """Yield the versions of key slots that are well-formed: of those that ``own`` digits name first, and the oldest first."""

    def order(version: Version) -> tuple[bool, int]:
        # Forged versions come later than what was there.
        return digits_of(version.name.removeprefix(KEYS_PREFIX)) not in own, version.modified_ns

    known = (
        version
        for found in group_versions(versions.list(KEYS_PREFIX), before_ns)
        if (name := parse_slot(found.name)) and digits_of(name) in ("", *own)
        for version in found.versions
        if version.size_bytes <= MAX_SLOT_BYTES
    )
    left = heapq.nsmallest(_MAX_SLOT_VERSIONS, known, key=order)
    with ThreadPoolExecutor(_SLOT_THREADS) as threads:
        for at in range(0, len(left), _SLOT_BATCH):
            for found in threads.map(lambda version: _slot(versions, version), left[at : at + _SLOT_BATCH]):
                if found is not None:
                    yield found


def _slot(versions: ObjectVersions, version: Version) -> tuple[KeySlot, bytes] | None:
    """Return a version of a slot and its content; None for what is none."""
    try:
        content = bytes(versions.read(version, 0, MAX_SLOT_BYTES))
        return decode_slot(version.name.removeprefix(KEYS_PREFIX), content), content
    except (Damaged, UnsupportedFormat, NotFound, RemoteRefused):
        return None


def _contents(versions: ObjectVersions, name: str, max_bytes: int, before_ns: int | None) -> Iterator[bytes]:
    groups = group_versions(versions.list(name), before_ns)
    found = next((one for one in groups if one.name == name), NameVersions(name, 0, (), None))
    for version in found.versions:
        if version.size_bytes <= max_bytes:
            try:
                yield bytes(versions.read(version, 0, max_bytes))
            except NotFound:
                continue
