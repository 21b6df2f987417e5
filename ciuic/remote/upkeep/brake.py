"""Brake of collections: find out that most of a repository's snapshots were given up at once, as no retention does.

Who has a host's key can write log entries that give up every snapshot of all hosts. A collection that took them at their word
would destroy what they were. So each collection compares what is live with what was live at earlier ones, by the store's own
times, which nobody changes who may neither replace nor delete. What a repository has given up suddenly is held: it counts as
live for collections until a person approves.

Three things happen to a repository under no retention:

* its three newest snapshots are all given up, and of three that are stored less than one is live: every retention keeps the
  newest;
* it has less than a quarter of the snapshots that it had in the last 30 days, and of a third of their ages, though others are
  stored: a retention by number has a new snapshot for each that goes, one by time keeps what is younger;
* of the snapshots that were kept on purpose, though newer ones had been given up (the days, weeks and months of a rotation),
  less than a quarter of the ages is left: snapshots that were stored today are in the place of none of these.

Ages are counted as powers of two: a rotation keeps some of each, however often a host snapshots.

What this cannot see: who gives up half at each of several collections, or leaves a quarter of the snapshots or some of a third of
their ages; false snapshots in the place of real ones where the retention keeps the newest and no others, or that were stored over
weeks. Levels are kept on the collector's
host alone, where no key of another host reaches; without them only the first of the three is noticed.

References:
    docs/remote.md, "Snapshots that were given up at once"; docs/security.md
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from ciuic.errors import Damaged
from ciuic.remote.documents import LiveManifest
from ciuic.remote.object_names import parse_manifest
from ciuic.remote.reading.opening import are_newest_gone
from ciuic.structs import decode_json
from ciuic.system.disk import Disk, read_regular

_HOUR_NS: Final = 3600 * 10**9
_DAY_NS: Final = 24 * _HOUR_NS
LEVEL_NS: Final = 30 * _DAY_NS
"""Time for which a level counts."""
_NEWEST: Final = 3
_MIN_COUNT: Final = 3
_MAX_BYTES: Final = 64 << 20


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """Snapshots of a repository that were live at a collection."""

    time_ns: int
    """The store's time then."""
    total: int
    """Number of them."""
    ages: int
    """Ages that they had, each counted once, and those that differ by less than a factor of two as one."""
    kept: int
    """Ages above a day of those that were kept on purpose, though newer ones had been given up."""
    displaced_ns: int
    """Store's time of the newest but two that was ever given up."""


class Times(NamedTuple):
    """Store's times of the manifests of a repository."""

    live: Collection[int]
    """Times of its live snapshots."""
    gone: Collection[int]
    """Times of its given-up snapshots that are still stored."""


def level_of(now_ns: int, times: Times, levels: Iterable[Level] = ()) -> Level:
    """Return the level of a repository at the store's time ``now_ns``, after earlier ``levels``."""
    third = sorted(times.gone)[-_NEWEST] if len(times.gone) >= _NEWEST else 0
    displaced_ns = max((third, *(level.displaced_ns for level in levels)))
    return Level(
        time_ns=now_ns,
        total=len(times.live),
        ages=len(_ages(now_ns, times.live)),
        kept=len(_ages(now_ns, _kept(now_ns, times.live, displaced_ns))),
        displaced_ns=displaced_ns,
    )


def is_sudden(now_ns: int, times: Times, levels: Sequence[Level]) -> bool:
    """Return whether more of a repository was given up than a retention does; arguments as of `level_of`."""
    live, gone = times
    if not gone:
        return False
    if are_newest_gone(live, gone):
        return True
    counted = [level for level in levels if level.time_ns > now_ns - LEVEL_NS]
    if not counted:
        return False
    now = level_of(now_ns, times, levels)
    stored = len(_ages(now_ns, _kept(now_ns, (*live, *gone), now.displaced_ns)))
    if _is_lost(max(level.kept for level in counted), now.kept, stored, share=4):
        return True
    return _is_lost(
        max(level.total for level in counted), now.total, len(live) + len(gone), share=4
    ) and _is_lost(
        max(level.ages for level in counted), now.ages, len(_ages(now_ns, (*live, *gone))), share=3
    )


def _is_lost(reference: int, left: int, stored: int, *, share: int) -> bool:
    """Return whether less than one of ``share`` is left of what was there, though half of it is still stored."""
    return reference >= _MIN_COUNT and share * left < reference <= 2 * stored


def _kept(now_ns: int, times: Iterable[int], displaced_ns: int) -> list[int]:
    before_ns = min(displaced_ns, now_ns - _DAY_NS)
    return [time_ns for time_ns in times if time_ns < before_ns]


