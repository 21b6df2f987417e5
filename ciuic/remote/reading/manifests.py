"""Manifests of a remote's snapshots, from the cache or the bucket.

Guarantee: a manifest is returned only if its bytes have the digest that the log names, and its seal opens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Final

from ciuic.errors import NotFound
from ciuic.remote.access.remote import Remote
from ciuic.remote.errors import DamagedRemote
from ciuic.remote.format.log_entry import LiveManifest
from ciuic.remote.format.manifest import RemoteManifest, decode_manifest, object_digest
from ciuic.remote.format.names import PackRef
from ciuic.remote.log.bounded import read_document
from ciuic.remote.log.log_reader import LogReader
from ciuic.remote.objects.model import NoSuchObject
from ciuic.remote.reading.cache_directory import CacheDirectory
from ciuic.remote.reading.patience import Patience
from ciuic.repository.errors import DamagedSnapshot


class Manifests:
    """Manifests of one space of a remote. May be used from several threads."""

    def __init__(
        self,
        space: Remote,
        cache: CacheDirectory,
        patience: Patience,
        logs: LogReader | None = None,
        *,
        prefer: Callable[[Iterable[PackRef], int], None] = lambda refs, around_ns: None,
    ) -> None:
        """Take the parts.

        Args:
            space: A remote, or the space of one repository in it.
            cache: Cache of the space.
            patience: For requests without an answer.
            logs: Reader of its logs, which says of a missing manifest whether its snapshot was removed; None: it was not.
            prefer: Told of the packs that were uploaded for a snapshot that is to be read, and of its time.
        """
        self._space = space
        self._cache = cache
        self._patience = patience
        self._logs = logs
        self.prefer: Final = prefer
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """URL of the space, for messages."""
        return self._space.objects.url

    def read(self, live: LiveManifest) -> RemoteManifest:
        """Return the manifest of a snapshot.

        Raises:
            NotFound: the snapshot was removed since the logs were read.
            DamagedSnapshot: it is missing, or not what was committed.
            UnsupportedFormat: a later version of ciuic wrote it.
            RemoteUnreachable: the store did not answer for too long.
        """
        name = live.manifest
        data = self._cache.load(live.digest)
        # Named by its digest: whatever else lies there is no manifest.
        if data is None or object_digest(data) != live.digest:
            data = self._fetch(live)
            self._cache.store(live.digest, data)
        try:
            return decode_manifest(self._space.sealer, name, data)
        except DamagedRemote as error:
            raise DamagedSnapshot(live.snapshot, error.message) from None

    def _fetch(self, live: LiveManifest) -> bytes:
        try:
            return self._patience.of(
                lambda: read_document(self._space.objects, live.manifest, lambda data: _committed(live, data))
            )
        except NoSuchObject:
            if not self._is_live(live):
                raise NotFound(
                    f"the snapshot {live.snapshot} was removed from the remote meanwhile"
                ) from None
            raise DamagedSnapshot(
                live.snapshot, f"its manifest {live.manifest} is missing in the remote"
            ) from None
        except DamagedRemote as error:
            raise DamagedSnapshot(live.snapshot, error.message) from None

    def _is_live(self, live: LiveManifest) -> bool:
        """Return whether logs commit the snapshot still; reads what is new in them."""
        if self._logs is None:
            return True
        with self._lock:
            self._patience.of(self._logs.refresh)
            return live.manifest in self._logs.live()


def _committed(live: LiveManifest, data: bytes) -> bytes:
    """Return the bytes if they are those that were committed. DamagedSnapshot otherwise."""
    if object_digest(data) != live.digest:
        raise DamagedSnapshot(
            live.snapshot, f"its manifest {live.manifest} in the remote is not the one that was committed"
        )
    return data
