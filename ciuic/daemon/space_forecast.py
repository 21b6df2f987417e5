"""When the repository's file system will be full, at the rate of the last week.

Once an hour the used space is noted in the file `space-history` of the repository, the last week of it, so that a restart forgets
nothing. The rate is the median, over all samples, of the growth since the sample a day before. One prune, one large copy that was removed
again and a few hours with a wrong clock are in the minority of these and do not move it. A file system that fills and is pruned by turns
within a day has a rate of zero, as it should: it is not filling.

The reader takes the file for hostile: it lies in the repository, which may come from elsewhere.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Final, NamedTuple

import msgspec
import structlog

from ciuic.protocol.control_types import RepositoryStatus
from ciuic.protocol.stored_remotely import StoredRecordDamaged, read_state_file, write_state_file
from ciuic.structs import decode_json
from ciuic.types import MAX_TIME_NS

HISTORY_NAME: Final = "space-history"
_MAX_BYTES: Final = 1 << 16
_HOUR_NS: Final = 3600 * 10**9
_KEPT_NS: Final = 7 * 24 * _HOUR_NS
_MAX_SAMPLES: Final = 7 * 24 + 1
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
        return decode_json(data, list[SpaceSample])[-_MAX_SAMPLES:]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
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