def _ages(now_ns: int, times: Iterable[int]) -> set[int]:
    """Return the ages of these times, as powers of two of an hour."""
    return {max(0, (now_ns - time_ns) // _HOUR_NS).bit_length() for time_ns in times}


class HeldRepository(NamedTuple):
    """Snapshots of a repository that were given up at once, and are held."""

    repository: str
    hosts: tuple[str, ...]
    """Labels of their hosts."""
    snapshots: int


class _Memory(msgspec.Struct, kw_only=True):
    """State that a collector's host keeps for a space."""

    levels: dict[str, list[Level]] = {}
    """Levels by repository, the highest of each day."""
    held: set[str] = set()
    """Manifests that are held until a person approves."""
    given_up: set[str] = set()
    """Manifests that a person gave up or approved on this host."""


class Brake:
    """Brake of the collections of one space on this host. For one thread.

    Args:
        path: File in a directory of the caller's own.
        approved: Ids of repositories and labels of hosts whose snapshots may go, this once.
        is_preview: Remember nothing.
    """

    def __init__(self, path: Path, *, approved: Collection[str] = (), is_preview: bool = False) -> None:
        self._path = path
        self._approved = frozenset(approved)
        self._is_preview = is_preview
        self._memory = self._load()
        self._seen: dict[str, Level] = {}
        self._sudden: set[str] = set()
        self._stored: frozenset[str] = frozenset()
        self.held: tuple[HeldRepository, ...] = ()
        """Held repositories, as of the last `hold`."""
        self.met: set[str] = set()
        """Those of the approvals by which something may go."""

    def hold(
        self,
        now_ns: int,
        stored: Mapping[str, int],
        live: Mapping[str, LiveManifest],
        gone: Mapping[str, LiveManifest],
    ) -> dict[str, LiveManifest]:
        """Return those of the given-up snapshots that count as live; remembered on return.

        Args:
            now_ns: The store's time.
            stored: Times at which manifests were stored, by name.
            live: Live snapshots by manifest.
            gone: Snapshots that were given up, by manifest, which are all stored.
        """
        self._stored = frozenset(stored)
        known = len(self._memory.held), len(self._memory.given_up)
        held: dict[str, LiveManifest] = {}
        self.held = ()
        for repository, names in _by_repository(gone).items():
            hosts = {name: label.host for name in names if (label := parse_manifest(name))}
            # By each one's own host: anybody may store one in this repository that names a host which is approved.
            met = {name: self._approved.intersection((repository, host)) for name, host in hosts.items()}
            approved = {name for name, by in met.items() if by}
            self.met.update(*met.values())
            self._memory.held -= approved
            # A person's own are no loss, and no sign of one; also at later collections, if they are too young for this one.
            self._memory.given_up |= approved
            others = set(names) - self._memory.given_up
            if approved and not others:
                self._sudden.add(repository)
            lives = [
                stored[name] for name, one in live.items() if one.repository == repository and name in stored
            ]
            times = Times(lives, [stored[name] for name in others])
            if is_sudden(now_ns, times, self._memory.levels.get(repository, ())):
                self._memory.held |= others
                self._sudden.add(repository)
            if kept := self._memory.held.intersection(others):
                held |= {name: gone[name] for name in kept}
                self.held += (HeldRepository(repository, tuple(sorted(set(hosts.values()))), len(kept)),)
        left_out = {*held, *self._memory.given_up}
        self._see(now_ns, stored, live, {name: one for name, one in gone.items() if name not in left_out})
        if known != (len(self._memory.held), len(self._memory.given_up)):
            # Before anything is deleted: an interrupted collection has noticed it, too.
            self._memory.given_up |= self._load().given_up
            self._save()
        return held

    def _see(
        self,
        now_ns: int,
        stored: Mapping[str, int],
        live: Mapping[str, LiveManifest],
        gone: Mapping[str, LiveManifest],
    ) -> None:
        lives, gones = _by_repository(live), _by_repository(gone)
        for repository in {*lives, *gones}:
            times = Times(
                [stored[name] for name in lives.get(repository, ()) if name in stored],
                [stored[name] for name in gones.get(repository, ())],
            )
            # A log may name any number of repositories of which nothing is stored.
            if times.live or times.gone:
                levels = self._memory.levels.get(repository, ())
                self._seen[repository] = level_of(now_ns, times, levels)

    def note(self) -> None:
        """Remember what is live now, for later collections; what was sudden is compared with that alone."""
        for repository, level in self._seen.items():
            before = [] if repository in self._sudden else self._memory.levels.get(repository, [])
            self._memory.levels[repository] = _added(before, level)
        latest_ns = max((level.time_ns for level in self._seen.values()), default=0)
        self._memory.levels = {
            repository: levels
            for repository, levels in self._memory.levels.items()
            if levels[-1].time_ns > latest_ns - LEVEL_NS
        }
        self._memory.held &= self._stored
        self._memory.given_up = (self._memory.given_up | self._load().given_up) & self._stored
        self._save()

    def give_up(self, manifests: Iterable[str]) -> None:
        """Remember that a person gives these up on this host."""
        # A collection may have held something since this was read.
        self._memory = self._load()
        self._memory.given_up.update(manifests)
        self._save()

    def _load(self) -> _Memory:
        try:
            return decode_json(read_regular(self._path, _MAX_BYTES + 1), _Memory)
        except FileNotFoundError:
            return _Memory()
        except (OSError, msgspec.DecodeError) as error:
            raise Damaged(
                f"{self._path}, which says what collections of this host hold, cannot be read: {error}",
                hint="look with `ciuic list --all-claims` for what was given up at once; then delete the file",
            ) from None

    def _save(self) -> None:
        if not self._is_preview:
            Disk().replace_file(self._path, msgspec.json.encode(self._memory), shared=True)


def _by_repository(manifests: Mapping[str, LiveManifest]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, one in manifests.items():
        found.setdefault(one.repository, []).append(name)
    return found


def _added(levels: Sequence[Level], level: Level) -> list[Level]:
    """Return the levels that still count, and this one; one for each day."""
    counted = [one for one in levels if one.time_ns > level.time_ns - LEVEL_NS]
    if counted and counted[-1].time_ns // _DAY_NS == level.time_ns // _DAY_NS:
        last = counted.pop()
        level = Level(
            **{name: max(getattr(last, name), getattr(level, name)) for name in level.__struct_fields__}
        )
    return [*counted, level]
