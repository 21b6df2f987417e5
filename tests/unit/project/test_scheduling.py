"""Tests that a parallel run comes to its end, with each test run once, when one of its processes dies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.file_costs import CHECKOUT

_CONFTEST = """
from support.scheduling import FilesOnce
def pytest_xdist_make_scheduler(config, log): return FilesOnce(config, log)
"""
_SOUND = """
def test_{}(): print(file=open("run", "a"))
"""
_DEADLY = """
def test_{}():
    print(file=open("run", "a"))
    import os; os._exit(1)
"""


@pytest.mark.parametrize(
    "files",
    [
        pytest.param(["s", "s", "s", "sd"], id="the-last"),
        pytest.param(["s", "s", "s", "sds"], id="one-is-left"),
        pytest.param(["d", "ss", "s", "s", "s"], id="the-first"),
        pytest.param(["sd", "d", "ds"], id="one-in-each-file"),
        pytest.param(["ddd"], id="all-of-one-file"),
    ],
)
def test_a_run_ends_when_processes_die(tmp_path: Path, files: list[str]) -> None:
    """Each test is run once; those in which a process died have failed, the others passed."""
    (tmp_path / "conftest.py").write_text(_CONFTEST)
    for number, kinds in enumerate(files):
        tests = [(_DEADLY if kind == "d" else _SOUND).format(at) for at, kind in enumerate(kinds)]
        (tmp_path / f"test_{number}.py").write_text("".join(tests))
    options = ["-n2", "--dist=loadfile", "--no-loadscope-reorder", "-p", "no:randomly", "-p", "no:kmock"]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(CHECKOUT / "tests"), "TMPDIR": str(tmp_path)}
    outcome = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    every = "".join(files)
    passed = f", {every.count('s')} passed" if "s" in every else ""
    assert f"{every.count('d')} failed{passed} in " in outcome.stdout, outcome.stdout
    assert (tmp_path / "run").read_text() == "\n" * len(every)
