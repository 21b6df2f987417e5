"""Suites, in the order in which they run. A new one is a module of this folder with SUITE and a line here."""

from __future__ import annotations

from benchmarks.suite import Suite
from benchmarks.workloads import (
    data,
    fio,
    git_clone,
    hold,
    metadata,
    requests,
    tensors,
    training,
    trees,
)

SUITES: tuple[Suite, ...] = (
    data.SUITE,
    metadata.SUITE,
    requests.SUITE,
    fio.SUITE,
    tensors.SUITE,
    git_clone.SUITE,
    trees.SUITE,
    hold.SUITE,
    training.SUITE,
)
