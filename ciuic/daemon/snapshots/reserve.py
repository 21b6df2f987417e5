"""Space on the repository's file system that captures leave free for others (the reserve).

Guarantees: where a root is on the same file system, the reserve grows with what others than the repository
took and gave back within the last interval and no longer: they will take it again. It does not grow beyond twice
what the roots hold: more is a neighbour's. What others took and keep is no longer free and needs no reserve. Leaves enforcing the reserve to the capture (capture/space.py), showing it to status and alerts.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

import trio

from ciuic.config.places import mount_holding
from ciuic.daemon.base.repository_store import Store
from ciuic.daemon.base.settings import Settings
from ciuic.errors import CiuicError
from ciuic.protocol.control_types import RepositoryStatus
from ciuic.system import mountinfo
from ciuic.system.disk_space import Reserve, measurable, reserve_of
from ciuic.system.mountinfo import Mount

# After a day the space that a snapshot needs may be less: files may have been removed from a root on another
# disk.
_TRIED_AGAIN_SECONDS: Final = 86400.0
# Samples kept of one interval, peaks apart; further ones replace their neighbours.
_MAX_SAMPLES: Final = 512


class _Sample(NamedTuple):
    """Space that others than the repository used, with the time on a monotonic clock."""

    at: float
    used_bytes: int


class SpaceWatch:
    """Measures free space and how it swings. `measure` blocks; call it in a thread."""

    def __init__(
        self, settings: Callable[[], Settings], store: Callable[[], Store], now: Callable[[], float]
    ) -> None:
        """Prepare to measure.

        Args:
            settings: settings in force.
            store: the repository.
            now: monotonic clock in seconds.
        """
        self._settings = settings
        self._store = store
        self._now = now
        self._samples: deque[_Sample] = deque(maxlen=4 * _MAX_SAMPLES)
        # Guards the samples: status, housekeeping and captures look from threads of their own.
        self._lock = threading.Lock()

    def measure(self) -> RepositoryStatus:
        """Return size and free space of the repository, with the reserve, and take a sample. Never fails."""
        facts = self._store().status()
        with self._lock:
            if facts.total_bytes:
                self._note(facts)
            reserve = self._reserve(facts)
        facts.reserve_bytes, facts.reserve_reason = reserve.size_bytes, reserve.reason
        return facts

    def _note(self, facts: RepositoryStatus) -> None:
        now, interval = self._now(), self._settings().interval_seconds
        # What snapshots themselves add is no reason to leave more room.
        used_bytes = facts.used_bytes - facts.size_bytes
        # The last sample is replaced while it is close to the one before and between its neighbours, because
        # status may be asked for many times a second. A peak stays: it is what a swing consists of.
        if len(self._samples) > 1 and now - self._samples[-2].at < interval / _MAX_SAMPLES:
            ends = sorted((self._samples[-2].used_bytes, used_bytes))
            if ends[0] <= self._samples[-1].used_bytes <= ends[1]:
                self._samples.pop()
        self._samples.append(_Sample(now, used_bytes))
        # The last sample before the beginning of the interval stays, because rises are measured from there.
        while len(self._samples) > 1 and self._samples[1].at <= now - interval:
            self._samples.popleft()

    def _reserve(self, facts: RepositoryStatus) -> Reserve:
        settings = self._settings()
        swing_bytes = 0
        if settings.reserve is None and self._samples and self._shares_a_disk(settings):
            swing_bytes = _largest_swing([sample.used_bytes for sample in self._samples])
            if swing_bytes > reserve_of(None, facts.total_bytes).size_bytes:
                swing_bytes = min(swing_bytes, self._writable_bytes(settings))
        return reserve_of(settings.reserve, facts.total_bytes, swing_bytes)

    def _writable_bytes(self, settings: Settings) -> int:
        """Return how much the roots may take of the disk: all that they hold, written anew beside it.

        The rest of a swing is a neighbour's, which must not keep a small snapshot from being stored. Without a snapshot of each root it
        is not known, nor where the repository cannot be read: then it is as much as there is.
        """
        try:
            newest = self._store().latest_of(root.path for root in settings.roots).values()
        except (CiuicError, OSError):
            return sys.maxsize
        sizes = {one.id: one.size_bytes for one in newest if one is not None}
        return 2 * sum(sizes.values()) if all(newest) else sys.maxsize

    def _shares_a_disk(self, settings: Settings) -> bool:
        """Return whether a root lies on the file system of the repository; swings elsewhere do not count."""
        if settings.repository is None:
            return False
        mounts = mountinfo.read()
        home = mount_holding(measurable(settings.repository), mounts)
        return home is not None and any(_is_on(root.path, home, mounts) for root in settings.roots)


class Shortage:
    """Memory of a snapshot that ran out of space.

    Without it every tick of the schedule would write and remove as much again.

    The space that it had used has to be free before another scheduled snapshot writes. Once a day one is
    tried all the same: files may have been removed from a root on another disk. Belongs to the trio thread.
    """

    def __init__(self) -> None:
        self._needed_bytes = 0
        self._met_at = 0.0

    def met(self, needed_bytes: int) -> None:
        """Remember that a snapshot was given up after it had written `needed_bytes`.

        The size is 0 for another reason than space.
        """
        if needed_bytes > self._needed_bytes:
            self._needed_bytes, self._met_at = needed_bytes, trio.current_time()

    def needed_bytes(self) -> int:
        """Return the space that has to be free for the next scheduled snapshot."""
        if trio.current_time() - self._met_at >= _TRIED_AGAIN_SECONDS:
            self._needed_bytes = 0
        return self._needed_bytes


def _is_on(root: str, home: Mount, mounts: list[Mount]) -> bool:
    mount = mount_holding(root, mounts)
    return mount is not None and mount.device == home.device


def _largest_swing(used_bytes: Sequence[int]) -> int:
    """Return the largest rise that was followed by a fall, as far as both went.

    A rise alone is data that stays, and a fall alone is somebody who made room for snapshots.
    """
    lowest_after = list(accumulate(reversed(used_bytes), min))[::-1]
    lowest_before = accumulate(used_bytes, min)
    return max(used - max(lows) for used, *lows in zip(used_bytes, lowest_before, lowest_after, strict=True))
