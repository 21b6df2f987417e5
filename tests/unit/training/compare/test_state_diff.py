"""Difference of two saved states: what is read of them, kinds of change, tables, and hostile documents."""

from __future__ import annotations

import html.parser
import json
import math
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.saved_states import BLOCK, SavedStates, Sharded, rows

from ciuic.errors import CiuicError, Damaged, NotFound
from ciuic.repository import Repository
from ciuic.repository.bulk_reader import IntoMemory
from ciuic.repository.chunk_reader import ChunkReader
from ciuic.training import StateDiff, change_figures
from ciuic.training.format.reading import FACTS_FILE, STATE_FILE
from ciuic.training.format.stored_files import SnapshotRef
from ciuic.training.state_diff import diff_states
from ciuic.types import ChunkId, SnapshotId

LARGE = 20 * BLOCK
"""Elements of a tensor of float32 in 80 blocks, behind a block with its header."""


@pytest.fixture
def states(tmp_path: Path) -> SavedStates:
    """Return a repository without states."""
    return SavedStates(tmp_path / "repository")


def _diff(states: SavedStates, old: Any, new: Any, **options: Any) -> StateDiff:
    with Repository.open(states.path) as repository:
        return diff_states(repository, old, new, **options)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Counter[ChunkId]:
    """Count for each chunk how often the store is asked for its content."""
    counted: Counter[ChunkId] = Counter()
    get, read = ChunkReader.get, IntoMemory.read

    def counting_get(self: ChunkReader, chunk: ChunkId) -> bytes:
        counted[chunk] += 1
        return get(self, chunk)

    def counting_read(self: IntoMemory, chunks: Any, targets: Any) -> list[int]:
        failed = read(self, chunks, targets)
        # Those that failed are asked for again, by `get`.
        counted.update(chunk for at, chunk in enumerate(chunks) if at not in failed)
        return failed

    monkeypatch.setattr(ChunkReader, "get", counting_get)
    monkeypatch.setattr(IntoMemory, "read", counting_read)
    return counted


