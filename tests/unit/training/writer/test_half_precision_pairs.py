"""Masters beside their half-precision copies are found, stored at half their size, and come back the same."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ciuic.repository import Repository, Walker
from ciuic.training.format.layout import lay_out
from ciuic.training.format.structure import Leaf
from ciuic.training.format.tensors import Array
from ciuic.training.writer.codecs import (
    CodecChooser,
    _as_bfloat16,
    _as_float16,
    find_copies,
    order_masters_last,
)
from ciuic.training.writer.messages import Manifest, ManifestFile, RetentionRules
from ciuic.training.writer_process import LastCommit, commit
from ciuic.types import Snapshot

_BLOCK = 65536
_COUNT = 90_000
ROUNDED: dict[str, Callable[[int], int]] = {"BF16": _as_bfloat16, "F16": _as_float16}


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    with Repository.create(tmp_path / "r", block_size=_BLOCK) as made:
        yield made


def weights(seed: int, count: int = _COUNT) -> bytes:
    drawn = random.Random(seed)
    return struct.pack(f"<{count}f", *(drawn.gauss(0, 0.02) for _ in range(count)))


def rounded(data: bytes, dtype: str) -> bytes:
    return b"".join(struct.pack("<H", ROUNDED[dtype](bits)) for (bits,) in struct.iter_unpack("<I", data))


def _array(dtype: str, size_bytes: int) -> Array:
    width = 4 if dtype == "F32" else 2
    return Array("torch", dtype, (size_bytes // width,), size_bytes, element_bytes=width)


def state(objects: dict[str, dict[str, tuple[str, bytes]]]) -> tuple[list[ManifestFile], bytearray]:
    """Return the files of a state in memory, from each object's tensors as dtype and content."""
    leaves = {}
    for name, tensors in objects.items():
        leaves[name] = [Leaf(key, None, _array(dtype, len(data))) for key, (dtype, data) in tensors.items()]
    layout = lay_out(leaves)
    memory = bytearray(layout.end)
    layout.write_fixed(memoryview(memory))
    for name, tensors in objects.items():
        for place, (_, data) in zip(layout.tensors[name], tensors.values(), strict=True):
            memory[place.offset : place.offset + len(data)] = data
    return [ManifestFile(*file) for file in layout.files], memory


def save(
    repository: Repository, chooser: CodecChooser, files: list[ManifestFile], memory: bytearray
) -> Snapshot:
    with repository.writer() as writer:
        chosen = chooser.begin(writer)
        view = memoryview(memory)
        made = commit(
            repository,
            writer,
            view,
            Manifest(time_ns=1, message="", tags=(), files=list(files)),
            b"/training",
            LastCommit(),
            chosen,
        )
        chooser.done(chosen)
    repository.close()
    return made


