"""Restores over directories that have changed at random, of everything and of what is chosen."""

from __future__ import annotations

import os
import shutil
import stat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import trees
from support.restoring import take
from support.stored import IDENTITIES
from support.trees import STEPS, Manifest, play

from ciuic.errors import NotFound
from ciuic.excludes import ExcludeMatcher
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


_PATTERNS = st.lists(
    st.sampled_from(
        ("a", "b", "c/", "d", "c/e", "f", "g/**", "*", "!b", "!f", "h", "[ab]", "c/d", "i/", "/b", "/c/")
    ),
    max_size=3,
)


def _anchored(root: bytes, pattern: str) -> str:
    """Return the pattern with its leading slash meaning the top of the restored tree, as in git."""
    return os.fsdecode(root) + pattern if pattern.startswith("/") else pattern


def _is_dir(facts: trees.Facts) -> bool:
    return facts.kind == stat.S_IFDIR


class _Choice:
    """Names that are chosen, by the definition: neither they nor a directory above is excluded, and one of these is included."""

    def __init__(self, root: bytes, include: list[str], exclude: list[str], wanted: Manifest) -> None:
        self._include = ExcludeMatcher(root, [_anchored(root, one) for one in include])
        self._exclude = ExcludeMatcher(root, [_anchored(root, one) for one in exclude])
        self._all = not include
        self.leading = {
            path[:end]
            for path, facts in wanted.items()
            if path != b"." and self.has(path, _is_dir(facts))
            for end in (at for at, byte in enumerate(path) if byte == 0x2F)
        }

    def has(self, path: bytes, is_dir: bool) -> bool:
        return not self._exclude.match(path, is_dir) and (self._all or self._include.match(path, is_dir))


@settings(max_examples=60)
@given(before=STEPS, after=STEPS, include=_PATTERNS, exclude=_PATTERNS, delete=st.booleans())
def test_what_is_chosen_is_restored_and_nothing_else_is_touched(
    tmp_path_factory: pytest.TempPathFactory,
    before: list,
    after: list,
    include: list,
    exclude: list,
    delete: bool,
) -> None:
    """A chosen name is as in the snapshot; any other is as it was, but where a chosen one took the place of what is above it."""
    base = tmp_path_factory.mktemp("selected")
    root = base / "root"
    root.mkdir()
    play(root, before)
    wanted = trees.manifest(root)
    with Repository.create(base / "repository", block_size=4096) as repository:
        snapshot = take(repository, root)
        play(root, after)
        changed = trees.manifest(root)
        try:
            plan = plan_restore(
                repository,
                snapshot,
                [os.fsencode(root)],
                overwrite=Overwrite.ALWAYS,
                delete=delete,
                include=include,
                exclude=exclude,
            )
        except NotFound:
            choice = _Choice(os.fsencode(root), include, exclude, wanted)
            assert not any(choice.has(path, _is_dir(facts)) for path, facts in wanted.items() if path != b".")
            shutil.rmtree(base)
            return
        result = execute(plan)
    assert result.complete, result.error()
    found = trees.manifest(root)
    choice = _Choice(os.fsencode(root), include, exclude, wanted)

    def restored(path: bytes) -> bool:
        facts = wanted.get(path)
        return facts is not None and (choice.has(path, _is_dir(facts)) or path in choice.leading)

    for path, facts in wanted.items():
        if path != b"." and choice.has(path, _is_dir(facts)):
            assert _alike(found.get(path), facts, with_times=not _is_dir(facts)), path
    replaced = {path for path, facts in changed.items() if restored(path) and facts.kind != wanted[path].kind}
    names: dict[bytes, int] = {}
    for facts in changed.values():
        names[facts.same_inode_as] = names.get(facts.same_inode_as, 0) + 1
    for path, facts in changed.items():
        if path == b"." or path in replaced or any(path.startswith(top + b"/") for top in replaced):
            continue
        if restored(path):
            if path in choice.leading and not choice.has(path, is_dir=True):
                assert _alike(found[path], facts, with_times=False), path
            continue
        if path in wanted or not delete or not choice.has(path, _is_dir(facts)):
            # A name of an inode with another, chosen name gets the attributes of that.
            if names[facts.same_inode_as] == 1 and not (
                delete and _is_below_removed(path, changed, wanted, choice)
            ):
                assert _alike(found.get(path), facts, with_times=not _is_dir(facts)), path
        else:
            # Wherever it lies: in a directory that the snapshot lacks, too. A directory stays for what is left alone in it.
            assert path not in found or any(
                other.startswith(path + b"/") and not choice.has(other, _is_dir(of_other))
                for other, of_other in changed.items()
            )
    assert set(found) <= set(wanted) | set(changed)
    shutil.rmtree(base)


def _is_below_removed(path: bytes, changed: Manifest, wanted: Manifest, choice: _Choice) -> bool:
    """Return whether a directory above is one that ``delete`` removes, which the snapshot lacks."""
    parts = path.split(b"/")
    above = [b"/".join(parts[:count]) for count in range(1, len(parts))]
    return any(top in changed and top not in wanted and choice.has(top, is_dir=True) for top in above)


def _alike(found: trees.Facts | None, expected: trees.Facts, *, with_times: bool) -> bool:
    if found is None:
        return False
    # Modes and times of directories change with what is in them, and with their links.
    times = {} if with_times else {"mtime_ns": 0}
    return found._replace(same_inode_as=b"", **times) == expected._replace(same_inode_as=b"", **times)
