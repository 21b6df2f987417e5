"""Tests that the lock files used by `.ci/setup` agree with pyproject.toml, with hashes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import tomli
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
LOCKS = (
    "build",
    "run",
    "dev",
    "operator",
    "frameworks",
    "torch-frameworks",
    "fuzz",
    "bench",
    "docs",
    "torch-cpu",
)


def locked(name: str) -> dict[str, list[Requirement]]:
    """Return the pinned requirements of a lock file, each of which must have a hash."""
    found: dict[str, list[Requirement]] = {}
    text = "\n".join(
        line for line in (ROOT / f"requirements/{name}.txt").read_text().splitlines() if line[:1] != "#"
    )
    for entry in re.split(r"\n(?=\S)", text.strip()):
        line, *hashes = entry.replace("\\\n", "\n").splitlines()
        assert hashes, line
        assert all(re.fullmatch(r"\s*--hash=sha256:[0-9a-f]{64}\s*", one) for one in hashes), line
        requirement = Requirement(line.strip())
        assert re.fullmatch(r"==[^*,]+", str(requirement.specifier)), line
        found.setdefault(canonicalize_name(requirement.name), []).append(requirement)
    return found


@pytest.mark.parametrize("name", LOCKS)
def test_everything_is_pinned_with_hashes_and_names_no_place(name: str) -> None:
    """Lock files have no range, no URL and no index: only the hash of a file counts."""
    assert locked(name)
    text = (ROOT / f"requirements/{name}.txt").read_text()
    assert "://" not in text
    assert "index" not in text.replace("is on no index that", "")
    assert "/tmp" not in text


def test_the_locks_match_the_requirements_of_the_project() -> None:
    """Each dependency of pyproject.toml is locked where it is installed, in a version it allows."""
    project = tomli.loads((ROOT / "pyproject.toml").read_text())
    groups = project["dependency-groups"]

    def members(group: str) -> list[str]:
        """Return a group's requirements, those of included groups among them."""
        return [
            line
            for entry in groups[group]
            for line in (members(entry["include-group"]) if isinstance(entry, dict) else [entry])
        ]

    wanted = {
        "build": members("build"),
        "run": [*project["project"]["dependencies"], *members("rescue")],
        "dev": [*project["project"]["dependencies"], *project["project"]["optional-dependencies"]["pyfuse3"], *project["project"]["optional-dependencies"]["notify"], *project["project"]["optional-dependencies"]["otlp"], *project["project"]["optional-dependencies"]["remote"], *project["project"]["optional-dependencies"]["remote-versions"], *project["project"]["optional-dependencies"]["tui"], *project["project"]["optional-dependencies"]["operator"], *members("dev")],
        "operator": [*project["project"]["dependencies"], *project["project"]["optional-dependencies"]["operator"]],
        "frameworks": members("frameworks"),
        "torch-frameworks": members("torch-frameworks"),
        "fuzz": members("fuzz"),
        "bench": members("bench"),
        "docs": members("docs"),
    }  # fmt: skip
    for name, lines in wanted.items():
        entries = locked(name)
        for requirement in map(Requirement, lines):
            found = entries[canonicalize_name(requirement.name)]
            for one in found:
                version = str(one.specifier).removeprefix("==")
                assert requirement.specifier.contains(version, prereleases=True), (name, str(one))


def test_the_locks_agree_with_each_other() -> None:
    """Packages have one version for each interpreter, as all locks are installed into one environment."""
    seen: dict[str, set[str]] = {}
    for name in LOCKS:
        for package, found in locked(name).items():
            versions = {str(one.specifier) for one in found}
            assert seen.setdefault(package, versions) >= versions or seen[package] <= versions, (
                name,
                package,
            )


def test_an_advisory_is_a_failure_and_silence_is_none(tmp_path: Path) -> None:
    """.ci/audit.py exits with 1 for a finding, and with 0 and a notice where nothing could be looked up."""
    fake = tmp_path / "pip_audit.py"
    script = [sys.executable, str(ROOT / ".ci/audit.py"), "requirements.txt"]
    for printed, status, message in (
        ('{"dependencies": [{"name": "a", "version": "1", "vulns": []}]}', 0, "no known weaknesses in 1"),
        (
            '{"dependencies": [{"name": "a", "version": "1", "vulns": [{"id": "X-1", "fix_versions": ["2"]}]}]}',
            1,
            "a 1: X-1, fixed in 2",
        ),
        ('{"dependencies": [{"name": "a", "version": "1", "skip_reason": "unknown"}]}', 0, "NOT DONE"),
        ("", 0, "NOT DONE"),
    ):
        fake.write_text(f"print({printed!r})")
        done = subprocess.run(
            script, capture_output=True, text=True, check=False, env={"PYTHONPATH": str(tmp_path)}, timeout=60
        )
        assert (done.returncode, message in done.stdout + done.stderr) == (status, True), (printed, done)
