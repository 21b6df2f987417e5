"""Objects of a remote whose packs lie in another place than its log: a router over two stores.

With the packs lie the copies of their tables and the manifests: everything that is written once under a random name, so that
a bucket with versions and a lock suits it. Everything else, all of which relies on create-only, lies in the place of the log.

Guarantees: remote.json and the key slots are in both places, so that the one with the packs can be rescued alone. They are
created in the place of the log, which decides between hosts, and then copied. Whenever remote.json of the remote is read, the
two must be equal: nothing is sent to, or taken from, the packs of another remote.

References:
    docs/remote-format.md, section 9
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeVar

from ciuic.errors import CiuicError
from ciuic.remote.objects.model import NoSuchObject, ObjectInfo, Objects, ObjectVersions, Version
from ciuic.repository.identity import Bytes

_SPACE: Final = re.compile(r"repositories/[0-9a-f]{32}/")
_SPACES: Final = "repositories/"
_PACKS: Final = ("manifests/", "packs/", "tables/")
_REMOTE_JSON: Final = "remote.json"
_SLOT: Final = re.compile(r"keys/[a-z0-9-]{1,32}\Z")
# Marks a version of an object that lies in both places and was read from the one with the packs.
_COPY: Final = "copy:"

_Result = TypeVar("_Result")


class PacksElsewhere(CiuicError):
    """The place that was named for the packs of a remote is not that of this remote, or none was named."""


def _in_space(name: str) -> str:
    """Return the name below the space that it belongs to."""
    found = _SPACE.match(name)
    return name[found.end() :] if found else name


def is_with_packs(name: str) -> bool:
    """Return whether an object of this name lies with the packs."""
    return _in_space(name).startswith(_PACKS)


def _is_in_both(name: str) -> bool:
    rest = _in_space(name)
    return rest == _REMOTE_JSON or _SLOT.match(rest) is not None


def _may_list(prefix: str) -> tuple[bool, bool]:
    """Return whether names with this prefix may be in the place of the log, and in that of the packs."""
    rest = _in_space(prefix)
    if rest == prefix and (_SPACES.startswith(prefix) or prefix.startswith(_SPACES)):
        return True, True
    return not rest.startswith(_PACKS), any(one.startswith(rest) or rest.startswith(one) for one in _PACKS)


def _order(listed: ObjectInfo | Version) -> list[str]:
    # Stores list by bytes or part by part; names of the two places differ in a whole part.
    return listed.name.split("/")


class SplitObjects:
    """Objects of two stores. `close` closes both.

    Args:
        log: Store of everything but packs; its URL is that of the remote.
        packs: Store of packs, tables and manifests.
    """

    def __init__(self, log: Objects, packs: Objects) -> None:
        self._log = log
        self._packs = packs

    @property
    def stores(self) -> tuple[Objects, Objects]:
        """The place of the log, and that of the packs."""
        return self._log, self._packs

    @property
    def url(self) -> str:
        """URL of the prefix that has the log."""
        return self._log.url

    def put(self, name: str, data: Sequence[Bytes]) -> None:
        """Store the parts as one object."""
        self._of(name).put(name, data)
        if _is_in_both(name):
            self._packs.put(name, data)

    def create(self, name: str, data: bytes) -> bool:
        """Store the object if the name is free; of what lies in both places, have the copy as well.

        Raises:
            PacksElsewhere: the place of the packs is that of another remote.
        """
        if not _is_in_both(name):
            return self._of(name).create(name, data)
        is_top = name == _REMOTE_JSON
        # Before anything is made. The copy is looked for first: one of a process that is making this very remote comes
        # after what the log has.
        if is_top and self._copy_of(name) not in (None, data) and self._log.info(name) is None:
            raise PacksElsewhere(
                f"{self._packs.url} has the packs of another remote",
                hint="choose another prefix for packs_url",
            )
        created = self._log.create(name, data)
        there = data if created else self._log.get(name)
        # Also after an interruption between the two, but never another's remote.json: that of a remote with its packs
        # beside its log would make it look like one that is split. A store with versions may not keep create-only; the
        # log has decided.
        if (there == data or not is_top) and self._packs.info(name) is None:
            self._packs.put(name, [there])
        return created

    def copy_again(self, name: str) -> None:
        """Store the copy of an object that lies in both places, where it is missing or another one; for repairs."""
        here = self._log.get(name)
        if self._copy_of(name) != here:
            self._packs.put(name, [here])

    def mend_identity(self) -> bool:
        """Store remote.json again where one of the two places alone has it; return whether one had."""
        here, copy = (_unless_missing(lambda one: one.get(_REMOTE_JSON), place) for place in self.stores)
        if here is None and copy is not None:
            return self._log.create(_REMOTE_JSON, copy)
        # A place without any pack may be a wrong one.
        if here is not None and copy is None and next(iter(self._packs.list("packs/")), None) is not None:
            self._packs.put(_REMOTE_JSON, [here])
            return True
        return False

    def _copy_of(self, name: str) -> bytes | None:
        return _unless_missing(lambda objects: objects.get(name), self._packs)

    def get(self, name: str) -> bytes:
        """Return the whole object."""
        return self._read(name, lambda objects: objects.get(name))

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> Sequence[Bytes]:
        """Return the bytes of each (offset, length)."""
        if name != _REMOTE_JSON:
            return self._of(name).get_ranges(name, ranges)
        return self._read(name, lambda objects: [bytes(one) for one in objects.get_ranges(name, ranges)])

    def tail(self, name: str, length: int) -> tuple[int, bytes]:
        """Return the size of the object and its last ``length`` bytes."""
        return self._read(name, lambda objects: objects.tail(name, length))

    def info(self, name: str) -> ObjectInfo | None:
        """Return size and time of an object."""
        return self._of(name).info(name)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects whose names begin with ``prefix``, part by part, where they lie in both places."""
        in_log, in_packs = _may_list(prefix)
        listings = []
        if in_log:
            found = self._log.list(prefix, after=after)
            listings.append(info for info in found if not is_with_packs(info.name))
        if in_packs:
            found = self._packs.list(prefix, after=after)
            listings.append(info for info in found if is_with_packs(info.name))
        yield from heapq.merge(*listings, key=_order) if len(listings) > 1 else listings[0]

    def delete(self, names: Iterable[str]) -> None:
        """Delete these objects, and the copies of them."""
        names = list(names)
        self._log.delete([name for name in names if not is_with_packs(name)])
        self._packs.delete([name for name in names if is_with_packs(name) or _is_in_both(name)])

    def reconnect(self) -> None:
        """Make new connections for reads."""
        self._log.reconnect()
        self._packs.reconnect()

    def close(self) -> None:
        """Close both."""
        self._log.close()
        self._packs.close()

    def _of(self, name: str) -> Objects:
        return self._packs if is_with_packs(name) else self._log

    def _read(self, name: str, read: Callable[[Objects], _Result]) -> _Result:
        """Return what ``read`` returns; of remote.json from both places, which must be equal."""
        if name != _REMOTE_JSON:
            return read(self._of(name))
        here, copy = (_unless_missing(read, objects) for objects in (self._log, self._packs))
        if here is None and copy is None:
            raise NoSuchObject(name)
        if here is None:
            raise PacksElsewhere(
                f"there is no remote at {self._log.url}, but the packs of one at {self._packs.url}",
                hint=f"check the URL; if {_REMOTE_JSON} alone was deleted, copy it from {self._packs.url}; if the log was: "
                "ciuic check --behind-deletions --repair; for a new remote choose another prefix for packs_url",
            )
        if copy is None:
            raise _no_part(self._packs.url, self._log.url)
        if here != copy:
            raise PacksElsewhere(
                f"{self._packs.url} has the packs of another remote than {self._log.url}, or one of their {_REMOTE_JSON} was altered",
                hint="check packs_url; if it is right, copy the one that an earlier version or another host's backup shows to be "
                "whole over the other: both have the same bytes",
            )
        return here


