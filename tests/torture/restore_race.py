"""Restores by root into a directory whose owner attacks them between every two system calls."""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from pathlib import Path

from support.restore_enemy import SWAPS, attacked, make_tree, race
from support.restoring import take
from torture.figure import Figure

from ciuic.repository import Repository


def run(seconds: float, seed: int) -> list[Figure]:
    """Return figures: attacked restores and exchanges of names in the race, none of which led outside."""
    end = time.monotonic() + seconds
    attacks, failures = _between_calls(random.Random(seed), end - seconds / 2)
    place = _new_place()
    try:
        raced = race(place, max(2.0, end - time.monotonic()), seed)
        wrong: tuple[str, ...] = () if raced.exchanges else ("nothing was exchanged",)
    finally:
        shutil.rmtree(place)
    return [
        Figure("restores attacked between two system calls", attacks, tuple(failures)),
        Figure("restores raced by another user", raced.restores, wrong),
        Figure("names exchanged meanwhile", raced.exchanges),
    ]


def _new_place() -> Path:
    place = Path(tempfile.mkdtemp())
    for path in (place, place.parent):
        # The other user must be able to enter here.
        path.chmod(0o755)
    return place


def _between_calls(dice: random.Random, end: float) -> tuple[int, list[str]]:
    place, attacks, failures = _new_place(), 0, []
    try:
        make_tree_at = place / "root"
        make_tree_at.mkdir()
        make_tree(make_tree_at)
        with Repository.create(place / "repository", block_size=4096) as repository:
            snapshot = take(repository, make_tree_at)
            calls = attacked(place, repository, snapshot, SWAPS[0], 0, 0)
            while time.monotonic() < end and not failures:
                swap, at, back = dice.choice(SWAPS), dice.randint(1, calls), dice.choice((0, 1, 2, 4, 8))
                try:
                    attacked(place, repository, snapshot, swap, at, back)
                except AssertionError as error:
                    failures.append(f"{swap} before call {at}, back after {back}: {error}")
                attacks += 1
    finally:
        shutil.rmtree(place)
    return attacks, failures
