"""Names of parameters and keys of states that no format likes come back as they were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ciuic import SnapshotManager
from ciuic.repository import Repository
from ciuic.training.format.layout import decode_header, encode_header
from ciuic.training.format.reading import check_resolves
from ciuic.training.format.structure import pack, unpack
from ciuic.types import SnapshotId

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
    with Repository.open(tmp_path / "snapshots") as repository:
        check_resolves(repository, SnapshotId(state.id))
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


@settings(max_examples=60, deadline=None)
@given(
    state=st.recursive(
        st.integers(1, 1 << 20), lambda inner: st.dictionaries(NAMES, inner, max_size=4), max_leaves=10
    ).filter(lambda state: isinstance(state, dict))
)
@example(state={"a": {"b.c": 1, "b": {"c": 2}}, "a.b": {"c": 3}, "": {"": 4}, "$": {"$": 5}})
def test_every_key_leads_to_its_own_tensor(state: dict[str, Any]) -> None:
    """Keys at any depth, joined to names of tensors, are never taken for one another's."""

    def arrays(value: Any) -> Any:
        return (
            {key: arrays(one) for key, one in value.items()} if isinstance(value, dict) else np.full(1, value)
        )

    def numbers(value: Any) -> Any:
        return {key: numbers(one) for key, one in value.items()} if isinstance(value, dict) else int(value[0])

    packed = pack(arrays(state), "state")
    header = encode_header(packed.leaves, of_torch=False)
    held = decode_header(header, len(header) + 8 * len(packed.leaves))
    assert not isinstance(held, int)
    content = {leaf.name: leaf.value for leaf in packed.leaves}
    assert held.keys() == content.keys()
    skeleton = json.loads(json.dumps(packed.skeleton))
    assert numbers(unpack(skeleton, lambda name, _: content[name])) == state
