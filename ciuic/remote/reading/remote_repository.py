"""Space of a remote as a repository that can be read.

Everything that only reads works on it: list, show, diff, verify, restore. Guarantees: content is compared with its chunk id by
the same readers as that of a local repository; nothing is written to the remote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ciuic.errors import NotFound, NotPermitted
from ciuic.remote.access.remote import Remote
from ciuic.remote.format.names import PACKS_PREFIX, PackRef, pack_name, parse_pack, split_ref
from ciuic.remote.format.pack_reader import RemotePackReader
from ciuic.remote.reading.remote_lookup import RemoteLookup
from ciuic.remote.reading.remote_packs import RemotePacks
from ciuic.remote.reading.remote_scrub import scrub_remote
from ciuic.remote.reading.remote_snapshots import RemoteSnapshots
from ciuic.remote.reading.space_reader import SpaceReader
from ciuic.repository import Repository
from ciuic.repository.config import CODECS_VERSION, KEYED_VERSION, StoredConfig
from ciuic.repository.disk.operations import Disk
from ciuic.repository.model import PackDamage, PackInfo, PackRecord
from ciuic.repository.writing.shared_write_claim import Claim
from ciuic.repository.writing.writer import Writer


class RemoteRepository(Repository):
    """Repository in a remote, open for reading. Not thread-safe: `reopen` it in each thread.

    ``path`` is its cache directory. Pack numbers are those of the cached index; packs whose table cannot be read have
    negative ones.
    """

    def __init__(self, reader: SpaceReader, snapshots: RemoteSnapshots) -> None:
        """Take the shared parts; the caller closes them."""
        super().__init__(reader.cache.path, _config(reader.space), Disk(), snapshots)
        self.reader = reader

    @property
    def url(self) -> str:
        """URL of the space."""
        return self.reader.space.objects.url

    def reopen(self) -> RemoteRepository:
        """Return the same repository once more, for another thread; index and cache are shared."""
        assert isinstance(self.snapshots, RemoteSnapshots)
        return RemoteRepository(self.reader, self.snapshots)

    def foreign_reason(self) -> str:
        """Return why others may have written this: without seals, any user of the bucket who may write."""
        if self.reader.space.sealer.sealed:
            return ""
        return f"remote {self.url} is not sealed, so that any user who may write there may have changed it"

    def _pack_source(self) -> RemotePacks:
        return self.reader.packs

    def _chunk_lookup(self) -> RemoteLookup:
        return self.reader.lookup

    def writer(self, *, wait_seconds: float = 0, command: str = "", pack_bytes: int | None = None) -> Writer:
        """Raise NotPermitted: only uploads write to a remote."""
        raise NotPermitted(f"{self.url} is a remote, which is only read")

    def claim(self) -> Claim:
        """Raise NotPermitted: only uploads write to a remote."""
        raise NotPermitted(f"{self.url} is a remote, which is only read")

    def packs(self) -> list[PackInfo]:
        """Return all packs whose table can be read, by number."""
        sizes = self.pack_sizes()
        known = self.reader.lookup.packs()
        return [
            PackInfo(number, split_ref(known[number].ref)[0], sizes.get(number, 0), True)
            for number in sorted(known)
        ]

    def pack_records(self, number: int, *, salvage: bool = False) -> Iterator[PackRecord]:
        """Return the records of a pack, from its table. Nothing of a damaged table can be salvaged."""
        ref = self._ref(number)
        reader = RemotePackReader(self.reader.space.sealer, ref)
        return iter(self.reader.patience.of(lambda: reader.read_table(self.reader.space.objects)))

    def pack_path(self, number: int) -> str:
        """Return the URL of a pack."""
        try:
            return f"{self.url}/{pack_name(self._ref(number))}"
        except NotFound:
            return self.url

    def pack_sizes(self) -> dict[int, int]:
        """Return the size in bytes of every pack that is there now, by its number. Lists all packs."""
        reader = self.reader
        reader.lookup.refresh()
        numbers = {pack.ref: number for number, pack in reader.lookup.packs().items()}
        numbers |= {ref: number for number, ref in self._unreadable().items()}

        def listed() -> dict[int, int]:
            return {
                numbers[ref]: info.size_bytes
                for info in reader.space.objects.list(PACKS_PREFIX)
                if (ref := parse_pack(info.name)) is not None and ref in numbers
            }

        return reader.patience.of(listed)

    def scrub(
        self,
        progress: Callable[[int, int], None] | None = None,
        *,
        after: int = -1,
        goes_on: Callable[[int], bool] = lambda number: True,
        between: Callable[[], None] = lambda: None,
    ) -> Iterator[PackDamage]:
        """Read every byte of every pack and check it, referred to or not; see `Repository.scrub`."""
        sizes = self.pack_sizes()
        reasons = self.reader.lookup.unreadable()
        for number, ref in self._unreadable().items():
            yield PackDamage(number, 0, None, reasons[ref])
        chosen = {number: size for number, size in sorted(sizes.items()) if number > max(after, -1)}
        yield from scrub_remote(self.reader, self, chosen, progress, goes_on, between)

    def check_index(self) -> list[str]:
        """Return nothing: the index is a cache of this host, and made from the packs."""
        return []

    def lacks_index(self) -> bool:
        """Return False: see `check_index`."""
        return False

    def pack_problems(self) -> list[tuple[int, str]]:
        """Return the packs whose table cannot be read."""
        self.reader.lookup.refresh()
        reasons = self.reader.lookup.unreadable()
        return [(number, reasons[ref]) for number, ref in self._unreadable().items()]

    def config_damage(self) -> list[str]:
        """Return nothing: a remote whose configuration is damaged is not opened."""
        return []

    def is_spent_copy(self, damage: PackDamage) -> bool:
        """Return False: damage in a remote is not marked."""
        return False

    def forget_pack(self, number: int) -> None:
        """Do nothing: no pack is open."""

    @property
    def may_have_bases(self) -> bool:
        """True: a remote may have chunks that are stored as differences."""
        return True

    def misses_no_snapshot(self) -> bool:
        """Return whether there is no snapshot: the logs say what there is."""
        return not self.snapshots.names()

    def _unreadable(self) -> dict[int, PackRef]:
        """Return the packs whose table cannot be read; the index has no number for them."""
        if self.reader.skips_unreadable:
            return {}
        return {-1 - at: ref for at, ref in enumerate(sorted(self.reader.lookup.unreadable()))}

    def _ref(self, number: int) -> PackRef:
        if number < 0 and number in (unreadable := self._unreadable()):
            return unreadable[number]
        return self.reader.lookup.ref(number)


def _config(space: Remote) -> StoredConfig:
    identity = space.identity
    return StoredConfig(
        format=CODECS_VERSION if identity.key is None else KEYED_VERSION,
        id=space.id,
        hash=identity.hash,
        seed=f"{identity.seed:016x}",
        key=(identity.key or b"").hex(),
        block_size=space.stored.block_size,
        created_ns=space.stored.created_ns,
    )
