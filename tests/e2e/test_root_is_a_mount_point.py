"""What is different because a root is a mount point, and what is said of it."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest
from support.live import Live

pytestmark = pytest.mark.mount


def _git(directory: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    quiet = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1", "GIT_CEILING_DIRECTORIES": "/"}
    return subprocess.run(
        ["git", "-c", "user.name=x", "-c", "user.email=x@example.org", *arguments],
        cwd=directory,
        env={"PATH": os.environ["PATH"], **quiet, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )


def test_a_root_inside_a_git_work_tree(live: Live) -> None:
    """`protect` says that git finds no repository from inside such a root, and what it names works."""
    top = live.top / "work tree"
    inside = top / "runs" / "one"
    inside.mkdir(parents=True)
    (inside / "config").write_text("x")
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "one"]):
        done = _git(top, *arguments)
        assert done.returncode == 0, done.stderr
    commit = _git(inside, "rev-parse", "HEAD").stdout
    live.start()
    said = live.run("protect", str(inside)).stderr.decode()
    assert f"lies in the git work tree {top}" in said
    assert "GIT_DISCOVERY_ACROSS_FILESYSTEM=1" in said
    assert f"ciuic protect '{top}'" in said
    live.wait_mounted(inside)
    assert "filesystem boundary" in _git(inside, "rev-parse", "HEAD").stderr
    assert _git(inside, "rev-parse", "HEAD", GIT_DISCOVERY_ACROSS_FILESYSTEM="1").stdout == commit
    assert _git(inside, "status", "--short", GIT_DISCOVERY_ACROSS_FILESYSTEM="1").stdout == ""
    # Once.
    assert live.run("protect", str(inside)).stderr == b""
    # The other remedy.
    live.run("unprotect", str(inside))
    said = live.json("protect", str(top))
    assert said["roots"][0]["work_tree"] is None
    live.wait_mounted(top)
    assert _git(inside, "rev-parse", "HEAD").stdout == commit
    live.run("unprotect", str(top))


def test_names_do_not_cross_the_border_of_a_root(live: Live, root: Path) -> None:
    """Rename and link between a root and what lies beside it fail with EXDEV, as between file systems; mv copies."""
    beside = live.top / "beside"
    beside.write_text("content")
    live.run("protect", str(root))
    live.start(root)
    for act in (os.rename, os.link):
        with pytest.raises(OSError, match="cross-device") as caught:
            act(beside, root / "file")
        assert caught.value.errno == errno.EXDEV
    subprocess.run(["mv", beside, root / "file"], check=True, timeout=30)
    assert (root / "file").read_text() == "content"
    assert os.lstat(root).st_dev != os.lstat(root.parent).st_dev
