"""Space of a remote as a repository that can be read, the state that its readers share, and the check of every byte of its packs.

Everything that only reads works on it: list, show, diff, verify, restore. Guarantees: content is compared with its chunk id by
the same readers as that of a local repository; nothing is written to the remote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from ciuic.errors import Damaged, NotFound, NotPermitted
from ciuic.remote.access import Remote
from ciuic.remote.errors import DamagedRemote
from ciuic.remote.format.names import PACKS_PREFIX, PackRef, pack_name, parse_pack, split_ref
from ciuic.remote.format.pack import HEADER_BYTES, RemotePackReader, in_runs
from ciuic.remote.log.log_reader import DamagedLog, UnloggedManifest
from ciuic.remote.objects.model import ArchivedObject, read_verified
from ciuic.remote.reading.cache_directory import CacheDirectory
from ciuic.remote.reading.range_prefetch import DEFAULT_MEMORY_BYTES, DEFAULT_THREADS, RangePrefetch
from ciuic.remote.reading.remote_lookup import RemoteLookup
from ciuic.remote.reading.remote_packs import MetaPacks, RemotePacks
from ciuic.remote.reading.remote_snapshots import RemoteSnapshots
from ciuic.remote.reading.retry_policy import RetryPolicy
from ciuic.repository import Repository
from ciuic.repository.chunk_reader import BadCopyError, read_base, unpack
from ciuic.repository.config import CODECS_VERSION, KEYED_VERSION, StoredConfig
from ciuic.repository.disk import Disk
from ciuic.repository.errors import Archived, UnsupportedFormat
from ciuic.repository.locks import Claim
from ciuic.repository.model import PackDamage, PackInfo, PackRecord
from ciuic.repository.writing.writer import Writer


class SpaceReader:
    """State that all readers of one space share: its index, its cache, and what is read ahead.

    Args:
        space: A remote, or the space of one repository in it.
        cache: Cache of the space.
        retry: For sequences of requests that create an object; the requests of ``space`` are repeated by themselves.
        threads: Ranges that are read at the same time.
        memory_bytes: Limit of what is read ahead.
        skips_unreadable: Say nothing of packs whose table cannot be read, unless a snapshot needs them.
    """

    def __init__(
        self,
        space: Remote,
        cache: CacheDirectory,
        retry: RetryPolicy,
        *,
        threads: int = DEFAULT_THREADS,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
        skips_unreadable: bool = False,
    ) -> None:
        self.space = space
        self.skips_unreadable = skips_unreadable
        self.cache = cache
        self.retry = retry
        self.lookup = RemoteLookup(space, cache)
        self.ranges = RangePrefetch(space.objects, threads=threads, memory_bytes=memory_bytes)
        self.meta = MetaPacks(space.objects, cache, self.ranges)
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


# Bytes that are asked for at once, and how many such ranges are read ahead.
_RUN_BYTES: Final = 4 << 20
_AHEAD: Final = 6


def _scrub_remote(
    reader: SpaceReader,
    repository: Repository,
    sizes: Mapping[int, int],
    progress: Callable[[int, int], None] | None,
    goes_on: Callable[[int], bool],
    between: Callable[[], None],
) -> Iterator[PackDamage]:
    """Yield the damage of these packs; see `Repository.scrub`.

    Args:
        reader: Reader of the space.
        repository: The same as a repository, from which bases are read.
        sizes: Size of each pack that is to be checked, by number and in that order.
        progress: Called with (bytes done, bytes in all).
        goes_on: Called with each checked pack.
        between: Called often.
    """
    done_bytes, all_bytes = 0, sum(sizes.values())
    for number, size_bytes in sizes.items():
        # Those below 0 have no table: the caller has reported them.
        if number >= 0:
            try:
                for damage in _scrub_pack(reader, repository, number):
                    between()
                    if damage is not None:
                        yield damage
            except NotFound:
                # A collection removed it meanwhile; what was live in it was copied before.
                pass
            except ArchivedObject as error:
                # Not read, and no damage.
                reader.archived.add(error.name)
            except (DamagedRemote, UnsupportedFormat) as error:
                yield PackDamage(number, 0, None, error.message)
        done_bytes += size_bytes
        if progress is not None:
            progress(done_bytes, all_bytes)
        if not goes_on(number):
            return


def _scrub_pack(reader: SpaceReader, repository: Repository, number: int) -> Iterator[PackDamage | None]:
    """Yield damage, and None for each run of sound records."""
    pack = RemotePackReader(reader.space.sealer, reader.lookup.ref(number))
    objects, tag_bytes = reader.space.objects, pack.layout.seal.tag_bytes
    records = pack.read_table(objects)

    def check_header() -> None:
        (header,) = objects.get_ranges(pack.name, [(0, HEADER_BYTES)])
        pack.layout.check_header(bytes(header))

    read_verified(objects, check_header)
    runs = list(in_runs(records, _RUN_BYTES))
    for at, run in enumerate(runs):
        for ahead in runs[at : at + _AHEAD]:
            reader.ranges.announce(pack.name, *_span(ahead, tag_bytes))
        start, length = _span(run, tag_bytes)
        data = memoryview(reader.ranges.read(pack.name, start, length))
        for record in run:
            begin = record.offset - start
            stored = data[begin : begin + record.stored_bytes + tag_bytes]
            try:
                content = _opened(reader, pack, record, stored)
                _check_content(repository, record, content)
            except DamagedRemote as error:
                yield PackDamage(number, record.offset, record.id, error.reason)
            except BadCopyError as error:
                yield PackDamage(number, record.offset, record.id, str(error))
        yield None


def _opened(reader: SpaceReader, pack: RemotePackReader, record: PackRecord, stored: memoryview) -> bytes:
    """Return the content of a record, which is read again where these bytes do not verify."""
    try:
        return pack.layout.open_record(record.offset, record.stored_bytes, stored, record.checksum)
    except DamagedRemote:
        (content,) = pack.read_records(reader.space.objects, [record])
        return content


def _check_content(repository: Repository, record: PackRecord, stored: bytes) -> None:
    try:
        base = read_base(record.base, repository.chunks.get)
    except Damaged as error:
        raise BadCopyError(error.message) from None
    except Archived:
        # Its bytes are as they were sealed; whether they are the chunk's takes the base.
        return
    content = unpack(stored, record.raw_bytes, record.flags, base=base)
    if repository.identity.chunk_id(content) != record.id:
        raise BadCopyError("its bytes do not match its id")


def _span(run: list[PackRecord], tag_bytes: int) -> tuple[int, int]:
    start, last = run[0].offset, run[-1]
    return start, last.offset + last.stored_bytes + tag_bytes - start


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
        return iter(reader.read_table(self.reader.space.objects))

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

        return {
            numbers[ref]: info.size_bytes
            for info in reader.space.objects.list(PACKS_PREFIX)
            if (ref := parse_pack(info.name)) is not None and ref in numbers
        }

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
        yield from _scrub_remote(self.reader, self, chosen, progress, goes_on, between)

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
