"""Files of checkpoints for the tests of verdicts: made by the formats' own libraries, and damaged as writers leave them."""

from __future__ import annotations

import io
import json
import random
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ciuic.repository.ids import is_zero
from ciuic.verdicts.sources import DirectorySource, FileSource

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


def make_gguf(rng: random.Random) -> bytes:
    """Return a GGUF file of version 3 with values of every kind."""
    return plain_gguf({name: values.astype("f4") for name, values in arrays(rng).items()})


def plain_gguf(tensors: dict[str, np.ndarray[Any, Any]]) -> bytes:
    """Return a GGUF file with these tensors of 32-bit floats."""

    def text(value: str) -> bytes:
        data = value.encode()
        return struct.pack("<Q", len(data)) + data

    values = [
        text("general.architecture") + struct.pack("<I", 8) + text("llama"),
        text("general.alignment") + struct.pack("<II", 4, 32),
        text("tokens") + struct.pack("<IIQ", 9, 8, 3) + b"".join(map(text, "abc")),
        text("scores") + struct.pack("<IIQ3f", 9, 6, 3, 1.0, 2.0, 3.0),
        text("flag") + struct.pack("<IB", 7, 1),
    ]
    described, body = b"", b""
    for name, numbers in tensors.items():
        body += bytes(-len(body) % 32)
        described += text(name) + struct.pack("<I", numbers.ndim)
        described += struct.pack(f"<{numbers.ndim}Q", *reversed(numbers.shape))
        described += struct.pack("<IQ", 0, len(body))
        body += numbers.tobytes()
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values)) + b"".join(values) + described
    return head + bytes(-len(head) % 32) + body


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
    "gguf": Format(b".gguf", make_gguf),
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
