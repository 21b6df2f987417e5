"""Packs of a remote as a source of records for readers of chunks.

Guarantee: in a sealed remote every byte that is returned was authenticated; elsewhere readers compare it with the chunk's id,
as they do in any case.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from ciuic.errors import Damaged, NotFound
from ciuic.remote.format.names import PackRef, pack_name, split_ref
from ciuic.remote.format.pack import PackLayout
from ciuic.remote.objects.model import ArchivedObject, Objects
from ciuic.remote.objects.verified import read_verified
from ciuic.remote.reading.meta_packs import MetaPacks
from ciuic.remote.reading.range_prefetch import RangePrefetch
from ciuic.remote.sealing.sealer import Sealer
from ciuic.repository.ids import Bytes
from ciuic.repository.model import ChunkLocation

# A layout holds the key of its pack: deriving it takes 30 us.
_MAX_LAYOUTS: Final = 1024


class RemotePacks:
    """`PackSource` of one space of a remote. May be used from several threads.

    Args:
        objects: Store of the space.
        sealer: Seals of it.
        ref: Function that returns the pack of a number in locations, or raises NotFound.
        ranges: Reader of data packs.
        meta: Reader of meta packs.
        on_archived: Called with the name of a pack that cannot be read before it is thawed.
    """

    def __init__(
        self,
        objects: Objects,
        sealer: Sealer,
        ref: Callable[[int], PackRef],
        ranges: RangePrefetch,
        meta: MetaPacks,
        *,
        on_archived: Callable[[str], object] = lambda name: None,
    ) -> None:
        self._objects = objects
        self._sealer = sealer
        self._ref = ref
        self._ranges = ranges
        self._meta = meta
        self._on_archived = on_archived
        self._layouts: dict[PackRef, PackLayout] = {}

    def read(self, number: int, offset: int, length: int) -> bytes:
        """Return the stored bytes of the record at this offset; none where the pack ends before its end."""
        layout = self._layout(number)
        wanted_bytes = length + layout.seal.tag_bytes

        def read() -> bytes:
            data = self._bytes(layout, offset, wanted_bytes)
            try:
                if len(data) < wanted_bytes:
                    raise _CutShort
                return layout.open_record(offset, length, data)
            except (_CutShort, Damaged):
                self._forget(layout)
                raise

        try:
            return read_verified(self._objects, read)
        except _CutShort:
            return b""
        except Damaged as error:
            raise _unreadable(error) from None

    def read_run(self, number: int, records: Iterable[ChunkLocation], start: int, target: memoryview) -> int:
        """Read neighbouring records with one request: the byte at ``start`` + n of the pack to the n-th of the target.

        A record that does not open leaves zeros in the target.
        """
        layout = self._layout(number)
        data = memoryview(self._bytes(layout, start, len(target) + layout.seal.tag_bytes))
        for location in records:
            at = location.offset - start
            if not self._open(layout, location, data[at:], target[at : at + location.stored_bytes]):
                return at
        return len(target)

    def read_scattered(self, number: int, records: Sequence[tuple[ChunkLocation, memoryview]]) -> None:
        """Read neighbouring records with one request, each into its target, as far as the pack goes."""
        layout = self._layout(number)
        start, (last, _) = records[0][0].offset, records[-1]
        length = last.offset + last.stored_bytes + layout.seal.tag_bytes - start
        data = memoryview(self._bytes(layout, start, length))
        for location, target in records:
            if not self._open(layout, location, data[location.offset - start :], target):
                return

    def will_need(self, number: int, offset: int, length: int) -> None:
        """Begin to read a range of a data pack, which reads of its records follow."""
        layout = self._layout(number)
        if split_ref(layout.ref)[0] == "data":
            self._ranges.announce(layout.name, offset, length + layout.seal.tag_bytes)

    def descriptor(self, number: int) -> int:
        """Raise NotFound: a pack of a remote is no file."""
        raise NotFound("a pack of a remote is no file")

    def close(self) -> None:
        """Do nothing: other readers use what is open here as well."""

    def _layout(self, number: int) -> PackLayout:
        ref = self._ref(number)
        layout = self._layouts.get(ref)
        if layout is None:
            if len(self._layouts) >= _MAX_LAYOUTS:
                self._layouts = {}
            layout = self._layouts[ref] = PackLayout(self._sealer, ref, pack_name(ref))
        return layout

    def _bytes(self, layout: PackLayout, offset: int, length: int) -> Bytes:
        if split_ref(layout.ref)[0] == "meta":
            return self._meta.read(layout.name, offset, length)
        try:
            return self._ranges.read(layout.name, offset, length)
        except ArchivedObject:
            self._on_archived(layout.name)
            raise

    def _forget(self, layout: PackLayout) -> None:
        """Forget what is kept of a pack, so that the bucket is read again."""
        self._ranges.forget(layout.name)
        if split_ref(layout.ref)[0] == "meta":
            self._meta.forget(layout.name)

    def _open(
        self, layout: PackLayout, location: ChunkLocation, data: memoryview, target: memoryview
    ) -> bool:
        """Write the record at the beginning of ``data`` to the target; False where the pack ends before its end."""
        end = location.stored_bytes + layout.seal.tag_bytes
        if len(data) < end:
            return False
        try:
            layout.seal.open_into(location.offset, data[:end], target)
        except Damaged:
            # It matches no id then, except by content that is right: readers ask for it once more, alone.
            target[:] = bytes(len(target))
        return True


class _CutShort(Damaged):
    """A pack ends before the end of a record."""

    def __init__(self) -> None:
        super().__init__("the pack ends before the end of the record")


def _unreadable(error: Damaged) -> OSError:
    return OSError(errno.EBADMSG, error.message)
