#!/usr/bin/env python3
"""Ask the index which of the locked versions have known weaknesses: `.venv/bin/python .ci/audit.py [REQUIREMENTS ...]`.

Exit status 1 for a finding. No answer from the advisory service is a notice and exit status 0: a check of the code must
not fail for a network. Names in ACCEPTED are left out, each with its reason.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

FILES = ("run", "dev")
TIMEOUT_SECONDS = 90
ACCEPTED: dict[str, str] = {}
"""Identifier of an advisory → why it does not concern ciuic."""


def main(files: list[str]) -> int:
    """Report findings; return the exit status."""
    command = [sys.executable, "-m", "pip_audit", "--no-deps", "--disable-pip", "--progress-spinner=off"]
    command += ["--timeout=10", "--format=json"]
    for name in ACCEPTED:
        command += ["--ignore-vuln", name]
    for file in files:
        command += ["--requirement", file]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        return notice("the advisory service did not answer in time")
    try:
        dependencies: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        return notice(f"pip-audit ended with {done.returncode}: {reason[:200]}")
    findings = [(one, weakness) for one in dependencies for weakness in one.get("vulns", ())]
    for one, weakness in findings:
        fixed = ", ".join(weakness["fix_versions"]) or "no version"
        print(f"{one['name']} {one['version']}: {weakness['id']}, fixed in {fixed}", file=sys.stderr)
    if findings:
        print("audit: `make lock ARGS='-P NAME'` takes the fixed version (CONTRIBUTING.md)", file=sys.stderr)
        return 1
    unknown = sum("skip_reason" in one for one in dependencies)
    if unknown:
        return notice(f"the advisory service knows nothing of {unknown} of {len(dependencies)} packages")
    print(f"audit: no known weaknesses in {len(dependencies)} packages")
    return 0


def notice(reason: str) -> int:
    """Say that nothing was found out; not a failure."""
    print(f"audit: NOT DONE, known weaknesses were not looked up: {reason}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    root = Path(__file__).resolve().parent.parent
    sys.exit(main(sys.argv[1:] or [str(root / "requirements" / f"{name}.txt") for name in FILES]))
