"""Assignment of tensors to files of a snapshot, and of files to offsets of the arena.

A large tensor has a safetensors file of its own, and the small ones of an object share one. So content that
did not change is the same blocks at the same offsets of the same file, wherever the tensor stands among the
others, and costs nothing. Each file can be read by any program that knows safetensors, and
`NAME.safetensors.index.json` tells which file has which tensor, as Hugging Face's sharded checkpoints do. In
memory a file stands as it will on disk, at a multiple of 4096, and its first tensor begins at a multiple of
4096 of the file: the header is padded with spaces, as the format allows.

References:
    https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Final, NamedTuple

import xxhash

from ciuic.training.format.structure import Leaf
from ciuic.training.format.tensors import Array, dtype_bytes, is_dtype, stored_shape
from ciuic.training.json_documents import decode_json

OWN_FILE_BYTES: Final = 128 << 10
"""Smallest tensor with a file of its own.

Below this size the name, the entry and the unused part of the last block would weigh more than they save.
"""
SMALL_FILE: Final = "small-tensors"
SUFFIX: Final = ".safetensors"
_ALIGNMENT: Final = 4096
_MAX_NAME_BYTES: Final = 180
_MAX_NUMBER: Final = 1 << 63
_RESERVED_NAME: Final = "__metadata__"
"""Name in a header of safetensors that is no tensor's (https://github.com/huggingface/safetensors, "Format")."""
# The limit of the reference implementation.
_MAX_HEADER_BYTES: Final = 100 << 20


class FileInMemory(NamedTuple):
    """A file of the snapshot, and its offset in the arena."""

    path: str
    """Path relative to the root of the snapshot, components joined by ``/``."""
    offset: int
    size_bytes: int
    width: int = 0
    """Bytes per number, where most of the file is numbers of one width; otherwise 0."""


class TensorInMemory(NamedTuple):
    """A tensor, and its offset in the arena."""

    offset: int
    array: Array


class Layout:
    """Files in an arena, one behind the other, valid as long as names, shapes and dtypes stay.

    Only the bytes of the tensors have to be filled in.
    """

    def __init__(self, end: int = 0) -> None:
        """Begin without files.

        Args:
            end: Offset from which there is room in the arena.
        """
        self.files: list[FileInMemory] = []
        self.tensors: dict[str, list[TensorInMemory]] = {}
        """Tensors of each object, in the order of its leaves."""
        self.fixed: list[tuple[int, bytes]] = []
        """Offset and content of headers, index files and documents."""
        self.end = end
        """Offset behind the last file."""

    def add_object(self, name: str, leaves: Sequence[Leaf], part: str = "") -> None:
        """Add the files of an object.

        Args:
            name: Name of the object.
            leaves: Its tensors.
            part: Goes into the names of files that other ranks have too.
        """
        offsets: dict[str, int] = {}
        weights: dict[str, str] = {}
        small = [leaf for leaf in leaves if leaf.array.size_bytes < OWN_FILE_BYTES]
        small.sort(key=packing_order)
        groups = [
            (file_name(leaf.name), [leaf]) for leaf in leaves if leaf.array.size_bytes >= OWN_FILE_BYTES
        ]
        if small:
            groups.append((f"{SMALL_FILE}{part}{SUFFIX}", small))
        for file, group in groups:
            header = encode_header(group, of_torch=all(leaf.array.framework == "torch" for leaf in group))
            places = self.add_tensor_file(f"{name}/{file}", header, group)
            offsets |= {leaf.name: at for leaf, at in zip(group, places, strict=True)}
            weights |= dict.fromkeys((leaf.name for leaf in group), file)
        if leaves:
            total = sum(leaf.array.size_bytes for leaf in leaves)
            # As Hugging Face's sharded checkpoints have it, so that their loaders read a restored snapshot.
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
            self.add_file(
                f"{name}/{name}{part}{SUFFIX}.index.json", json.dumps(index, indent=1).encode("ascii")
            )
        self.tensors[name] = [TensorInMemory(offsets[leaf.name], leaf.array) for leaf in leaves]

    def add_tensor_file(
        self, path: str, header: bytes, leaves: Sequence[Leaf], offset: int | None = None
    ) -> list[int]:
        """Add a safetensors file and return the offset of each tensor in the arena.

        Args:
            path: Path of the file.
            header: Its header.
            leaves: Its tensors, in their order.
            offset: Offset of the file, where its tensors stand already; None: behind all files.
        """
        at = self.add_file(
            path, header, sum(leaf.array.size_bytes for leaf in leaves), _width_of(leaves), offset
        )
        sizes = [len(header), *(leaf.array.size_bytes for leaf in leaves)]
        return [at + before for before in itertools.accumulate(sizes[:-1])]

    def add_file(
        self, path: str, start: bytes, more_bytes: int = 0, width: int = 0, offset: int | None = None
    ) -> int:
        """Add a file and return its offset in the arena.

        Args:
            path: Path of the file.
            start: Its first bytes.
            more_bytes: Number of bytes after them, which are filled in later.
            width: As of `FileInMemory`.
            offset: Its offset, where it stands already; None: behind all files.
        """
        size_bytes = len(start) + more_bytes
        if offset is None:
            offset = aligned(self.end)
            self.end = offset + size_bytes
        self.files.append(FileInMemory(path, offset, size_bytes, width))
        self.fixed.append((offset, start))
        return offset

    def write_fixed(self, memory: memoryview) -> None:
        """Write all that is known before the tensors are filled in."""
        for offset, content in self.fixed:
            memory[offset : offset + len(content)] = content


