"""Tests of `make release`, in a clone of what is here."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

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
