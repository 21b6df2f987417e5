"""Tests of the built distribution: one package, real files, and nothing else at the top level."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from support.ci import needs

from ciuic import errors
from ciuic.cli import reference

CHECKOUT = Path(__file__).parents[3]
PARTS = {"cli": "cli", "daemon": "daemon", "fuse_layer": "fuse_layer"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Build a source distribution of this checkout, and a wheel from it, as an index would."""
    top = tmp_path_factory.mktemp("built")
    _build(CHECKOUT, "sdist", top)
    sdist = next(top.glob("*.tar.gz"))
    with tarfile.open(sdist) as archive:
        archive.extractall(top, filter="data")
    _build(top / sdist.name.removesuffix(".tar.gz"), "wheel", top)
    return {"sdist": sdist, "wheel": next(top.glob("*.whl"))}


def _build(source: Path, target: str, out: Path) -> None:
    _run([sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)], cwd=source)


def _modules(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*.py") if "__pycache__" not in path.parts}


def _run(command: list[str], *, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """Return the standard output of the command, which must succeed."""
    done = subprocess.run(command, cwd=cwd, env=env, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_wheel_holds_one_package_of_real_files(built: dict[str, Path]) -> None:
    """The wheel has ciuic with every module of the four folders as regular files, and its metadata."""
    with zipfile.ZipFile(built["wheel"]) as wheel:
        infos = {info.filename: info for info in wheel.infolist()}
        tops = {name.split("/")[0] for name in infos}
        assert {top for top in tops if not top.endswith((".dist-info", ".data"))} == {"ciuic"}
        for info in infos.values():
            assert (info.external_attr >> 16) & 0o170000 in (0, 0o100000), (
                f"{info.filename} is not a regular file"
            )
        for part, folder in PARTS.items():
            if (CHECKOUT / folder).is_dir():
                expected = {f"ciuic/{part}/{name}" for name in _modules(CHECKOUT / folder)}
                assert expected <= infos.keys(), f"{part}: {sorted(expected - infos.keys())} are missing"
        assert "ciuic/py.typed" in infos
        for name in ("ciuic.toml", "alert.sh"):
            assert wheel.read(f"ciuic/data/etc/{name}") == (CHECKOUT / "etc" / name).read_bytes()


def test_the_sdist_can_be_unpacked_anywhere(built: dict[str, Path]) -> None:
    """The source distribution has no links that a file system or an unpacker may refuse."""
    with tarfile.open(built["sdist"]) as archive:
        assert [member.name for member in archive if not (member.isfile() or member.isdir())] == []


def test_an_installed_wheel_offers_both_commands_and_no_other_top_level_name(
    built: dict[str, Path], tmp_path: Path
) -> None:
    """The installed wheel provides ciuic, of the version of the source it is from, its commands, and no other top-level name."""
    target = tmp_path / "site"
    _run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--no-compile",
            "--target",
            str(target),
            str(built["wheel"]),
        ]
    )
    assert {"ciuic", "ciuric"} <= {path.name for path in (target / "bin").iterdir()}
    program = (
        "import importlib.util as u, ciuic;"
        "print(ciuic.__file__, ciuic.__version__, [n for n in ('daemon', 'cli', 'fuse_layer', 'tests') if u.find_spec(n)])"
    )
    # With -S: the environment that runs the tests may have the checkout itself on its path.
    out = _run(
        [sys.executable, "-S", "-c", program], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(target)}
    )
    version = built["sdist"].name.removeprefix("ciuic-").removesuffix(".tar.gz")
    assert built["wheel"].name == f"ciuic-{version}-py3-none-any.whl"
    assert out.split() == [f"{target}/ciuic/__init__.py", version, "[]"]


def test_the_wheel_has_a_manual_page_of_each_command(built: dict[str, Path], tmp_path: Path) -> None:
    """Each command has a manual page, which groff sets without a warning, with all its options and its exit codes."""
    with zipfile.ZipFile(built["wheel"]) as wheel:
        wheel.extractall(tmp_path)
    pages = {path.stem: path for path in tmp_path.glob("*.data/data/share/man/man1/*.1")}
    sections = reference.options().split("### `ciuic ")[1:]
    named = {re.sub(r"[^a-z-]+", "-", re.split(" [^a-z]|`", text)[0]): text for text in sections}
    assert pages.keys() == {"ciuic", *(f"ciuic-{name}" for name in named)}
    for name, section in named.items():
        text = pages[f"ciuic-{name}"].read_text()
        for escape, plain in (("\\-", "-"), ("\\:", ""), ("\\[u2026]", "…")):
            text = text.replace(escape, plain)
        assert [
            one for one in re.findall(r"(?m)^\* `(.*?)`", section) if f"\n\\fB{one}\\fR\n" not in text
        ] == []
    assert f".TP\n{errors.Damaged.exit_code}\n" in pages["ciuic"].read_text()
    needs("" if shutil.which("groff") else "no groff")
    for page in pages.values():
        for width in (60, 80):
            command_line = ["groff", "-man", "-Tutf8", "-ww", f"-rLL={width}n", str(page)]
            done = subprocess.run(command_line, check=True, capture_output=True, text=True)
            assert done.stderr == ""


def test_an_editable_install_imports_the_checkout_from_anywhere(tmp_path: Path) -> None:
    """The parts are importable as ciuic.… from another directory after `pip install -e .`."""
    source = tmp_path / "checkout"
    unwanted = shutil.ignore_patterns(".git", ".venv", ".hypothesis", "*_cache", "__pycache__")
    shutil.copytree(CHECKOUT, source, symlinks=True, ignore=unwanted)
    venv = tmp_path / "venv"
    _run([sys.executable, "-m", "venv", "--without-pip", str(venv)])
    # Without dependencies: only the import path is in question. The build tools are the test's own.
    _run([sys.executable, "-c", _EDITABLE, str(tmp_path)], cwd=source)
    wheel = next(tmp_path.glob("*.whl"))
    pip = [sys.executable, "-m", "pip", "--python", str(venv / "bin/python")]
    _run([*pip, "install", "-q", "--no-deps", "--no-compile", str(wheel)])
    program = "import ciuic.fuse_layer as f, ciuic; print(ciuic.__file__, f.__file__)"
    out = _run([str(venv / "bin/python"), "-c", program], cwd=tmp_path)
    assert out.split() == [f"{source}/ciuic/__init__.py", f"{source}/ciuic/fuse_layer/__init__.py"]


_EDITABLE = "import sys, hatchling.build; hatchling.build.build_editable(sys.argv[1])"
"""The hooks that pip calls of the build backend for `--editable` (PEP 660)."""
