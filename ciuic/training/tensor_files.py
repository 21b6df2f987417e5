"""`FileTensors`: the tensors in files of safetensors, torch and NumPy that any program wrote into a root, unread.

Guarantees: nothing is executed or unpickled: a pickle is interpreted as data (`inert_pickle`). Of a file its headers are read, at most
64 MiB. Whatever they claim was checked: a tensor lies inside of its file and has the size that type and shape say. A tensor whose elements are
not all stored once and without gaps, as a view of another, is listed without numbers.

References:
    https://huggingface.co/docs/safetensors (format)
    https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
    torch/_utils.py (`_rebuild_tensor_v2` and others), torch/serialization.py (archives)
    APPNOTE.TXT 6.3.10, section 4.3.7 (local header)
"""

from __future__ import annotations

import ast
import io
import os
import zipfile
from collections.abc import Hashable, Iterator, Sequence
from math import prod
from typing import Any, Final, NamedTuple

from ciuic.errors import Damaged, UsageError
from ciuic.printable import one_line
from ciuic.repository import Repository
from ciuic.repository.block_maps import blocks_of
from ciuic.training.change_figures import NumberKind, number_kind
from ciuic.training.format.layout import read_header
from ciuic.training.inert_pickle import Made, Name, Persistent, read_pickle
from ciuic.training.json_documents import MALFORMED
from ciuic.training.stored_tensors import BlockReader, FileRange, StoredTensor
from ciuic.types import Entry

_MAX_HEADERS_BYTES: Final = 64 << 20
"""Limit of what is read of one file to know its tensors."""
_MAX_PICKLE_BYTES: Final = 16 << 20
_MAX_FILES: Final = 10_000
"""Limit of files of one directory."""
_MAX_DIMENSIONS: Final = 64
_MAX_NUMPY_HEADER_BYTES: Final = 10_000
_ZIP_HEAD: Final = b"PK\3\4"
_NUMPY_HEAD: Final = b"\x93NUMPY"
_LOCAL_HEADER_BYTES: Final = 30
SUFFIXES: Final = (".safetensors", ".pt", ".pth", ".ckpt", ".bin", ".npz", ".npy")
"""Names of files in a directory that are looked into."""
_STORAGES: Final = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}  # fmt: skip
"""Names in safetensors of the numbers in torch's typed storages."""
_COMPLEX_STORAGES: Final = {"ComplexFloatStorage": "complex64", "ComplexDoubleStorage": "complex128"}
_MAX_BYTE_ORDER: Final = 64
_MAX_CONTAINERS: Final = 1 << 20
_MAX_SHARED: Final = 4
"""Limit of the size of all tensors, in sizes of the file: several may share a storage."""
_MAX_TENSORS: Final = 1 << 18
_MAX_NAME: Final = 4096


class NotTensors(UsageError):
    """A file is in no format whose tensors can be read in place."""


class _Ranges(io.RawIOBase):
    """A file of a snapshot as `zipfile` reads it, up to a limit."""

    def __init__(self, reader: BlockReader, entry: Entry) -> None:
        super().__init__()
        self._reader = reader
        self._entry = entry
        self._at = 0
        self._left_bytes = _MAX_HEADERS_BYTES

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._entry.size_bytes}[whence]
        self._at = max(0, start + offset)
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._entry.size_bytes - self._at)
        size = left if size is None or size < 0 else min(size, left)
        self._left_bytes -= size
        if self._left_bytes < 0:
            raise NotTensors(f"its headers have more than {_MAX_HEADERS_BYTES >> 20} MiB")
        data = bytes(self._reader.read(self._entry, self._at, self._at + size)) if size else b""
        self._at += size
        return data


class _Found(NamedTuple):
    """A tensor of a file."""

    kind: NumberKind
    shape: tuple[int, ...]
    order: tuple[int, ...]
    """Dimensions by stride, largest first: in which order the elements lie."""
    start: int
    size_bytes: int
    is_dense: bool = True
    state: str = ""
    """Path of the dict or list that holds it in a checkpoint of torch."""


