"""Tests that the hash which names chunks changes nothing but names: every operation has the same outcome."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.stored import KEYED, SEEDED, Tree, flip_stored, read_back, store

from ciuic.compare.diff import diff_snapshots
from ciuic.errors import Damaged
from ciuic.maintenance.check import check
from ciuic.maintenance.prune import prune
from ciuic.maintenance.sweep import Thresholds
from ciuic.maintenance.verify import verify_snapshots
from ciuic.repository import Identity, Repository
from ciuic.repository.lookup import find
from ciuic.retention import RetentionPolicy
from ciuic.types import ChunkId, SnapshotId

BLOCK = 4096
FILE = b"\xfffile"
"""File that every tree has, four blocks of the same content in all of them."""
EAGER = Thresholds(unused_share=0.0, pack_dead_share=0.0)

_contents = st.builds(
    lambda seed, size: random.Random(seed).randbytes(size),
    st.integers(0, 9),
    st.sampled_from([0, 1, 100, BLOCK, BLOCK + 1, 5 * BLOCK]),
)
_names = st.integers(0, 400).map(lambda number: b"n%03d" % number)
_trees = st.dictionaries(_names, _contents | st.dictionaries(_names, _contents, max_size=3), max_size=40)


class Plan(NamedTuple):
    """Operations of one life of a repository."""

    history: Sequence[Tree]
    held: frozenset[int]
    keep: int
    bad_block: int


_plans = st.builds(
    Plan,
    st.lists(_trees, min_size=2, max_size=4),
    st.frozensets(st.integers(0, 3)),
    st.integers(1, 3),
    st.integers(0, 3),
)


@settings(max_examples=25)
@given(plan=_plans)
def test_both_identities_have_the_same_outcomes(tmp_path_factory: pytest.TempPathFactory, plan: Plan) -> None:
    """Storing, comparing, damage, verification, repair, prune and reading have equal outcomes with both."""
    base = tmp_path_factory.mktemp("identities")
    outcomes = [_live(base / identity.hash, identity, plan) for identity in (SEEDED, KEYED)]
    assert outcomes[0] == outcomes[1]
    # The last snapshot reads back after repair and prune.
    assert outcomes[0][-1] == {**plan.history[-1], FILE: _file()}


def _file() -> bytes:
    return random.Random(100).randbytes(4 * BLOCK)


def _live(path: Path, identity: Identity, plan: Plan) -> list[Any]:
    """Carry out the plan and return what each operation did, without ids and places of chunks."""
    with Repository.create(path, block_size=BLOCK, identity=identity) as repository:
        ids = []
        sizes: list[int] = []
        for number, tree in enumerate(plan.history):
            with repository.writer(pack_bytes=16 * BLOCK) as writer:
                snapshot = store(writer, {**tree, FILE: _file()}, number=number)
                if number in plan.held:
                    writer.set_marks(snapshot.id, hold=True)
            ids.append(snapshot.id)
            sizes.append(snapshot.files)
        changes = [
            (change.path, change.kind)
            for before, after in itertools.pairwise(ids)
            for change in diff_snapshots(
                repository, repository.snapshots.load(before), repository.snapshots.load(after)
            )
        ]
        flip_stored(repository, _bad_chunk(repository, ids[-1], plan.bad_block))
        damages = _damages(repository)
        with pytest.raises(Damaged):
            read_back(repository, ids[-1])
        lost = check(repository, repair=True, read_data=True).damaged
        # The content comes again, as from the next capture, and heals what refers to it.
        with repository.writer() as writer:
            for at in range(4):
                writer.put_chunk(_file()[at * BLOCK : (at + 1) * BLOCK])
            writer.flush()
    with Repository.open(path) as repository:
        healed = [check(repository, read_data=True).damaged, _damages(repository)]
        report = prune(
            repository, RetentionPolicy(keep_within_seconds=0, keep_last=plan.keep), thresholds=EAGER
        )
        kept = [(id_, read_back(repository, id_)) for id_ in repository.snapshots.ids()]
        last = read_back(repository, ids[-1])
        assert repository.check_index() == []
        return [sizes, changes, damages, lost, healed, report.removed, kept, last]


def _bad_chunk(repository: Repository, id_: SnapshotId, block: int) -> ChunkId:
    entry = find(repository, repository.snapshots.load(id_), b"/root/" + FILE).entry
    return dict(repository.block_maps.ids(entry.content, entry.map_height, 4))[block]


def _damages(repository: Repository) -> list[object]:
    result = verify_snapshots(repository, checksum=True)
    return sorted((found.kind, found.path, found.block, found.snapshots) for found in result.damages)
