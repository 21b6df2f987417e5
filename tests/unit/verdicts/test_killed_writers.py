"""A small dose of the torture `checkpoints`: writers that are stopped and killed at random instants."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.checkpoint_files import MODES, watch


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["safetensors", "npz", "pickle"])
def test_no_file_of_a_killed_writer_is_called_good(name: str, mode: str, tmp_path: Path) -> None:
    """No torn file is GOOD, and every whole one that no process had open is."""
    found = watch(name, mode, 7, 12, tmp_path)
    assert not found.wrong
    assert found.whole_good == found.whole
    assert sum(found.states.values()) > 3
