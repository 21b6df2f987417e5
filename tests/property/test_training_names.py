"""Names of parameters and keys of states that no format likes come back as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ciuic import SnapshotManager
from ciuic.training.format.layout import decode_header, encode_header
from ciuic.training.format.structure import pack

HOSTILE = (
    *("__metadata__", "__metadata__~", "__metadata__~~", "", "/", "a/b", "..", ".", "x\0y", "\n", "%2F", "~"),
    *("é", "e\u0301", "\ud800", "n" * 5000, "0", "12", "a b", "small-tensors", "format", "weight_map"),
)
NAMES = st.one_of(
    st.sampled_from(HOSTILE), st.text(max_size=8), st.integers(0, 30).map(lambda n: "__metadata__" + "~" * n)
)


class Thing:
    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_hostile_keys_come_back(tmp_path: Path) -> None:
    """Keys that are reserved, empty, very long, no UTF-8, or mean something to a path, at any depth, with small and large tensors."""
    small = {key: np.arange(5) + number for number, key in enumerate(HOSTILE)}
    large = {key: {key: np.full(40_000, number)} for number, key in enumerate(HOSTILE)}
    with SnapshotManager(tmp_path / "snapshots") as manager:
        manager.register(thing=Thing({**small, "large": large}))
        manager.save_snapshot()
        state = manager.load_latest_snapshot()
    assert state is not None
    found = state["thing_state_dict"]
    assert set(found) == {*HOSTILE, "large"}
    for key in HOSTILE:
        assert np.array_equal(found[key], small[key]), key
        assert np.array_equal(found["large"][key][key], large[key][key]), key


@settings(max_examples=60, deadline=None)
@given(names=st.lists(NAMES, min_size=1, max_size=12, unique=True))
@example(names=["__metadata__", "__metadata__~"])
def test_headers_tell_every_name(names: list[str]) -> None:
    """Every name of a header is read back as it was, none is taken for another's or for the header's own."""
    leaves = pack({name: np.arange(number + 1) for number, name in enumerate(names)}, "state").leaves
    header = encode_header(leaves, of_torch=False)
    size = len(header) + sum(leaf.array.size_bytes for leaf in leaves)
    found = decode_header(header, size)
    assert not isinstance(found, int)
    assert {name: tensor.shape for name, tensor in found.items()} == {
        leaf.name: leaf.array.shape for leaf in leaves
    }
