"""Tests of restores that are checked after use: shared unread, read back, wrong files put aside."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
from support.extents import overlap_bytes, shared_extents
from support.restoring import take, write
from support.small_disks import place as place
from support.trees import assert_same, manifest

from ciuic.errors import Damaged, Partial
from ciuic.repository import Repository
from ciuic.repository.lookup import find
from ciuic.restore import Overwrite, Result, execute, plan_restore
from ciuic.restore.content import BlockWorker
from ciuic.restore.deferred_check import DeferredCheck
from ciuic.types import ChunkId, Snapshot

# The file system is on a loop device.
pytestmark = pytest.mark.mount

_MIB = 1 << 20
_KILLED = 99


def _restore(
    repository: Repository,
    snapshot: Snapshot,
    root: Path,
    out: Path,
    usable: list[int] | None = None,
    *,
    overwrite: Overwrite | None = None,
    check_after: bool = True,
) -> Result:
    plan = plan_restore(repository, snapshot, [os.fsencode(root)], os.fsencode(out), overwrite=overwrite)
    return execute(plan, check_after=check_after, usable=None if usable is None else usable.append)


def _make_root(root: Path) -> None:
    write(root / "dir" / "large", os.urandom(12 * _MIB + 5000))
    os.link(root / "dir" / "large", root / "large too")
    write(root / "middle", os.urandom(700_001))
    write(root / "small", os.urandom(3000))
    write(root / "text", b"step 1000 loss 0.125\n" * 100_000)
    write(root / "zeros", os.urandom(300_000) + bytes(65536) + os.urandom(300_000))
    write(root / "hole", os.urandom(400_000))
    os.truncate(root / "hole", 9 * _MIB)
    os.utime(root / "dir", ns=(10, 20))
    os.utime(root, ns=(30, 40))


def _random_tree(root: Path, dice: random.Random) -> None:
    for number in range(dice.randrange(4, 12)):
        path = root.joinpath(*(f"d{dice.randrange(3)}" for _ in range(dice.randrange(3))), f"f{number}")
        parts = []
        for _ in range(dice.randrange(4)):
            size = dice.choice((1, 4096, 70_000, 262_144, 1_048_576, 3_000_001))
            parts.append(dice.choice((dice.randbytes(size), bytes(size), b"log line\n" * (size // 9 + 1))))
        write(path, b"".join(parts))
        os.utime(path, ns=(dice.randrange(1 << 60), dice.randrange(1 << 60)))
        os.chmod(path, dice.choice((0o600, 0o444, 0o755)))
        os.setxattr(path, "user.number", str(number).encode())
        if dice.random() < 0.3:
            os.link(path, root / f"link {number}")


def _damage(place: Path, repository: Repository, snapshot: Snapshot, path: bytes, block: int) -> None:
    """Change a byte of one block in its pack."""
    entry = find(repository, snapshot, path).entry
    blocks = -(-entry.size_bytes // repository.block_size)
    found = repository.chunks.locate(
        repository.block_maps.get(entry.content, entry.map_height, blocks, block)
    )
    with (place / f"repository/packs/{found.pack:016x}.pack").open("r+b") as pack:
        pack.seek(found.offset + 77)
        before = pack.read(1)
        pack.seek(found.offset + 77)
        pack.write(bytes([before[0] ^ 1]))
        os.fsync(pack.fileno())


def test_both_modes_restore_the_same(place: Path, tmp_path: Path) -> None:
    """Random trees come back the same, content and attributes, whenever they are checked."""
    for seed in range(6):
        dice = random.Random(seed)
        root = tmp_path / f"root {seed}"
        root.mkdir()
        _random_tree(root, dice)
        wanted = manifest(root)
        with Repository.create(place / f"repository {seed}") as repository:
            snapshot = take(repository, root)
            for check_after in (False, True):
                out = place / f"out {seed} {check_after}"
                assert _restore(repository, snapshot, root, out, check_after=check_after).complete
                assert_same(wanted, manifest(out / root.name))
                again = _restore(
                    repository, snapshot, root, out, overwrite=Overwrite.ALWAYS, check_after=check_after
                )
                assert again.complete
                assert not again.restored
                assert_same(wanted, manifest(out / root.name))


def test_everything_is_in_place_before_it_is_read(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No shared content is read before the tree is complete, all of it afterwards, and no journal is left."""
    root = tmp_path / "root"
    _make_root(root)
    wanted, seen = manifest(root), []
    with Repository.create(place / "repository") as repository:
        snapshot = take(repository, root)
        checks = [0]
        real = BlockWorker.equal

        def equal(self: BlockWorker, *args: object, **kwargs: object) -> bool:
            checks[0] += 1
            return real(self, *args, **kwargs)  # type: ignore[arg-type]

        def usable(files: int) -> None:
            assert not checks[0]
            found = manifest(place / "out/root")
            assert found.pop(b".ciuic-restore", None) is not None
            assert_same(wanted, found)
            seen.append(files)

        monkeypatch.setattr(BlockWorker, "equal", equal)
        plan = plan_restore(repository, snapshot, [os.fsencode(root)], os.fsencode(place / "out"))
        result = execute(plan, check_after=True, usable=usable)
        assert result.complete
        assert seen == [result.checked_behind]
        assert checks[0] >= 2
        assert_same(wanted, manifest(place / "out/root"))
        packs = [extent for pack in (place / "repository/packs").iterdir() for extent in shared_extents(pack)]
        assert overlap_bytes(packs, shared_extents(place / "out/root/dir/large")) >= 12 * _MIB


