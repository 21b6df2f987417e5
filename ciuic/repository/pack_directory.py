"""The directory of packs, for reading: which packs there are, their records, bytes at an offset.

A sealed pack is read from its footer; one without a footer, or with a damaged one, is scanned, and the scan
continues at the next segment after damage. Nothing here decides what is good: the readers check payloads.
"""

from __future__ import annotations

import errno
import os
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from ciuic.errors import NotFound
from ciuic.repository import pack_format as pf
from ciuic.repository.errors import DamagedPack
from ciuic.repository.identity import HashName
from ciuic.repository.model import ChunkLocation, PackInfo, PackKind, PackRecord
from ciuic.system.disk import open_regular

_NAME = re.compile(r"([0-9a-f]{16})\.pack\Z")
# Descriptors kept open; the least recently used one is closed first.
_OPEN_PACKS = 32
# Beyond the end of every file.
_NOWHERE = 1 << 63
# Size of one read in the search for the next segment after damage.
_RESYNC_BYTES = 1 << 20
# Limit of buffers that one preadv(2) fills (UIO_MAXIOV).
_MAX_IOVECS = 1024


class Segment(msgspec.Struct, frozen=True):
    """Segment as a scan finds it; with ``damage``, a stretch of unreadable bytes."""

    offset: int
    end: int
    records: list[PackRecord]
    damage: DamagedPack | None = None


