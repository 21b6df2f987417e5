"""Structure of HDF5: the superblock, and every object that can be reached from the root group by structures of the first version.

The superblock is written last, and says how long the file is. A file that was copied into allocated space has a complete superblock
and lacks what follows: so objects, their tables of names and the places of their data are followed, as far as the default format of
the library (`libver="earliest"`) has them. A file with newer structures ends with a checksum in none of its parts that can be found
without them; it is not judged.

Every structure on the way has to have its signature, and every address has to lie in the file. Objects are followed once, without
recursion, and there is a limit of them.

References:
    HDF5 File Format Specification, version 3.0, sections II to IV
    https://burtleburtle.net/bob/c/lookup3.c (hashlittle; the checksum of newer structures)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from ciuic.verdicts.model import BoundedReader, NotJudged, OtherFormat, Piece, Structure, TornContent

_MASK: Final = 0xFFFFFFFF


def lookup3(data: bytes) -> int:
    """Return the 32-bit hash of some bytes with the initial value 0."""
    a = b = c = (0xDEADBEEF + len(data)) & _MASK
    at = 0
    while len(data) - at > 12:
        x, y, z = _words(data[at : at + 12])
        a, b, c = _mix((a + x) & _MASK, (b + y) & _MASK, (c + z) & _MASK)
        at += 12
    if at == len(data):
        return c
    x, y, z = _words(data[at:].ljust(12, b"\0"))
    return _final((a + x) & _MASK, (b + y) & _MASK, (c + z) & _MASK)


def _words(part: bytes) -> tuple[int, int, int]:
    return tuple(int.from_bytes(part[at : at + 4], "little") for at in (0, 4, 8))  # type: ignore[return-value]


def _turned(value: int, bits: int) -> int:
    return ((value << bits) | (value >> (32 - bits))) & _MASK


def _mix(a: int, b: int, c: int) -> tuple[int, int, int]:
    for bits in (4, 6, 8, 16, 19, 4):
        # The three variables take turns: (a, c), (b, a), (c, b).
        a = ((a - c) & _MASK) ^ _turned(c, bits)
        c = (c + b) & _MASK
        a, b, c = b, c, a
    return a, b, c


def _final(a: int, b: int, c: int) -> int:
    for bits in (14, 11, 25, 16, 4, 14, 24):
        c = ((c ^ b) - _turned(b, bits)) & _MASK
        a, b, c = b, c, a
    # After seven turns of three variables the hash stands in `b`.
    return b


UNDEFINED: Final = (1 << 64) - 1
"""Address of what has no place in the file."""
_MAX_OBJECTS: Final = 1 << 16
_MAX_NODES: Final = 1 << 16
_MAX_DATA: Final = 1 << 18
_MAX_MESSAGES: Final = 1 << 14
_MAX_CHECKED_BYTES: Final = 4 << 20
_MAX_VARIABLE_BYTES: Final = 1 << 20
_GROUP_ENTRY_BYTES: Final = 40
_FLOAT: Final = 1
_VARIABLE_LENGTH: Final = 9
"""Class of a type: items are references into global heaps."""
_LINK_INFO, _TYPE, _LINK, _LAYOUT, _ATTRIBUTE, _CONTINUATION, _SYMBOLS = (
    0x02,
    0x03,
    0x06,
    0x08,
    0x0C,
    0x10,
    0x11,
)
_EXTERNAL: Final = 0x07


class ObjectData(NamedTuple):
    """Range of a file with numbers of a dataset."""

    start: int
    stop: int
    item_bytes: int


class Hdf5File:
    """Structures at addresses of a file."""

    def __init__(self, reader: BoundedReader, base: int) -> None:
        self._reader = reader
        self._base = base
        self._left_checked_bytes = _MAX_CHECKED_BYTES
        self.structures: list[Piece] = []
        """Ranges of all structures that were read."""

    def at(self, address: int, length: int, what: str, *, used_bytes: int | None = None) -> bytes:
        """Return the bytes of a structure at an address; ``used_bytes``, if it has fewer that mean anything."""
        data = self._reader.at(self._base + address, length, what)
        self.note(address, length if used_bytes is None else used_bytes)
        return data

    def note(self, address: int, length: int) -> None:
        """Note the range of a structure."""
        self.spend()
        self.structures.append(Piece(self._base + address, self._base + address + length))

    def spend(self, steps: int = 1) -> None:
        """Count steps of work; raise NotJudged at the limit."""
        self._reader.spend(steps)

    def check_sum(self, block: bytes) -> None:
        """Check the checksum at the end of a structure."""
        # In Python: a megabyte takes half a second.
        self._left_checked_bytes -= len(block)
        if self._left_checked_bytes < 0:
            raise NotJudged("it has more structures than are followed for a verdict")
        if lookup3(block[:-4]) != int.from_bytes(block[-4:], "little"):
            raise TornContent("an object does not match its checksum")

    def signed(self, address: int, signature: bytes, length: int, what: str) -> bytes:
        """Return the bytes of a structure that begins with a signature."""
        data = self.at(address, length, what)
        if not data.startswith(signature):
            raise TornContent(f"{what} is not where the file says")
        return data

    def range_of(self, address: int, length: int) -> tuple[int, int]:
        """Return (start, stop) in the file; TornContent if it ends before."""
        start = self._base + address
        if start + length > self._reader.size_bytes:
            raise TornContent("a dataset is cut")
        return start, start + length


class _Message(NamedTuple):
    kind: int
    data: bytes


class Hdf5Objects:
    """Objects that can be reached from a group."""

    def __init__(self, file: Hdf5File) -> None:
        self._file = file
        self.data: list[ObjectData] = []
        self.datasets = 0
        self._nodes = 0
        self._heaps: dict[int, set[int]] = {}

    @property
    def structures_end(self) -> int:
        """Offset after the last structure that was read."""
        return max((piece.stop for piece in self._file.structures), default=0)

    def follow(self, root: int) -> None:
        """Follow everything from an object header on; raise TornContent or NotJudged."""
        seen, waiting = {root}, [root]
        while waiting:
            address = waiting.pop()
            for below in self._object(address):
                if below not in seen:
                    seen.add(below)
                    waiting.append(below)
            if len(seen) > _MAX_OBJECTS:
                raise NotJudged("it has more objects than are followed for a verdict")

    def _object(self, address: int) -> Iterator[int]:
        """Yield the addresses of the objects in a group; note the data of a dataset."""
        messages = list(_messages(self._file, address))
        kinds = {message.kind: message.data for message in messages}
        if _EXTERNAL in kinds:
            raise NotJudged("a dataset lies in another file")
        for message in messages:
            if message.kind == _SYMBOLS:
                yield from self._symbols(_number(message.data, 0), _number(message.data, 8))
            elif message.kind == _LINK:
                yield from _linked(message.data)
            elif message.kind == _LINK_INFO:
                at = 2 + (8 if _byte(message.data, 1) & 1 else 0)
                if _number(message.data, at) != UNDEFINED:
                    raise NotJudged("its groups have structures that are not followed for a verdict")
            elif message.kind == _ATTRIBUTE:
                self._attribute(message.data)
        if _LAYOUT in kinds:
            self.datasets += 1
            self._dataset(kinds[_LAYOUT], kinds.get(_TYPE, b""))

    def _symbols(self, tree: int, heap: int) -> Iterator[int]:
        """Yield the addresses of the objects that a group of the first version names."""
        head = self._file.signed(heap, b"HEAP", 32, "a table of names")
        length, free, address = _number(head, 8), _number(head, 16), _number(head, 24)
        names = self._file.at(address, length, "a table of names")
        # 1: no free block. The free block is behind the names: its size shows that they were written.
        if free not in (1, UNDEFINED) and (free + 16 > length or not _number(names, free + 8)):
            raise TornContent("a table of names is incomplete")
        # Once, because a table of names may be long and have many entries.
        last_end = names.rfind(b"\0")
        for node in self._leaves(tree, 0, 8):
            entries = self._file.signed(node, b"SNOD", 8, "a list of names")
            count = int.from_bytes(entries[6:8], "little")
            data = self._file.at(node + 8, count * _GROUP_ENTRY_BYTES, "a list of names")
            for at in range(0, len(data), _GROUP_ENTRY_BYTES):
                name, header = _number(data, at), _number(data, at + 8)
                self._file.spend()
                if not 0 < name < length or not names[name] or last_end < name:
                    raise TornContent("a list of names is incomplete")
                # 2: a symbolic link, which has no object header.
                if int.from_bytes(data[at + 16 : at + 20], "little") != 2:
                    yield header

    def _leaves(self, tree: int, kind: int, key_bytes: int) -> Iterator[int]:
        """Yield the children of the lowest nodes of a B-tree of the first version."""
        for child, _ in self._keyed_leaves(tree, kind, key_bytes):
            yield child

    def _keyed_leaves(self, tree: int, kind: int, key_bytes: int) -> Iterator[tuple[int, bytes]]:
        waiting = [(tree, -1)]
        while waiting:
            address, expected = waiting.pop()
            self._nodes += 1
            if self._nodes > _MAX_NODES:
                raise NotJudged("it has more structures than are followed for a verdict")
            head = self._file.signed(address, b"TREE", 24, "an index")
            level, count = head[5], int.from_bytes(head[6:8], "little")
            # Levels fall by one, so that no node can be below itself.
            if head[4] != kind or (expected >= 0 and level != expected):
                raise TornContent("an index is damaged")
            step = key_bytes + 8
            body = self._file.at(address + 24, count * step + key_bytes, "an index")
            for at in range(0, count * step, step):
                self._file.spend()
                child = _number(body, at + key_bytes)
                if not child:
                    raise TornContent("an index is incomplete")
                if level:
                    waiting.append((child, level - 1))
                else:
                    yield child, body[at : at + key_bytes]

    def _dataset(self, layout: bytes, described: bytes) -> None:
        version, kind = _byte(layout, 0), _byte(layout, 1)
        if version not in (3, 4):
            raise NotJudged("a dataset has a layout that is not known here")
        # A float ends with its exponent, which is zero in hardly any number: its last byte shows more than all of it.
        is_float = bool(described) and described[0] & 0x0F == _FLOAT
        item_bytes = 1 if is_float else int.from_bytes(described[4:8], "little") or 1
        is_variable = bool(described) and described[0] & 0x0F == _VARIABLE_LENGTH
        if kind == 0:
            return
        if kind == 1:
            self._note(_number(layout, 2), _number(layout, 10), item_bytes)
            if is_variable:
                self._references(_number(layout, 2), _number(layout, 10))
        elif kind == 2 and version == 3 and not is_variable:
            dimensions, tree = _byte(layout, 2), _number(layout, 3)
            if tree == UNDEFINED:
                return
            for chunk, key in self._keyed_leaves(tree, 1, 8 + 8 * dimensions):
                self._note(chunk, int.from_bytes(key[:4], "little"), 1)
        else:
            raise NotJudged("a dataset has a layout that is not followed for a verdict")

    def _note(self, address: int, length: int, item_bytes: int) -> None:
        if address == UNDEFINED:
            return
        # At 0 there is the superblock: both are what the rest of a structure that was never written looks like.
        if not address or not length:
            raise TornContent("the place of a dataset was never written")
        if len(self.data) >= _MAX_DATA:
            raise NotJudged("it has more parts than are followed for a verdict")
        self.data.append(ObjectData(*self._file.range_of(address, length), item_bytes))

    def _references(self, address: int, length: int) -> None:
        """Check items of variable length at an address."""
        if address == UNDEFINED:
            return
        if length > _MAX_VARIABLE_BYTES:
            raise NotJudged("a dataset of variable length is longer than what is read for a verdict")
        self._check_heap_references(self._file.at(address, length, "a dataset"))

    def _attribute(self, data: bytes) -> None:
        """Check the references of an attribute with items of variable length."""
        version = _byte(data, 0)
        if version not in (1, 2, 3) or len(data) < 9:
            raise TornContent("an attribute is damaged")
        sizes = [int.from_bytes(data[at : at + 2], "little") for at in (2, 4, 6)]
        at = 9 if version == 3 else 8
        padded = [-(-size // 8) * 8 for size in sizes] if version == 1 else sizes
        described = data[at + padded[0] : at + padded[0] + sizes[1]]
        if described and described[0] & 0x0F == _VARIABLE_LENGTH:
            self._check_heap_references(data[at + sum(padded) :])

    def _check_heap_references(self, data: bytes) -> None:
        for at in range(0, len(data) - 15, 16):
            self._file.spend()
            length, address = int.from_bytes(data[at : at + 4], "little"), _number(data, at + 4)
            index = int.from_bytes(data[at + 12 : at + 16], "little")
            if length and address not in (0, UNDEFINED) and index not in self._heap(address):
                raise TornContent("a text is not in the heap that the file says")

    def _heap(self, address: int) -> set[int]:
        """Return the numbers of the objects in a global heap."""
        if address not in self._heaps:
            head = self._file.signed(address, b"GCOL", 16, "a heap")
            size = _number(head, 8)
            # What is behind its objects is unused.
            data = self._file.at(address, size, "a heap", used_bytes=0)
            found: set[int] = set()
            at = 16
            while at + 16 <= size:
                self._file.spend()
                index = int.from_bytes(data[at : at + 2], "little")
                if not index:
                    break
                found.add(index)
                at += 16 + -(-_number(data, at + 8) // 8) * 8
            self._file.note(address, min(at, size))
            self._heaps[address] = found
        return self._heaps[address]


def _messages(file: Hdf5File, address: int) -> Iterator[_Message]:
    """Yield the messages of an object header, those of its continuations as well."""
    head = file.at(address, 16, "an object")
    found = 0
    is_new = head.startswith(b"OHDR")
    first = _new_header(file, address, head) if is_new else _old_header(head, address)
    parts = [first]
    while parts:
        start, length, extra = parts.pop(0)
        block = file.at(start, length, "an object")
        at = 0
        head_bytes = (4 + extra) if is_new else 8
        while at + head_bytes <= length:
            if is_new:
                kind, size = block[at], int.from_bytes(block[at + 1 : at + 3], "little")
            else:
                kind, size = (
                    int.from_bytes(block[at : at + 2], "little"),
                    int.from_bytes(block[at + 2 : at + 4], "little"),
                )
                if not kind and not size:
                    raise NotJudged("an object has an empty message, or was not written to its end")
            data = block[at + head_bytes : at + head_bytes + size]
            if len(data) != size:
                raise TornContent("an object is damaged")
            at += head_bytes + size
            found += 1
            file.spend()
            if found > _MAX_MESSAGES:
                raise NotJudged("an object has more parts than are followed for a verdict")
            if kind == _CONTINUATION:
                parts.append(_continued(file, _number(data, 0), _number(data, 8), extra, is_new))
            else:
                yield _Message(kind, data)
    # The first version has no checksum, and says how many messages there are.
    if not is_new and found != int.from_bytes(head[2:4], "little"):
        raise TornContent("an object is incomplete")


def _old_header(head: bytes, address: int) -> tuple[int, int, int]:
    """Return (address, length, 0) of the messages of a header of version 1."""
    if head[0] != 1 or head[1]:
        raise TornContent("an object is not where the file says")
    return address + 16, int.from_bytes(head[8:12], "little"), 0


def _new_header(file: Hdf5File, address: int, head: bytes) -> tuple[int, int, int]:
    """Return (address, length, bytes of a message's creation order) of a header of version 2, whose checksum is right."""
    flags = head[5]
    at = 6 + (16 if flags & 0x20 else 0) + (4 if flags & 0x10 else 0)
    width = 1 << (flags & 3)
    length = int.from_bytes(file.at(address + at, width, "an object"), "little")
    start = at + width
    file.check_sum(file.at(address, start + length + 4, "an object"))
    return address + start, length, 2 if flags & 4 else 0


def _continued(file: Hdf5File, address: int, length: int, extra: int, is_new: bool) -> tuple[int, int, int]:
    if not is_new:
        return address, length, 0
    if length < 8:
        raise TornContent("an object is damaged")
    file.check_sum(file.signed(address, b"OCHK", length, "an object"))
    return address + 4, length - 8, extra


def _linked(data: bytes) -> Iterator[int]:
    """Yield the address that a link message names, if it is a hard link."""
    flags = _byte(data, 1)
    at = 2
    kind = 0
    if flags & 8:
        kind, at = _byte(data, at), at + 1
    at += (8 if flags & 4 else 0) + (1 if flags & 16 else 0)
    width = 1 << (flags & 3)
    at += width + int.from_bytes(data[at : at + width], "little")
    if kind == 0:
        yield _number(data, at)


def _byte(data: bytes, at: int) -> int:
    if at >= len(data):
        raise TornContent("an object is damaged")
    return data[at]


def _number(data: bytes, at: int) -> int:
    if at + 8 > len(data):
        raise TornContent("an object is damaged")
    return int.from_bytes(data[at : at + 8], "little")


SUFFIXES: Final = (".h5", ".hdf5")
_MAGIC: Final = b"\x89HDF\r\n\x1a\n"
_USER_BLOCKS: Final = (0, 512, 1024, 2048)
"""Offsets at which the superblock may begin; further powers of two are allowed, and no library uses them."""
_OPEN_FLAGS: Final = 1 | 4
"""Open for writing, or for writing beside readers (SWMR)."""


def read_hdf5(reader: BoundedReader) -> Structure:
    """Return the structure; raise TornContent, OtherFormat or NotJudged."""
    base = next((at for at in _USER_BLOCKS if reader.up_to(at, 8, "the beginning") == _MAGIC), None)
    if base is None:
        if reader.has_suffix(*SUFFIXES):
            raise TornContent("it does not begin as HDF5: its first part was never written")
        raise OtherFormat
    version = reader.at(base + 8, 1, "its superblock")[0]
    if version > 3:
        raise NotJudged(f"HDF5 with a superblock of version {version} is not known here")
    file, end, root = _superblock(reader, base, version)
    if reader.size_bytes not in (end, base + end):
        raise TornContent(f"it was closed with {end} bytes, and has {reader.size_bytes}")
    objects = Hdf5Objects(file)
    objects.follow(root)
    last = max(objects.data, key=lambda data: data.stop, default=None)
    last_item = None
    # Structures at the very end were read; numbers there may be zeros that were never written.
    if last is not None and last.stop >= objects.structures_end:
        last_item = (max(last.start, last.stop - last.item_bytes), last.stop)
    data = [Piece(one.start, one.stop) for one in objects.data]
    return Structure("hdf5", f"{objects.datasets} datasets", (*data, *file.structures), last_item)


def _superblock(reader: BoundedReader, base: int, version: int) -> tuple[Hdf5File, int, int]:
    """Return the file, where it ends, and the address of its root group."""
    if version >= 2:
        block = reader.at(base, 48, "its superblock")
        offsets, lengths, flags = block[9:12]
        if flags & _OPEN_FLAGS:
            raise TornContent("it was not closed: its superblock says that a program writes to it")
        at = 12
        end, root = block[at + 16 : at + 24], block[at + 24 : at + 32]
    else:
        at = 28 if version else 24
        block = reader.at(base, at + 48, "its superblock")
        offsets, lengths = block[13:15]
        end, root = block[at + 16 : at + 24], block[at + 40 : at + 48]
    if (offsets, lengths) != (8, 8):
        raise NotJudged("HDF5 with addresses of another size than 8 bytes is not known here")
    start = int.from_bytes(block[at : at + 8], "little")
    # Some writers leave the base address 0 behind a user block.
    if start not in (0, base):
        raise TornContent("its superblock is damaged")
    file = Hdf5File(reader, start)
    return file, int.from_bytes(end, "little"), int.from_bytes(root, "little")
