"""Restores that are killed between any two operations, and run again."""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support import trees
from support.cli_repository import CliRepository
from support.restoring import take, write

from ciuic.repository import Repository
from ciuic.restore import Overwrite, execute, plan_restore
from ciuic.restore.journal import unfinished
from ciuic.types import Snapshot

CALLS = (
    "open",
    "pwrite",
    "ftruncate",
    "mkdir",
    "symlink",
    "link",
    "rename",
    "unlink",
    "chmod",
    "utime",
    "fsync",
)
KILLED = 99


def make_root(root: Path) -> None:
    for number in range(4):
        write(root / "dir" / f"file {number}", os.urandom(6000))
    write(root / "large", os.urandom(2_000_000))
    os.link(root / "large", root / "dir" / "large too")
    (root / "link").symlink_to("nowhere")
    os.chmod(root / "dir", 0o750)
    os.utime(root / "dir", ns=(10, 20))
    os.utime(root, ns=(30, 40))


def die_at(number: int) -> None:
    """End the process at the given operation as SIGKILL would: nothing is cleaned up."""
    count = iter(range(number))
    lock = threading.Lock()

    def counted(real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            with lock:
                if next(count, None) is None:
                    os._exit(KILLED)
            return real(*args, **kwargs)

        return call

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))


def restore(repository: Path, snapshot: Snapshot, root: Path, overwrite: Overwrite | None) -> None:
    with Repository.open(repository) as opened:
        result = execute(
            plan_restore(opened, snapshot, [os.fsencode(root)], overwrite=overwrite, delete=True)
        )
        assert result.complete, result.error()


def killed_restore(
    repository: Path, snapshot: Snapshot, root: Path, overwrite: Overwrite | None, number: int
) -> bool:
    """Run a restore in a child that dies at operation ``number``; return whether the child got that far."""
    child = os.fork()
    if child == 0:
        try:
            die_at(number)
            restore(repository, snapshot, root, overwrite)
        except BaseException:
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, KILLED)
    return status == KILLED


def temporaries(root: Path) -> list[Path]:
    return [path for path in root.rglob(".ciuic-restore*") if path.exists()]


@pytest.mark.parametrize(
    "overwrite",
    [
        pytest.param(None, marks=pytest.mark.full),
        pytest.param(Overwrite.ALWAYS, marks=pytest.mark.full),
        Overwrite.IF_CHANGED,
    ],
)
def test_killed_anywhere_and_run_again(tmp_path: Path, overwrite: Overwrite | None) -> None:
    """Each name shows the old file or the restored one at every kill; a second run completes it."""
    root = tmp_path / "root"
    make_root(root)
    wanted = trees.manifest(root)
    with Repository.create(tmp_path / "repository", block_size=4096) as repository:
        snapshot = take(repository, root)
    shutil.rmtree(root)
    old: trees.Manifest = {}
    if overwrite is not None:
        write(root / "dir" / "file 1", b"other content")
        write(root / "dir" / "file 2" / "a directory now", b"x")
        write(root / "large", os.urandom(2_000_000))
        write(root / "link", b"a file now")
        os.utime(root / "large", ns=(1, 1))
        old = trees.manifest(root)
    shutil.copytree(root, tmp_path / "old", symlinks=True) if old else (tmp_path / "old").mkdir()
    rng, number, deaths = random.Random(7), 0, 0
    while True:
        shutil.rmtree(root, ignore_errors=True)
        if old:
            shutil.copytree(tmp_path / "old", root, symlinks=True)
        if not killed_restore(repository.path, snapshot, root, overwrite, number):
            break
        deaths += 1
        check_nothing_is_half(root, wanted, old)
        again = overwrite
        if overwrite is None and is_complete_but_for_its_time(root, wanted):
            # The mark of an unfinished restore is gone: these files are conflicts now.
            again = Overwrite.IF_CHANGED
        restore(repository.path, snapshot, root, again)
        trees.assert_same(wanted, trees.manifest(root))
        assert not temporaries(root)
        number += rng.randrange(3, 20)
    assert deaths > 10


def told(made: CliRepository) -> list[dict[str, Any]]:
    """Return the restores that were cut short, as ``restore --status`` tells of them."""
    # The option reads the words of the process.
    found = unfinished(Path(f"{made.path}.state") / "ciuic" / "restores")
    assert [os.fsdecode(one.command[0]) for one in found] == ["ciuic"] * len(found)
    return [msgspec.to_builtins(one, builtin_types=(bytes,)) for one in found]


@pytest.mark.parametrize("options", [["--overwrite", "--delete"], ["--exclude", "file 1"]])
def test_a_killed_command_is_told_with_the_words_that_go_on(tmp_path: Path, options: list[str]) -> None:
    """After a kill anywhere, status tells of a restore that has a mark, and its words complete it; then nothing is told.

    What was whole before the kill is not written again.
    """
    root = tmp_path / "root"
    make_root(root)
    made = CliRepository(tmp_path / "repository", root)
    with Repository.open(made.path) as repository:
        snapshot = take(repository, root)
    shutil.rmtree(root)
    words = ["restore", "-s", str(snapshot.id), "-p", str(root), *options]
    assert made.run(*words).exit_code == 0
    wanted = trees.manifest(root)
    rng, number, told_of = random.Random(3), 0, 0
    while True:
        shutil.rmtree(root)
        child = os.fork()
        if child == 0:
            try:
                die_at(number)
                os._exit(made.run(*words).exit_code)
            finally:
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, KILLED)
        if status == 0:
            break
        has_mark = (root / ".ciuic-restore").exists()
        found = told(made)
        assert len(found) == has_mark
        if has_mark:
            told_of += 1
            # No daemon answers: that is its exit code, and the line is there all the same.
            assert f"{root}: cut short, of {snapshot.id}" in made.run("status").stdout
            whole = {path: path.stat().st_ino for path in root.rglob("*") if path.name in ("large", "file 2")}
            assert made.run(*found[0]["command"][1:]).exit_code == 0
            trees.assert_same(wanted, trees.manifest(root))
            assert {path: path.stat().st_ino for path in whole} == whole
            assert told(made) == []
        root.mkdir(exist_ok=True)
        number += rng.randrange(3, 12)
    assert told_of > 3
    assert told(made) == []


def is_complete_but_for_its_time(root: Path, wanted: trees.Manifest) -> bool:
    """Return whether only the directory's time is missing, as after a kill before the last operation."""
    if not root.exists() or temporaries(root):
        return False
    found = trees.manifest(root)
    found[b"."] = found[b"."]._replace(mtime_ns=wanted[b"."].mtime_ns)
    return found == wanted


def check_nothing_is_half(root: Path, wanted: trees.Manifest, old: trees.Manifest) -> None:
    if not root.exists():
        return
    for path, facts in trees.manifest(root).items():
        if b".ciuic-restore" in path or path == b".":
            continue
        assert path in wanted or path in old, path
        shown = {
            (known[path].kind, known[path].size_bytes, known[path].digest)
            for known in (wanted, old)
            if path in known
        }
        assert (facts.kind, facts.size_bytes, facts.digest) in shown, path
