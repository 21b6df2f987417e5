"""`tensor_history`: norm, drift and counts of NaN of the tensors of a file, or of a directory, over all snapshots.

Guarantees: of two versions only the blocks that differ are compared, and what is the same only once and for norms. What was summed is
kept in a cache of this user's by the ids of the contents, never by name, time or snapshot, so that a second look reads no tensors. A cached file that is
damaged is not there. Memory: the figures of one version, and what `state_diff` takes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from math import hypot, prod
from typing import Final, NamedTuple

import msgspec

from ciuic.errors import Damaged
from ciuic.history import OnDamage, PathVersion, Timeline, versions
from ciuic.remote.reading.cache_directory import CacheDirectory
from ciuic.repository import Repository
from ciuic.structs import msgpack_decoder
from ciuic.training.change_figures import ChangeFigures, FigureSums, numpy
from ciuic.training.state_diff import tensor_change
from ciuic.training.stored_tensors import (
    BlockReader,
    KnownSets,
    SavedState,
    StoredTensor,
    TensorSource,
    holds_state,
)
from ciuic.training.tensor_files import FileTensors, NotTensors

_SPAN_BYTES: Final = 4 << 20
_CACHE_VERSION: Final = 1


class TensorFigures(msgspec.Struct, frozen=True):
    """Figures of one tensor in one version. Norms are Euclidean, over the finite numbers."""

    dtype: str
    shape: tuple[int, ...]
    """Sizes in the order in which the elements lie in the file."""
    norm: float | None
    """None for what holds no numbers that are known here."""
    nan: int
    inf: int
    change_norm: float | None = None
    """Norm of the change from the version before; None where there is no such tensor, and for another shape."""
    old_norm: float | None = None
    largest_change: float | None = None
    cosine: float | None = None

    @property
    def drift(self) -> float | None:
        """Return the norm of the change by the norm before."""
        if self.change_norm is None or self.old_norm is None:
            return None
        return _ratio(self.change_norm, self.old_norm)


def _ratio(change: float, old: float) -> float:
    return change / old if old else float("inf") if change else 0.0


class TensorVersion(NamedTuple):
    """The tensors of one version of a path."""

    version: PathVersion
    tensors: Mapping[str, TensorFigures]
    problem: str = ""
    """Why its tensors cannot be read; empty if they were."""
    is_other: bool = False
    """True if they cannot because it is no file with tensors that are known here: nothing is wrong with it."""
    left_out: tuple[str, ...] = ()
    """Files of a directory that are not as they should be, with the reason."""
    has_earlier: bool = True
    """False if changes are not known: no version before, or one that cannot be read."""

    @property
    def norm(self) -> float:
        """Return the norm of all tensors together."""
        return hypot(*(one.norm for one in self.tensors.values() if one.norm is not None))

    @property
    def drift(self) -> float | None:
        """Return the norm of the change of all tensors that both have, by their norm before; None if that is not known."""
        pairs = [
            (one.change_norm, one.old_norm)
            for one in self.tensors.values()
            if one.change_norm is not None and one.old_norm is not None
        ]
        if not self.has_earlier or not pairs:
            return None
        return _ratio(hypot(*(change for change, _ in pairs)), hypot(*(old for _, old in pairs)))

    @property
    def nan(self) -> int:
        """Return the number of NaN in all tensors."""
        return sum(one.nan for one in self.tensors.values())

    @property
    def inf(self) -> int:
        """Return the number of infinities in all tensors."""
        return sum(one.inf for one in self.tensors.values())

    @property
    def most_changed(self) -> str | None:
        """Return the name of the tensor with the largest drift."""
        drifts = [(one.drift, name) for name, one in self.tensors.items() if one.drift]
        return max(drifts, key=lambda pair: pair[0], default=(0.0, None))[1]


class _Cached(msgspec.Struct):
    version: int
    tensors: dict[str, TensorFigures]


_cached = msgpack_decoder(_Cached)


def tensor_history(
    repository: Repository,
    timeline: Timeline,
    path: bytes,
    *,
    pattern: str = "*",
    cache: CacheDirectory | None = None,
    on_damage: OnDamage | None = None,
) -> Iterator[TensorVersion]:
    """Yield the versions of a path with the figures of its tensors, newest first, as they are found.

    Versions that differ in attributes alone are one; where the path is gone there is no version.

    Args:
        repository: Repository of the snapshots.
        timeline: Root with the path.
        path: File, or directory with files, absolute and normalised.
        pattern: Only tensors whose names match (as `fnmatch`).
        cache: Keeps figures; None: nothing is kept.
        on_damage: Called for each snapshot in which the path cannot be looked up; None: that is raised.

    Raises:
        Damaged: As ``on_damage`` says.
        CiuicError: NumPy is not installed.
    """
    numpy()
    reader = BlockReader(repository)
    found = versions(repository, timeline, path, **({} if on_damage is None else {"on_damage": on_damage}))
    newer: _Opened | None = None
    sets = KnownSets(repository)
    for version in found:
        if version.entry is None:
            continue
        older = _Opened(repository, reader, version, path, sets)
        if newer is not None:
            if newer.content == older.content and older.content is not None:
                newer = newer.joined(older)
                continue
            yield newer.figures(older, pattern, reader, cache)
        newer = older
    if newer is not None:
        yield newer.figures(None, pattern, reader, cache)


class _Opened:
    """A version whose headers were read."""

    def __init__(
        self,
        repository: Repository,
        reader: BlockReader,
        version: PathVersion,
        path: bytes,
        sets: KnownSets,
    ) -> None:
        self.version = version
        self.source: TensorSource | None = None
        self.problem = ""
        self._is_other = False
        self._left_out: tuple[str, ...] = ()
        self._repository_id = repository.id
        assert version.entry is not None
        try:
            if holds_state(repository, version.last):
                state = SavedState(repository, version.last.id, reader, path, sets)
                self.problem, self._is_other = state.lacking, bool(state.lacking)
                self.source = None if state.lacking else state
            else:
                files = FileTensors(repository, version.entry, path, reader)
                self.source, self._left_out = files, tuple(files.left_out)
        except (Damaged, NotTensors) as error:
            self.problem = error.message
            self._is_other = isinstance(error, NotTensors)
        self.content: tuple[object, ...] | None = None
        if self.source is not None:
            self.content = tuple((name, self.source.identity(name)) for name in self.source.names())

    def joined(self, older: _Opened) -> _Opened:
        """Return this version from where an older one of the same tensors began."""
        self.version = self.version._replace(
            kind=older.version.kind,
            first=older.version.first,
            snapshots=self.version.snapshots + older.version.snapshots,
        )
        return self

    def figures(
        self, older: _Opened | None, pattern: str, reader: BlockReader, cache: CacheDirectory | None
    ) -> TensorVersion:
        """Return the figures, compared with an older version."""
        before = None if older is None else older.source
        if self.source is None:
            return TensorVersion(self.version, {}, self.problem, self._is_other)
        key = self._key(older, pattern)
        known = None if cache is None else _load(cache, key)
        if known is None:
            # Half of a surrogate pair, which JSON and pickles of others may have, cannot be stored.
            known = {
                name.encode("utf-8", "backslashreplace").decode(): figures
                for name, figures in _figures(self.source, before, pattern, reader)
            }
            if cache is not None:
                cache.store(key, msgspec.msgpack.encode(_Cached(_CACHE_VERSION, known)))
        return TensorVersion(self.version, known, left_out=self._left_out, has_earlier=before is not None)

    def _key(self, older: _Opened | None, pattern: str) -> str:
        # Ids of chunks are those of one repository.
        content = (self._repository_id, pattern, self.content, older and older.content)
        return hashlib.blake2b(repr(content).encode("utf-8", "surrogatepass"), digest_size=24).hexdigest()


def _load(cache: CacheDirectory, key: str) -> dict[str, TensorFigures] | None:
    data = cache.load(key)
    if data is None:
        return None
    try:
        cached = _cached.decode(data)
    except msgspec.DecodeError:
        return None
    return cached.tensors if cached.version == _CACHE_VERSION else None


def _figures(
    source: TensorSource, before: TensorSource | None, pattern: str, reader: BlockReader
) -> Iterator[tuple[str, TensorFigures]]:
    known = set() if before is None else set(before.names())
    for name in source.names():
        if not fnmatchcase(name, pattern):
            continue
        tensor = source.tensor(name)
        if before is None or name not in known:
            yield name, _alone(tensor, reader, same=False)
            continue
        change = None
        if before.identity(name) != source.identity(name):
            change = tensor_change(name, before.tensor(name), tensor, reader, whole=True)
        if change is None:
            yield name, _alone(tensor, reader, same=True)
        elif change.figures is None:
            yield name, _alone(tensor, reader, same=False)
        else:
            yield name, _of_change(tensor, change.figures)


def _of_change(tensor: StoredTensor, figures: ChangeFigures) -> TensorFigures:
    return TensorFigures(
        tensor.kind.name,
        tensor.shape,
        figures.new_norm,
        figures.new_nan,
        figures.new_inf,
        figures.change_norm,
        figures.old_norm,
        figures.largest_change,
        figures.cosine,
    )


def _alone(tensor: StoredTensor, reader: BlockReader, *, same: bool) -> TensorFigures:
    """Return the figures of a tensor that is compared with none, or that has not changed."""
    if tensor.kind.read is None:
        return TensorFigures(tensor.kind.name, tensor.shape, None, 0, 0)
    sums = FigureSums(tensor.kind, tensor.kind)
    step = _SPAN_BYTES - _SPAN_BYTES % tensor.kind.element_bytes
    for one in tensor.ranges:
        for at in range(0, one.size_bytes, step):
            data = reader.read(one.entry, one.start + at, one.start + min(one.size_bytes, at + step))
            sums.add_identical(numpy().frombuffer(data, numpy().uint8))
    figures = _of_change(tensor, sums.result(prod(tensor.shape)))
    if same:
        return figures
    return TensorFigures(figures.dtype, figures.shape, figures.norm, figures.nan, figures.inf)