class TensorInFile(NamedTuple):
    """Entry of one tensor in a safetensors header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    """Offset from the beginning of the file."""
    stop: int


def lay_out(objects: Mapping[str, Sequence[Leaf]], part: str = "") -> Layout:
    """Lay out the files of all objects. The result depends only on names, dtypes and shapes.

    Args:
        objects: Leaves of each object.
        part: Goes into the names of files that other ranks have too.
    """
    layout = Layout()
    for name, leaves in objects.items():
        layout.add_object(name, leaves, part)
    return layout


def packing_order(leaf: Leaf) -> tuple[int, str]:
    """Return the sort key of a tensor in a file of several.

    Elements with the largest power of two in their size first: so each is aligned to that power without gaps.
    """
    return -(leaf.array.element_bytes & -leaf.array.element_bytes), leaf.name


def aligned(offset: int) -> int:
    """Return the next offset at which a file may stand."""
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def file_name(tensor: str) -> str:
    """Return the file name for a tensor: its name, quoted as in a URL where a file name needs that."""
    quoted = "".join(char if char not in "/%\0" and char.isprintable() else _quoted(char) for char in tensor)
    # Neither hidden, nor the name of the file that the small tensors share.
    if quoted[:1] == "." or quoted.startswith(SMALL_FILE):
        quoted = _quoted(quoted[0]) + quoted[1:]
    raw = quoted.encode("utf-8", "surrogateescape")
    # File names end at 255 bytes (NAME_MAX); a digest keeps two long names apart.
    if len(raw) > _MAX_NAME_BYTES:
        short = raw[: _MAX_NAME_BYTES - 20].decode("utf-8", "ignore")
        quoted = f"{short}~{xxhash.xxh3_64_hexdigest(raw)}"
    return quoted + SUFFIX


def encode_header(
    leaves: Sequence[Leaf], *, of_torch: bool, metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return the header of a file whose tensors follow in the order of ``leaves``, without gaps."""
    # Without `format` in the metadata Hugging Face's loaders refuse the file.
    header: dict[str, object] = {_RESERVED_NAME: {"format": "pt" if of_torch else "np", **(metadata or {})}}
    at = 0
    for leaf in leaves:
        stop = at + leaf.array.size_bytes
        header[_stored_name(leaf.name)] = {
            "dtype": leaf.array.dtype,
            "shape": list(leaf.array.shape),
            "data_offsets": [at, stop],
        }
        at = stop
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    padded = aligned(8 + len(text)) - 8
    return struct.pack("<Q", padded) + text.ljust(padded)


