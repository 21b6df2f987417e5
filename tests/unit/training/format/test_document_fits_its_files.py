"""The check that the tensors of a state's document are in its files, on crafted documents."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ciuic.training.format.layout import TensorInFile
from ciuic.training.format.reading import STATE_VERSION, check_document

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
