"""Ages of the newest snapshots, by a clock that cannot be set.

A snapshot has the wall time of its cut. Once it is seen its age is counted in time since boot (CLOCK_BOOTTIME), so that setting
the clock makes no snapshot younger or older. Guarantees: a restart of the daemon keeps the count, by a file in the runtime directory; an age
goes on growing while the repository cannot be read; a cut that lies in the future is no recent one, but counts as old as the boot.
Leaves to the repository which snapshot is the newest: it has the order of commits, whatever the clock said.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from ciuic.daemon.base.events import EventBus
from ciuic.daemon.base.repository_store import LastSnapshot
from ciuic.daemon.base.runtime import AgeRecord, AgeRecords, RuntimeDirectory
from ciuic.system.processes import boot_id
from ciuic.types import TAG_SAFETY

GRACE_SECONDS: Final = 300.0
"""Time that a snapshot may be late beside one interval that may fail."""
_MAX_STEPS: Final = 16
_MAX_CUTS: Final = 64
_STEP_NS: Final = 10**9


def overdue_after_seconds(interval_seconds: float) -> float:
    """Return the age from which the newest snapshot of a root is overdue: two intervals and `GRACE_SECONDS`."""
    return 2 * interval_seconds + GRACE_SECONDS


def boot_ns() -> int:
    """Return the time since boot, with that in which the machine slept."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class SnapshotAges:
    """Ages of the newest snapshot of each root. Any thread may call it."""

    def __init__(
        self,
        runtime: RuntimeDirectory,
        now_ns: Callable[[], int],
        boot_ns: Callable[[], int] = boot_ns,
        boot_id: Callable[[], str] = boot_id,
    ) -> None:
        """Prepare to count; the predecessor's file is read at the first look.

        Args:
            runtime: directory with the file.
            now_ns: wall clock.
            boot_ns: time since boot.
            boot_id: identity of this boot of the kernel.
        """
        self._runtime = runtime
        self._now_ns = now_ns
        self._boot_ns = boot_ns
        self._boot_id = boot_id
        self._known: dict[str, AgeRecord] | None = None
        # By root, the newest snapshot unless it is a safety snapshot, and the time since boot at which this daemon first saw it listed.
        self._listed: dict[str, tuple[str, int]] = {}
        # (Time since boot until which it held, wall clock less time since boot), the oldest first.
        self._earlier: list[tuple[int, int]] = []
        self._difference_ns = now_ns() - boot_ns()
        # Time since boot at the last cuts of this daemon, by id.
        self._cuts: dict[str, int] = {}
        # Status, metrics and housekeeping look from tasks and threads of their own.
        self._lock = threading.Lock()

    async def follow(self, events: EventBus) -> None:
        """Note when snapshots are cut, until cancelled."""
        with events.subscribe() as subscription:
            async for event in subscription.events():
                if event.kind == "snapshot_cut" and event.snapshot is not None:
                    self.cut(event.snapshot.id)

    def cut(self, id_: str) -> None:
        """Note that a snapshot is cut now."""
        with self._lock:
            self._cuts[id_] = self._boot_ns()
            if len(self._cuts) > _MAX_CUTS:
                del self._cuts[next(iter(self._cuts))]

    def note(self, newest: Mapping[str, LastSnapshot | None], *, is_readable: bool) -> None:
        """Take note of the newest committed snapshot of every root.

        Args:
            newest: what the repository lists.
            is_readable: the repository could be read; if not, what was known holds.
        """
        with self._lock:
            self._heed_clock()
            known = self._records()
            if is_readable:
                self._listed = {root: self._listed_since(root, one) for root, one in newest.items()}
            found: dict[str, AgeRecord] = {}
            for root, snapshot in newest.items():
                id_ = "" if snapshot is None else str(snapshot.id)
                before = known.get(root)
                if before is not None and (before.snapshot == id_ or not is_readable):
                    found[root] = before
                else:
                    since = self._boot_ns() if snapshot is None else self._cut_boot_ns(id_, snapshot.time_ns)
                    found[root] = AgeRecord(snapshot=id_, boot_ns=since)
            if found != known:
                self._known = found
                self._runtime.write_ages(AgeRecords(boot_id=self._boot_id(), roots=found))

    def _listed_since(self, root: str, snapshot: LastSnapshot | None) -> tuple[str, int]:
        id_ = "" if snapshot is None or TAG_SAFETY in snapshot.tags else str(snapshot.id)
        known = self._listed.get(root)
        return known if known is not None and known[0] == id_ else (id_, self._boot_ns())

    def seconds(self, root: str) -> float | None:
        """Return the age of the newest snapshot of a root; None if it has none, or the repository was never read."""
        with self._lock:
            record = self._records().get(root)
            return None if record is None or not record.snapshot else self._since(record)

    def newest(self, before_ns: int, path: str | None = None) -> str:
        """Return the newest snapshot if it is known to be from before an instant; empty if it is not.

        It was in the repository then, whatever clock it has its time from, and is no safety snapshot.

        Args:
            before_ns: the instant, in time since boot.
            path: file that its root holds; None: of any root.
        """
        with self._lock:
            roots = [root for root in self._listed if path is None or path.startswith(root.rstrip("/") + "/")]
            if path is not None:
                # Of nested roots the inner one holds the file.
                roots = [max(roots, key=len)] if roots else []
            found = [(since_ns, id_) for id_, since_ns in map(self._listed.__getitem__, roots) if id_]
        return max((one for one in found if one[0] < before_ns), default=(0, ""))[1]

    def overdue(self, roots: Iterable[str], interval_seconds: float) -> dict[str, bool]:
        """Return the roots whose newest snapshot is overdue, with whether there is one.

        A root without a snapshot counts from when it was first seen without one.
        """
        limit_seconds = overdue_after_seconds(interval_seconds)
        with self._lock:
            known = self._records()
            return {
                root: bool(known[root].snapshot)
                for root in roots
                if root in known and self._since(known[root]) > limit_seconds
            }

    def _since(self, record: AgeRecord) -> float:
        return max(0.0, (self._boot_ns() - record.boot_ns) / 1e9)

    def _records(self) -> dict[str, AgeRecord]:
        if self._known is None:
            record = self._runtime.read_ages()
            self._known = dict(record.roots) if record.boot_id == self._boot_id() else {}
        return self._known

    def _heed_clock(self) -> None:
        difference_ns = self._now_ns() - self._boot_ns()
        if abs(difference_ns - self._difference_ns) >= _STEP_NS:
            self._earlier = [*self._earlier, (self._boot_ns(), self._difference_ns)][-_MAX_STEPS:]
        self._difference_ns = difference_ns

    def _cut_boot_ns(self, id_: str, time_ns: int) -> int:
        """Return the time since boot at a cut: as this daemon saw it, else by the clock as it was then.

        The clock may have been set between the cut and the commit. It is negative for a cut before the boot, and 0 for one in the future.
        """
        seen = self._cuts.get(id_)
        if seen is not None:
            return seen
        found_ns, begin_ns = 0, None
        for until_ns, difference_ns in [*self._earlier, (self._boot_ns(), self._difference_ns)]:
            at_ns = time_ns - difference_ns
            # The first: of two instants that a clock that was put back has given the same time, the earlier one.
            if at_ns <= until_ns and (begin_ns is None or at_ns >= begin_ns):
                found_ns = at_ns
                break
            begin_ns = until_ns
        return found_ns
