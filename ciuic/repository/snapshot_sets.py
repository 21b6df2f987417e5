"""Sets as readers see them: which snapshots are of one set, what it lacks, and what a person's name for one means.

No record of a set exists but in its snapshots (`ciuic.types.SetMember`; docs/format.md, section 8), so what is said here
is said of the snapshots that are given: a repository of one host has one member of a set, a remote has all.

A person names a set ``set:NAME`` (the newest whole one of that name, else the newest) or ``set:ID``, where ID is the
beginning of its id, and a member's snapshot ``MEMBER/set:…``.

Guarantee: a set is told as whole only if each of its members is among the snapshots.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from ciuic.errors import NotFound, UsageError
from ciuic.types import Snapshot, order_of
from ciuic.units import plural

SET_MARK: Final = "set:"
_ID_DIGITS: Final = 8
"""Digits of a set's id that are shown."""
_ID_PREFIX: Final = re.compile(r"[0-9a-f]{1,32}\Z")
_SHOWN: Final = 8
_HINT: Final = "ciuic list --sets shows those there are"


class SetName(msgspec.Struct, frozen=True):
    """A person's name for a set, or for one of its snapshots."""

    name: str
    """Name of a set, or the beginning of its id."""
    member: str = ""
    """Member, or its host; empty: the set."""


class SnapshotSet(msgspec.Struct, frozen=True):
    """A set, as far as it is found. At least one member is."""

    id: str
    name: str
    members: tuple[str, ...]
    found: Mapping[str, Snapshot]
    """Snapshot of each member that is found, by member, in the order of `members`."""

    @property
    def short_id(self) -> str:
        """Beginning of the id, for people."""
        return self.id[:_ID_DIGITS]

    @property
    def lacking(self) -> tuple[str, ...]:
        """Members of which no snapshot is found."""
        return tuple(member for member in self.members if member not in self.found)

    @property
    def is_whole(self) -> bool:
        """True if every member is found."""
        return not self.lacking

    @property
    def newest(self) -> Snapshot:
        """The last of the snapshots that are found."""
        return max(self.found.values(), key=order_of)

    @property
    def size_bytes(self) -> int:
        """Sum of the sizes of the snapshots that are found."""
        return sum(snapshot.size_bytes for snapshot in self.found.values())

    def described(self) -> str:
        """Return how messages call it."""
        return f"{SET_MARK}{self.name} ({self.short_id})"

    def member_snapshot(self, member: str) -> Snapshot:
        """Return the snapshot of a member, named by itself or by the host that took it.

        Raises:
            NotFound: there is no such member, or its snapshot is not found.
            UsageError: several members are of this host.
        """
        if member in self.found:
            return self.found[member]
        if member in self.members:
            raise NotFound(f"the snapshot of {member} in {self.described()} is not here", hint=_HINT)
        of_host = [name for name, snapshot in self.found.items() if snapshot.host == member]
        if not of_host:
            raise NotFound(f"{self.described()} has no member {member}: it has {shown_members(self.members)}")
        if len(of_host) > 1:
            raise UsageError(f"{member} has several members of {self.described()}: {shown_members(of_host)}")
        return self.found[of_host[0]]


def shown_members(members: Sequence[str]) -> str:
    """Return the members in words, the first few of many."""
    more = len(members) - _SHOWN
    return ", ".join(members[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def parse_set_name(text: str) -> SetName | None:
    """Return what ``set:…`` or ``MEMBER/set:…`` names; None if the text names no set.

    Raises:
        UsageError: it names a set without a name.
    """
    if text.startswith(SET_MARK):
        named = SetName(text.removeprefix(SET_MARK))
    else:
        member, mark, name = text.partition(f"/{SET_MARK}")
        if not mark:
            return None
        named = SetName(name, member)
    if not named.name:
        raise UsageError(f"{text!r} names no set", hint=f"such as {SET_MARK}NAME; {_HINT}")
    return named


def sets_of(snapshots: Iterable[Snapshot]) -> list[SnapshotSet]:
    """Return the sets of which these snapshots are, newest first.

    Of several snapshots of one member, such as copies, the newest counts, and the first of equal ones. A snapshot that
    disagrees with others about the members of its set is of a set of its own.
    """
    by_set: dict[tuple[str, str, tuple[str, ...]], dict[str, Snapshot]] = {}
    for snapshot in snapshots:
        place = snapshot.set_member
        if place is None:
            continue
        found = by_set.setdefault((place.id, place.name, place.members), {})
        known = found.get(place.member)
        if known is None or snapshot.order_ns > known.order_ns:
            found[place.member] = snapshot
    sets = [
        SnapshotSet(id_, name, members, {member: found[member] for member in members if member in found})
        for (id_, name, members), found in by_set.items()
    ]
    sets.sort(key=lambda one: (order_of(one.newest), one.id, one.members), reverse=True)
    return sets


def named_set(name: str, sets: Sequence[SnapshotSet]) -> SnapshotSet:
    """Return the set of this name: the newest whole one, else the newest; or that whose id begins so.

    Args:
        name: Name, or beginning of an id.
        sets: Sets, newest first.

    Raises:
        NotFound: There is none.
        UsageError: Several ids begin so.
    """
    meant = [one for one in sets if one.name == name]
    if not meant:
        meant = [one for one in sets if _ID_PREFIX.match(name) and one.id.startswith(name)]
        if not meant:
            raise NotFound(f"there is no set {name}", hint=_HINT)
        # Several of one id: snapshots that disagree about its members.
        if len({one.id for one in meant}) > 1:
            some = ", ".join(f"{one.id} ({one.name})" for one in meant[:_SHOWN])
            raise UsageError(f"the set {name} could be {some}", hint="Give more digits.")
    return next((one for one in meant if one.is_whole), meant[0])


def named_snapshot(named: SetName, sets: Sequence[SnapshotSet]) -> Snapshot:
    """Return the one snapshot that a name of a set means: that of the member, or the only one that is found.

    Raises:
        NotFound: There is none.
        UsageError: It could be several.
    """
    found = named_set(named.name, sets)
    if named.member:
        return found.member_snapshot(named.member)
    if len(found.found) > 1:
        raise UsageError(
            f"{found.described()} has {plural(len(found.found), 'snapshot')} here, and one is needed",
            hint=f"MEMBER/{SET_MARK}{named.name} names one; members: {shown_members([*found.found])}",
        )
    return next(iter(found.found.values()))