class Packs:
    """Packs of one repository: the `PackSource` of a directory.

    Keeps a few descriptors open, so that a pack just deleted can still be read to its end.
    """

    def __init__(self, directory: str, repository_id: bytes, hash_name: HashName) -> None:
        self.directory = directory
        self.repository_id = repository_id
        self.hash_name: HashName = hash_name
        # The least recently used first.
        self._fds: OrderedDict[int, int] = OrderedDict()
        self._dropped = bytearray(pf.ALIGN_BYTES)

    def reopen(self) -> Packs:
        """Return the same packs with descriptors of their own, for another thread."""
        return Packs(self.directory, self.repository_id, self.hash_name)

    def path(self, number: int) -> str:
        """Return the path of a pack."""
        return f"{self.directory}/{number:016x}.pack"

    def sizes(self) -> dict[int, int]:
        """Return the size in bytes of every pack, by number, ascending."""
        sizes = {}
        with os.scandir(self.directory) as found:
            for item in found:
                match = _NAME.match(item.name)
                if match:
                    try:
                        sizes[int(match[1], 16)] = item.stat(follow_symlinks=False).st_size
                    except FileNotFoundError:
                        # Prune removed it meanwhile.
                        continue
        return dict(sorted(sizes.items()))

    def numbers(self) -> list[int]:
        """Return the numbers of all packs, in no order."""
        return [int(match[1], 16) for match in map(_NAME.match, os.listdir(self.directory)) if match]

    def facts(self, number: int) -> PackInfo:
        """Return number, kind, size and state of a pack.

        Raises:
            NotFound: the pack is gone.
        """
        kind = self.kind(number)
        size_bytes = self.size(number)
        return PackInfo(number, kind, size_bytes, self._trailer(number, size_bytes) is not None)

    def header(self, number: int) -> pf.PackHeader:
        """Return the header of a pack.

        Raises:
            DamagedPack: its structure is damaged.
            UnsupportedFormat: a later version of ciuic wrote it.
            NotFound: the pack is gone.
        """
        return pf.decode_header(
            self.read(number, 0, pf.ALIGN_BYTES), number, self.repository_id, self.hash_name
        )

    def kind(self, number: int) -> PackKind:
        """Return the kind in the header; "data" if it is damaged: only the layout depends on it."""
        try:
            return self.header(number).kind
        except DamagedPack:
            return "data"

    def size(self, number: int) -> int:
        """Return the current size of a pack.

        Raises:
            NotFound: the pack is gone.
        """
        return os.fstat(self.descriptor(number)).st_size

    def read(self, number: int, offset: int, length: int) -> bytes:
        """Return up to ``length`` bytes, fewer only at the end of the file.

        NotFound when the pack is gone.
        """
        fd = self.descriptor(number)
        data = os.pread(fd, length, offset)
        # A short read is no error (pread(2)).
        while 0 < len(data) < length:
            more = os.pread(fd, length - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data

    def read_into(self, number: int, offset: int, target: memoryview) -> int:
        """Fill the target and return how much was read, less only at the end of the file.

        Raises:
            NotFound: the pack is gone.
        """
        fd = self.descriptor(number)
        done = 0
        while done < len(target):
            got = os.preadv(fd, [target[done:]], offset + done)
            if not got:
                break
            done += got
        return done

    def read_run(self, number: int, records: Iterable[ChunkLocation], start: int, target: memoryview) -> int:
        """Read like `read_into`: records lie in the file as they are."""
        return self.read_into(number, start, target)

    def read_scattered(self, number: int, records: Sequence[tuple[ChunkLocation, memoryview]]) -> None:
        """Read each record into its target, as far as the file goes. NotFound when the pack is gone."""
        offset = end = records[0][0].offset
        left: list[memoryview] = []
        for location, target in records:
            if location.offset > end:
                left.append(self._gap(location.offset - end))
            if len(target):
                left.append(target)
            end = location.offset + len(target)
        self._fill(number, offset, left)

    def _gap(self, length: int) -> memoryview:
        """Return a buffer for bytes that are read and dropped."""
        if length > len(self._dropped):
            self._dropped = bytearray(length)
        return memoryview(self._dropped)[:length]

    def _fill(self, number: int, offset: int, left: list[memoryview]) -> None:
        """Fill one buffer after the other."""
        fd = self.descriptor(number)
        while left:
            got = os.preadv(fd, left[:_MAX_IOVECS], offset)
            if not got:
                break
            offset += got
            while left and got >= len(left[0]):
                got -= len(left.pop(0))
            if got:
                left[0] = left[0][got:]

    def will_need(self, number: int, offset: int, length: int) -> None:
        """Let the kernel start reading. NotFound; OSError where it takes no advice."""
        os.posix_fadvise(self.descriptor(number), offset, length, os.POSIX_FADV_WILLNEED)

    def records(self, number: int) -> list[PackRecord]:
        """Return the records of the pack in order of position, from the footer or by a scan.

        Raises:
            NotFound: the pack is gone.
        """
        try:
            records = self.footer(number)
        except DamagedPack:
            records = None
        if records is None:
            records = [record for segment in self.scan(number) for record in segment.records]
        return records

    def strict_records(self, number: int) -> list[PackRecord]:
        """Return every record of the pack, from the footer or a scan that finds no damage.

        Raises:
            DamagedPack: a record may be missing from the list.
            NotFound: the pack was deleted.
        """
        try:
            records = self.footer(number)
        except DamagedPack:
            # A scan that finds no damage is as good.
            records = None
        if records is None:
            records = []
            for segment in self.scan(number):
                if segment.damage is not None:
                    raise segment.damage
                records += segment.records
        return records

    def footer(self, number: int) -> list[PackRecord] | None:
        """Return the records in the footer; None if there is none.

        Raises:
            DamagedPack: its structure is damaged.
        """
        trailer = self._trailer(number, self.size(number))
        if trailer is None:
            return None
        offset, count = trailer
        length = count * pf.RECORD_BYTES + pf.TRAILER_BYTES
        return pf.decode_footer(self.read(number, offset, length), number, offset)

    def unfinished(self, number: int) -> bool:
        """Return whether the pack has no footer, not even a damaged one."""
        return self._trailer(number, self.size(number)) is None

    def footer_offset(self, number: int) -> int:
        """Return where the segments of the pack end: at its footer, or at its end."""
        size_bytes = self.size(number)
        trailer = self._trailer(number, size_bytes)
        return size_bytes if trailer is None else trailer[0]

    def scan(self, number: int, start: int = pf.ALIGN_BYTES) -> Iterator[Segment]:
        """Yield segments and damaged stretches from ``start``, where one must begin, to the footer or end.

        Records that reach beyond the end of the file are left out, and their segment is marked damaged.
        """
        end = self.footer_offset(number)
        offset = start
        while offset < end:
            segment = self._segment(number, offset, end)
            if segment is None:
                reached = self._resync(number, pf.align(offset + 1), end)
                damage = DamagedPack(number, offset, "a segment must begin here, and none does")
                segment = Segment(offset, reached, [], damage)
            yield segment
            offset = pf.align(segment.end)

    @contextmanager
    def page_cache_preserved(self, number: int) -> Iterator[None]:
        """Drop from the page cache afterwards what of the pack was not in it before.

        Raises:
            NotFound: the pack is gone.
        """
        # Imported here: readers need no ctypes (2 ms).
        from ciuic.system import page_cache

        # A duplicate, because the cached descriptor may be closed meanwhile.
        fd = os.dup(self.descriptor(number))
        try:
            spans = page_cache.cold_spans(fd, 0, os.fstat(fd).st_size)
            try:
                yield
            finally:
                page_cache.drop(fd, spans)
        finally:
            os.close(fd)

    def forget(self, number: int) -> None:
        """Close the descriptor of a pack, for instance because it has been deleted."""
        fd = self._fds.pop(number, None)
        if fd is not None:
            os.close(fd)

    def close(self) -> None:
        """Close all descriptors."""
        while self._fds:
            self.forget(next(iter(self._fds)))

    def _segment(self, number: int, offset: int, end: int) -> Segment | None:
        head = pf.decode_segment_head(self.read(number, offset, pf.SEGMENT_HEAD_BYTES), offset)
        if head is None:
            return None
        try:
            table = self.read(number, offset, head.table_bytes)
            records = pf.decode_table(table, number, offset, head)
        except DamagedPack:
            return None
        segment_end = offset + head.table_bytes + head.payload_bytes
        if segment_end <= end:
            return Segment(offset, segment_end, records)
        # The file ends before the other payloads, as after a crash.
        whole = [record for record in records if record.offset + record.stored_bytes <= end]
        damage = DamagedPack(number, offset, "the last segment is cut short")
        return Segment(offset, end, whole, damage)

    def _resync(self, number: int, offset: int, end: int) -> int:
        """Return the first offset from here on where a whole table stands, or the end."""
        while (offset := self._next_data(number, offset)) < end:
            block = self.read(number, offset, _RESYNC_BYTES)
            # Segments begin at multiples of 4096.
            for at in range(0, len(block), pf.ALIGN_BYTES):
                head = block[at : at + pf.SEGMENT_HEAD_BYTES]
                # The head in memory first: only where it fits is a table read, which may take megabytes.
                if pf.decode_segment_head(head, offset + at) and self._segment(number, offset + at, end):
                    return offset + at
            offset += _RESYNC_BYTES
        return end

    def _next_data(self, number: int, offset: int) -> int:
        """Return the first aligned offset from here on that may not be a hole.

        A sparse file may claim any length; SEEK_DATA skips its holes at once.
        """
        try:
            at = os.lseek(self.descriptor(number), offset, os.SEEK_DATA)
        except OSError as error:
            # ENXIO: nothing but a hole up to the end. Any other error: the file system cannot say, so all is
            # read.
            return _NOWHERE if error.errno == errno.ENXIO else offset
        return max(offset, at - at % pf.ALIGN_BYTES)

    def _trailer(self, number: int, size_bytes: int) -> tuple[int, int] | None:
        at = max(0, size_bytes - pf.TRAILER_BYTES)
        return pf.decode_trailer(self.read(number, at, pf.TRAILER_BYTES), size_bytes)

    def descriptor(self, number: int) -> int:
        """Return the descriptor of a pack, valid until another pack is used, to read or to share its extents.

        Raises:
            NotFound: the pack is gone, or something else than a file has its name.
        """
        fd = self._fds.get(number)
        if fd is not None:
            self._fds.move_to_end(number)
            return fd
        try:
            fd = open_regular(self.path(number), os.O_RDONLY)
        except OSError as error:
            if error.errno == errno.ENOENT:
                raise NotFound(f"there is no pack {number:016x}") from None
            if error.errno == errno.EINVAL:
                raise NotFound(
                    f"what has the name of the pack {number:016x} is no regular file",
                    hint=f"move it away, and put the pack there again if you have it: {self.path(number)}",
                ) from None
            raise
        if len(self._fds) >= _OPEN_PACKS:
            os.close(self._fds.popitem(last=False)[1])
        self._fds[number] = fd
        return fd
