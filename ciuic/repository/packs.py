"""The directory of packs, read: which there are, what each holds, bytes at an offset.

A sealed pack is read from its footer; one without (or with a damaged) footer is scanned, and the scan finds
its way past damage to the next segment. Nothing here decides what is good: payloads are checked by those who
read them.
"""

from __future__ import annotations

import errno
import os
import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from ciuic import page_cache
from ciuic.errors import NotFound
from ciuic.repository import packformat as pf
from ciuic.repository.errors import DamagedPack
from ciuic.repository.model import PackInfo, PackKind, PackRecord
from ciuic.repository.opening import open_regular

_NAME = re.compile(r"([0-9a-f]{16})\.pack\Z")
_OPEN_PACKS = 32
_NOWHERE = 1 << 63
_RESYNC_BYTES = 1 << 20
_MOST_AT_ONCE = 1024
"""Pieces of memory that one call fills."""


class Segment(NamedTuple):
    """One segment as a scan finds it: where, where it ends, what it holds; or, with ``damage``, a stretch of
    rubbish.
    """

    offset: int
    end: int
    records: list[PackRecord]
    damage: DamagedPack | None = None


class Packs:
    """The packs of one repository. Keeps a few descriptors open, so a pack just deleted can still be read to
    its end.
    """

    def __init__(self, directory: str, repository_id: bytes) -> None:
        self.directory = directory
        self.repository_id = repository_id
        self._fds: OrderedDict[int, int] = OrderedDict()

    def path(self, number: int) -> str:
        return f"{self.directory}/{number:016x}.pack"

    def sizes(self) -> dict[int, int]:
        """Size in bytes of every pack, by number, ascending."""
        sizes = {}
        with os.scandir(self.directory) as found:
            for item in found:
                match = _NAME.match(item.name)
                if match:
                    try:
                        sizes[int(match[1], 16)] = item.stat(follow_symlinks=False).st_size
                    except FileNotFoundError:
                        continue  # garbage collection removed it meanwhile
        return dict(sorted(sizes.items()))

    def numbers(self) -> list[int]:
        """Of all packs, in no order."""
        return [int(match[1], 16) for match in map(_NAME.match, os.listdir(self.directory)) if match]

    def facts(self, number: int) -> PackInfo:
        """NotFound."""
        kind = self.kind(number)
        size_bytes = self.size(number)
        return PackInfo(number, kind, size_bytes, self._trailer(number, size_bytes) is not None)

    def header(self, number: int) -> pf.PackHeader:
        return pf.decode_header(self.read(number, 0, pf.ALIGN_BYTES), number, self.repository_id)

    def kind(self, number: int) -> PackKind:
        """As `header` says; "data" where the header is damaged, for it matters to nobody but the layout."""
        try:
            return self.header(number).kind
        except DamagedPack:
            return "data"

    def size(self, number: int) -> int:
        return os.fstat(self._fd(number)).st_size

    def read(self, number: int, offset: int, length: int) -> bytes:
        """Up to ``length`` bytes (fewer only at the end of the file). NotFound when the pack is gone."""
        fd = self._fd(number)
        data = os.pread(fd, length, offset)
        while 0 < len(data) < length:
            more = os.pread(fd, length - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data

    def read_into(self, number: int, offset: int, target: memoryview) -> int:
        """Fills the target; how much of it (less only at the end of the file). NotFound when the pack is gone."""
        fd = self._fd(number)
        done = 0
        while done < len(target):
            got = os.preadv(fd, [target[done:]], offset + done)
            if not got:
                break
            done += got
        return done

    def read_scattered(self, number: int, offset: int, targets: Sequence[memoryview]) -> None:
        """Fills one after the other, as far as the file goes. NotFound when the pack is gone."""
        fd = self._fd(number)
        left = [target for target in targets if len(target)]
        while left:
            got = os.preadv(fd, left[:_MOST_AT_ONCE], offset)
            if not got:
                break
            offset += got
            while left and got >= len(left[0]):
                got -= len(left.pop(0))
            if got:
                left[0] = left[0][got:]

    def descriptor(self, number: int) -> int:
        """For sharing its extents: ours, and good until another pack is asked for. NotFound."""
        return self._fd(number)

    def will_need(self, number: int, offset: int, length: int) -> None:
        """Lets the kernel begin to read. NotFound; OSError where it takes no advice."""
        os.posix_fadvise(self._fd(number), offset, length, os.POSIX_FADV_WILLNEED)

    def records(self, number: int) -> list[PackRecord]:
        """What the pack holds, in the order of their places: from the footer, or by a scan. NotFound."""
        try:
            records = self.footer(number)
        except DamagedPack:
            records = None
        if records is None:
            records = [record for segment in self.scan(number) for record in segment.records]
        return records

    def footer(self, number: int) -> list[PackRecord] | None:
        """The records in the footer; None where there is none; DamagedPack."""
        trailer = self._trailer(number, self.size(number))
        if trailer is None:
            return None
        offset, count = trailer
        length = count * pf.RECORD_BYTES + pf.TRAILER_BYTES
        return pf.decode_footer(self.read(number, offset, length), number, offset)

    def unfinished(self, number: int) -> bool:
        """Whether it has no footer, not even a damaged one."""
        return self._trailer(number, self.size(number)) is None

    def footer_offset(self, number: int) -> int:
        """Where the segments of the pack end: at its footer, or at its end."""
        size_bytes = self.size(number)
        trailer = self._trailer(number, size_bytes)
        return size_bytes if trailer is None else trailer[0]

    def scan(self, number: int, start: int = pf.ALIGN_BYTES) -> Iterator[Segment]:
        """Segments from ``start`` (where one must begin) to the footer or the end; damaged stretches are
        named.

        Records that reach beyond the end of the file are left out, and the segment is named damaged.
        """
        end = self.footer_offset(number)
        offset = start
        while offset < end:
            segment = self._segment(number, offset, end)
            if segment is None:
                reached = self._resync(number, pf.align(offset + 1), end)
                damage = DamagedPack(number, offset, "no segment begins where one must")
                segment = Segment(offset, reached, [], damage)
            yield segment
            offset = pf.align(segment.end)

    @contextmanager
    def left_as_found(self, number: int) -> Iterator[None]:
        """What of the pack was not in the page cache before is not there afterwards. NotFound."""
        fd = os.dup(self._fd(number))  # ours may be closed meanwhile
        try:
            spans = page_cache.cold_spans(fd, 0, os.fstat(fd).st_size)
            yield
            page_cache.drop(fd, spans)
        finally:
            os.close(fd)

    def forget(self, number: int) -> None:
        """Closes the descriptor of a pack, for instance because it has been deleted."""
        fd = self._fds.pop(number, None)
        if fd is not None:
            os.close(fd)

    def close(self) -> None:
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
        whole = [record for record in records if record.offset + record.stored_bytes <= end]
        damage = DamagedPack(number, offset, "the last segment is cut short")
        return Segment(offset, end, whole, damage)

    def _resync(self, number: int, offset: int, end: int) -> int:
        """The first offset from here on where a whole table stands, or the end."""
        while (offset := self._next_data(number, offset)) < end:
            block = self.read(number, offset, _RESYNC_BYTES)
            for at in range(0, len(block), pf.ALIGN_BYTES):
                head = block[at : at + pf.SEGMENT_HEAD_BYTES]
                if pf.decode_segment_head(head, offset + at) and self._segment(number, offset + at, end):
                    return offset + at
            offset += _RESYNC_BYTES
        return end

    def _next_data(self, number: int, offset: int) -> int:
        """The first place from here on, on a boundary, that may not be a hole: a sparse file may claim any length."""
        try:
            at = os.lseek(self._fd(number), offset, os.SEEK_DATA)
        except OSError as error:
            return _NOWHERE if error.errno == errno.ENXIO else offset
        return max(offset, at - at % pf.ALIGN_BYTES)

    def _trailer(self, number: int, size_bytes: int) -> tuple[int, int] | None:
        at = max(0, size_bytes - pf.TRAILER_BYTES)
        return pf.decode_trailer(self.read(number, at, pf.TRAILER_BYTES), size_bytes)

    def _fd(self, number: int) -> int:
        fd = self._fds.get(number)
        if fd is not None:
            self._fds.move_to_end(number)
            return fd
        try:
            fd = open_regular(self.path(number), os.O_RDONLY)
        except OSError as error:
            if error.errno == errno.ENOENT:
                raise NotFound(f"there is no pack {number:016x}") from None
            raise
        if len(self._fds) >= _OPEN_PACKS:
            os.close(self._fds.popitem(last=False)[1])
        self._fds[number] = fd
        return fd
