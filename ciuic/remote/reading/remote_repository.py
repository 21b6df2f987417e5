"""Space of a remote as a repository that can be read: lookup of its chunks, the state its readers share, the check of every byte.

Everything that only reads works on it: list, show, diff, verify, restore. Guarantees: content is compared with its chunk id by
the same readers as that of a local repository; nothing is written to the remote.

The index in the cache directory only says where to look. It may be behind the bucket, and its file may have decayed: a chunk
that it lacks, or whose copies cannot be read, leads to a new listing of packs, then to the tables of the packs that it was
said to be in, and at last to an index that is made anew.

Until an index is complete, tables are read as chunks are asked for, in the order of `TableOrder`. Every table of a remote of
5 TB takes minutes; a restore needs those of the packs that hold its chunks. First come the packs that were uploaded for the
snapshots that were chosen, which their manifests name: for a training state these are nearly all. What they lack was stored
for an earlier snapshot, or by another host at about the same time, or in the very first one, as weights that a training never
changes. Tables of trees come before those of data, because a restore walks trees first.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Final, TypeVar

from ciuic.errors import Damaged, NotFound, NotPermitted
from ciuic.remote.access import Remote
from ciuic.remote.errors import DamagedRemote
from ciuic.remote.log_reader import DamagedLog, LogReader, RolledBack, Rounds, UnloggedManifest
from ciuic.remote.object_names import PACKS_PREFIX, PackRef, pack_name, parse_pack, split_ref
from ciuic.remote.objects.model import ArchivedObject, ObjectInfo, RemoteUnreachable, read_verified
from ciuic.remote.pack import HEADER_BYTES, RemotePackReader, in_runs
from ciuic.remote.reading.cache_directory import CacheDirectory
from ciuic.remote.reading.remote_packs import (
    DEFAULT_MEMORY_BYTES,
    DEFAULT_THREADS,
    MetaPacks,
    RangePrefetch,
    RemotePacks,
)
from ciuic.remote.reading.remote_snapshots import RemoteSnapshots
from ciuic.remote.reading.retry_policy import RetryPolicy
from ciuic.remote.remote_index import IndexRefresh, RemoteIndex, RemotePack, read_ahead
from ciuic.repository import Repository
from ciuic.repository import log as events
from ciuic.repository.chunk_reader import BadCopyError, read_base, unpack
from ciuic.repository.config import CODECS_VERSION, KEYED_VERSION, StoredConfig
from ciuic.repository.errors import Archived, UnsupportedFormat
from ciuic.repository.index_database import discard
from ciuic.repository.locks import Claim
from ciuic.repository.model import ChunkLocation, PackDamage, PackInfo, PackRecord
from ciuic.system.disk import Disk

if TYPE_CHECKING:
    from ciuic.repository.writing.writer import Writer

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


_Result = TypeVar("_Result")
# A remote without a thousand chunks would otherwise be listed a thousand times.
_MIN_SECONDS_BETWEEN_LISTINGS: Final = 60.0
# What a decayed index file raises: a flipped byte may also make a number a text.
_UNREADABLE: Final = (sqlite3.Error, ValueError, TypeError)


class RemoteLookup:
    """`ChunkLookup` of one space of a remote, which reads tables as they are needed. May be used from several threads."""

    def __init__(
        self,
        space: Remote,
        cache: CacheDirectory,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._space = space
        self._cache = cache
        self._now = now
        # SQLite's connection is used by one thread at a time.
        self._lock = threading.RLock()
        self._opened: RemoteIndex | None = None
        self._is_ended = False
        self._path: str | None = None
        self._closing = ExitStack()
        self._listed_at: float | None = None
        self._unreadable: dict[PackRef, str] = {}
        # Packs whose tables were read by this process.
        self._reread: set[PackRef] = set()
        self._is_fresh = False
        self._archived: set[PackRef] = set()
        self._order = TableOrder()
        # Last finished round before the index lists its packs for the first time; None where it is complete.
        self._incomplete_since: int | None = None

    def avoid(self, refs: Iterable[PackRef]) -> None:
        """Return copies in these packs after all others: they cannot be read before they are thawed."""
        with self._lock:
            self._archived.update(refs)

    def prefer(self, refs: Iterable[PackRef], around_ns: int) -> None:
        """Look into these packs first, and into others that were stored at about this time: a snapshot of them is read."""
        with self._lock:
            self._order.prefer(refs, around_ns)

    def find(self, chunk: bytes) -> list[ChunkLocation]:
        """Return known copies, the best first."""
        with self._lock:
            found = self._ask(lambda index: index.find(chunk))
            while not found and self._read_more():
                found = self._ask(lambda index: index.find(chunk))
        if len(found) > 1 and self._archived:
            found.sort(key=lambda location: self._is_archived(location.pack))
        return found

    def find_many(self, chunks: Sequence[bytes]) -> dict[bytes, ChunkLocation]:
        """Return the copy to read first for each chunk that is known."""
        with self._lock:
            found = self._known(chunks)
            while (missing := [chunk for chunk in chunks if chunk not in found]) and self._read_more():
                found.update(self._known(missing))
        if self._archived:
            for chunk, location in found.items():
                if self._is_archived(location.pack):
                    found[chunk] = self.find(chunk)[0]
        return found

    def _known(self, chunks: Sequence[bytes]) -> dict[bytes, ChunkLocation]:
        return self._ask(lambda index: index.find_many(chunks))

    def search(self, chunk: bytes, failed: list[ChunkLocation]) -> list[ChunkLocation]:
        """Search harder: in packs that the index does not know, and in the tables of those that it is wrong about."""
        with self._lock:
            # Another thread may have listed the packs since the copies failed.
            found = self.find(chunk)
            for step in (self._list_again, self._read_tables_of, self._make_anew):
                if any(location not in failed for location in found):
                    break
                if step(found):
                    found = self.find(chunk)
            return found

    def _read_more(self) -> bool:
        """Read tables of packs that an incomplete index lacks; False if there are none."""
        return self._ask(self._read_more_into)

    def _read_more_into(self, index: RemoteIndex) -> bool:
        if self._incomplete_since is None:
            return False
        known, order = index.known, self._order
        refs = order.take_preferred(known)
        if not refs:
            if order.listed is None:
                listed, _ = index.drop_missing(self._space.objects)
                self._listed_at = self._now()
                order.found(listed, known)
            refs = order.take(known)
        if not refs:
            index.mark_complete(self._incomplete_since)
            self._incomplete_since = None
            return False
        try:
            self._learn(index, refs)
        except BaseException:
            order.put_back(refs)
            raise
        return True

    def _list_again(self, found: list[ChunkLocation]) -> bool:
        """List the packs that are there, unless that was done just now."""
        if self._listed_at is not None and self._now() - self._listed_at <= _MIN_SECONDS_BETWEEN_LISTINGS:
            return False
        self.refresh()
        return True

    def _read_tables_of(self, found: list[ChunkLocation]) -> bool:
        """Read the tables of these packs, unless this process has read them."""
        if self._is_fresh:
            return False
        refs = {self.ref(location.pack) for location in found} - self._reread
        self._reread |= refs
        space = self._space
        if refs:
            self._ask(lambda index: index.reread(space.objects, space.sealer, refs))
        return bool(refs)

    def _make_anew(self, found: list[ChunkLocation]) -> bool:
        """Make the index anew in memory if it has no row of the chunk and was not made by this process."""
        if found or self._is_fresh:
            return False
        self._replace()
        return True

    def close(self) -> None:
        """Do nothing: other readers use the lookup as well. See `end`."""

    def end(self) -> None:
        """Close the index. Later calls, as of threads that are still running, raise RemoteUnreachable."""
        with self._lock:
            self._is_ended = True
            self._closing.close()
            self._opened = None

    def ref(self, number: int) -> PackRef:
        """Return the pack of this number in locations.

        Raises:
            NotFound: a collection has removed it.
        """
        with self._lock:
            try:
                return self._ask(lambda index: index.ref(number))
            except KeyError:
                raise NotFound(f"the remote has no pack {number} any more") from None

    def _is_archived(self, number: int) -> bool:
        try:
            return self.ref(number) in self._archived
        except NotFound:
            return False

    def refresh(self) -> IndexRefresh:
        """List the packs that are there, and read the tables of new ones."""
        with self._lock:
            return self._ask(self._list)

    def forget(self, refs: Iterable[PackRef]) -> None:
        """Forget packs until the next listing, such as those whose tables decayed after they were read."""
        with self._lock:
            self._index().drop(refs)

    def packs(self) -> dict[int, RemotePack]:
        """Return every pack whose table could be read, by its number."""
        return self._ask(
            lambda index: {
                number: pack for pack in index.packs() if (number := index.number(pack.ref)) is not None
            }
        )

    def unreadable(self) -> dict[PackRef, str]:
        """Return the packs whose table cannot be read, with the reason, as of the last listing."""
        with self._lock:
            return dict(self._unreadable)

    def _ask(self, question: Callable[[RemoteIndex], _Result]) -> _Result:
        with self._lock:
            try:
                return question(self._index())
            except _UNREADABLE as error:
                # A cache: the bucket says all that is in it.
                events.warning("remote_index_unreadable", error=str(error))
                return question(self._replace())

    def _replace(self) -> RemoteIndex:
        """Return an index in memory, made from the bucket; the file is deleted."""
        # Before the lock is given back: another process may make its index there at once.
        if self._path is not None:
            discard(self._path)
            with suppress(OSError):
                os.unlink(f"{self._path}.logs")
        self._closing.close()
        self._opened = self._new(None)
        return self._opened

    def _index(self) -> RemoteIndex:
        if self._is_ended:
            raise RemoteUnreachable("the remote was closed meanwhile")
        if self._opened is None:
            self._path = self._closing.enter_context(self._cache.index_path())
            try:
                self._opened = self._new(self._path)
            # That the remote is older than it was has been ruled out when its snapshots were listed.
            except (*_UNREADABLE, RolledBack) as error:
                events.warning("remote_index_unreadable", error=str(error))
                self._opened = self._replace()
        return self._opened

    def _new(self, path: str | None) -> RemoteIndex:
        """Return an index of everything that the logs name."""
        space = self._space
        index = RemoteIndex.open(path)
        self._closing.callback(index.close)
        self._is_fresh = index.rounds_finished is None and not index.known
        rounds = Rounds(space.objects, space.sealer, known=index.rounds_finished)
        # Apart from the logs that the list of snapshots has read: these are the entries that the index lacks.
        reader = LogReader(
            space.objects,
            space.sealer,
            cache_path=None if path is None else f"{path}.logs",
            skip_damaged=True,
        )
        # At once: over a long way each is several round trips.
        with ThreadPoolExecutor(1, thread_name_prefix="rounds") as pool:
            refreshed = pool.submit(rounds.refresh)
            news = reader.refresh()
        sound = True
        try:
            refreshed.result()
            index.follow(rounds)
        except RolledBack:
            raise
        except (Damaged, UnsupportedFormat) as error:
            # Rounds matter to those who write. A reader finds what is there by a listing.
            events.warning("remote_round_unreadable", error=error.message)
            sound = False
        self._order.restart()
        self._incomplete_since = None
        if index.rounds_finished is None and sound:
            self._incomplete_since = index.rounds_known
        elif not sound or not news.complete:
            self._list(index)
        else:
            self._learn(index, news.packs)
        return index

    def _learn(self, index: RemoteIndex, refs: Iterable[PackRef]) -> None:
        space, listed = self._space, self._order.listed
        result = index.learn(space.objects, space.sealer, refs, listed)
        self._unreadable.update(result.unreadable)
        self._warn(result)

    def _list(self, index: RemoteIndex) -> IndexRefresh:
        result = index.refresh(self._space.objects, self._space.sealer)
        self._listed_at = self._now()
        self._incomplete_since = None
        self._unreadable = dict(result.unreadable)
        self._warn(result)
        return result

    def _warn(self, result: IndexRefresh) -> None:
        for ref, reason in result.unreadable.items():
            events.warning("remote_pack_unreadable", pack=pack_name(ref), reason=reason)


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
_PACKS_AT_ONCE: Final = 6


def _scrub_remote(
    reader: SpaceReader,
    repository: RemoteRepository,
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
    own = threading.local()

    def scrub(number: int) -> list[PackDamage]:
        if not hasattr(own, "repository"):
            own.repository = repository.reopen()
        return _damages(reader, own.repository, number)

    # Small packs take three requests each, one after the other, and mostly wait for the store.
    for number, damages in read_ahead(scrub, sizes, _PACKS_AT_ONCE, _PACKS_AT_ONCE - 1):
        yield from damages
        between()
        done_bytes += sizes[number]
        if progress is not None:
            progress(done_bytes, all_bytes)
        if not goes_on(number):
            return


def _damages(reader: SpaceReader, repository: Repository, number: int) -> list[PackDamage]:
    # Those below 0 have no table: the caller has reported them.
    if number < 0:
        return []
    found: list[PackDamage] = []
    try:
        found.extend(_scrub_pack(reader, repository, number))
    except NotFound:
        # A collection removed it meanwhile; what was live in it was copied before.
        pass
    except ArchivedObject as error:
        # Not read, and no damage.
        reader.archived.add(error.name)
    except (DamagedRemote, UnsupportedFormat) as error:
        found.append(PackDamage(number, 0, None, error.message))
    return found


def _scrub_pack(reader: SpaceReader, repository: Repository, number: int) -> Iterator[PackDamage]:
    """Yield the damage of the records of a pack."""
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
        place = self.reader.space.objects.url
        try:
            return f"{place}/{pack_name(self._ref(number))}"
        except NotFound:
            return place

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