def decode_header(start: bytes, size_bytes: int) -> dict[str, TensorInFile] | int:
    """Decode the header of a file.

    Args:
        start: First bytes of the file.
        size_bytes: Size of the file.

    Returns:
        The tensors by name; or the number of first bytes that are needed to decode the header.

    Raises:
        ValueError: The header is not as it should be.
    """
    if len(start) < 8:
        raise ValueError("the file is shorter than a safetensors header")
    # The length may be anything: it is checked before that much is read.
    length = struct.unpack("<Q", start[:8])[0]
    begin = 8 + length
    if length > _MAX_HEADER_BYTES or begin > size_bytes:
        raise ValueError(f"the safetensors header is too long for its file: {length} bytes of {size_bytes}")
    if begin > len(start):
        return int(begin)
    header = decode_json(start[8:begin], "the safetensors header")
    if not isinstance(header, dict):
        raise ValueError("the safetensors header must be a JSON object")
    found = {}
    for name, facts in header.items():
        if name != _RESERVED_NAME:
            found[_name_of(name)] = _tensor(facts, begin, size_bytes)
    # The reference implementation refuses this too: a million names for the same bytes would each become a
    # tensor of that size.
    if sum(tensor.stop - tensor.start for tensor in found.values()) > size_bytes - begin:
        raise ValueError("tensors of the safetensors header overlap")
    return found


def read_header(
    read: Callable[[int], bytes], size_bytes: int, first_bytes: int, what: str
) -> dict[str, TensorInFile]:
    """Read and decode the header of a file.

    Args:
        read: Returns this many first bytes of the file, or more.
        size_bytes: Size of the file.
        first_bytes: Number of bytes to try first; a longer header is read once more, with as many as it says.
        what: What errors call the file.

    Raises:
        ValueError: The header is not as it should be.
    """
    header = decode_header(read(min(first_bytes, size_bytes)), size_bytes)
    if isinstance(header, int):
        header = decode_header(read(header), size_bytes)
    if isinstance(header, int):
        raise ValueError(f"the header of {what} has no end")
    return header


def _stored_name(name: str) -> str:
    """Return the name of a tensor in a header, in which one name is reserved: that one, and it with tildes, gets one tilde more."""
    return f"{name}~" if name.rstrip("~") == _RESERVED_NAME else name


def _name_of(stored: str) -> str:
    """Return the name of a tensor by its name in a header, which is not the reserved one."""
    return stored[:-1] if stored.rstrip("~") == _RESERVED_NAME else stored


def _tensor(facts: object, begin: int, size_bytes: int) -> TensorInFile:
    try:
        dtype, shape, (start, stop) = facts["dtype"], stored_shape(facts["shape"]), facts["data_offsets"]  # type: ignore[index]
        size = prod(shape) * dtype_bytes(dtype)
    except (KeyError, TypeError) as error:
        raise ValueError(f"the safetensors header is malformed: {error!r}") from None
    # Integers only: 2.0 and True compare equal to integers.
    if not all(type(number) is int and 0 <= number < _MAX_NUMBER for number in (start, stop)):
        raise ValueError("the safetensors header has an impossible number")
    if not (is_dtype(dtype) and start <= stop <= size_bytes - begin and stop - start == size):
        raise ValueError("the safetensors header does not fit the file")
    return TensorInFile(dtype, shape, begin + start, begin + stop)


def _width_of(leaves: Sequence[Leaf]) -> int:
    """Return the bytes per number of most of the content of these tensors; a complex number counts as two."""
    bytes_of: dict[int, int] = {}
    for leaf in leaves:
        array = leaf.array
        width = array.element_bytes // (2 if "complex" in array.true_dtype else 1)
        bytes_of[width] = bytes_of.get(width, 0) + array.size_bytes
    return max(bytes_of, key=lambda width: bytes_of[width], default=0)


def _quoted(char: str) -> str:
    return "".join(f"%{byte:02X}" for byte in char.encode("utf-8", "surrogatepass"))
