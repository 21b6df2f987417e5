"""Space on the repository's file system that captures leave free for others (the reserve).

Guarantees: where a root is on the same file system, the reserve grows with what others than the repository
took and gave back within the last interval and no longer: they will take it again. It does not grow beyond twice
what the roots hold: more is a neighbour's. What others took and keep is no longer free and needs no reserve. Leaves enforcing the reserve to the capture (capture/space.py), showing it to status and alerts.

When the repository's file system will be full, at the rate of the last week.

Once an hour the used space is noted in the file `space-history` of the repository, the last week of it, so that a restart forgets
nothing. The rate is the median, over all samples, of the growth since the sample a day before. One prune, one large copy that was removed
again and a few hours with a wrong clock are in the minority of these and do not move it. A file system that fills and is pruned by turns
within a day has a rate of zero, as it should: it is not filling.

The reader takes the file for hostile: it lies in the repository, which may come from elsewhere.
"""

from __future__ import annotations

import os
import sys
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Annotated, Final, NamedTuple

import msgspec
import structlog
import trio

from ciuic.config.places import mount_holding
from ciuic.daemon.base.repository_store import Store
from ciuic.daemon.base.settings import Settings
from ciuic.errors import CiuicError
from ciuic.protocol.control_types import RepositoryStatus
from ciuic.protocol.stored_remotely import StoredRecordDamaged, read_state_file, write_state_file
from ciuic.structs import decode_json
from ciuic.system import mountinfo
from ciuic.system.disk_space import Reserve, measurable, reserve_of
from ciuic.system.mountinfo import Mount
from ciuic.types import MAX_TIME_NS

HISTORY_NAME: Final = "space-history"
_MAX_BYTES: Final = 1 << 16
_HOUR_NS: Final = 3600 * 10**9
_KEPT_NS: Final = 7 * 24 * _HOUR_NS
_MAX_FORECAST_SAMPLES: Final = 7 * 24 + 1
_DAY_NS: Final = 24 * _HOUR_NS
MIN_DIFFERENCES: Final = 12
"""Samples with another a day before, from which a rate is one: a first snapshot must not be taken for growth."""
_DAY_SECONDS: Final = 86_400.0
_Bytes = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
log = structlog.get_logger(__name__)


class SpaceSample(msgspec.Struct, frozen=True, array_like=True):
    """Space in use at one time."""

    time_ns: Annotated[int, msgspec.Meta(ge=0, le=MAX_TIME_NS)]
    used_bytes: _Bytes
    """Bytes in use on the whole file system."""
    repository_bytes: _Bytes


class GrowthRate(NamedTuple):
    """Bytes per day by which the use of a file system grows; negative where it shrinks."""

    all_bytes: float = 0.0
    repository_bytes: float = 0.0


def growth_rate(samples: Sequence[SpaceSample]) -> GrowthRate | None:
    """Return the rate of samples, the oldest first; None for too few, or too short a time."""
    times = [sample.time_ns for sample in samples]
    pairs = [
        (samples[before - 1], sample)
        for sample in samples
        if (before := bisect_right(times, sample.time_ns - _DAY_NS))
    ]
    if len(pairs) < MIN_DIFFERENCES:
        return None
    days = [(new.time_ns - old.time_ns) / _DAY_NS for old, new in pairs]
    return GrowthRate(
        median((new.used_bytes - old.used_bytes) / t for (old, new), t in zip(pairs, days, strict=True)),
        median(
            (new.repository_bytes - old.repository_bytes) / t
            for (old, new), t in zip(pairs, days, strict=True)
        ),
    )


def decode_samples(data: bytes) -> list[SpaceSample]:
    """Return the samples in ``data``. StoredRecordDamaged for anything else."""
    try:
        return decode_json(data, list[SpaceSample])[-_MAX_FORECAST_SAMPLES:]
    except msgspec.DecodeError as error:
        raise StoredRecordDamaged(f"it is no history of space: {error}") from error


class SpaceForecast:
    """Samples of one repository. `note` blocks; call it in a thread, and in one at a time."""

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        self._place = Path()
        self._samples: list[SpaceSample] = []
        self.rate: GrowthRate | None = None
        """Rate of the last week; None while it is not known."""

    def note(self, facts: RepositoryStatus) -> None:
        """Take a sample if the last one is an hour old."""
        if not facts.exists or not facts.total_bytes:
            return
        place = Path(os.path.realpath(facts.path))
        if place != self._place:
            self._place, self._samples, self.rate = place, _read(place), None
        now_ns = self._now_ns()
        # A sample in the future is of a clock that was ahead.
        kept = [one for one in self._samples if now_ns - _KEPT_NS <= one.time_ns <= now_ns]
        if not kept or now_ns - kept[-1].time_ns >= _HOUR_NS:
            kept.append(SpaceSample(now_ns, facts.used_bytes, facts.size_bytes))
            try:
                write_state_file(place.parent, place.name, HISTORY_NAME, msgspec.json.encode(kept))
            except OSError as error:
                log.warning("space_history_not_written", error=str(error))
        elif self.rate is not None and len(kept) == len(self._samples):
            return
        self._samples = kept
        self.rate = growth_rate(kept)

    def apply(self, facts: RepositoryStatus) -> None:
        """Add growth and forecast to the status of the repository."""
        if self.rate is None:
            return
        facts.growth_bytes_per_day = self.rate.all_bytes
        facts.own_growth_bytes_per_day = self.rate.repository_bytes
        if self.rate.all_bytes > 0 and facts.total_bytes:
            facts.full_in_seconds = facts.free_bytes / self.rate.all_bytes * _DAY_SECONDS


def _read(place: Path) -> list[SpaceSample]:
    try:
        found = decode_samples(read_state_file(place.parent, place.name, HISTORY_NAME, _MAX_BYTES))
    except (OSError, StoredRecordDamaged):
        return []
    return sorted(found, key=lambda one: one.time_ns)


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
