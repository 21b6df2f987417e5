"""Tests that the space told of a snapshot is what forgetting it and pruning frees, to the byte."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.small_repository import noise
from support.stored import IDENTITIES, Tree, store

from ciuic.maintenance.prune import forget, prune
from ciuic.maintenance.sweep import Thresholds
from ciuic.maintenance.usage import measure_usage
from ciuic.repository import Identity, Repository

BLOCK = 4096
EAGER = Thresholds(unused_share=0.0, pack_dead_share=0.0)
DAY_NS = 86_400 * 10**9
ROOTS = (b"/one", b"/two")


contents = st.builds(noise, st.integers(0, 8), st.sampled_from([0, 1, 100, BLOCK, BLOCK + 1, 5 * BLOCK]))
names = st.sampled_from([b"a", b"b", b"c", b"\xff"])
trees = st.recursive(
    st.dictionaries(names, contents, max_size=4),
    lambda t: st.dictionaries(names, contents | t, max_size=4),
    max_leaves=6,
)
histories = st.lists(st.tuples(trees, st.sampled_from(ROOTS), st.integers(0, 2)), min_size=1, max_size=6)


def chunks_bytes(repository: Repository) -> int:
    """Return the stored bytes of all chunks in all packs."""
    return sum(
        record.stored_bytes for pack in repository.packs() for record in repository.pack_records(pack.number)
    )


def freed(path: Path, chosen: list[Any]) -> int:
    """Return how many stored bytes go with these snapshots."""
    with Repository.open(path) as repository:
        before = chunks_bytes(repository)
        forget(repository, chosen)
        prune(repository, thresholds=EAGER)
        return before - chunks_bytes(repository)


@pytest.mark.parametrize("identity", IDENTITIES)
@settings(max_examples=25)
@given(history=histories, data=st.data())
def test_what_is_told_is_what_prune_frees(
    tmp_path_factory: pytest.TempPathFactory,
    history: list[tuple[Tree, bytes, int]],
    data: st.DataObject,
    identity: Identity | None,
) -> None:
    """For any history and any set of snapshots, alone, by root and by day: the bytes told are freed, no more and no less."""
    path = tmp_path_factory.mktemp("usage") / "repo"
    with Repository.create(path, block_size=BLOCK, identity=identity) as repository:
        for number, (tree, root, day) in enumerate(history):
            with repository.writer(pack_bytes=32 * BLOCK) as writer:
                store(writer, tree, number=number, root=root, time_ns=(20_000 + day) * DAY_NS + number + 1)
        prune(repository, thresholds=EAGER)
        ids = repository.snapshots.ids()
        kind = data.draw(st.sampled_from(["one", "set", "root", "day"]))
        if kind == "one":
            chosen = [data.draw(st.sampled_from(ids))]
        elif kind == "set":
            chosen = sorted(data.draw(st.sets(st.sampled_from(ids), min_size=1)))
        else:
            root, day = data.draw(st.sampled_from([(root, day) for _, root, day in history]))
            chosen = [
                info.id
                for info in repository.snapshots.infos()
                if (root in info.roots if kind == "root" else info.time_ns // DAY_NS == 20_000 + day)
            ]
        from datetime import timezone

        usage = measure_usage(repository, frozenset(chosen), tz=timezone.utc)
        assert usage.garbage_bytes == 0
        assert usage.stored_bytes == chunks_bytes(repository)
        assert usage.size_bytes == sum(one.size_bytes for one in usage.snapshots)
        told = usage.together_bytes
        if kind == "one":
            assert told == next(one.alone_bytes for one in usage.snapshots if one.id == chosen[0])
        elif kind == "root":
            assert told == next(one.alone_bytes for one in usage.roots if one.name.encode() == root)
        elif kind == "day":
            begins = time.strftime("%Y-%m-%d", time.gmtime((20_000 + day) * 86_400))
            assert told == next(one.alone_bytes for one in usage.periods if one.name == begins)
    assert freed(path, chosen) == told