def contents(repository: Repository, snapshot: Snapshot) -> dict[str, bytes]:
    """Return the content of the files by path."""
    found: dict[str, bytes] = {}
    top = snapshot.roots[0].entry
    for folder in repository.trees.entries(top.content):
        for entry in repository.trees.entries(folder.content):
            data = bytearray(entry.size_bytes)
            blocks = -(-entry.size_bytes // _BLOCK)
            for at, chunk in repository.block_maps.ids(entry.content, entry.map_height, blocks):
                block = repository.chunks.get(chunk)
                data[at * _BLOCK : at * _BLOCK + len(block)] = block
            found[f"{folder.name.decode()}/{entry.name.decode()}"] = bytes(data)
    return found


def mixed(dtype: str, seed: int = 1, damage: bool = False) -> dict[str, dict[str, tuple[str, bytes]]]:
    """Return two layers of one shape with their moments, and their masters in another order."""
    one, other = weights(seed), weights(seed + 1)
    narrow = bytearray(rounded(one, dtype))
    if damage:
        narrow[40_001] ^= 0xFF
    return {
        "model": {"a": (dtype, bytes(narrow)), "b": (dtype, rounded(other, dtype))},
        "optimizer": {
            "moments": ("F32", weights(77)),
            "b.master": ("F32", other),
            "a.master": ("F32", one),
            "zeros": ("F32", bytes(4 * _COUNT)),
        },
    }


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_each_master_is_found_with_its_own_twin(dtype: str) -> None:
    """A master is paired with its own copy and not with another of its shape; others stay unpaired."""
    files, memory = state(mixed(dtype))
    twins = find_copies(files, memoryview(memory))
    assert {path: twin.path for path, twin in twins.items()} == {
        "optimizer/a.master.safetensors": "model/a.safetensors",
        "optimizer/b.master.safetensors": "model/b.safetensors",
    }
    order = [file.path for file in order_masters_last(files, twins)]
    assert sorted(order) == sorted(file.path for file in files)
    assert all(order.index(path) == order.index(twin.path) + 1 for path, twin in twins.items())


def test_nothing_is_looked_at_where_nothing_has_16_bits() -> None:
    """Without a file of 16-bit numbers no file is read at all."""
    files, _ = state({"model": {"a": ("F32", weights(1))}})
    assert find_copies(files, memoryview(b"")) == {}
    assert order_masters_last(files, {}) == files


def test_rubbish_has_no_twin() -> None:
    """Files that are no safetensors, or shorter than they say, are not paired."""
    noise = random.Random(1).randbytes(400_000)
    sizes = [ManifestFile("a", 0, 200_000, 2), ManifestFile("b", 0, 400_000, 4), ManifestFile("c", 0, 10, 2)]
    assert find_copies(sizes, memoryview(noise)) == {}
    long = bytearray(noise)
    assert find_copies([*sizes, ManifestFile("d", 399_990, 200_000, 2)], memoryview(noise)) == {}
    empty = b'{"a":{"dtype":"BF16","shape":[0],"data_offsets":[0,0]}}'.ljust(199_992)
    assert find_copies(sizes, memoryview((199_992).to_bytes(8, "little") + empty + noise)) == {}
    long[:8] = (199_000).to_bytes(8, "little")
    assert find_copies(sizes, memoryview(long)) == {}


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
@pytest.mark.parametrize("damage", [False, True])
def test_a_state_comes_back_and_its_masters_take_half(
    repository: Repository, dtype: str, damage: bool
) -> None:
    """Masters take half their size from the first snapshot on, whether or not they round to their copies."""
    chooser = CodecChooser("small", RetentionRules())
    for seed in (1, 5, 9):
        files, memory = state(mixed(dtype, seed, damage))
        made = save(repository, chooser, files, memory)
        found = contents(repository, made)
        assert found == {f.path: bytes(memory[f.offset : f.offset + f.size_bytes]) for f in files}
        rest = [
            location
            for reached in Walker(repository).walk(made)
            if reached.kind == "data"
            for location in [repository.chunks.locate(reached.id)]
            if location.base
        ]
        masters = [location for location in rest if location.stored_bytes < 0.54 * location.raw_bytes]
        assert len(masters) == 2 * -(-(4 * _COUNT + 4096) // _BLOCK)
    assert list(repository.scrub()) == []


def test_none_means_no_twins_either(repository: Repository) -> None:
    """compression="none" stores masters as they are."""
    files, memory = state(mixed("BF16"))
    made = save(repository, CodecChooser("none", RetentionRules()), files, memory)
    stored = [reached.id for reached in Walker(repository).walk(made) if reached.kind == "data"]
    assert not any(repository.chunks.locate(chunk).base for chunk in stored)


def test_a_block_rests_on_the_one_that_has_most_of_its_numbers() -> None:
    """A block of masters rests on the block of the copy with most of its numbers, wherever headers end."""
    files, memory = state(mixed("BF16"))
    twin = find_copies(files, memoryview(memory))["optimizer/a.master.safetensors"]
    assert twin.shift_bytes == 2048
    stored = {at: bytes([at]) * 16 for at in range(3)}
    chosen = [twin.of_block(at, _BLOCK, stored) for at in range(6)]  # type: ignore[arg-type]
    assert [one and (one.base[0], one.widening.start) for one in chosen] == [
        (0, 1024),
        (0, 1024 + _BLOCK // 4),
        (1, 1024),
        (1, 1024 + _BLOCK // 4),
        (2, 1024),
        (2, 1024 + _BLOCK // 4),
    ]
    assert twin.of_block(6, _BLOCK, stored) is None  # type: ignore[arg-type]
