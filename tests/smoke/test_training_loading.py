"""Loading of states whose files are larger than what one thread reads at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ciuic import SnapshotManager
from ciuic.errors import Damaged
from ciuic.repository import Repository, Walker
from ciuic.training.format import stored_files
from ciuic.training.format.reading import load
from ciuic.types import SnapshotId

_COUNT = 300_000


class _Model:
    """Model of one array, large enough for many ranges."""

    def __init__(self) -> None:
        self.weights = np.random.default_rng(3).standard_normal(_COUNT)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = state["weights"]


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Make each range one block; the list gets the first block and the length of each that is read."""
    read: list[tuple[int, int]] = []
    read_file = stored_files.read_file

    def noted(repository: Any, entry: Any, into: memoryview, first_block: int = 0) -> None:
        read.append((first_block, len(into)))
        read_file(repository, entry, into, first_block)

    monkeypatch.setattr(stored_files, "read_file", noted)
    monkeypatch.setattr(stored_files, "CHUNKS_AT_ONCE", 1)
    return read


def _saved(save_dir: Path, model: _Model) -> str:
    with SnapshotManager(save_dir, compression="none") as manager:
        manager.register(model=model)
        manager.save_snapshot(wait=True)
        return manager.list_snapshots()[0].id


def test_a_file_in_many_ranges_comes_back_whole(tmp_path: Path, ranges: list[tuple[int, int]]) -> None:
    """An array whose file is read in ranges, the last of them shorter, comes back as it was."""
    model = _Model()
    id_ = _saved(tmp_path, model)
    loaded = load(str(tmp_path), id_)
    assert np.array_equal(loaded.objects["model"]["weights"], model.weights)
    starts = sorted(start for start, _ in ranges)
    assert starts[-1] >= 4
    assert set(range(starts[-1] + 1)) == set(starts)
    assert sum(size for _, size in ranges) > 8 * _COUNT


def test_a_damaged_range_fails_the_load(tmp_path: Path, ranges: list[tuple[int, int]]) -> None:
    """A bad chunk in any range is an error of the whole load, whichever thread reads it."""
    id_ = _saved(tmp_path, _Model())
    with Repository.open(tmp_path) as repository:
        snapshot = repository.snapshots.load(SnapshotId.parse(id_))
        places = [
            repository.chunks.locate(reached.id)
            for reached in Walker(repository).walk(snapshot, on_damage=lambda *_: None)
            if reached.kind == "data"
        ]
        packs = {place.pack: repository.path / "packs" / f"{place.pack:016x}.pack" for place in places}
    large = [place for place in places if place.raw_bytes > 60_000]
    assert len(large) > 4
    for place in (large[0], large[len(large) // 2], large[-1]):
        whole = packs[place.pack].read_bytes()
        changed = bytearray(whole)
        changed[place.offset + place.stored_bytes // 2] ^= 1
        packs[place.pack].write_bytes(changed)
        with pytest.raises(Damaged):
            load(str(tmp_path), id_)
        packs[place.pack].write_bytes(whole)
    assert load(str(tmp_path), id_).objects["model"]["weights"].shape == (_COUNT,)
    assert ranges
