"""Objects of a remote as they were stored: of every name the version that verifies, deleted and overwritten or not.

Versions are tried oldest first. Every name of a remote is written once, and the names of packs and manifests are random: an attacker who
forges one comes later, and 10,000 forged versions cost pages of a listing and nothing else.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Final, TypeVar

from ciuic.remote.errors import DamagedRemote
from ciuic.remote.format.document import MAX_DOCUMENT_BYTES
from ciuic.remote.format.names import (
    LOGS_PREFIX,
    REMOTE_JSON,
    ROUNDS_PREFIX,
    parse_log_entry,
    parse_pack,
)
from ciuic.remote.objects.model import (
    MAX_OBJECT_BYTES,
    NoSuchObject,
    ObjectInfo,
    RemoteRefused,
    TooLargeObject,
    is_name,
)
from ciuic.remote.objects.ranges import merge_ranges, slices_of
from ciuic.remote.objects.versions import NameVersions, ObjectVersions, Version, group_versions
from ciuic.remote.versions.verification import VersionCheck, split_space
from ciuic.repository import log as events
from ciuic.repository.ids import Bytes

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
        verification: VersionCheck,
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
        """Return size and time of an object; None if nothing was ever stored under this name."""
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
