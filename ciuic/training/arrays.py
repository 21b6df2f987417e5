"""The tensors of a snapshot. Files are read in several threads, each with a repository of its own; of what other ranks have stored, only
what somebody asks for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

from ciuic.repository import Repository
from ciuic.training import tensors
from ciuic.training.files import Files, read_file
from ciuic.training.layout import TensorInFile, decode_header
from ciuic.training.pieces import InPieces, Piece, Source
from ciuic.training.shards import parse_piece
from ciuic.types import Entry

_THREADS: Final = 4
_MARK: Final = "@"
"""In the name of a file that holds one piece of a tensor."""


class _Found(NamedTuple):
    owner: Any
    """What the file's bytes lie in; None where they were not read yet."""
    path: str
    where: TensorInFile


def arrays_of(path: str, files: Files, names: Sequence[str], source: Source | None = None) -> Arrays:
    """The tensors in these files, read. Damaged. ``source``: for those that are there in pieces, which are not read yet."""
    arrays = Arrays(path, files, source)
    arrays.fetch(sorted(names))
    return arrays


class Arrays:
    """Whole tensors are read by `fetch`; of those in pieces `lookup` returns an `InPieces`."""

    def __init__(self, path: str, files: Files, source: Source | None = None) -> None:
        self._path = path
        self._files = files
        self._source = source
        self._found: dict[str, dict[str, _Found]] = {}
        self._pieces: dict[tuple[str, str], list[Piece]] = {}
        self._made: dict[tuple[str, str], Any] = {}

    def fetch(self, names: Sequence[str]) -> None:
        entries = [(name, self._files.entry(name)) for name in names]
        entries.sort(key=lambda entry: -entry[1].size_bytes)
        shares = [entries[number::_THREADS] for number in range(min(_THREADS, len(entries)))]
        with ThreadPoolExecutor(max(1, len(shares)), "ciuic-load") as pool:
            for found in pool.map(self._read_share, shares):
                for name, owner, held in found:
                    self._note(name, owner, held)

    def _note(self, path: str, owner: Any, held: Mapping[str, TensorInFile]) -> None:
        object_name = path.partition("/")[0]
        for tensor, facts in held.items():
            self._found.setdefault(object_name, {})[tensor] = _Found(owner, path, facts)
            piece = parse_piece(tensor)
            if piece is not None:
                self._pieces.setdefault((object_name, piece[0]), []).append(Piece(piece[1], path, facts))

    def _read_share(self, share: list[tuple[str, Entry]]) -> list[tuple[str, Any, dict[str, TensorInFile]]]:
        done = []
        with Repository.open(self._path) as repository:
            for name, entry in share:
                of_one_piece = self._source is not None and _MARK in name
                if of_one_piece and entry.size_bytes > repository.block_size:
                    owner, view = None, memoryview(bytearray(repository.block_size))
                else:
                    owner, view = tensors.empty_buffer(entry.size_bytes)
                read_file(repository, entry, view)
                done.append((name, owner, _header(view, entry.size_bytes, name)))
        return done

    def has_pieces(self, object_name: str) -> bool:
        return any(of == object_name for of, _ in self._pieces)

    def lookup(self, object_name: str) -> Any:
        """For `structure.unpack`: of one object."""

        def tensor(name: str, packed: dict[str, Any]) -> Any:
            key = object_name, name
            if key not in self._made:
                self._made[key] = self._make(object_name, name, packed)
            return self._made[key]

        return tensor

    def _make(self, object_name: str, name: str, packed: dict[str, Any]) -> Any:
        if packed["$"] == "sharded":
            if self._source is None:
                raise ValueError(f"the tensor {object_name}.{name} is in pieces, which cannot be here")
            return InPieces(name, packed, self._pieces.get((object_name, name), []), self._source)
        try:
            owner, path, facts = self._found[object_name][name]
        except KeyError:
            raise ValueError(f"the tensor {object_name}.{name} is in no file") from None
        if owner is None:
            assert self._source is not None
            owner = self._source.read(path, 0, self._files.entry(path).size_bytes)
        array = tensors.Array(
            "numpy" if packed.get("of") == "numpy" else "torch",
            facts.dtype,
            facts.shape,
            facts.stop - facts.start,
            packed.get("dtype", ""),
            tuple(packed.get("shape", ())),
        )
        return tensors.from_buffer(owner, facts.start, array)


def _header(start: memoryview, size_bytes: int, name: str) -> dict[str, TensorInFile]:
    """Of a file of this size that begins so. ValueError."""
    header = decode_header(start.tobytes() if len(start) < 8192 else bytes(start[:8192]), size_bytes)
    if isinstance(header, int):
        header = decode_header(bytes(start[:header]), size_bytes)
    if isinstance(header, int):
        raise ValueError(f"the header of {name} has no end")
    return header
