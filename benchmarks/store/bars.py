"""Bars of the store benchmark, as data, judged by the same rules as the bars of `make bench`.

Absolute bars (seconds, milliseconds, megabytes) hold at scale 1.
"""

from __future__ import annotations

from benchmarks.bars import Bar
from benchmarks.places import DISK, EXT4, XFS
from benchmarks.store.suites import CAPTURE_MEMORY, PLACES, nothing_changed
from benchmarks.store.tools import BORG, CIUIC, COPY, RESTIC

_JUDGED = (CIUIC,)
_UNCHANGED = nothing_changed(1_000_000)


def _at_most(
    limit: float, figure: str, *against: str, places: tuple[str, ...] = PLACES, figure_of_its_own: str = ""
) -> tuple[Bar, ...]:
    """Return bars with an upper limit, relative to ``against`` or to ``figure_of_its_own``, or absolute."""
    return tuple(
        Bar((figure,), limit, False, reference, _JUDGED, places, figure_of_its_own)
        for reference in against or ("",)
    )


BARS: tuple[Bar, ...] = (
    *_at_most(1.1, "first capture", COPY),
    *_at_most(0.6, "first capture", RESTIC, BORG),
    # A bar against each of the two is a bar against the faster one.
    *_at_most(0.5, "incremental", RESTIC, BORG, places=(EXT4, DISK)),
    *_at_most(0.1, "incremental", RESTIC, BORG, places=(XFS,)),
    *_at_most(0.05, _UNCHANGED),
    *_at_most(1.1, _UNCHANGED, figure_of_its_own=nothing_changed(1_000)),
    *_at_most(1.1, "restore", COPY, places=(EXT4, DISK)),
    *_at_most(0.5, "restore", RESTIC, BORG),
    *_at_most(1.0, "restore", places=(XFS,)),
    *_at_most(1.0, "restore over existing", figure_of_its_own="restore"),
    Bar(("verify, speed beside cat of the packs",), 0.9, True, "", _JUDGED, PLACES),
    *_at_most(256.0, f"first capture{CAPTURE_MEMORY}"),
    *_at_most(0.3, "prune of half of 200 snapshots", RESTIC),
)
