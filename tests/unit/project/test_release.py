"""Tests of releases: `make release` in a clone of what is here, the changelog from fragments, and the version of a build."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

CHECKOUT = Path(__file__).parents[3]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    place = tmp_path / "clone"
    left = shutil.ignore_patterns(".git", ".venv", ".hypothesis", "*_cache", "__pycache__", "dist", "build")
    shutil.copytree(CHECKOUT, place, symlinks=True, ignore=left)
    _run(place, "git", "init", "--quiet")
    _run(place, "git", "config", "user.name", "a")
    _run(place, "git", "config", "user.email", "a@example.org")
    _run(place, "git", "add", "--all")
    _run(place, "git", "commit", "--quiet", "--message", "a")
    (place / "dist").mkdir()
    (place / "dist/tested").write_text(_run(place, sys.executable, ".ci/build.py").stdout)
    return place


def _run(place: Path, *command: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PY": sys.executable}
    done = subprocess.run(command, cwd=place, env=environment, check=False, capture_output=True, text=True, timeout=120)  # fmt: skip
    assert done.returncode == code, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.mark.full
def test_a_release_has_the_same_bytes_each_time(clone: Path) -> None:
    """Two releases of one commit are equal; all name the version, and the checkout stays as it was."""
    files = []
    for _ in range(2):
        told = _run(clone, ".ci/release", "7.0.0").stdout
        files.append({path.name: path.read_bytes() for path in (clone / "dist").iterdir()})
    assert files[0] == files[1]
    assert _run(clone, "git", "status", "--porcelain").stdout == ""
    names = ["ciuic-7.0.0-py3-none-any.whl", "ciuic-7.0.0.tar.gz", "ciuic.cdx.json"]
    assert sorted(files[0]) == ["SHA256SUMS", *names, "tested"]
    sums = dict(reversed(line.split()) for line in files[0]["SHA256SUMS"].decode().splitlines())
    assert sums == {name: hashlib.sha256(files[0][name]).hexdigest() for name in names}
    assert json.loads(files[0]["ciuic.cdx.json"])["metadata"]["component"]["version"] == "7.0.0"
    commit = next(line.split()[-1] for line in told.splitlines() if "git merge --ff-only" in line)
    _run(clone, "git", "merge", "--quiet", "--ff-only", commit)
    assert "\n## 7.0.0 (" in (clone / "CHANGELOG.md").read_text()
    assert "ciuic:7.0.0" in (clone / "etc/kubernetes/chart/values.yaml").read_text()


@pytest.mark.full
def test_a_debian_package_is_made_of_a_release(clone: Path) -> None:
    """The package has the same bytes each time, SHA256SUMS names it, and its program runs from /opt/ciuic with its libraries."""
    # Not in every image: the package is for the Python of a Debian, and this test's may be another.
    if not shutil.which("dpkg-deb") or not os.path.exists("/usr/bin/python3"):
        pytest.skip("no Debian with its own Python")
    _run(clone, ".ci/release", "7.0.0")
    package = []
    for _ in range(2):
        _run(clone, ".ci/deb")
        (path,) = clone.glob("dist/ciuic_7.0.0_*.deb")
        package.append(path.read_bytes())
    assert package[0] == package[1]
    assert (
        f"{hashlib.sha256(package[0]).hexdigest()}  {path.name}\n" in (clone / "dist/SHA256SUMS").read_text()
    )
    # In a mount namespace of its own, so that the machine keeps what it has there.
    program = "unset PYTHONPATH && mount -t tmpfs none /opt && dpkg-deb --fsys-tarfile $0 | tar -x -C / ./opt"
    program += " && /opt/ciuic/bin/ciuric --version"
    program += (
        " && /opt/ciuic/bin/python3 -I -c 'import ciuic.remote, msgspec, obstore; print(ciuic.__file__)'"
    )
    said = _run(clone, "unshare", "--mount", "sh", "-c", program, str(path)).stdout
    assert said.splitlines()[0] == "ciuric 7.0.0"
    assert said.splitlines()[1].startswith("/opt/ciuic/lib/")


def test_what_is_not_proved_is_not_released(clone: Path) -> None:
    """Refused are no version, an existing tag, what was not tested, and what is no commit."""
    for reason, prepare in (
        ("make test-full was not green", ("git", "commit", "--quiet", "--allow-empty", "--message", "b")),
        ("the tag v7.0.0 exists", ("git", "tag", "v7.0.0")),
        ("in no commit", ("touch", "ciuic/new.py")),
    ):
        _run(clone, *prepare)
        assert reason in _run(clone, ".ci/release", "7.0.0", code=2).stderr
    assert "name the version" in _run(clone, ".ci/release", "7.0", code=2).stderr


@pytest.fixture
def collector() -> ModuleType:
    spec = importlib.util.spec_from_file_location("collect", CHECKOUT / "changelog.d/collect.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_fragments_become_the_newest_section(tmp_path: Path, collector: ModuleType) -> None:
    """Fragments become the newest section, sorted by type, and their files are removed."""
    changelog = tmp_path / "CHANGELOG.md"
    changelog.write_text("# Changelog\n\nIntroduction.\n\n## 0.1.0\n\n- Old.\n")
    (tmp_path / "README.md").write_text("not a fragment")
    (tmp_path / "b.added.md").write_text("New\ncommand.\n")
    (tmp_path / "a.fixed.md").write_text("Mended.")
    collector.collect(tmp_path, changelog, "0.2.0", "2026-01-02")
    assert changelog.read_text() == (
        "# Changelog\n\nIntroduction.\n\n## 0.2.0 (2026-01-02)\n\n### Fixed\n\n- Mended.\n\n### Added\n\n- New command.\n\n"
        "## 0.1.0\n\n- Old.\n"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["CHANGELOG.md", "README.md"]


@pytest.mark.parametrize(
    ("name", "text"), [("a.broken.md", "Text."), ("a.fixed.md", " \n"), ("note.txt", "Text.")]
)
def test_a_wrong_fragment_is_named(tmp_path: Path, collector: ModuleType, name: str, text: str) -> None:
    """A wrong fragment is named, and nothing is written."""
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=name if name.endswith(".md") else "got none"):
        collector.section(tmp_path, "0.2.0", "2026-01-02")


def test_the_fragments_that_are_here_are_right(collector: ModuleType) -> None:
    """The fragments of this checkout are valid."""
    if list((CHECKOUT / "changelog.d").glob("*.*.md")):
        collector.section(CHECKOUT / "changelog.d", "0", "2026-01-02")


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
