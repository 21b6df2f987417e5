"""Restores over directories that have changed at random."""

from __future__ import annotations

import os
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import trees
from support.restoring import take
from support.stored import IDENTITIES
from support.trees import STEPS, play

from ciuic.repository import Identity, Repository
from ciuic.restore import Overwrite, execute, plan_restore


@pytest.mark.parametrize("identity", IDENTITIES)
@settings(max_examples=15)
@given(before=STEPS, after=STEPS, mode=st.sampled_from((Overwrite.ALWAYS, Overwrite.IF_CHANGED)))
def test_restore_in_place_with_delete_is_exactly_the_snapshot(
    tmp_path_factory: pytest.TempPathFactory,
    before: list,
    after: list,
    mode: Overwrite,
    identity: Identity | None,
) -> None:
    """An in-place restore with overwrite and delete gives exactly the snapshot, whatever times programs have set."""
    base = tmp_path_factory.mktemp("restore")
    root = base / "root"
    root.mkdir()
    play(root, before)
    wanted = trees.manifest(root)
    with Repository.create(base / "repository", block_size=4096, identity=identity) as repository:
        snapshot = take(repository, root)
        play(root, after)
        plan = plan_restore(repository, snapshot, [os.fsencode(root)], overwrite=mode, delete=True)
        preview = execute(plan, dry_run=True)
        result = execute(plan)
    assert result.complete, result.error()
    trees.assert_same(wanted, trees.manifest(root))
    assert (preview.restored, preview.skipped, preview.removed) == (
        result.restored,
        result.skipped,
        result.removed,
    )
    shutil.rmtree(base)


@settings(max_examples=15)
@given(before=STEPS, after=STEPS)
def test_without_delete_nothing_else_is_touched(
    tmp_path_factory: pytest.TempPathFactory, before: list, after: list
) -> None:
    """A restore without delete brings back what the snapshot has and touches nothing else."""
    base = tmp_path_factory.mktemp("merge")
    root = base / "root"
    root.mkdir()
    play(root, before)
    wanted = trees.manifest(root)
    with Repository.create(base / "repository", block_size=4096) as repository:
        snapshot = take(repository, root)
        play(root, after)
        changed = trees.manifest(root)
        result = execute(plan_restore(repository, snapshot, [os.fsencode(root)], overwrite=Overwrite.ALWAYS))
    assert result.complete, result.error()
    found = trees.manifest(root)
    for path, facts in wanted.items():
        assert found[path]._replace(same_inode_as=b"") == facts._replace(same_inode_as=b""), path
    gone = {path for path, facts in changed.items() if path in wanted and facts.kind != wanted[path].kind}
    for path in changed.keys() - wanted.keys():
        if not any(path.startswith(top + b"/") for top in gone):
            assert found[path]._replace(same_inode_as=b"") == changed[path]._replace(same_inode_as=b""), path
    shutil.rmtree(base)
