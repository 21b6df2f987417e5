"""Age of the newest GOOD checkpoint of each root, from stored verdicts.

Guarantees: nothing is judged here, and a record that does not count is none, so that an age errs towards old. The age of a checkpoint that
is known is counted since boot, and one that is dated in the future counts from when it was first seen: setting the clock makes none younger.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from ciuic.daemon.snapshots.snapshot_ages import boot_ns
from ciuic.errors import CiuicError
from ciuic.repository import Repository
from ciuic.types import is_safety
from ciuic.verdicts.records import VerdictRecords, newest_of


class GoodCheckpoint(NamedTuple):
    """Newest GOOD checkpoint of a root."""

    path: bytes
    mtime_ns: int
    """Latest change of one of its files."""


class GoodCheckpoints:
    """Newest GOOD checkpoints. `look` blocks; any thread may ask for ages."""

    def __init__(self, now_ns: Callable[[], int], boot_ns: Callable[[], int] = boot_ns) -> None:
        """Prepare to look.

        Args:
            now_ns: wall clock.
            boot_ns: time since boot.
        """
        self._now_ns = now_ns
        self._boot_ns = boot_ns
        self._began_ns = boot_ns()
        # What each snapshot with verdicts has, by root: a record is read once, of the patterns in force.
        self._patterns: tuple[str, ...] = ()
        self._of_snapshots: dict[str, dict[bytes, GoodCheckpoint]] = {}
        # The newest, and the time since boot at its last change.
        self._newest: dict[str, tuple[GoodCheckpoint, int]] = {}
        self._lock = threading.Lock()

    def look(self, repository: Repository, records: VerdictRecords, roots: Collection[str]) -> None:
        """Find the newest GOOD checkpoint of each root."""
        if records.patterns != self._patterns:
            with self._lock:
                self._patterns, self._of_snapshots = records.patterns, {}
        infos = [
            info for info in repository.snapshots.newest_first() if not is_safety(info.tags, info.message)
        ]
        ids = {str(info.id) for info in infos}
        found: dict[str, GoodCheckpoint] = {}
        wanted = {os.fsencode(root): root for root in roots}
        for info in infos:
            for path in wanted.keys() & set(info.roots):
                root = wanted[path]
                # A snapshot shows nothing that was changed after its cut.
                if root in found and found[root].mtime_ns >= info.time_ns:
                    del wanted[path]
                    continue
                known = self._of_snapshot(repository, records, str(info.id)).get(path)
                if known is not None and (root not in found or known.mtime_ns > found[root].mtime_ns):
                    found[root] = known
            if not wanted:
                break
        with self._lock:
            self._of_snapshots = {id_: one for id_, one in self._of_snapshots.items() if id_ in ids}
            before, now_ns = self._newest, self._now_ns()
            self._newest = {
                root: before[root]
                if root in before and before[root][0] == one
                else (one, self._boot_ns() - max(0, now_ns - one.mtime_ns))
                for root, one in found.items()
            }

    def _of_snapshot(
        self, repository: Repository, records: VerdictRecords, id_: str
    ) -> dict[bytes, GoodCheckpoint]:
        known = self._of_snapshots.get(id_)
        if known is not None:
            return known
        try:
            record = records.record(repository.snapshots.load(repository.snapshots.resolve(id_)))
        except CiuicError:
            return {}
        # It may have verdicts by the next look.
        if record is None:
            return {}
        good: dict[bytes, GoodCheckpoint] = {}
        for root, dated in record.roots:
            newest = newest_of(one for one in dated if one.checkpoint.verdict.is_good)
            if newest is not None:
                good[root] = GoodCheckpoint(newest.checkpoint.path, newest.mtime_ns)
        with self._lock:
            self._of_snapshots[id_] = good
        return good

    def seconds(self, root: str) -> float | None:
        """Return the age of a root's newest GOOD checkpoint; None if none is known."""
        with self._lock:
            known = self._newest.get(root)
        return None if known is None else max(0.0, (self._boot_ns() - known[1]) / 1e9)

    def too_old(self, limits_seconds: Iterable[tuple[str, int]]) -> dict[str, bytes]:
        """Return the roots whose newest GOOD checkpoint is older than their limit, with its path.

        A root without one counts from the start of the daemon, and has an empty path.

        Args:
            limits_seconds: root and limit; 0: none.
        """
        found: dict[str, bytes] = {}
        for root, limit_seconds in limits_seconds:
            with self._lock:
                known = self._newest.get(root)
            since_ns = self._began_ns if known is None else known[1]
            if limit_seconds and self._boot_ns() - since_ns > limit_seconds * 10**9:
                found[root] = b"" if known is None else known[0].path
        return found
