"""File with the packs that a remote had."""

from __future__ import annotations

from pathlib import Path

import pytest

from ciuic.remote.object_names import PackRef
from ciuic.remote.stored_facts import add_known_pack, read_known_packs, write_known_packs

A, B, C = (PackRef("d" + letter * 32) for letter in "abc")


@pytest.mark.parametrize("kept", range(45))
def test_a_line_that_was_torn_is_none(tmp_path: Path, kept: int) -> None:
    """A line cut at any byte names no pack, and spoils neither those before nor those after it."""
    write_known_packs(str(tmp_path), 3, {A: 16_777_216})
    before = (tmp_path / "packs").stat().st_size
    add_known_pack(str(tmp_path), B, 16_777_216)
    whole = (tmp_path / "packs").read_bytes()
    assert len(whole) - before >= kept
    (tmp_path / "packs").write_bytes(whole[: before + kept])
    sizes = {A: 16_777_216} | (
        {B: 16_777_216} if whole[before : before + kept].strip().endswith(B.encode()) else {}
    )
    for more in ({}, {C: 5}):
        for ref, size_bytes in more.items():
            add_known_pack(str(tmp_path), ref, size_bytes)
        found = read_known_packs(str(tmp_path))
        assert found is not None
        assert (found.rounds_finished, found.sizes) == (3, sizes | more)
