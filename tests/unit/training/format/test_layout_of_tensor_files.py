"""Layout of tensors in the files of a snapshot, and the check that those of a document are in its files."""

from __future__ import annotations

import json
from itertools import cycle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load as load_safetensors

from ciuic.training.format.layout import OWN_FILE_BYTES, TensorInFile, decode_header, file_name, lay_out
from ciuic.training.format.reading import STATE_VERSION, check_document
from ciuic.training.format.structure import Leaf, pack

SIZES = st.sampled_from([0, 1, 3, 1000, OWN_FILE_BYTES // 8, OWN_FILE_BYTES, OWN_FILE_BYTES + 1])
NAMES = st.text(min_size=1, max_size=300)
DTYPES = st.sampled_from(["<f4", "<f8", "u1", "?", "<c16", "<c8"])


def _leaves(sizes: dict[str, int], *dtypes: str) -> list[Leaf]:
    arrays = {
        name: np.arange(size).astype(dtype)
        for (name, size), dtype in zip(sizes.items(), cycle(dtypes), strict=False)
    }
    return pack(arrays, "state").leaves


def _image(objects: dict[str, list[Leaf]]) -> dict[str, bytes]:
    """Return the files as they would be saved."""
    layout = lay_out(objects)
    memory = bytearray(layout.end)
    layout.write_fixed(memoryview(memory))
    for name, leaves in objects.items():
        for place, leaf in zip(layout.tensors[name], leaves, strict=True):
            assert place.array == leaf.array
            assert place.offset % leaf.value.itemsize == 0, "frameworks crash on that"
            memory[place.offset : place.offset + leaf.array.size_bytes] = leaf.value.tobytes()
    return {file.path: bytes(memory[file.offset : file.offset + file.size_bytes]) for file in layout.files}


@given(st.dictionaries(NAMES, SIZES, max_size=6), st.lists(DTYPES, min_size=1, max_size=6))
def test_each_file_is_readable_by_the_safetensors_library(sizes: dict[str, int], dtypes: list[str]) -> None:
    """The safetensors library reads every tensor under its own name from the file that the index names."""
    leaves = _leaves(sizes, *dtypes)
    files = _image({"model": leaves})
    if not leaves:
        assert not files
        return
    index = json.loads(files["model/model.safetensors.index.json"])["weight_map"]
    assert sorted(index) == sorted(leaf.name for leaf in leaves)
    for leaf in leaves:
        data = files[f"model/{index[leaf.name]}"]
        assert load_safetensors(data)[leaf.name].tobytes() == leaf.value.tobytes()
        header = decode_header(data, len(data))
        assert isinstance(header, dict)
        facts = header[leaf.name]
        assert data[facts.start : facts.stop] == leaf.value.tobytes()


def test_a_large_tensor_lies_the_same_wherever_it_stands_among_others() -> None:
    """A large tensor has the same bytes at the same offsets of its file, whatever tensors are saved with it."""
    first = _leaves({"a": OWN_FILE_BYTES, "b": 3}, "<f4")
    second = _leaves({"new": 7, "b": 5, "later": OWN_FILE_BYTES * 2, "a": OWN_FILE_BYTES}, "<f4")
    name = f"model/{file_name('a')}"
    assert _image({"model": first})[name] == _image({"other": [], "model": second})[name]


@given(st.lists(NAMES, unique=True, min_size=2, max_size=5))
def test_file_names_are_possible_and_differ(names: list[str]) -> None:
    """Any two tensor names give two different names that a file can have."""
    made = [file_name(name) for name in names]
    assert len(set(made)) == len(made)
    for name in made:
        assert "/" not in name
        assert "\0" not in name
        assert not name.startswith(".")
        assert len(name.encode("utf-8", "surrogateescape")) <= 255


@given(st.binary(max_size=300), st.integers(0, 400))
def test_a_header_of_anything_is_read_or_refused(start: bytes, size_bytes: int) -> None:
    """Any bytes give tensors inside of the file, or a ValueError."""
    try:
        found = decode_header(start, size_bytes)
    except ValueError:
        return
    if isinstance(found, dict):
        assert all(0 <= facts.start <= facts.stop <= size_bytes for facts in found.values())


@pytest.mark.parametrize(
    "header",
    [
        '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,9]}}',
        '{"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}',
        '{"a":{"dtype":"F33","shape":[2],"data_offsets":[0,8]}}',
        '{"a":{"dtype":"F32","shape":[2],"data_offsets":[-8,0]}}',
        '{"a":{"dtype":"F32","shape":["x",4611686018427387904],"data_offsets":[0,8]}}',
        '{"a":{"dtype":"F32","shape":[[2],4611686018427387904],"data_offsets":[0,8]}}',
        '{"a":7}',
        "[1]",
    ],
)
def test_a_header_that_does_not_fit_its_file_is_refused(header: str) -> None:
    """Headers with impossible shapes, offsets or sizes raise ValueError."""
    data = len(header).to_bytes(8, "little") + header.encode() + bytes(8)
    with pytest.raises(ValueError):  # noqa: PT011 (whichever)
        decode_header(data, len(data))


_HELD = {"model": {"w": TensorInFile("U8", (8,), 0, 8), "w@0": TensorInFile("F32", (2,), 8, 16)}}
_BYTES = {"$": "tensor", "name": "w", "dtype": "float8_e8m0fnu", "shape": [8]}
_PIECES = {"$": "sharded", "name": "w", "dtype": "float32", "shape": [2]}


def _check(own: dict[str, Any]) -> None:
    document = {"version": STATE_VERSION, "objects": {"model": [own]}, "values": {}}
    check_document(json.dumps(document).encode(), _HELD)


@pytest.mark.parametrize("own", [_BYTES, _PIECES], ids=["bytes", "pieces"])
def test_a_shape_is_looked_at_before_it_is_computed_with(own: dict[str, Any]) -> None:
    """What is no list of numbers is refused: text or a list times a large number would fill the memory."""
    _check(own)
    for wrong in (["x", 1 << 62], [[2], 1 << 62], [True], [-2, -4], [2.0], "8", 8, [1 << 63], [1] * 2000):
        with pytest.raises(ValueError, match="a shape must be a list of numbers from 0"):
            _check({**own, "shape": wrong})


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({**_BYTES, "name": "v"}, r"the tensor model\.v is in no file"),
        ({**_BYTES, "shape": [3]}, "of shape .* cannot have 8 bytes"),
        ({**_PIECES, "shape": [3]}, "do not make up the whole"),
        ({**_PIECES, "dtype": "float64"}, "a piece of the tensor .* is of F32, expected F64"),
    ],
)
def test_a_tensor_that_is_not_held_as_described_is_named(own: dict[str, Any], message: str) -> None:
    """A tensor in no file, or of another size or dtype, is a ValueError that names it."""
    with pytest.raises(ValueError, match=message):
        _check(own)