class FileTensors:
    """Tensors of a file, or of all files in a directory, by name.

    In a directory of several files with tensors a name that two of them have begins with the path of the file.

    Args:
        repository: Repository of the snapshot.
        entry: Complete entry of the file or directory.
        path: Its path, for messages and for its suffix.
        reader: Reads headers.

    Raises:
        NotTensors: there is nothing with tensors in it.
        Damaged: a file cannot be read, or is not as it should be.
        CiuicError: NumPy is not installed.
    """

    def __init__(self, repository: Repository, entry: Entry, path: bytes, reader: BlockReader) -> None:
        self._reader = reader
        self._tensors: dict[str, tuple[Entry, _Found]] = {}
        self.size_bytes = 0
        """Size of the files."""
        self.left_out: list[str] = []
        """Files of a directory that are not as they should be, with the reason."""
        if not entry.is_dir:
            self._add(entry, path, "")
        else:
            for relative, one in _files_below(repository, entry):
                self._add(one, path + b"/" + relative, one_line(os.fsdecode(relative)))
            if not self._tensors and self.left_out:
                raise Damaged(self.left_out[0])
            if not self._tensors:
                raise NotTensors(
                    f"no file of {one_line(path)} has tensors that are known here: {', '.join(SUFFIXES)}"
                )

    def names(self) -> Iterator[str]:
        """Iterate over the names in the order of the files."""
        return iter(self._tensors)

    def identity(self, name: str) -> Hashable:
        """Return what equal content has: type, shape and the ids of its blocks."""
        entry, found = self._tensors[name]
        block = self._reader.block_size
        first, stop = found.start // block, blocks_of(found.start + found.size_bytes, block)
        ids = tuple(sorted(self._reader.ids(entry, first, stop).items()))
        shifted = tuple((at - first, chunk) for at, chunk in ids)
        return found.kind.name, found.shape, found.order, found.start % block, found.size_bytes, shifted

    def tensor(self, name: str) -> StoredTensor:
        """Return where the tensor is. One whose elements lie in another order has its shape in that order."""
        entry, found = self._tensors[name]
        if not found.is_dense:
            return StoredTensor(found.kind._replace(read=None), found.shape, ())
        shape = tuple(found.shape[at] for at in found.order)
        place = FileRange((0,) * len(shape), shape, entry, found.start, found.size_bytes)
        return StoredTensor(found.kind, shape, (place,))

    def state(self, name: str) -> str:
        """Return the path of the dict or list that holds the tensor; "" for one at the top."""
        return self._tensors[name][1].state

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape as the program has it."""
        return self._tensors[name][1].shape

    def order(self, name: str) -> tuple[int, ...]:
        """Return the dimensions by stride, largest first: in which order the elements lie."""
        return self._tensors[name][1].order

    def _add(self, entry: Entry, path: bytes, prefix: str) -> None:
        try:
            found = dict(_tensors_in(self._reader, entry, path))
            if sum(one.size_bytes for one in found.values()) > _MAX_SHARED * entry.size_bytes:
                raise ValueError(f"its tensors have more than {_MAX_SHARED} times its size")
        except NotTensors as error:
            if prefix:
                # Beside checkpoints lie other files of the same suffixes.
                return
            raise NotTensors(f"{one_line(path)}: {error.message}", hint=error.hint) from None
        except (*MALFORMED, ValueError, zipfile.BadZipFile, EOFError, NotImplementedError) as error:
            damage = f"{one_line(path)} is malformed: {one_line(str(error))}"
            if not prefix:
                raise Damaged(damage) from None
            # A torn one beside others: it hides none of them.
            self.left_out.append(damage)
            return
        self.size_bytes += entry.size_bytes
        for name, one in found.items():
            whole = f"{prefix}:{name}" if name in self._tensors else name
            self._tensors[_free(whole, self._tensors)] = entry, one


def _free(name: str, taken: dict[str, Any]) -> str:
    free, number = name, 2
    while free in taken:
        free, number = f"{name}#{number}", number + 1
    return free


def _files_below(repository: Repository, directory: Entry) -> Iterator[tuple[bytes, Entry]]:
    """Yield the files with tensors below a directory, by path."""
    waiting = [(b"", directory)]
    count = 0
    while waiting:
        above, tree = waiting.pop()
        inner = []
        for entry in repository.trees.entries(tree.content) if tree.content else ():
            path = above + entry.name
            if entry.is_dir:
                inner.append((path + b"/", entry))
            elif entry.is_file and path.lower().endswith(tuple(map(os.fsencode, SUFFIXES))):
                count += 1
                if count > _MAX_FILES:
                    raise UsageError(
                        f"it has more than {_MAX_FILES} files with tensors", hint="name one of them"
                    )
                yield path, entry
        waiting.extend(reversed(inner))


def _tensors_in(reader: BlockReader, entry: Entry, path: bytes) -> Iterator[tuple[str, _Found]]:
    if not entry.is_file:
        raise NotTensors("it is no regular file")
    head = bytes(reader.read(entry, 0, min(entry.size_bytes, len(_NUMPY_HEAD))))
    if head.startswith(_ZIP_HEAD):
        yield from _archived(reader, entry)
    elif head == _NUMPY_HEAD:
        yield "array", _array(_Ranges(reader, entry), 0, entry.size_bytes)
    elif path.lower().endswith(b".safetensors"):
        header = read_header(
            lambda count: bytes(reader.read(entry, 0, count)),
            entry.size_bytes,
            reader.block_size,
            one_line(path),
        )
        for name, where in header.items():
            kind = number_kind(where.dtype)
            if kind.read is not None and prod(where.shape) * kind.element_bytes != where.stop - where.start:
                raise ValueError(f"the tensor {name} has another size than its shape says")
            dense = _Found(
                kind, where.shape, tuple(range(len(where.shape))), where.start, where.stop - where.start
            )
            yield name, dense
    else:
        raise NotTensors(
            "it is neither safetensors nor an archive of torch or NumPy",
            hint="others are converted by the program that writes them; ciuic cat prints the file as it was",
        )


class _Member(NamedTuple):
    start: int
    size_bytes: int


def _archived(reader: BlockReader, entry: Entry) -> Iterator[tuple[str, _Found]]:
    raw = _Ranges(reader, entry)
    with zipfile.ZipFile(raw) as archive:
        members = {member.filename: member for member in archive.infolist()}
        pickles = [name for name in members if name == "data.pkl" or name.endswith("/data.pkl")]
        if pickles:
            yield from _of_torch(raw, archive, members, pickles[0].removesuffix("data.pkl"))
            return
        for name, member in members.items():
            if name.endswith(".npy"):
                place = _place(raw, member, entry)
                yield name.removesuffix(".npy"), _array(raw, place.start, place.size_bytes)


def _place(raw: _Ranges, member: zipfile.ZipInfo, entry: Entry) -> _Member:
    """Return where the content of a member lies."""
    if member.compress_type != zipfile.ZIP_STORED:
        raise NotTensors(
            "its members are compressed, so that nothing in them can be read in place",
            hint="np.savez instead of np.savez_compressed: ciuic compresses what it stores",
        )
    raw.seek(member.header_offset)
    header = raw.read(_LOCAL_HEADER_BYTES)
    # zipfile takes any offset, also a negative one, from the directory.
    if member.header_offset < 0 or len(header) < _LOCAL_HEADER_BYTES or header[:4] != _ZIP_HEAD:
        raise ValueError("a member is not where the directory says")
    start = (
        member.header_offset
        + _LOCAL_HEADER_BYTES
        + sum(int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    )
    if start + member.file_size > entry.size_bytes:
        raise ValueError("a member reaches past the end of the file")
    return _Member(start, member.file_size)


def _array(file: _Ranges, start: int, size_bytes: int) -> _Found:
    file.seek(start)
    head = file.read(len(_NUMPY_HEAD) + 2)
    if len(head) < len(_NUMPY_HEAD) + 2 or not head.startswith(_NUMPY_HEAD) or not 1 <= head[6] <= 3:
        raise NotTensors("an array is in no version of NumPy's format that is known here")
    length = int.from_bytes(file.read(2 if head[6] == 1 else 4), "little")
    if length > _MAX_NUMPY_HEADER_BYTES:
        raise NotTensors("the header of an array is longer than NumPy reads")
    try:
        # Literals alone: nothing is evaluated.
        described = ast.literal_eval(file.read(length).decode("utf-8").strip())
    except (SyntaxError, MemoryError) as error:
        raise ValueError(f"the header is not that of an array: {error}") from None
    shape, dtype = described["shape"], described["descr"]
    _check_shape(shape)
    begin = file.tell()
    # Records and text are listed without numbers.
    kind = number_kind("", dtype, of_torch=False) if isinstance(dtype, str) else NumberKind("record", 1, None)
    count = prod(shape) * kind.element_bytes
    order = tuple(range(len(shape)))
    if kind.read is None:
        return _Found(kind, shape, order, begin, 0, is_dense=False)
    if begin - start + count != size_bytes:
        raise ValueError("the array has another size than its header says")
    return _Found(
        kind, shape, _element_order(shape, order[::-1] if described["fortran_order"] else order), begin, count
    )


def _element_order(shape: tuple[int, ...], by_stride: Sequence[int]) -> tuple[int, ...]:
    """Return the dimensions by stride; one whose stride moves no element keeps its place."""
    long = iter(at for at in by_stride if shape[at] != 1)
    return tuple(next(long) if size != 1 and 0 not in shape else at for at, size in enumerate(shape))


def _check_shape(shape: Any) -> None:
    if (
        not isinstance(shape, tuple)
        or len(shape) > _MAX_DIMENSIONS
        or any(type(size) is not int or not 0 <= size < 1 << 48 for size in shape)
        or prod(shape) >= 1 << 60
    ):
        raise ValueError("a tensor has an impossible shape")


def _of_torch(
    raw: _Ranges, archive: zipfile.ZipFile, members: dict[str, zipfile.ZipInfo], top: str
) -> Iterator[tuple[str, _Found]]:
    order = members.get(f"{top}byteorder")
    if order is not None and (order.compress_type != zipfile.ZIP_STORED or order.file_size > _MAX_BYTE_ORDER):
        raise ValueError("its byte order is no word")
    if order is not None and archive.read(order)[:3] == b"big":
        raise NotTensors("its numbers are big-endian")
    pickle = members[f"{top}data.pkl"]
    if pickle.file_size > _MAX_PICKLE_BYTES or pickle.compress_type != zipfile.ZIP_STORED:
        raise NotTensors(f"its pickle is compressed, or has more than {_MAX_PICKLE_BYTES >> 20} MiB")
    places: dict[str, _Member] = {}
    for state, name, made in _rebuilt(read_pickle(archive.read(pickle))):
        found = _TorchTensor(made)
        if found.key not in places:
            places[found.key] = _place(raw, members[f"{top}data/{found.key}"], raw._entry)
        yield name, found.located(places[found.key])._replace(state=state)


_REBUILD: Final = {
    *(Name("torch._utils", name) for name in ("_rebuild_tensor_v2", "_rebuild_tensor", "_rebuild_tensor_v3")),
}
_WRAPPED: Final = {
    *(Name("torch._utils", name) for name in ("_rebuild_parameter", "_rebuild_parameter_with_state")),
}
_SUBCLASS: Final = Name("torch._tensor", "_rebuild_from_type_v2")


def _rebuilt(value: Any) -> Iterator[tuple[str, str, Made]]:
    """Yield of each tensor the path of what holds it, its own path, and its description, in their order.

    What stands in several places is met once.
    """
    seen: set[int] = set()
    # One iterator for each level, and no path before it is needed: a list may have as many items as the pickle has bytes.
    stack: list[tuple[str, str, Iterator[tuple[Any, Any]]]] = [("", "", iter(((None, value),)))]
    tensors, containers = _MAX_TENSORS, _MAX_CONTAINERS
    while stack:
        state, above, items = stack[-1]
        for key, one in items:
            # What is no container and no tensor has none below it.
            if type(one) not in (dict, list, tuple, Made) or id(one) in seen:
                continue
            path = above if key is None else _joined(above, key)
            containers -= 1
            if len(path) > _MAX_NAME or containers < 0:
                raise ValueError("its values are nested too deeply, or are too many")
            if type(one) is not Made:
                seen.add(id(one))
                stack.append((path, path, iter(one.items() if type(one) is dict else enumerate(one))))
                break
            # Only names are looked up in tables: a tuple that holds another one twice, which does so again, is hashed for years.
            if type(one.function) is not Name or type(one.arguments) is not tuple:
                continue
            if one.function in _REBUILD:
                tensors -= 1
                if tensors < 0:
                    raise ValueError(f"it has more than {_MAX_TENSORS} tensors")
                yield state, path or "tensor", one
                continue
            inner = one.state
            if one.function in _WRAPPED:
                inner = one.arguments[0]
            elif one.function == _SUBCLASS:
                inner = Made(one.arguments[0], one.arguments[2])
            # A parameter is a tensor of what holds it.
            stack.append((state, path, iter(((None, inner),))))
            break
        else:
            stack.pop()


def _joined(path: str, key: Any) -> str:
    text = key if isinstance(key, str) else str(key) if isinstance(key, (int, float)) else "?"
    return f"{path}.{text}" if path else text


class _TorchTensor:
    """A tensor as torch's pickles describe it: a storage, an offset in it, sizes and strides."""

    def __init__(self, made: Made) -> None:
        storage, offset, shape, strides, *rest = made.arguments
        if (
            not isinstance(storage, Persistent)
            or not isinstance(storage.id, tuple)
            or storage.id[0] != "storage"
        ):
            raise ValueError("a tensor has no storage")
        kind, key = storage.id[1], storage.id[2]
        if not isinstance(kind, Name) or not isinstance(key, str):
            raise ValueError("a storage is described by what is no type and key")
        _check_shape(shape)
        if type(offset) is not int or not 0 <= offset < 1 << 48 or not isinstance(strides, tuple):
            raise ValueError("a tensor has an impossible offset")
        if len(strides) != len(shape) or any(
            type(one) is not int or not 0 <= one < 1 << 48 for one in strides
        ):
            raise ValueError("a tensor has impossible strides")
        self.key = key
        self._shape, self._strides, self._offset = shape, strides, offset
        self._dtype = {**_STORAGES, **_COMPLEX_STORAGES}.get(kind.name, kind.name)
        if made.function.name == "_rebuild_tensor_v3" and len(rest) > 2 and isinstance(rest[2], Name):
            self._dtype = rest[2].name

    def located(self, where: _Member) -> _Found:
        """Return the tensor with its place, inside of its storage."""
        kind = number_kind(self._dtype) if self._dtype in _STORAGES.values() else number_kind("", self._dtype)
        item = kind.element_bytes
        count = prod(self._shape)
        by_stride = sorted(range(len(self._shape)), key=lambda at: (-self._strides[at], at))
        order = _element_order(self._shape, by_stride)
        dense = kind.read is not None
        expected = 1
        for at in reversed(order):
            if count and self._shape[at] != 1:
                dense = dense and self._strides[at] == expected
                expected *= self._shape[at]
        last = (
            sum((size - 1) * stride for size, stride in zip(self._shape, self._strides, strict=True))
            if count
            else -1
        )
        if kind.read is not None and (self._offset + last + 1) * item > where.size_bytes:
            raise ValueError("a tensor reaches past the end of its storage")
        if not dense:
            return _Found(kind, self._shape, order, where.start, 0, is_dense=False)
        return _Found(kind, self._shape, order, where.start + self._offset * item, count * item)
