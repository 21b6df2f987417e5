"""Training scripts, run and killed by run_script.py: what came of each run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(modules: str, script: Path, *runs: str, where: Path, allowed_s: float = 200) -> list[dict[str, Any]]:
    """``runs``: ``whole``, ``parts:7``, ``parts@other.py`` … : a directory for snapshots below ``where``, the step in which the run is
    killed, a script there other than ``script``."""
    results = where / "results"
    results.unlink(missing_ok=True)
    program = Path(__file__).with_name("run_script.py")
    done = subprocess.run(
        [
            sys.executable,
            str(program),
            modules,
            str(script),
            str(results),
            *(str(where / name) for name in runs),
        ],
        cwd=where,
        env={**os.environ, "PYTHONHASHSEED": "0", "TF_CPP_MIN_LOG_LEVEL": "3", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=allowed_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in results.read_text().splitlines()]
    expected = [-signal.SIGKILL if ":" in name else 0 for name in runs]
    assert [one["status"] for one in found] == expected, done.stderr
    return found


def assert_goes_on(modules: str, script: Path, kills: tuple[int, ...], where: Path) -> list[dict[str, Any]]:
    """A run that is killed so often ends with the bits of one that is not, took fewer steps at last, and then has nothing left to do."""
    killed = [f"parts:{step}" for step in kills]
    whole, *_, last, again = found = run(modules, script, "whole", *killed, "parts", "parts", where=where)
    assert last["digest"] == whole["digest"]
    assert 0 < last["steps"] < whole["steps"], "it began anew"
    assert again["steps"] == 0
    assert again["digest"] == whole["digest"]
    return found
