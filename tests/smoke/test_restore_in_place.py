"""Restores through a live overlay, over the files that it serves."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from support import trees
from support.overlay import overlay_over
from support.restoring import take, write

from ciuic.repository import Repository
from ciuic.restore import Overwrite, execute, plan_restore
from ciuic.system.open_files import find_open_files, replaced


@pytest.mark.mount
def test_a_live_root_is_put_back_exactly(short_tmp: Path) -> None:
    """A restore over a live root brings everything back, through the mount and behind it."""
    root = short_tmp / "root"
    root.mkdir()
    trees.make_everything(root)
    wanted = trees.manifest(root)
    with Repository.create(short_tmp / "repository") as repository:
        snapshot = take(repository, root)
        with overlay_over(root, short_tmp / "control.sock") as overlay:
            write(root / "block", b"overwritten")
            write(root / "extra" / "file", b"x")
            (root / "first name").unlink()
            shutil.rmtree(root / "folder")
            os.chmod(root / "modes", 0o600)
            (root / "empty").unlink()
            (root / "empty").mkdir()
            os.truncate(root / "odd size", 5)
            plan = plan_restore(
                repository, snapshot, [os.fsencode(root)], overwrite=Overwrite.ALWAYS, delete=True
            )
            result = execute(plan)
            assert result.complete, result.error()
            trees.assert_same(wanted, trees.manifest(root))
            again = execute(plan)
            assert (again.restored, again.removed) == (0, [])
            trees.assert_same(wanted, trees.manifest(root))
            trees.assert_same(wanted, trees.manifest(overlay.backing))


@pytest.mark.mount
def test_a_program_that_has_a_served_file_open_is_found(short_tmp: Path) -> None:
    """A descriptor through the overlay counts for the program that has it, and not for the worker that serves it."""
    root = short_tmp / "root"
    root.mkdir()
    write(root / "log", b"old")
    with Repository.create(short_tmp / "repository") as repository:
        snapshot = take(repository, root)
        with overlay_over(root, short_tmp / "control.sock"):
            holder = subprocess.Popen(["tail", "-f", root / "log"], stdout=subprocess.PIPE)
            try:
                assert holder.stdout is not None
                assert holder.stdout.read(3) == b"old"
                write(root / "log", b"newer")
                before = find_open_files([os.fsencode(root)])
                assert [(one.path, one.pid) for one in before] == [(os.fsencode(root / "log"), holder.pid)]
                plan = plan_restore(repository, snapshot, [os.fsencode(root)], overwrite=Overwrite.ALWAYS)
                assert replaced(before) == []
                assert execute(plan).complete
                assert replaced(before) == before
            finally:
                holder.kill()
                holder.communicate(timeout=30)
