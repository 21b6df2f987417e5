"""A messy host: mounts inside the root, odd files, git around it, stops and kills, restores with every option."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.mess import run_rounds

pytestmark = pytest.mark.mount


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_nothing_is_lost_on_a_messy_host(short_tmp: Path, seed: int) -> None:
    """Fifty random actions each: nothing that is mounted changes or goes, no job sees an error, every snapshot is exact."""
    done, restores, checked = run_rounds(short_tmp, seed, 50)
    assert done == 50
    assert restores
    assert checked