def _blocks(states: SavedStates, id_: SnapshotId, path: str) -> list[ChunkId]:
    """Return the ids of the blocks of a file."""
    with Repository.open(states.path) as repository:
        entry = SnapshotRef("", id_).files(repository).entry(path)
        blocks = -(-entry.size_bytes // BLOCK)
        return [id_ for _, id_ in repository.block_maps.ids(entry.content, entry.map_height, blocks)]


def _noise(seed: int, count: int = LARGE) -> Any:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


@pytest.mark.parametrize("whole", [True, False])
def test_identical_blocks_are_read_for_norms_alone(
    whole: bool, states: SavedStates, asked: Counter[ChunkId]
) -> None:
    """Identical tensors are not read; of others identical blocks are read once, and only for the norm."""
    old = {"w": _noise(1), "frozen": _noise(2)}
    new = {"w": old["w"].copy(), "frozen": old["frozen"]}
    new["w"][10 * BLOCK : 10 * BLOCK + 5] += 1
    ids = states.save(model=old), states.save(model=new)
    frozen, before, after = (
        _blocks(states, ids[0], "model/frozen.safetensors"),
        *(_blocks(states, id_, "model/w.safetensors") for id_ in ids),
    )
    differing = set(before) ^ set(after)
    assert (len(frozen), len(before), len(differing)) == (81, 81, 2)
    asked.clear()
    diff = _diff(states, *ids, whole=whole)
    (change,) = diff
    assert (change.name, diff.identical) == ("model.w", 1)
    assert change.figures is not None
    assert change.figures.changed_elements == 5
    assert (change.figures.cosine is None) is not whole
    assert not any(asked[chunk] for chunk in frozen)
    # The first block has the header, which says where the tensor is.
    expected = set(before) | set(after) if whole else {before[0], *differing}
    assert {chunk for chunk in {*before, *after} if asked[chunk]} == expected
    assert all(asked[chunk] == 1 for chunk in expected)
    assert diff.read_bytes == len(expected) * BLOCK
    asked.clear()
    same = _diff(states, ids[0], ids[0])
    assert (len(same), same.identical, same.read_bytes) == (0, 2, 0)
    assert not any(asked[chunk] for chunk in {*frozen, *before})


def test_small_tensors_in_any_order_are_read_once(states: SavedStates) -> None:
    """The blocks that small tensors share are read once, whatever order the state has them in."""
    names = [f"t{number}" for number in np.random.default_rng(1).permutation(300)]
    ids = [
        states.save(m={name: _noise(seed + at, 300) for at, name in enumerate(names)}) for seed in (0, 500)
    ]
    diff = _diff(states, *ids)
    assert len(diff) == 300
    # The header is longer than a block, and its blocks are read beside those that are kept.
    assert diff.read_bytes < 1.2 * diff.size_bytes


def test_a_tensor_that_moved_in_its_file_is_identical(states: SavedStates) -> None:
    """A small tensor that stands elsewhere in its file, and is the same, is identical."""
    old = {"bias": _noise(1, 700)}
    ids = states.save(model=old), states.save(model={"a": np.zeros(333, np.float32), **old})
    diff = _diff(states, *ids)
    assert [(one.name, one.kind) for one in diff] == [("model.a", "added")]
    assert diff.identical == 1


def test_what_is_added_removed_reshaped_or_retyped_is_told(states: SavedStates) -> None:
    """Each change has its kind with dtypes and shapes; figures are given where numbers can be compared."""
    values = np.arange(6, dtype=np.float32)
    old = {"gone": values, "shape": values, "type": values, "text": np.array(["a", "b"]), "same": values}
    new = {
        "come": values.astype(np.int8),
        "shape": values.reshape(2, 3),
        "type": values.astype(np.float64) * 2,
        "text": np.array(["a", "c"]),
        "same": values,
    }
    diff = _diff(states, states.save(model=old), states.save(model=new))
    found = {one.name: one for one in diff}
    assert diff.identical == 1
    assert list(found) == ["model.come", "model.gone", "model.shape", "model.text", "model.type"]
    assert found["model.come"][1:] == ("added", None, "I8", None, (6,), None)
    assert found["model.gone"][1:] == ("removed", "F32", None, (6,), None, None)
    assert found["model.shape"][1:] == ("reshaped", "F32", "F32", (6,), (2, 3), None)
    retyped = found["model.type"]
    assert retyped[1:6] == ("retyped", "F32", "F64", (6,), (6,))
    assert retyped.figures is not None
    assert retyped.figures.relative_change == pytest.approx(1.0)
    assert retyped.figures.changed_elements == 5, "0 is the same number"
    text = found["model.text"]
    assert (text.kind, text.old_dtype) == ("changed", "<U1")
    assert text.figures is not None
    assert text.figures.change_norm is None


def test_arrays_of_numpy_are_read_by_their_own_dtype(states: SavedStates) -> None:
    """Complex numbers and the other byte order, which safetensors has no names for, have figures."""
    old = {"z": np.array([3 + 4j, 1j]), "big": np.array([1, 2, 3], ">i4")}
    new = {"z": np.array([0j, 1j]), "big": np.array([1, 2, 13], ">i4")}
    found = {one.name: one.figures for one in _diff(states, states.save(m=old), states.save(m=new))}
    assert found["m.z"] is not None
    assert found["m.big"] is not None
    assert (found["m.z"].largest_change, found["m.z"].change_norm) == (5.0, 5.0)
    assert (found["m.big"].largest_change, found["m.big"].changed_elements) == (10, 1)


def test_new_nan_comes_before_large_changes(states: SavedStates) -> None:
    """Tensors are ordered by relative change, and those that have lost numbers come first."""
    old = {name: np.ones(4, np.float32) for name in ("a", "b", "c", "d")}
    spoilt = np.array([math.nan, -math.inf, 1, 1], np.float32)
    new = {"a": old["a"] * 1.5, "b": spoilt, "c": old["c"] * 3, "d": old["d"]}
    diff = _diff(states, states.save(m=old), states.save(m=new))
    assert [one.name for one in diff] == ["m.b", "m.c", "m.a"]
    lines = repr(diff).splitlines()
    assert lines[:4] == [
        "tensor   change  largest  cosine  nan  inf",
        "m.b     0.0e+00  0.0e+00  1.0000    1    1",
        "m.c     2.0e+00  2.0e+00  1.0000",
        "m.a     5.0e-01  5.0e-01  1.0000",
    ]
    assert lines[4].startswith("3 tensors of 4 differ; read ")


def test_tied_tensors_are_compared_by_their_paths(states: SavedStates, asked: Counter[ChunkId]) -> None:
    """Tied tensors are named each and read once, also where they are tied on one side alone."""
    old, new = _noise(1), _noise(2)
    ids = [states.save(m={"a": one, "b": one}) for one in (old, new)]
    asked.clear()
    diff = _diff(states, *ids)
    assert [one.name for one in diff] == ["m.a", "m.b"]
    assert diff[0].figures == diff[1].figures
    assert all(asked[chunk] == 1 for chunk in _blocks(states, ids[0], "m/a.safetensors")[1:])
    untied = states.save(m={"a": old, "b": new})
    diff = _diff(states, ids[0], untied)
    assert ([one.name for one in diff], diff.identical) == (["m.b"], 1)


def test_nested_states_have_the_names_of_their_keys(states: SavedStates) -> None:
    """Tensors in nested dicts and lists are named by their keys; keys that look alike get numbers."""

    def state(seed: int) -> dict[str, Any]:
        value = [_noise(seed + at, 3) for at in range(5)]
        return {
            "state": {0: {"exp_avg": value[0]}, (1, 2): value[1]},
            "l": [value[2]],
            "a.b": value[3],
            "a": {"b": value[4]},
        }

    diff = _diff(states, states.save(o=state(1)), states.save(o=state(7)))
    assert {one.name for one in diff} == {
        "o.state.0.exp_avg",
        'o.state.{"$": "tuple", "items": [1, 2]}',
        "o.l.0",
        "o.a.b",
        "o.a.b#2",
    }


class _Page(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_table_of_a_notebook_is_escaped(states: SavedStates) -> None:
    """A tensor's name is text in HTML, and in text one line without control characters."""
    name = "<img src=x onerror=alert(1)>\x1b[2J"
    diff = _diff(states, states.save(m={name: _noise(1, 9)}), states.save(m={name: _noise(2, 9)}))
    page = _Page()
    page.feed(diff._repr_html_())
    assert page.tags == {"table", "thead", "tbody", "tr", "th", "td", "p"}
    assert "m.<img src=x onerror=alert(1)>\\x1b[2J" in page.text
    assert len(repr(diff).splitlines()) == 3
    assert "\x1b" not in repr(diff)


def test_only_what_is_below_a_path(states: SavedStates) -> None:
    """A path selects the tensors with files below it; one without tensors is an error."""
    ids = [
        states.save(model={"a": _noise(seed, LARGE), "b": _noise(seed)}, other={"a": _noise(seed, 9)})
        for seed in (1, 2)
    ]
    for path, names in (
        (b"/training", ["model.a", "model.b", "other.a"]),
        (b"/training/model", ["model.a", "model.b"]),
        (b"/training/model/b.safetensors", ["model.b"]),
    ):
        assert sorted(one.name for one in _diff(states, *ids, below=path)) == names
    for path in (b"/training/mod", b"/elsewhere"):
        with pytest.raises(NotFound, match="has a tensor at or below"):
            _diff(states, *ids, below=path)


def test_a_snapshot_of_files_holds_no_state(states: SavedStates) -> None:
    """A snapshot that is no state of a `SnapshotManager` is refused with what to do."""
    state, files = states.save(m={"a": _noise(1, 9)}), states.commit({b"log": b"x"})
    with pytest.raises(NotFound, match="cs-000002 holds no training state") as caught:
        _diff(states, state, files)
    assert "without --tensors" in caught.value.hint


def test_without_numpy_the_error_names_it(states: SavedStates, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without NumPy tensors that differ cannot be compared, and the error says what is missing."""
    ids = [states.save(m={"a": _noise(seed, 9)}) for seed in (1, 2)]
    monkeypatch.setitem(__import__("sys").modules, "numpy", None)
    with pytest.raises(CiuicError, match="only with NumPy, which is not installed"):
        _diff(states, *ids)
    assert change_figures.numpy is not None


def _documents(**state: Any) -> dict[bytes, Any]:
    """Return the files of a state with one object of one small tensor, with other members of `state.json`."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    model = {
        b"small-tensors.safetensors": struct.pack("<Q", len(header)) + header + bytes(8),
        b"model.safetensors.index.json": b'{"weight_map": {"w": "small-tensors.safetensors"}}',
    }
    document = {"version": 1, "values": {}, "objects": {"model": {"w": {"$": "tensor", "name": "w"}}}} | state
    return {STATE_FILE.encode(): json.dumps(document).encode(), FACTS_FILE.encode(): b"{}", b"model": model}


def _object(**packed: Any) -> dict[str, Any]:
    return {"objects": {"model": {"w": packed}}}


HOSTILE: dict[str, dict[str, Any]] = {
    "a later version": {"version": 2},
    "objects that are a list": {"objects": [1]},
    "a tensor without a file": _object(**{"$": "tensor", "name": "v"}),
    "a name that is a list": _object(**{"$": "tensor", "name": ["w"]}),
    "a shape of more bytes": _object(**{"$": "tensor", "name": "w", "dtype": "complex64", "shape": [2]}),
    "a negative shape": _object(**{"$": "tensor", "name": "w", "dtype": "complex64", "shape": [-1, -1]}),
    "pieces that are not there": _object(**{"$": "sharded", "name": "w", "dtype": "float32", "shape": [2]}),
    "a dtype of no numbers": _object(**{"$": "sharded", "name": "w", "dtype": "object", "shape": [0]}),
    "a shape of text": _object(**{"$": "sharded", "name": "w", "dtype": "float32", "shape": "xy"}),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_malformed_state_is_damaged(what: str, states: SavedStates) -> None:
    """Whatever the documents of a state claim, the comparison ends in Damaged."""
    # Other facts on the other side, so that nothing is taken for equal.
    good = states.save(model={"w": _noise(1, 2)})
    bad = states.commit(_documents(**HOSTILE[what]))
    with pytest.raises(Damaged):
        _diff(states, good, bad)


def test_the_state_that_is_changed_for_those_tests_is_good(states: SavedStates) -> None:
    """Unchanged, the documents of the hostile states are compared."""
    good = states.save(model={"w": np.ones(2, np.float32)})
    (change,) = _diff(states, good, states.commit(_documents()))
    assert change.figures is not None
    assert change.figures.relative_change == 1.0


def test_pieces_that_overlap_are_damaged(states: SavedStates) -> None:
    """Pieces that hold an element twice and lack another are refused."""
    torch = pytest.importorskip("torch", reason="no CPU build of PyTorch is offered here")
    value = torch.arange(8.0).reshape(4, 2)
    good = states.save(model={"w": Sharded(value, rows((4, 2), [2]))})
    overlapping = Sharded(value, [((0, 0), (2, 2)), ((1, 0), (2, 2))])
    bad = states.save(model={"w": overlapping})
    with pytest.raises(Damaged, match="do not make up the whole"):
        _diff(states, good, bad)
