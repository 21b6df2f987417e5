"""Files of checkpoints for the tests of verdicts: made by the formats' own libraries, and damaged as writers leave them.

Writers are stopped and killed at random instants, and a snapshot of each instant is judged. A whole file is one whose bytes are those that the writer was to write, or whose values the library reads back.
"""

from __future__ import annotations

import io
import json
import os
import random
import signal
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ciuic.repository.identity import is_zero
from ciuic.verdicts.sources import DirectorySource, FileSource
from ciuic.verdicts.verdict import judge_file

BLOCK = 4096
Make = Callable[[random.Random], bytes]


class MemoryFile(FileSource):
    """File in memory, with holes as a snapshot records them: blocks of zeros."""

    def __init__(
        self, name: bytes, data: bytes, *, doubt: str = "", mixture: str = "", block_size: int = BLOCK
    ) -> None:
        self.name = name
        self.size_bytes = len(data)
        self.identity = b""
        self.data = data
        self.read_bytes = 0
        self._doubt = doubt
        self._mixture = mixture
        self._block_size = block_size

    def read(self, offset: int, length: int) -> bytes:
        self.read_bytes += length
        return self.data[offset : offset + length]

    def holes(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        size = self._block_size
        for at in range(start // size * size, min(stop, self.size_bytes), size):
            if is_zero(self.data[at : at + size]):
                yield max(start, at), min(at + size, self.size_bytes)

    def doubt(self) -> str:
        return self._doubt

    def mixture(self) -> str:
        return self._mixture


class MemoryDirectory(DirectorySource):
    """Directory in memory: dictionaries are directories."""

    def __init__(
        self, tree: dict[bytes, Any], path: bytes = b"/d", open_files: frozenset[bytes] = frozenset()
    ) -> None:
        self.path = path
        self.tree = tree
        self._open = open_files

    def names(self) -> list[bytes]:
        return sorted(self.tree)

    def file(self, name: bytes) -> FileSource | None:
        data = self.tree.get(name)
        doubt = "a program had it open for writing" if name in self._open else ""
        return MemoryFile(name, data, doubt=doubt) if isinstance(data, bytes) else None

    def directory(self, name: bytes) -> DirectorySource | None:
        below = self.tree.get(name)
        if not isinstance(below, dict):
            return None
        return MemoryDirectory(below, self.path + b"/" + name, self._open)


class Format(NamedTuple):
    """A format: the end of its names, and a maker of whole files."""

    suffix: bytes
    make: Make
    library: str = ""
    """Library that makes it, if not every test environment has that."""


def arrays(rng: random.Random, count: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """Return arrays of random numbers, none of them zero, with random names."""
    made = {}
    numbers = np.random.default_rng(rng.randrange(1 << 32))
    for index in range(count or rng.randrange(1, 6)):
        shape = tuple(rng.randrange(1, 40) for _ in range(rng.randrange(1, 3)))
        kind = rng.choice(["f4", "f2", "f8", "i8"])
        # Negative integers have no zero byte at their end.
        values = numbers.uniform(1.0, 2.0, shape) if kind[0] == "f" else -numbers.integers(1, 1 << 40, shape)
        made[f"layer.{index}.{rng.choice('wbxy')}"] = values.astype(kind)
    return made


def make_safetensors(rng: random.Random) -> bytes:
    """Return a file of safetensors, as the library orders it."""
    try:
        from safetensors.numpy import save
    except ImportError:
        return plain_safetensors(arrays(rng))
    return bytes(save(arrays(rng), {"step": "5"}))


def plain_safetensors(tensors: dict[str, np.ndarray[Any, Any]]) -> bytes:
    """Return a file of safetensors, made without the library."""
    kinds = {"f4": "F32", "f2": "F16", "f8": "F64", "i8": "I64"}
    header: dict[str, Any] = {}
    body = b""
    for name, values in tensors.items():
        data = values.tobytes()
        header[name] = {
            "dtype": kinds[values.dtype.str[1:]],
            "shape": list(values.shape),
            "data_offsets": [len(body), len(body) + len(data)],
        }
        body += data
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def make_npz(rng: random.Random) -> bytes:
    """Return a file of `numpy.savez`."""
    into = io.BytesIO()
    np.savez(into, allow_pickle=False, **arrays(rng))
    return into.getvalue()


def make_npy(rng: random.Random) -> bytes:
    """Return a file of `numpy.save`."""
    into = io.BytesIO()
    np.save(into, next(iter(arrays(rng, 1).values())), allow_pickle=False)
    return into.getvalue()


def make_pickle(rng: random.Random) -> bytes:
    """Return a pickle of plain values."""
    from pickle import dumps  # noqa: TID251 - it writes one, and nothing reads it

    value = {"step": rng.randrange(1000), "data": rng.randbytes(rng.randrange(1, 9000)), "names": ["a", "b"]}
    return dumps(value, protocol=rng.randrange(2, 6))


def make_hdf5(rng: random.Random) -> bytes:
    """Return an HDF5 file with groups, attributes, texts and compressed chunks."""
    import h5py

    into = io.BytesIO()
    with h5py.File(into, "w") as file:
        for name, values in arrays(rng).items():
            made = file.create_dataset(name.replace(".", "/"), data=values)
            made.attrs["unit"] = "metre"
        if rng.random() < 0.5:
            file.create_dataset("text", data=["first", "second"])
        if rng.random() < 0.5:
            data = np.random.default_rng(rng.randrange(99)).random((50, 40))
            file.create_dataset("packed", data=data, chunks=(10, 10), compression="gzip")
    return into.getvalue()


def make_torch(rng: random.Random) -> bytes:
    """Return a checkpoint of `torch.save`."""
    import torch

    into = io.BytesIO()
    torch.save({name: torch.from_numpy(values) for name, values in arrays(rng).items()}, into)
    return into.getvalue()


def make_old_torch(rng: random.Random) -> bytes:
    """Return a checkpoint of torch as before version 1.6."""
    import torch

    into = io.BytesIO()
    state = {name: torch.from_numpy(values) for name, values in arrays(rng).items()}
    torch.save({"model": state, "step": 3}, into, _use_new_zipfile_serialization=False)
    return into.getvalue()


FORMATS = {
    "safetensors": Format(b".safetensors", make_safetensors),
    "npz": Format(b".npz", make_npz),
    "npy": Format(b".npy", make_npy),
    "pickle": Format(b".pkl", make_pickle),
    "hdf5": Format(b".h5", make_hdf5, "h5py"),
    "torch": Format(b".pt", make_torch, "torch"),
    "old-torch": Format(b".pth", make_old_torch, "torch"),
}


def damaged(rng: random.Random, whole: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield a few ways in which a writer that was killed leaves a file, none equal to the whole one."""
    cut = rng.randrange(len(whole))
    yield f"truncated at {cut}", whole[:cut]
    # No writer stops within a number: buffers and pages end at multiples of 8.
    cut = cut // 8 * 8
    yield f"allocated, written to {cut}", whole[:cut] + bytes(len(whole) - cut)
    if len(whole) > 3 * BLOCK:
        block = rng.randrange(1, len(whole) // BLOCK) * BLOCK
        yield f"hole at {block}", whole[:block] + bytes(BLOCK) + whole[block + BLOCK :]
    yield "only allocated", bytes(len(whole))


MODES = ("new", "rename", "allocated", "in place", "library")
_PIECE_BYTES = 4096
_SECONDS = {"torch": 0.03, "old-torch": 0.02, "hdf5": 0.02}
"""Time that a library takes for a file, about, if it is not a few milliseconds."""
_OPEN = "a program had it open for writing"
_OVERWRITTEN = "it was overwritten in place"


class Instants(NamedTuple):
    """Observations at the instants of one format and way of writing."""

    whole: int
    """Snapshots of whole files that no process had open."""
    whole_good: int
    states: dict[str, int]
    wrong: tuple[str, ...]
    """Torn files that were called GOOD."""


class _Seen(NamedTuple):
    ino: int
    data: bytes


def watch(name: str, mode: str, seed: int, instants: int, directory: Path) -> Instants:
    """Stop and kill a writer at random instants, and judge two snapshots of each: one while it is stopped, one after its end."""
    rng = random.Random(f"{name} {mode} {seed}")
    states: Counter[str] = Counter()
    wrong: list[str] = []
    whole = whole_good = 0
    for number in range(instants):
        path = directory / f"{number}{FORMATS[name].suffix.decode()}"
        writer = _Library(name, rng) if mode == "library" else _Bytes(name, mode, rng)
        before = writer.prepare(path)
        child = _start(writer, path)
        writer.wait(child, rng)
        for is_alive in (True, False):
            if not is_alive:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            seen = _copy(path)
            if seen is None:
                continue
            source = _source(path, seen, before, is_open=is_alive and _has_open(child, path))
            verdict = judge_file(source)
            states[verdict.state] += 1
            is_whole = writer.is_whole(seen.data)
            if is_whole and not source.doubt() and not source.mixture():
                whole += 1
                whole_good += verdict.is_good
            if verdict.is_good and not is_whole:
                wrong.append(f"{name}, {mode}, instant {number}: {len(seen.data)} bytes, {verdict.reason}")
        path.unlink(missing_ok=True)
    return Instants(whole, whole_good, dict(states), tuple(wrong))


def _source(path: Path, seen: _Seen, before: _Seen | None, *, is_open: bool) -> MemoryFile:
    """Return the file as a snapshot has it, with what the snapshot before says of it."""
    is_mixed = (
        before is not None
        and before.ino == seen.ino
        and before.data != seen.data
        and len(before.data) == len(seen.data)
    )
    return MemoryFile(
        os.fsencode(path.name),
        seen.data,
        doubt=_OPEN if is_open else "",
        mixture=_OVERWRITTEN if is_mixed else "",
    )


def _copy(path: Path) -> _Seen | None:
    try:
        with path.open("rb") as file:
            return _Seen(os.fstat(file.fileno()).st_ino, file.read())
    except FileNotFoundError:
        return None


def _has_open(pid: int, path: Path) -> bool:
    """Return whether the process has the file open for writing."""
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        if os.readlink(fd) == os.fspath(path):
            flags = next(
                line
                for line in Path(f"/proc/{pid}/fdinfo/{fd.name}").read_text().splitlines()
                if "flags" in line
            )
            return int(flags.split()[1], 8) & os.O_ACCMODE != os.O_RDONLY
    return False


def _start(writer: _Bytes | _Library, path: Path) -> int:
    child = os.fork()
    if not child:
        try:
            writer.write(path)
            # Alive until it is killed, so that the first snapshot is one of a living writer.
            os.kill(os.getpid(), signal.SIGSTOP)
        finally:
            os._exit(0)
    return child


class _Bytes:
    """Writer of given bytes, piece by piece, which stops itself before a random piece."""

    def __init__(self, name: str, mode: str, rng: random.Random) -> None:
        make: Callable[[random.Random], bytes] = FORMATS[name].make
        self._mode = mode
        self._data = make(rng)
        self._old = b""
        if mode == "in place":
            self._old = self._data
            # Of equal size, as the states of one training are; of other sizes the structure tells.
            while self._old == self._data or len(self._old) != len(self._data):
                self._data, self._old = _pair(name, rng)
        self._stop = rng.randrange(-(-len(self._data) // _PIECE_BYTES) + 1)

    def prepare(self, path: Path) -> _Seen | None:
        if not self._old:
            return None
        path.write_bytes(self._old)
        return _copy(path)

    def write(self, path: Path) -> None:
        target = path.with_suffix(".tmp") if self._mode == "rename" else path
        fd = os.open(target, os.O_RDWR | os.O_CREAT, 0o600)
        if self._mode == "allocated":
            os.posix_fallocate(fd, 0, len(self._data))
        for number, at in enumerate(range(0, len(self._data), _PIECE_BYTES)):
            if number == self._stop:
                os.kill(os.getpid(), signal.SIGSTOP)
            os.pwrite(fd, self._data[at : at + _PIECE_BYTES], at)
        os.close(fd)
        if self._mode == "rename":
            target.rename(path)

    def wait(self, child: int, rng: random.Random) -> None:
        os.waitpid(child, os.WUNTRACED)

    def is_whole(self, data: bytes) -> bool:
        return data in (self._data, self._old) and bool(data)


def _pair(name: str, rng: random.Random) -> tuple[bytes, bytes]:
    """Return two files of the same structure with other numbers."""
    seed = rng.randrange(1 << 32)
    values = _values(seed, 1), _values(seed, 2)
    return _saved(name, values[0]), _saved(name, values[1])


def _values(seed: int, version: int) -> dict[str, np.ndarray[Any, Any]]:
    count = random.Random(seed).randrange(1, 5)
    numbers = np.random.default_rng([seed, version])
    return {f"w{index}": numbers.uniform(1.0, 2.0, (30 + index, 40)).astype("f4") for index in range(count)}


def _saved(name: str, values: dict[str, np.ndarray[Any, Any]]) -> bytes:
    into = io.BytesIO()
    _SAVERS[name](into, values)
    return into.getvalue()


class _Library:
    """Writer by the format's own library, over and over, stopped after a random time."""

    def __init__(self, name: str, rng: random.Random) -> None:
        self._name = name
        self._seed = rng.randrange(1 << 32)
        self._path = Path()

    def prepare(self, path: Path) -> _Seen | None:
        self._path = path
        return None

    def write(self, path: Path) -> None:
        # HDF5 reads as well.
        with path.open("w+b") as file:
            _SAVERS[self._name](file, _values(self._seed, 1))

    def wait(self, child: int, rng: random.Random) -> None:
        # The time of a busy machine before the first byte is none of the writer's.
        deadline = time.monotonic() + 60
        while not self._path.exists():
            assert time.monotonic() < deadline, "the writer did not begin"
            time.sleep(0.0005)
        # Not a wait for anything: the instant is what is random.
        time.sleep(rng.random() * _SECONDS.get(self._name, 0.003))
        os.kill(child, signal.SIGSTOP)
        os.waitpid(child, os.WUNTRACED)

    def is_whole(self, data: bytes) -> bool:
        into = io.BytesIO()
        _SAVERS[self._name](into, _values(self._seed, 1))
        if data == into.getvalue():
            return True
        # HDF5 and zip archives have times in them, and torch's old files addresses: the values decide.
        loaded = _loaded(self._name, data)
        return loaded is not None and all(
            key in loaded and np.array_equal(loaded[key], values)
            for key, values in _values(self._seed, 1).items()
        )


def _save_safetensors(into: Any, values: dict[str, Any]) -> None:

    into.write(plain_safetensors(values))


def _save_hdf5(into: Any, values: dict[str, Any]) -> None:
    import h5py

    with h5py.File(into, "w") as file:
        for key, value in values.items():
            file.create_dataset(key, data=value)


def _save_torch(into: Any, values: dict[str, Any], *, is_zip: bool = True) -> None:
    import torch

    tensors = {key: torch.from_numpy(value) for key, value in values.items()}
    torch.save(tensors, into, _use_new_zipfile_serialization=is_zip)


def _save_pickle(into: Any, values: dict[str, Any]) -> None:
    from pickle import dumps  # noqa: TID251 - it writes one, and nothing reads it

    into.write(dumps({key: value.tobytes() for key, value in values.items()}))


_SAVERS: dict[str, Callable[[Any, Any], None]] = {
    "safetensors": _save_safetensors,
    "npz": lambda into, values: np.savez(into, **values),
    "npy": lambda into, values: np.save(into, values["w0"]),
    "pickle": _save_pickle,
    "hdf5": _save_hdf5,
    "torch": _save_torch,
    "old-torch": lambda into, values: _save_torch(into, values, is_zip=False),
}


def _loaded(name: str, data: bytes) -> dict[str, Any] | None:
    """Return the values of a file that the library can read; None for one that it cannot."""
    try:
        if name == "npz":
            with np.load(io.BytesIO(data)) as file:
                return dict(file)
        if name in ("torch", "old-torch"):
            import torch

            state = torch.load(io.BytesIO(data), weights_only=True)  # noqa: TID251 - weights alone
            return {key: tensor.numpy() for key, tensor in state.items()}
        if name == "hdf5":
            import h5py

            with h5py.File(io.BytesIO(data)) as file:
                return {key: value[()] for key, value in file.items()}
    except Exception:
        # A torn file: libraries raise what they like.
        return None
    return None
