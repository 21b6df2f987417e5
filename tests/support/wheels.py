"""Wheels of this checkout and of older states of it, installed beside the test environment's libraries."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
_BUILD_SECONDS = 120
_NOT_BUILT = shutil.ignore_patterns(".*", "__pycache__", "tests", "benchmarks")


def build(source: Path, out: Path) -> Path:
    """Build the wheel of a source tree into ``out``, with no download."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=_BUILD_SECONDS)
    return next(out.glob("*.whl"))


def install(wheel: Path, python: Path) -> None:
    """Do what `pip install ciuic` does, with libraries of this interpreter in place of downloaded ones."""
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", str(wheel)]
    subprocess.run(command, check=True, timeout=_BUILD_SECONDS)
    (site,) = (python.parents[1] / "lib").glob("python3*/site-packages")
    # Libraries of another environment that this interpreter sees too; editable installations there are not
    # visible.
    lent = {entry for entry in sys.path if entry.endswith("site-packages")}
    lent |= {sysconfig.get_path(kind) for kind in ("purelib", "platlib")}
    (site / "libraries.pth").write_text("\n".join(sorted(lent)))


def environment(place: Path, wheel: Path) -> Path:
    """Make a virtual environment with the wheel; return its ``ciuic``."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True, timeout=60)
    install(wheel, place / "bin/python")
    return place / "bin/ciuic"


def older_source(place: Path, commit: str, version: str) -> None:
    """Put the tree of ``commit`` into ``place``, under a version of its own.

    Where this checkout has no such history (a source distribution, a shallow clone) it is this tree, under
    that version.
    """
    done = subprocess.run(
        ["git", "-c", f"safe.directory={CHECKOUT}", "archive", commit],
        cwd=CHECKOUT,
        check=False,
        capture_output=True,
    )
    if done.returncode == 0:
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            archive.extractall(place, filter="data")
    else:
        shutil.copytree(CHECKOUT, place, symlinks=True, ignore=_NOT_BUILT)
    with (place / "ciuic/__init__.py").open("a") as module:
        module.write(f'\n__version__ = "{version}"\n')
