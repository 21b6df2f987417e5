"""A user who owns directories restores into them whatever their modes say, and their modes are what they should be afterwards."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
from support import trees
from support.restoring import take, write
from support.second_user import NOBODY, run_as

from ciuic.repository import Repository

pytestmark = pytest.mark.mount
# What a restore imports late is imported before: this interpreter may lie where the other user cannot read.
_IMPORTS = """
import ctypes, json, os, random, sys
from pathlib import Path
from ciuic.repository import Repository
from ciuic.restore import Overwrite, execute, plan_restore
"""
_RESTORE = """
with Repository.open(Path(sys.argv[1])) as repository:
    snapshot = repository.snapshots.load(repository.snapshots.resolve(sys.argv[2]))
    plan = plan_restore(repository, snapshot, [os.fsencode(sys.argv[3])], overwrite=Overwrite.ALWAYS, delete=True, special=True)
    result = execute(plan)
    print(result.error() or "")
"""
_MODES = (0o555, 0o500, 0o700, 0o755, 0o577)


def _own(top: Path, dice: random.Random) -> None:
    """Give everything to the user; directories get modes that may withhold writing from their owner."""
    for folder, _, names in os.walk(top, topdown=False):
        for name in names:
            os.chown(os.path.join(folder, name), NOBODY.uid, NOBODY.gid)
        os.chown(folder, NOBODY.uid, NOBODY.gid)
        os.chmod(folder, dice.choice(_MODES))


@pytest.mark.parametrize("seed", range(8))
def test_own_directories_of_any_mode(short_tmp: Path, seed: int) -> None:
    """Files that are missing, changed and superfluous in read-only directories of the caller are put right, and no mode is left lifted."""
    dice = random.Random(seed)
    short_tmp.parent.chmod(0o755)
    short_tmp.chmod(0o755)
    root = short_tmp / "root"
    folders = [root, root / "a", root / "a" / "b", root / "c"]
    for folder in folders:
        for number in range(3):
            write(folder / f"file{number}", dice.randbytes(dice.choice([0, 10, 5000])))
    _own(root, dice)
    wanted = trees.manifest(root)
    with Repository.create(short_tmp / "repository") as repository:
        snapshot = take(repository, root)
    for path in [short_tmp / "repository", *(short_tmp / "repository").rglob("*")]:
        os.chown(path, NOBODY.uid, NOBODY.gid)
    for folder in folders[1:]:
        harm = dice.choice(["file", "folder", "extra", "mode"])
        if not folder.exists():
            continue
        if harm == "file":
            (folder / "file0").unlink()
            (folder / "file1").write_bytes(b"damage")
        elif harm == "folder":
            shutil.rmtree(folder)
        elif harm == "extra":
            write(folder / "extra" / "file", b"x")
            _own(folder / "extra", dice)
        else:
            folder.chmod(0o511)
    done = run_as(NOBODY, _RESTORE, str(repository.path), str(snapshot.id), str(root), imports=_IMPORTS)
    assert (done.stdout.strip(), done.returncode) == ("", 0), done.stderr
    trees.assert_same(wanted, trees.manifest(root))
