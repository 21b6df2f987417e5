"""Order in which a reader that knows nothing of a remote reads the tables of its packs.

Every table of a remote of 5 TB takes minutes; a restore needs those of the packs that hold its chunks. First come the packs
that were uploaded for the snapshots that were chosen, which their manifests name: for a training state these are nearly
all. What they lack was stored for an earlier snapshot, or by another host at about the same time, or in the very first
one, as weights that a training never changes. Tables of trees come before those of data, because a restore walks trees first.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Container, Iterable, Mapping
from itertools import chain, zip_longest
from typing import Final

from ciuic.remote.format.names import PackRef, split_ref
from ciuic.remote.objects.model import ObjectInfo

# Tables that are read before the lookup is asked again; twice as many each time.
_FIRST_BATCH: Final = 64
_MAX_BATCH: Final = 4096


class TableOrder:
    """Packs whose tables are to be read. For one thread at a time."""

    def __init__(self) -> None:
        self._preferred: dict[PackRef, None] = {}
        self._ever_preferred: dict[PackRef, None] = {}
        self._left: deque[PackRef] = deque()
        self._around_ns: int | None = None
        self._batch = _FIRST_BATCH
        self.listed: Mapping[PackRef, ObjectInfo] | None = None
        """Packs by a listing, once there was one."""

    def prefer(self, refs: Iterable[PackRef], around_ns: int) -> None:
        """Read these packs first, then others that were stored at about this time."""
        new = dict.fromkeys(refs)
        self._preferred.update(new)
        self._ever_preferred.update(new)
        if self._around_ns is None:
            self._around_ns = around_ns

    def restart(self) -> None:
        """Begin again, for an empty index: with all packs that were ever preferred, and before any listing."""
        self._preferred = dict(self._ever_preferred)
        self._left.clear()
        self._batch = _FIRST_BATCH
        self.listed = None

    def found(self, listed: Mapping[PackRef, ObjectInfo], known: Container[PackRef]) -> None:
        """Take the packs of a listing; those that are known are left out."""
        self.listed = listed
        new = [ref for ref in listed if ref not in known]
        self._left = deque(
            chain.from_iterable(
                _ordered([ref for ref in new if split_ref(ref)[0] == kind], listed, self._around_ns)
                for kind in ("meta", "data")
            )
        )

    def take_preferred(self, known: Container[PackRef]) -> list[PackRef]:
        """Return the packs that are preferred and not known; once."""
        refs, self._preferred = self._preferred, {}
        return [ref for ref in refs if ref not in known]

    def take(self, known: Container[PackRef]) -> list[PackRef]:
        """Return the next packs that are not known; none at the end."""
        taken: list[PackRef] = []
        while self._left and len(taken) < self._batch:
            ref = self._left.popleft()
            if ref not in known:
                taken.append(ref)
        self._batch = min(2 * self._batch, _MAX_BATCH)
        return taken

    def put_back(self, refs: Iterable[PackRef]) -> None:
        """Take back packs whose tables could not be read now."""
        self._preferred = dict.fromkeys(refs) | self._preferred


def _ordered(
    refs: list[PackRef], listed: Mapping[PackRef, ObjectInfo], around_ns: int | None
) -> Iterable[PackRef]:
    """Return packs by turns: backwards from a moment, forwards from it, and from the first one on."""
    by_age = sorted(refs, key=lambda ref: (listed[ref].modified_ns, ref))
    times = [listed[ref].modified_ns for ref in by_age]
    at = len(times) if around_ns is None else bisect_right(times, around_ns)
    turns = zip_longest(reversed(by_age[:at]), by_age[at:], by_age[:at])
    return dict.fromkeys(ref for turn in turns for ref in turn if ref is not None)
