"""Tests of every kind of damage to every structure: found, named, survived, and repaired where possible."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.damage import Made, judge_all, look, make
from support.stored import IDENTITIES


@pytest.fixture(scope="module", params=IDENTITIES)
def made(request: pytest.FixtureRequest) -> Iterator[Made]:
    """Make the repository, in memory where possible: a restore syncs every file, a thousand here."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="ciuic-matrix-", dir=place) as top:
        yield make(Path(top), request.param)


def test_the_matrix_has_every_structure(made: Made) -> None:
    """The matrix has every structure of docs/format.md, nodes of every level too, and starts undamaged."""
    kinds = {structure.kind for structure in made.structures}
    assert kinds >= {
        *(
            "config copy",
            "lock",
            "index",
            "snapshot file",
            "marks",
            "sealed pack",
            "open pack",
            "pack header",
        ),
        *("segment head, sealed", "segment head, open", "record, sealed", "record, open"),
        *("segment checksum, sealed", "segment checksum, open", "footer records", "footer trailer"),
        *("payload: data", "payload: xattrs", "payload: links node, level 0"),
        *("payload: data, planes", "payload: data, difference", "record of a base"),
        "payload: data, beside its twin",
        *("payload: tree node, level 0", "payload: tree node, level 1", "payload: tree node, level 2"),
        *("payload: map node, level 1", "payload: map node, level 2"),
    }, kinds
    assert look(made.repository).words == []


def test_every_damage_of_every_structure(
    made: Made, record_testsuite_property: Callable[[str, object], None]
) -> None:
    """Each damage is found and named, and none leads to a wrong restore, a wrong deletion or a lost snapshot.

    No prune deletes because of it, repair loses nothing, and the next snapshot is whole.
    """
    # Nothing but ids depends on the identity: of the second, one damage of each kind of structure.
    keyed = made.keyed
    tally = judge_all(made, random.Random(1), one_each=keyed)
    assert not tally.failures, "\n".join(tally.failures)
    assert tally.planted - tally.meaningless > (20 if keyed else 100)
    record_testsuite_property("damaged structures found", tally.planted - tally.meaningless)
