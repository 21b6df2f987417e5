"""Bytes of a tree node, and the rule that cuts a list of names into nodes.

Both depend on the entries alone. A name ends a node of level n if the n+1 lowest groups of six bits of its
seeded hash are all zero: one name in 64 on average ends a leaf, one in 64 of these ends a node above, and so
on. So equal lists make equal trees whatever their history, and a change moves only the borders next to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from operator import lt

import msgspec
import xxhash

from ciuic.repository.errors import DamagedTree
from ciuic.structs import msgpack_decoder
from ciuic.types import CHUNK_ID_BYTES, FLAG_XATTRS_CHUNK, ChunkId, Entry

# 64**9 leaves hold more names than any directory has.
MAX_LEVEL = 9
# Longer lists of attributes go into a chunk of their own.
MAX_ENTRY_BYTES = 65536
MAX_NODE_ITEMS = 1 << 16
"""Limit of names in one node: there are 64 on average, and this many with a probability of 10^-447. A crafted
node may claim millions."""
# Nodes of 64 names on average: some 8 KiB, so that a change of one name writes little.
_BITS = 6
_MASK = (1 << _BITS) - 1
_MAGIC = b"CT"
_DIRECTORY, _LINKS = b"d", b"l"
_HEAD_BYTES = 4
# Big-endian, so that the order of bytes is that of inode numbers.
LINK_KEY_BYTES = 8
_16, _32, _63, _64 = 1 << 16, 1 << 32, 1 << 63, 1 << 64
MAX_TOTAL_BYTES = (1 << 63) - 1
"""Two files of holes have more together: they must not keep the directory out of its snapshot."""
# Block maps have heights from 0 to 6.
_HEIGHTS = 7
_CONTENT_LENGTHS = (0, CHUNK_ID_BYTES)
# PATH_MAX, far above NAME_MAX (255): it bounds what a crafted node may hold.
_MAX_NAME_BYTES = 4096


class NodeRef(msgspec.Struct, frozen=True, array_like=True):
    """Child of an inner node: the last name below it, its id, and the totals of what is below."""

    name: bytes
    id: ChunkId
    total_files: int
    total_bytes: int


_entries_decoder = msgpack_decoder(list[Entry])
_refs_decoder = msgpack_decoder(list[NodeRef])
_pairs_decoder = msgpack_decoder(tuple[tuple[bytes, bytes], ...])
_encoder = msgspec.msgpack.Encoder()


class TreeNode(msgspec.Struct, frozen=True):
    """Decoded node: a leaf (level 0) has entries, others have refs; never empty, names ascending."""

    level: int
    entries: list[Entry]
    refs: list[NodeRef]

    @property
    def last_name(self) -> bytes:
        """Last name in the node or below it."""
        return self.refs[-1].name if self.level else self.entries[-1].name


def name_level(name: bytes, seed: int) -> int:
    """Return how many levels of nodes this name ends: 0 for 63 names of 64."""
    bits: int = xxhash.xxh3_64_intdigest(name, seed=seed)
    level = 0
    while level < MAX_LEVEL and not bits & _MASK:
        bits >>= _BITS
        level += 1
    return level


def _name_problem(name: bytes, links: bool) -> str:
    """Return why this cannot be a key of such a tree; empty when it can."""
    if links:
        return "" if len(name) == LINK_KEY_BYTES else "a link table key must be 8 bytes"
    if not name or name in (b".", b"..") or b"/" in name or b"\0" in name:
        return f"{name!r} cannot be a file name"
    return "" if len(name) <= _MAX_NAME_BYTES else "a name is too long"


def _totals_of(entry: Entry) -> tuple[int, int]:
    """Return (files, bytes) that this entry adds to its directory (see `Entry.total_files`)."""
    if entry.is_dir:
        return entry.total_files, entry.total_bytes
    # Counted in the link table, once for all its names.
    if entry.link:
        return 0, 0
    return 1, entry.size_bytes if entry.is_file else 0


def encode_leaf(entries: Sequence[Entry], links: bool) -> bytes:
    """Return the bytes of a leaf."""
    return _MAGIC + (_LINKS if links else _DIRECTORY) + b"\0" + _encoder.encode(entries)


def encode_inner(level: int, refs: Sequence[NodeRef], links: bool) -> bytes:
    """Return the bytes of an inner node."""
    return _MAGIC + (_LINKS if links else _DIRECTORY) + bytes([level]) + _encoder.encode(refs)


def entry_problem(entry: Entry, links: bool) -> str:
    """Return why this entry cannot stand in a tree; empty when it can."""
    problem = _name_problem(entry.name, links)
    if problem:
        return problem
    return attributes_problem(entry)


def attributes_problem(entry: Entry) -> str:
    """Return why the attributes of this entry cannot be valid; empty when they can.

    Numbers beyond the kernel's types would reach system calls, SQLite and the clock, which refuse them in
    ways of their own.
    """
    # Checked for every entry that is ever read: one expression takes a tenth of the time of finding out what
    # is wrong.
    if (
        0 <= entry.mode < _16
        and 0 <= entry.uid < _32
        and 0 <= entry.gid < _32
        and 0 <= entry.flags < _32
        and 0 <= entry.rdev < _64
        and 0 <= entry.ino < _64
        and 0 <= entry.link < _64
        and 0 <= entry.size_bytes < _63
        and 0 <= entry.total_files < _63
        and 0 <= entry.total_bytes < _63
        and 0 <= entry.map_height < _HEIGHTS
        and -_63 < entry.mtime_ns < _63
        and -_63 < entry.ctime_ns < _63
        and -_63 < entry.atime_ns < _63
        and len(entry.content) in _CONTENT_LENGTHS
        and not entry.xattrs
        and not entry.flags & FLAG_XATTRS_CHUNK
        and not (entry.target and b"\0" in entry.target)
    ):
        return ""
    return _attributes_problem(entry)


def _attributes_problem(entry: Entry) -> str:
    """Return in words what `attributes_problem` has found."""
    if len(entry.content) not in _CONTENT_LENGTHS:
        return f"the content id of {entry.name!r} has {len(entry.content)} bytes"
    numbers = (
        (entry.mode, _16),
        *((number, _32) for number in (entry.uid, entry.gid, entry.flags)),
        *((number, _64) for number in (entry.rdev, entry.ino, entry.link)),
        *((number, _63) for number in (entry.size_bytes, entry.total_files, entry.total_bytes)),
        (entry.map_height, _HEIGHTS),
    )
    if any(not 0 <= number < limit for number, limit in numbers):
        return f"{entry.name!r} has an impossible number"
    if any(abs(time_ns) >= _63 for time_ns in (entry.mtime_ns, entry.ctime_ns, entry.atime_ns)):
        return f"{entry.name!r} has an impossible time"
    if b"\0" in entry.target:
        return f"{entry.name!r} has an impossible target"
    if entry.flags & FLAG_XATTRS_CHUNK:
        if len(entry.xattrs) != 1 or len(entry.xattrs[0][1]) != CHUNK_ID_BYTES:
            return f"{entry.name!r} has no id of its extended attributes"
        return ""
    return _xattrs_problem(entry.xattrs)


def _xattrs_problem(pairs: Sequence[tuple[bytes, bytes]]) -> str:
    """Return why these cannot be extended attributes; empty when they can."""
    return next(
        (f"{key!r} cannot be an extended attribute" for key, _ in pairs if not key or b"\0" in key), ""
    )


def decode_node(chunk: ChunkId, data: bytes, *, links: bool) -> TreeNode:
    """Return the node in this chunk's content.

    DamagedTree unless it is well formed, of that kind, in order.
    """
    if data[:2] != _MAGIC or data[2:3] != (_LINKS if links else _DIRECTORY) or len(data) < _HEAD_BYTES:
        raise DamagedTree(chunk, f"it is not a node of a {'link table' if links else 'directory tree'}")
    level = data[3]
    body = memoryview(data)[_HEAD_BYTES:]
    # Checked before any of them is decoded, which takes twenty times the memory.
    if _items(body) > MAX_NODE_ITEMS:
        raise DamagedTree(chunk, f"it has more than {MAX_NODE_ITEMS} names")
    try:
        if level == 0:
            node = TreeNode(0, _entries_decoder.decode(body), [])
        elif level <= MAX_LEVEL:
            node = TreeNode(level, [], _refs_decoder.decode(body))
        else:
            raise DamagedTree(chunk, f"it has level {level}")
    except msgspec.DecodeError as error:
        raise DamagedTree(chunk, str(error)) from None
    _check(chunk, node, links)
    return node


def _items(body: memoryview) -> int:
    """Return the number of items that a msgpack array claims to have.

    It is 0 for anything else, which the decoder refuses.
    """
    width = {0xDC: 2, 0xDD: 4}.get(body[0] if body else 0, 0)
    return int.from_bytes(body[1 : 1 + width], "big")


def _check(chunk: ChunkId, node: TreeNode, links: bool) -> None:
    if not node.entries and not node.refs:
        raise DamagedTree(chunk, "it is empty")
    names = [item.name for item in (node.refs if node.level else node.entries)]
    # Lookups bisect and updates merge: both rely on the order.
    if not all(map(lt, names, islice(names, 1, None))):
        raise DamagedTree(chunk, "its names are not in order")
    # Checked for every entry that is ever read: all at once takes a quarter of the time of finding out what is wrong with which.
    if not (_are_names(names, links) and all(map(_is_plain, node.entries))):
        problem = next(filter(None, (entry_problem(entry, links) for entry in node.entries)), "")
        if problem:
            raise DamagedTree(chunk, problem)
    for ref in node.refs:
        if not _ref_ok(ref, links):
            raise DamagedTree(chunk, f"a child has an impossible reference {ref.id.hex()}")


def _are_names(names: list[bytes], links: bool) -> bool:
    """Return whether all of these, which are in order, can be keys of such a tree, as `_name_problem` has it of one."""
    if links:
        return all(len(name) == LINK_KEY_BYTES for name in names)
    together = b"\0".join(names)
    return (
        bool(names[0])
        and max(map(len, names)) <= _MAX_NAME_BYTES
        and together.count(b"\0") == len(names) - 1
        and b"/" not in together
        and b"." not in names
        and b".." not in names
    )


def _is_plain(entry: Entry) -> bool:
    """Return whether an entry has nothing that has to be looked at; its numbers are those that the decoder lets through."""
    return (
        len(entry.content) in _CONTENT_LENGTHS
        and not entry.xattrs
        and not entry.flags & FLAG_XATTRS_CHUNK
        and not (entry.target and b"\0" in entry.target)
    )


def _ref_ok(ref: NodeRef, links: bool) -> bool:
    return (
        len(ref.id) == CHUNK_ID_BYTES
        and 0 <= ref.total_files < 1 << 63
        and 0 <= ref.total_bytes < 1 << 63
        and not _name_problem(ref.name, links)
    )


def node_totals(node: TreeNode) -> tuple[int, int]:
    """Return (files, bytes) of everything below a node, of bytes `MAX_TOTAL_BYTES` at most."""
    pairs = (
        [(r.total_files, r.total_bytes) for r in node.refs]
        if node.level
        else [_totals_of(entry) for entry in node.entries]
    )
    return sum(files for files, _ in pairs), min(MAX_TOTAL_BYTES, sum(size for _, size in pairs))


def encode_xattrs(pairs: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return the content of a chunk of extended attributes (FLAG_XATTRS_CHUNK)."""
    return b"CX\0\0" + _encoder.encode(pairs)


def decode_xattrs(chunk: ChunkId, data: bytes) -> tuple[tuple[bytes, bytes], ...]:
    """Return the extended attributes in this chunk's content.

    Raises:
        DamagedTree: the chunk is something else.
    """
    if data[:4] != b"CX\0\0":
        raise DamagedTree(chunk, "it is not a list of extended attributes")
    try:
        pairs = _pairs_decoder.decode(memoryview(data)[4:])
    except msgspec.DecodeError as error:
        raise DamagedTree(chunk, str(error)) from None
    if problem := _xattrs_problem(pairs):
        raise DamagedTree(chunk, problem)
    return pairs
