"""Build the documentation as a site: ``make docs`` writes build/site/html.

The pages are those of the checkout, at their own places, so that every link works both in the checkout and on the site. A link that
leads nowhere fails the build. Two more pages have the API, from the docstrings.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
BUILD = CHECKOUT / "build" / "site"
API = {
    "training": ("Training API", ["ciuic.SnapshotManager", "ciuic.training"]),
    "library": (
        "Library API",
        [
            "ciuic.repository",
            "ciuic.restore",
            "ciuic.compare.diff",
            "ciuic.maintenance.verify",
            "ciuic.types",
            "ciuic.errors",
        ],
    ),
}
"""Page, its heading, and the modules or classes on it."""


def stage() -> None:
    """Copy what the pages are made of to build/site/src."""
    shutil.rmtree(BUILD, ignore_errors=True)
    tracked = subprocess.run(
        ["git", "ls-files", "*.md", "*.svg", "*.png", "examples/*", "etc/*", "systemd/*"],
        cwd=CHECKOUT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    for name in [*tracked, "LICENSE"]:
        target = BUILD / "src" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(CHECKOUT / name, target)
    for page, (heading, names) in API.items():
        target = BUILD / "src" / "api" / f"{page}.md"
        target.parent.mkdir(exist_ok=True)
        target.write_text(f"# {heading}\n\n" + "".join(f"::: {name}\n\n" for name in names), encoding="utf-8")
    shutil.copyfile(CHECKOUT / "docs/site/mkdocs.yml", BUILD / "mkdocs.yml")


def main() -> int:
    """Stage the pages and build the site; the exit status of mkdocs."""
    stage()
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "-f",
        str(BUILD / "mkdocs.yml"),
    ]
    return subprocess.run(command, cwd=CHECKOUT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
