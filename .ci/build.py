"""What is made when a wheel is built: its version, from the tags of the history.

``python .ci/build.py`` prints the version of the checkout. It is written here and not by setuptools-scm because no two contents may
share a name, which takes more than a tag: that looks neither at untracked files, which are built in, nor at what was changed.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.builders.sdist import SdistBuilder

ROOT = Path(__file__).resolve().parents[1]
_RELEASE = r"(\d+)\.(\d+)\.(\d+)"


def version() -> str:
    """Return the version of this tree (PEP 440), the same for no other content.

    | tree | version |
    | --- | --- |
    | tag v0.3.0, nothing changed | 0.3.0 |
    | five commits after tag v0.2.0 | 0.3.0.dev5+g1a2b3c4d5e |
    | the same with changed or new files | 0.3.0.dev5+g1a2b3c4d5e.dirty.x6f7a8b9c0d, by the content |
    | no tag to be seen (shallow clone) | 0.2.0+g1a2b3c4d5e: the release in CHANGELOG.md, or anything after it |
    | no history (an exported tree, no git) | 0.2.0+source.x6f7a8b9c0d, by the content |
    """
    described = _git(
        "describe", "--tags", "--long", "--always", "--abbrev=10", "--match=v[0-9]*.[0-9]*.[0-9]*"
    )
    if not described:
        return f"{_newest_release()}+source.{_content()}"
    tagged = re.fullmatch(rf"v{_RELEASE}-(\d+)-g(\w+)", described)
    dirty = f".dirty.{_content()}" if _git("status", "--porcelain") else ""
    if tagged is None:
        return f"{_newest_release()}+g{described}{dirty}"
    major, minor, patch, distance, commit = tagged.groups()
    if distance == "0" and not dirty:
        return f"{major}.{minor}.{patch}"
    return f"{major}.{int(minor) + 1}.0.dev{distance}+g{commit}{dirty}"


def _git(*arguments: str) -> str | None:
    """Return what git says of this tree; None where it has no history of its own, or there is no git."""
    # Named, and not searched for: a tree that was unpacked within another one's history is no part of it.
    place = (f"--git-dir={ROOT}/.git", f"--work-tree={ROOT}")
    try:
        done = subprocess.run(
            ("git", *place, *arguments), cwd=ROOT, check=False, capture_output=True, text=True
        )
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _newest_release() -> str:
    found = re.search(rf"(?m)^## ({_RELEASE})", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    return found[1] if found else "0.0.0"


def _content() -> str:
    """Name the content of what is published, a label that has a letter: PEP 440 strips zeros from numbers."""
    digest = hashlib.sha256()
    for file in sorted(
        SdistBuilder(str(ROOT)).recurse_included_files(), key=lambda file: file.distribution_path
    ):
        content = Path(file.path).read_bytes()
        digest.update(f"{file.distribution_path}\0{len(content)}\0".encode() + content)
    return f"x{digest.hexdigest()[:10]}"


class Hook(BuildHookInterface):  # type: ignore[type-arg]
    """Puts into a wheel what the checkout does not have."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the files of the wheel that are made; an editable installation has none."""
        self._made = Path(tempfile.mkdtemp())
        if version != "editable":
            module = self._made / "_version.py"
            module.write_text(f'__version__ = "{self.metadata.version}"\n')
            build_data["force_include"][str(module)] = "ciuic/_version.py"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what `initialize` made."""
        shutil.rmtree(self._made)


if __name__ == "__main__":
    print(version())
