"""Tests of the version of a build, in a small tree with a history of its own."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[3]


class Tree:
    """A project with the build script of this one."""

    def __init__(self, place: Path) -> None:
        self.place = place
        for name in (".ci/build.py", "pyproject.toml", ".gitignore"):
            if (CHECKOUT / name).exists():
                (place / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(CHECKOUT / name, place / name)
        self.write("CHANGELOG.md", "# Changelog\n\n## 0.2.0 (2026-11-23)\n\n## 0.1.0 (2026-10-01)\n")
        self.write("ciuic/__init__.py", "")

    def write(self, name: str, text: str) -> None:
        (self.place / name).parent.mkdir(exist_ok=True)
        (self.place / name).write_text(text)

    def git(self, *arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgSign=false")
        subprocess.run(("git", *identity, *arguments), cwd=self.place, check=True, capture_output=True)

    def commit(self) -> None:
        self.git("add", "--all")
        self.git("commit", "--allow-empty", "--message", "a")

    def version(self) -> str:
        command = [sys.executable, ".ci/build.py"]
        done = subprocess.run(command, cwd=self.place, check=True, capture_output=True, text=True)
        return done.stdout.strip()


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "tree")


def test_a_version_is_the_tag_or_counts_from_it(tree: Tree) -> None:
    """A tagged commit has the tag's version, a later one is a development release of the next, named by its commit."""
    tree.git("init", "--quiet")
    tree.commit()
    assert re.fullmatch(r"0\.2\.0\+g[0-9a-f]{10}", tree.version())
    tree.git("tag", "v0.3.0")
    assert tree.version() == "0.3.0"
    tree.commit()
    tree.commit()
    assert re.fullmatch(r"0\.4\.0\.dev2\+g[0-9a-f]{10}", tree.version())


def test_different_contents_have_different_versions(tree: Tree) -> None:
    """Each content that is no commit has a version of its own, be it changed, new, or without a history, and the same again."""
    tree.git("init", "--quiet")
    tree.commit()
    tree.git("tag", "v0.3.0")
    seen = [tree.version()]
    for text in ("a = 1\n", "a = 2\n"):
        for name in ("ciuic/__init__.py", "ciuic/new.py"):
            tree.write(name, text)
            seen.append(tree.version())
            assert re.fullmatch(r"0\.4\.0\.dev0\+g[0-9a-f]{10}\.dirty\.x[0-9a-f]{10}", seen[-1])
    assert tree.version() == seen[-1]
    shutil.rmtree(tree.place / ".git")
    for text in ("a = 3\n", "a = 4\n"):
        tree.write("ciuic/new.py", text)
        seen.append(tree.version())
        assert re.fullmatch(r"0\.2\.0\+source\.x[0-9a-f]{10}", seen[-1])
    assert len(set(seen)) == len(seen)


def test_a_tree_within_another_history_is_no_part_of_it(tree: Tree) -> None:
    """A tree without a history that lies within a repository of something else takes no version from that."""
    subprocess.run(["git", "init", "--quiet", tree.place.parent], check=True)
    assert tree.version().startswith("0.2.0+source.x")
