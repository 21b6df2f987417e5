"""State that all readers of one space of a remote share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ciuic.remote.access.remote import Remote
from ciuic.remote.log.damaged_log import DamagedLog
from ciuic.remote.log.unlogged import UnloggedManifest
from ciuic.remote.reading.cache_directory import CacheDirectory
from ciuic.remote.reading.meta_packs import MetaPacks
from ciuic.remote.reading.patience import Patience
from ciuic.remote.reading.range_prefetch import DEFAULT_MEMORY_BYTES, DEFAULT_THREADS, RangePrefetch
from ciuic.remote.reading.remote_lookup import RemoteLookup
from ciuic.remote.reading.remote_packs import RemotePacks


class SpaceReader:
    """State that all readers of one space share: its index, its cache, and what is read ahead.

    Args:
        space: A remote, or the space of one repository in it.
        cache: Cache of the space.
        patience: For requests without an answer.
        threads: Ranges that are read at the same time.
        memory_bytes: Limit of what is read ahead.
        skips_unreadable: Say nothing of packs whose table cannot be read, unless a snapshot needs them.
    """

    def __init__(
        self,
        space: Remote,
        cache: CacheDirectory,
        patience: Patience,
        *,
        threads: int = DEFAULT_THREADS,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
        skips_unreadable: bool = False,
    ) -> None:
        self.space = space
        self.skips_unreadable = skips_unreadable
        self.cache = cache
        self.patience = patience
        self.lookup = RemoteLookup(space, cache, patience)
        self.ranges = RangePrefetch(space.objects, patience, threads=threads, memory_bytes=memory_bytes)
        self.meta = MetaPacks(space.objects, cache, patience, self.ranges)
        self.archived: set[str] = set()
        """Names of packs that could not be read because they are archived."""
        self.packs = RemotePacks(
            space.objects,
            space.sealer,
            self.lookup.ref,
            self.ranges,
            self.meta,
            on_archived=self.archived.add,
        )
        self.damaged_logs: Mapping[str, DamagedLog] = {}
        """Logs that were damaged when the remote was opened, by writer."""

        self.unlogged: Sequence[UnloggedManifest] = ()
        """Manifests that no log accounted for when the remote was opened."""

    def close(self) -> None:
        """Close the index and the cache, and end what is read ahead."""
        self.ranges.close()
        self.meta.close()
        self.lookup.end()
