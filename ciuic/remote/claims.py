"""How many snapshots logs may give up in a day without a person: which claims of logs count, and which wait.

Whoever has the key of one host can append to any log. So the bound is on what is lost, and not on who gives it up: in any 24
hours the number of snapshots of a repository may fall by half of the most there were, or by `FREE` where that is more. Retention
that drops as many as are taken never gets there. The newest one that is left of a repository that had snapshots a day before
never goes. An entry that exceeds that waits as a whole: its snapshots stay live until an object below ``approvals/`` says that a person has agreed.

All times are the store's own, of the entries of logs, which nobody can set who can only add objects.

Not bounded: a party that stores a false snapshot for each that it gives up, which is what retention looks like.

References:
    docs/remote-format.md, section 6 (Claims)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

INTERVAL_NS: Final = 86_400 * 10**9
"""Time by the store's clock in which snapshots are counted: a day."""
FREE: Final = 4
"""Snapshots of a repository that may always go within it, but the newest."""


class Claim(msgspec.Struct, frozen=True, array_like=True):
    """Statement of a log that a snapshot is given up."""

    number: int
    """Number of the entry."""
    time_ns: int
    """Time of the entry by the store's clock."""
    waits: bool = False
    """True where an entry that sums up the log says that it waits."""


class Commit(NamedTuple):
    """Commit of a manifest."""

    repository: str
    snapshot: str
    time_ns: int
    """Time by the store's clock; 0 for one that was summed up before it was read."""


class ClaimOfLog(NamedTuple):
    """Claim on a manifest."""

    manifest: str
    writer: str
    claim: Claim


class _Event(NamedTuple):
    """Commit of a manifest, or claims of an entry on a repository."""

    time_ns: int
    is_claim: bool
    name: str
    """The manifest, or the repository."""
    writer: str = ""
    number: int = 0


class _Repository:
    """Snapshots of one repository while its claims are judged, in the order of time."""

    def __init__(self) -> None:
        # Manifests that are live, by snapshot; the newest last.
        self.live: dict[str, set[str]] = {}
        self._first_ns: int | None = None
        # Earlier numbers of snapshots, falling, with the time until which there were so many: the first is the most of the interval.
        # What a person agreed to does not count as a fall.
        self._most: deque[tuple[int, int]] = deque()
        self._agreed = 0

    def commit(self, manifest: str, commit: Commit) -> None:
        if self._first_ns is None:
            self._first_ns = commit.time_ns
        self._end_count(commit.time_ns)
        self.live.setdefault(commit.snapshot, set()).add(manifest)

    def give_up(self, manifests: Mapping[str, str], now_ns: int, *, agreed: bool = False) -> bool:
        """Take these manifests, each with its snapshot, away, and return True; unless that has to wait."""
        left: dict[str, set[str]] = {}
        for manifest, snapshot in manifests.items():
            if snapshot in self.live:
                left.setdefault(snapshot, set(self.live[snapshot])).discard(manifest)
        gone = [snapshot for snapshot, others in left.items() if not others]
        if gone and not agreed and not self._may_lose(gone, now_ns):
            return False
        self._end_count(now_ns)
        self.live.update(left)
        for snapshot in gone:
            del self.live[snapshot]
        self._agreed += len(gone) if agreed else 0
        return True

    def _may_lose(self, gone: Sequence[str], now_ns: int) -> bool:
        since_ns = now_ns - INTERVAL_NS
        is_old = self._first_ns is not None and self._first_ns <= since_ns
        if is_old and next(reversed(self.live)) in gone:
            return False
        while self._most and self._most[0][0] < since_ns:
            self._most.popleft()
        most = max(len(self.live), self._most[0][1] - self._agreed if self._most else 0)
        return len(self.live) - len(gone) >= most - max(FREE, most // 2)

    def _end_count(self, now_ns: int) -> None:
        count = len(self.live) + self._agreed
        while self._most and self._most[-1][1] <= count:
            self._most.pop()
        self._most.append((now_ns, count))


def waiting_claims(
    commits: Mapping[str, Commit],
    claims: Iterable[ClaimOfLog],
    agreed: Collection[str] = (),
) -> dict[str, ClaimOfLog]:
    """Return the claims that wait for a person, by manifest: the first of each.

    Args:
        commits: All commits that are known, by manifest, also of what was given up.
        claims: All claims that are known.
        agreed: Manifests of the snapshots that a person has let go.
    """
    known = [one for one in claims if one.manifest in commits]
    # Whoever summed up the log knew more of it.
    noted = {one.manifest for one in known if one.claim.waits}
    concerned = {commits[one.manifest].repository for one in known}
    # In the order of time; claims of one entry on one repository together, and not before the commits, whose times may be those of
    # other entries.
    events: dict[_Event, dict[str, ClaimOfLog]] = {}
    for name, commit in commits.items():
        if commit.repository in concerned:
            events[_Event(commit.time_ns, False, name)] = {}
    for one in known:
        commit = commits[one.manifest]
        time_ns = max(one.claim.time_ns, commit.time_ns)
        entry = _Event(time_ns, True, commit.repository, one.writer, one.claim.number)
        events.setdefault(entry, {})[one.manifest] = one
    repositories = {id_: _Repository() for id_ in concerned}
    waiting: dict[str, ClaimOfLog] = {}
    for event, claimed in sorted(events.items(), key=lambda one: one[0]):
        if not event.is_claim:
            commit = commits[event.name]
            repositories[commit.repository].commit(event.name, commit)
            continue
        repository = repositories[event.name]
        snapshots = {name: commits[name].snapshot for name in claimed}
        let_go = {name: snapshot for name, snapshot in snapshots.items() if name in agreed}
        others = {name: one for name, one in snapshots.items() if name not in let_go and name not in noted}
        repository.give_up(let_go, event.time_ns, agreed=True)
        counts = {*let_go, *(others if repository.give_up(others, event.time_ns) else ())}
        for name, one in claimed.items():
            if name in counts:
                waiting.pop(name, None)
            else:
                waiting.setdefault(name, one)
    return waiting