def test_damage_is_put_aside_or_refused(place: Path, tmp_path: Path) -> None:
    """A damaged block: after use the file is renamed under all of its names; before use it never comes into place."""
    root = tmp_path / "root"
    _make_root(root)
    wanted = manifest(root)
    with Repository.create(place / "repository") as repository:
        snapshot = take(repository, root)
        _damage(place, repository, snapshot, os.fsencode(root / "dir/large"), 20)
        refused = _restore(repository, snapshot, root, place / "before", check_after=False)
        assert isinstance(refused.error(), Partial)
        assert not (place / "before/root/dir/large").exists()
        result = _restore(repository, snapshot, root, place / "out")
        error = result.error()
        assert isinstance(error, Damaged)
        aside = {one.path: one.aside for one in result.put_aside}
        out = os.fsencode(place / "out/root")
        assert set(aside) == {out + b"/dir/large", out + b"/large too"}
        for path, name in aside.items():
            assert name.startswith(path + b".ciuic-damaged-")
            assert os.path.getsize(name) == 12 * _MIB + 5000
            assert not os.path.lexists(path)
        assert {failure.path for failure in result.failed if failure.damaged} == set(aside)
        found = {
            name: value for name, value in manifest(place / "out/root").items() if b"damaged" not in name
        }
        assert set(wanted) - set(found) == {b"dir/large", b"large too"}


def test_a_file_that_a_program_writes_meanwhile_stays(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change between use and check is no damage, unless the file was made from a damaged block."""
    root = tmp_path / "root"
    _make_root(root)
    with Repository.create(place / "repository") as repository:
        snapshot = take(repository, root)
        out = place / "out/root"

        def change(_: int) -> None:
            for name in ("middle", "dir/large"):
                with (out / name).open("r+b") as file:
                    file.write(b"changed")
            (out / "zeros").unlink()

        plan = plan_restore(repository, snapshot, [os.fsencode(root)], os.fsencode(place / "out"))
        assert execute(plan, check_after=True, usable=change).complete
        assert (out / "middle").read_bytes().startswith(b"changed")
        shutil.rmtree(out)
        _damage(place, repository, snapshot, os.fsencode(root / "dir/large"), 20)
        plan = plan_restore(repository, snapshot, [os.fsencode(root)], os.fsencode(place / "out"))
        result = execute(plan, check_after=True, usable=change)
        assert {os.path.basename(one.path) for one in result.put_aside} == {b"large", b"large too"}


@pytest.mark.parametrize("check_after", [False, True])
@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("overwrite", [None, Overwrite.NEVER])
def test_killed_between_use_and_check(
    place: Path, tmp_path: Path, check_after: bool, damaged: bool, overwrite: Overwrite | None
) -> None:
    """The same restore, run again in either mode, finishes the check that is owed."""
    root = tmp_path / "root"
    _make_root(root)
    wanted = manifest(root)
    with Repository.create(place / "repository") as repository:
        snapshot = take(repository, root)
        if damaged:
            _damage(place, repository, snapshot, os.fsencode(root / "dir/large"), 20)
    child = os.fork()
    if not child:
        with Repository.open(place / "repository") as repository:
            DeferredCheck.run = lambda self: os._exit(_KILLED)  # type: ignore[method-assign]
            _restore(repository, snapshot, root, place / "out", overwrite=overwrite)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == _KILLED
    assert (place / "out/root/.ciuic-restore").exists()
    with Repository.open(place / "repository") as repository:
        result = _restore(
            repository, snapshot, root, place / "out", overwrite=overwrite, check_after=check_after
        )
        assert result.checked_behind >= 3
        if damaged:
            assert {os.path.basename(one.path) for one in result.put_aside} == {b"large", b"large too"}
            assert not (place / "out/root/dir/large").exists()
        else:
            assert result.complete
            assert_same(wanted, manifest(place / "out/root"))


def test_existing_files_that_share_extents_are_judged_by_the_packs(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over an existing file that shares the packs' extents the packs are read, and not the file; damage there is found."""
    root = tmp_path / "root"
    _make_root(root)
    large = os.fsencode(root / "dir/large")
    read: list[int] = []
    real = BlockWorker._has

    def has(self: BlockWorker, fd: int, start: int, end: int, chunk: bytes) -> bool:
        read.append(start)
        return real(self, fd, start, end, ChunkId(chunk))

    with Repository.create(place / "repository") as repository:
        snapshot = take(repository, root)
        for damaged in (False, True):
            if damaged:
                _damage(place, repository, snapshot, large, 20)
            # Nothing is checked, so that the file gets the damaged extents.
            with monkeypatch.context() as patch:
                patch.setattr(DeferredCheck, "run", lambda self: None)
                shutil.rmtree(place / "out", ignore_errors=True)
                assert _restore(repository, snapshot, root, place / "out").complete
            with monkeypatch.context() as patch:
                patch.setattr(BlockWorker, "_has", has)
                read.clear()
                result = _restore(
                    repository, snapshot, root, place / "out", overwrite=Overwrite.ALWAYS, check_after=False
                )
            failed = {os.path.basename(failure.path) for failure in result.failed}
            if damaged:
                assert b"large" in failed
            else:
                assert not failed
                assert not result.restored
                # Not of the large file: its small last block, and the compressed ones of the text, share nothing.
                assert [start for start in read if 4 * _MIB < start < 12 * _MIB] == []