def _unless_missing(read: Callable[[Objects], _Result], objects: Objects) -> _Result | None:
    try:
        return read(objects)
    except NoSuchObject:
        return None


def _no_part(packs_url: str, url: str) -> PacksElsewhere:
    return PacksElsewhere(
        f"{packs_url} has no part of the remote at {url}",
        hint=f"check packs_url, and leave it out if the remote has its packs beside its log; if {_REMOTE_JSON} was deleted there, "
        f"copy it from {url}; only if `remote init` was interrupted and nothing was ever uploaded, remove it from {url}",
    )


class SplitVersions:
    """Versions of the objects of a remote whose packs lie in another place.

    Of what lies in both places the versions beside the packs count as the older ones, which are tried first: they are the ones
    that a lock keeps.
    """

    def __init__(self, log: ObjectVersions, packs: ObjectVersions) -> None:
        """Take the versions of the place of the log and of that of the packs."""
        self._log = log
        self._packs = packs

    @property
    def url(self) -> str:
        """URL of the prefix that has the log."""
        return self._log.url

    def list(self, prefix: str, *, after: str = "") -> Iterator[Version]:
        """Yield all versions and marks of deletion of names that begin with ``prefix``."""
        log = (one for one in self._log.list(prefix, after=after) if not is_with_packs(one.name))
        packs = (
            one._replace(id=_COPY + one.id, is_current=False) if _is_in_both(one.name) else one
            for one in self._packs.list(prefix, after=after)
            if _is_in_both(one.name) or is_with_packs(one.name)
        )
        # Of equal names those of the first come first.
        return heapq.merge(log, packs, key=_order)

    def require_copy(self, remote_json: bytes) -> None:
        """Raise PacksElsewhere unless this remote.json was ever stored in the place of the packs."""
        for version in self._packs.list(_REMOTE_JSON):
            same = version.name == _REMOTE_JSON and version.size_bytes == len(remote_json)
            if same and not version.is_deletion:
                try:
                    found = self._packs.read(version, 0, len(remote_json))
                except NoSuchObject:
                    continue
                if found == remote_json:
                    return
        raise _no_part(self._packs.url, self._log.url)

    def read(self, version: Version, offset: int, length: int) -> Bytes:
        """Return bytes of a version."""
        versions, stored = self._of(version)
        return versions.read(stored, offset, length)

    def lock(self, version: Version, until_ns: int) -> bool:
        """Lock a version that lies with the packs; of another one its copy. False where there is none to lock."""
        versions, stored = self._of(version)
        if versions is self._packs:
            return versions.lock(stored, until_ns)
        if not _is_in_both(version.name):
            return False
        same = version.digest, version.size_bytes
        for copy in self._packs.list(version.name):
            if copy.name == version.name and (copy.digest, copy.size_bytes) == same and not copy.is_deletion:
                return self._packs.lock(copy, until_ns)
        return False

    def delete_marks(self, name: str) -> None:
        """Delete a name: its versions stay."""
        if not is_with_packs(name):
            self._log.delete_marks(name)
        if is_with_packs(name) or _is_in_both(name):
            self._packs.delete_marks(name)

    def close(self) -> None:
        """Close both."""
        self._log.close()
        self._packs.close()

    def _of(self, version: Version) -> tuple[ObjectVersions, Version]:
        """Return where a version lies, and the version as that place has it."""
        if version.id.startswith(_COPY):
            return self._packs, version._replace(id=version.id.removeprefix(_COPY))
        return (self._packs if is_with_packs(version.name) else self._log), version
