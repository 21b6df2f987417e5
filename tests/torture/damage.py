"""Torture by damage to every structure of many repositories, and by mutations for every decoder."""

from __future__ import annotations

import logging
import os
import random
import tempfile
import time
from pathlib import Path

import structlog
from support.damage import judge_all, make
from support.readers import mutate, readers, refused_or_read
from torture.figure import Figure

_MUTATIONS = 2000


def run(seconds: float, seed: int) -> list[Figure]:
    """Return figures: damaged structures found and survived, mutations read or refused."""
    # Thousands of warnings that damage was seen are expected.
    quiet = structlog.make_filtering_bound_logger(logging.CRITICAL)
    structlog.configure(wrapper_class=quiet)
    dice = random.Random(seed)
    end = time.monotonic() + 0.8 * seconds
    planted = meaningless = 0
    failures: list[str] = []
    while time.monotonic() < end and not failures:
        place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        with tempfile.TemporaryDirectory(prefix="ciuic-damage-", dir=place) as top:
            tally = judge_all(make(Path(top)), dice, lambda: time.monotonic() < end)
        planted += tally.planted
        meaningless += tally.meaningless
        failures += tally.failures
    mutations, wrong = _mutations(dice, end + 0.2 * seconds)
    return [
        Figure("damaged structures found of those planted", planted - meaningless, tuple(failures)),
        Figure("harmless damages survived", meaningless),
        Figure("mutated inputs read or refused with words", mutations, tuple(wrong)),
    ]


def _mutations(dice: random.Random, end: float) -> tuple[int, list[str]]:
    count, wrong = 0, []
    while True:
        for reader in readers():
            for _ in range(_MUTATIONS):
                data = mutate(reader.valid, dice)
                count += 1
                try:
                    refused_or_read(reader, data)
                except Exception as error:
                    wrong.append(f"{reader.name}: {type(error).__name__}: {error}: {data[:200]!r}")
                    return count, wrong
            if time.monotonic() > end:
                return count, wrong
