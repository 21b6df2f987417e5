"""Tools that clean up a work tree delete what ciuic keeps beside a root: the job and its snapshots go on."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from support.overlay import state_of
from support.site import Site, ended
from support.until import until

from ciuic import STATE_DIR_NAME

pytestmark = pytest.mark.mount

NAME = os.fsdecode(STATE_DIR_NAME)


def _git(site: Site, *words: str) -> str:
    command = ["git", "-C", str(site.top), "-c", "user.name=a", "-c", "user.email=a@b", *words]
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null"}
    return subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True, timeout=60
    ).stdout


def _work_tree(site: Site) -> Path:
    """Return a root with state beside it, in what became a work tree later."""
    root = site.root("a")
    site.start()
    (root / "f").write_text("one")
    site.snapshot()
    _git(site, "init", "-q")
    _git(site, "config", "core.excludesFile", "/dev/null")
    (site.top / ".git" / "info" / "exclude").write_text("/*\n!/.ciuic-state\n!/code\n")
    (site.top / "code").write_text("x")
    _git(site, "add", "code")
    _git(site, "commit", "-qm", "x")
    return root


def test_git_neither_lists_nor_stashes_the_state(site: Site) -> None:
    """`git status`, `stash -u` and `clean -fd` leave the state of a root in a work tree alone."""
    root = _work_tree(site)
    state = state_of(root)
    assert _git(site, "status", "--porcelain") == ""
    (site.top / "code").write_text("y")
    _git(site, "stash", "-u")
    _git(site, "clean", "-fd")
    assert state_of(root) == state
    assert state.is_dir()
    (root / "f").write_text("two")
    assert site.content(site.snapshot(), root, b"f") == b"two"


@pytest.mark.parametrize("killed", [False, True])
def test_snapshots_go_on_after_git_clean(site: Site, killed: bool) -> None:
    """After `git clean -fdx` the next snapshots are right without a restart; also if the worker dies before it notices."""
    root = _work_tree(site)
    above = site.top.parent / NAME
    others = set(above.iterdir()) if above.exists() else set()
    with open(root / "log", "a", buffering=1) as job:
        job.write("before\n")
        assert NAME in _git(site, "clean", "-fdx", "--", NAME)
        assert not (site.top / NAME).exists()
        job.write("after\n")
        (root / "f").write_text("two")
        if killed:
            worker = site.root_status(root).worker_pid
            os.kill(worker, signal.SIGKILL)
            until("the end of the worker", lambda: ended(worker))
            until("its successor", lambda: site.root_status(root).worker_pid not in (0, worker))
        assert site.content(site.snapshot(), root, b"f") == b"two"
        job.write("and on\n")
        last = site.snapshot()
        assert site.content(last, root, b"log") == b"before\nafter\nand on\n"
    # Anew, and now out of reach: above the work tree.
    assert not (site.top / NAME).exists()
    (made,) = (path for path in above.iterdir() if path not in others and (path / "undo").is_dir())
    with site.client() as client:
        client.remove_root(str(root))
    until("the removal of the state", lambda: not made.exists())
