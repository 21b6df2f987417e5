"""Read the copies that stay, before others of the same chunks are deleted.

A copy may have decayed in the store since it was written. Of two copies a collection must not delete the sound one.
What is read is bounded by the packs that are about to go: one record for each chunk in them that a snapshot needs,
with its bases, and the tables of the packs that have these.
"""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

from ciuic.errors import Damaged
from ciuic.remote.collection.marking import LiveChunks, live_groups
from ciuic.remote.format.names import PackRef
from ciuic.remote.format.pack_reader import RemotePackReader, in_runs
from ciuic.remote.index.remote_index import RemoteIndex
from ciuic.remote.log.inline_pool import InlinePool
from ciuic.remote.objects.model import ArchivedObject, NoSuchObject, Objects
from ciuic.remote.sealing.sealer import Sealer
from ciuic.repository.errors import UnsupportedFormat
from ciuic.repository.model import ChunkLocation, PackRecord

# Stored bytes of the records that one request asks for; each thread has as much in memory.
_READ_BYTES: Final = 4 << 20
_THREADS: Final = 4


class _Copy(NamedTuple):
    chunk: bytes
    pack: int


class KeptCopies:
    """Copies in packs that stay, as far as they were read. For one thread.

    Args:
        objects: The remote.
        sealer: Its seals.
        index: Index of the remote, complete.
        trusted: Packs that this process has just written from verified records.
        threads: Packs that are read at the same time.
    """

    def __init__(
        self,
        objects: Objects,
        sealer: Sealer,
        index: RemoteIndex,
        trusted: Collection[PackRef] = (),
        threads: int = _THREADS,
    ) -> None:
        self._objects = objects
        self._sealer = sealer
        self._index = index
        self._trusted = frozenset(trusted)
        self._threads = threads
        self._whole: dict[_Copy, bool] = {}
        self.read_bytes = 0
        """Stored bytes of the records that were read."""
        self.decayed: set[PackRef] = set()
        """Packs with a table or a record that could not be read; without archived ones, which nothing was read of."""
        self._archived: set[PackRef] = set()

    def keep_sound(self, live: LiveChunks, doomed: Collection[int]) -> set[int]:
        """Return those of the packs without which each live chunk has a whole copy.

        A chunk without one keeps all packs that have it: which of these copies is the best is not known.
        """
        left = set(doomed)
        needed = {
            chunk: {copy.pack for copy in copies}
            for chunk, copies in live_groups(self._index, live)
            if any(copy.pack in left for copy in copies)
        }
        for chunk in needed.keys() - self.whole_elsewhere(needed, left):
            left -= needed[chunk]
        return left

    def whole_elsewhere(self, chunks: Collection[bytes], without: Collection[int]) -> set[bytes]:
        """Return those of the chunks that can be read, bases included, from packs other than ``without``."""
        while True:
            chosen = self._choose(chunks, without)
            wanted: dict[int, set[bytes]] = {}
            for chunk, place in chosen.items():
                if _Copy(chunk, place.pack) not in self._whole:
                    wanted.setdefault(place.pack, set()).add(chunk)
            if wanted:
                self._read(wanted)
                continue
            usable = _usable(chosen)
            if usable == chosen.keys():
                return {chunk for chunk in chunks if chunk in usable}
            # Differences whose bases are found nowhere.
            for chunk in chosen.keys() - usable:
                self._whole[_Copy(chunk, chosen[chunk].pack)] = False

    def _choose(self, chunks: Collection[bytes], without: Collection[int]) -> dict[bytes, ChunkLocation]:
        """Return a copy of each of the chunks, and of each base of these, that may be whole."""
        chosen: dict[bytes, ChunkLocation] = {}
        seen: set[bytes] = set()
        todo = list(chunks)
        while todo:
            chunk = todo.pop()
            if chunk in seen:
                continue
            seen.add(chunk)
            places = [
                place
                for place in self._index.find(chunk)
                if place.pack not in without and self._whole.get(_Copy(chunk, place.pack), True)
            ]
            if places:
                # One that needs no other first.
                place = min(places, key=lambda place: (bool(place.base), place.pack))
                chosen[chunk] = place
                if place.base:
                    todo.append(place.base)
        return chosen

    def _read(self, wanted: dict[int, set[bytes]]) -> None:
        refs = {number: self._index.ref(number) for number in wanted}

        def read(number: int) -> dict[bytes, int]:
            return self._whole_records(refs[number], wanted[number])

        with ThreadPoolExecutor(self._threads) if self._threads > 1 else InlinePool() as pool:
            for number, whole in zip(wanted, pool.map(read, wanted), strict=True):
                self.read_bytes += sum(whole.values())
                if len(whole) < len(wanted[number]) and refs[number] not in self._archived:
                    self.decayed.add(refs[number])
                for chunk in wanted[number]:
                    self._whole[_Copy(chunk, number)] = chunk in whole

    def _whole_records(self, ref: PackRef, chunks: set[bytes]) -> dict[bytes, int]:
        """Return the stored bytes of those of these chunks whose records in a pack are whole."""
        if ref in self._trusted:
            return dict.fromkeys(chunks, 0)
        reader = RemotePackReader(self._sealer, ref)
        try:
            records = [record for record in reader.read_table(self._objects) if record.id in chunks]
        except ArchivedObject:
            self._archived.add(ref)
            return {}
        except (NoSuchObject, Damaged, UnsupportedFormat):
            return {}
        return {
            record.id: record.stored_bytes
            for some in in_runs(records, _READ_BYTES)
            for record in self._whole_of(reader, some)
        }

    def _whole_of(self, reader: RemotePackReader, records: list[PackRecord]) -> list[PackRecord]:
        try:
            for _ in reader.read_records(self._objects, records):
                pass
            return records
        # What cannot be read is not known to be whole, so the other copies stay.
        except ArchivedObject:
            self._archived.add(PackRef(reader.ref))
            return []
        except NoSuchObject:
            return []
        except Damaged:
            # Which one it is shows when each is read alone.
            half = len(records) // 2
            if not half:
                return []
            return self._whole_of(reader, records[:half]) + self._whole_of(reader, records[half:])


def _usable(chosen: dict[bytes, ChunkLocation]) -> set[bytes]:
    """Return the chunks whose copies rest, base after base, on one that needs no other."""
    usable = {chunk for chunk, place in chosen.items() if not place.base}
    while more := {chunk for chunk, place in chosen.items() if chunk not in usable and place.base in usable}:
        usable |= more
    return usable
