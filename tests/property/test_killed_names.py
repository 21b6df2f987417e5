"""Tests of a worker that dies at any step of an operation on names, unnoticed by the job."""

from __future__ import annotations

import pytest
from support.killed_names import run

pytestmark = pytest.mark.keeps_descriptors("a worker that dies within a call closes nothing")

RUNS = 26
SEEDS_A_TEST = 4
"""Runs 95 and 101 found two files with one node, and an exchange that was carried out twice."""


@pytest.mark.parametrize("first", range(0, RUNS * SEEDS_A_TEST, SEEDS_A_TEST))
def test_every_step_of_a_change_of_names_survives_its_worker(first: int) -> None:
    """Each request repeated to a successor succeeds, and names, handles and attributes are the expected ones.

    The operations are rename then link, link then unlink, exchange, and removal while open; the model is a
    plain directory.
    """
    kills = sum(run(seed) for seed in range(first, first + SEEDS_A_TEST))
    assert kills >= SEEDS_A_TEST
