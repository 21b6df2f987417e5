"""The reserve on the repository's file system, as of now: how much captures leave to others.

Guarantees: growth counts what others than the repository took, where a root is on the same file system, over the last
interval and no longer, so that a reserve that refuses a snapshot goes down again by itself. Leaves keeping the reserve to
the capture (capture_space.py), telling it to status and alerts.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

import trio

from ciuic import mountinfo
from ciuic.config.places import mount_holding
from ciuic.control_types import RepositoryStatus
from ciuic.daemon.settings import Settings
from ciuic.daemon.store import Store
from ciuic.disk_space import Reserve, reserve_of
from ciuic.mountinfo import Mount

_TRIED_AGAIN_SECONDS: Final = 86400.0
_MAX_SAMPLES: Final = 512
"""Of one interval; further ones take the place of their neighbours."""


class _Sample(NamedTuple):
    """What others than the repository used, on a monotonic clock."""

    at: float
    used_bytes: int


class SpaceWatch:
    """Of one daemon. ``look`` blocks: call it in a thread."""

    def __init__(
        self, settings: Callable[[], Settings], store: Callable[[], Store], now: Callable[[], float]
    ) -> None:
        """``now``: monotonic seconds."""
        self._settings = settings
        self._store = store
        self._now = now
        self._samples: deque[_Sample] = deque()
        self._lock = threading.Lock()
        """Status, housekeeping and captures look from threads of their own."""

    def look(self) -> RepositoryStatus:
        """Size and room of the repository, with the reserve; takes a sample. Never fails."""
        facts = self._store().status()
        with self._lock:
            if facts.total_bytes:
                self._note(facts)
            reserve = self._reserve(facts)
        facts.reserve_bytes, facts.reserve_reason = reserve.size_bytes, reserve.reason
        return facts

    def _note(self, facts: RepositoryStatus) -> None:
        now, interval = self._now(), self._settings().interval_seconds
        used_bytes = facts.used_bytes - facts.size_bytes
        if len(self._samples) > 1 and now - self._samples[-2].at < interval / _MAX_SAMPLES:
            self._samples.pop()
        self._samples.append(_Sample(now, used_bytes))
        # The last sample before the interval began stays: growth is measured from there.
        while len(self._samples) > 1 and self._samples[1].at <= now - interval:
            self._samples.popleft()

    def _reserve(self, facts: RepositoryStatus) -> Reserve:
        settings = self._settings()
        growth_bytes = 0
        if settings.reserve is None and self._samples and self._shares_a_disk(settings):
            growth_bytes = max(0, self._samples[-1].used_bytes - self._samples[0].used_bytes)
        return reserve_of(settings.reserve, facts.total_bytes, growth_bytes)

    def _shares_a_disk(self, settings: Settings) -> bool:
        """Whether a root lies on the file system of the repository: what others take elsewhere is no matter here."""
        if settings.repository is None:
            return False
        mounts = mountinfo.read()
        home = mount_holding(settings.repository, mounts)
        return home is not None and any(_is_on(root.path, home, mounts) for root in settings.roots)


class Shortage:
    """That a snapshot met the reserve, so that the schedule does not write and remove as much again every time.

    What was written then has to be free before another scheduled one writes. Once a day it is tried all the same: files may
    have been removed from a root on another disk. Belongs to the trio thread.
    """

    def __init__(self) -> None:
        self._needed_bytes = 0
        self._met_at = 0.0

    def met(self, needed_bytes: int) -> None:
        """A snapshot was given up after it had written so much; 0: for another reason."""
        if needed_bytes > self._needed_bytes:
            self._needed_bytes, self._met_at = needed_bytes, trio.current_time()

    def needed_bytes(self) -> int:
        """What has to be free for the next one."""
        if trio.current_time() - self._met_at >= _TRIED_AGAIN_SECONDS:
            self._needed_bytes = 0
        return self._needed_bytes


def _is_on(root: str, home: Mount, mounts: list[Mount]) -> bool:
    mount = mount_holding(root, mounts)
    return mount is not None and mount.device == home.device
