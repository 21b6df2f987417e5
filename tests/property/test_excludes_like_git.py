"""The exclude patterns mean what they mean to git, on names that are not text too."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ciuic.excludes import ExcludeMatcher, effective_patterns

NAMES = [b"a", b"b", b"ab", b"a.b", b"c-d", b"[x]", b"new\nline", b"\xff\xfe", b"sp ", b"#h", b"!n", b"\\"]
PIECES = [
    "a",
    "b",
    "ab",
    "*",
    "**",
    "?",
    "a*",
    "*b",
    "[a-c]",
    "[!a]",
    "[[:alpha:]]*",
    "\\*",
    "\\[x]",
    "new*",
    "sp\\ ",
]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A git checkout with directories and files of all NAMES, three deep for some."""
    top = tmp_path_factory.mktemp("git-oracle")
    subprocess.run(["git", "init", "-q", str(top)], check=True)
    base = os.fsencode(top)
    for outer in NAMES:
        os.mkdir(base + b"/" + outer)
        for inner in NAMES[:8]:
            if inner < b"b":
                os.mkdir(base + b"/" + outer + b"/" + inner)
                (Path(os.fsdecode(base + b"/" + outer + b"/" + inner + b"/b"))).touch()
                (Path(os.fsdecode(base + b"/" + outer + b"/" + inner + b"/a.b"))).touch()
            else:
                (Path(os.fsdecode(base + b"/" + outer + b"/" + inner))).touch()
    return top


def everything(top: Path) -> list[tuple[bytes, bool]]:
    found = []
    base = os.fsencode(top)
    for directory, directories, files in os.walk(base):
        if b".git" in directories:
            directories.remove(b".git")
        for name, is_dir in [(d, True) for d in directories] + [(f, False) for f in files]:
            found.append((os.path.relpath(os.path.join(directory, name), base), is_dir))
    return sorted(found)


@st.composite
def patterns(draw: st.DrawFn) -> str:
    parts = draw(st.lists(st.sampled_from(PIECES), min_size=1, max_size=3))
    lead = draw(st.sampled_from(["", "", "/"]))
    return (
        draw(st.sampled_from(["", "", "!"])) + lead + "/".join(parts) + draw(st.sampled_from(["", "", "/"]))
    )


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chosen=st.lists(patterns(), min_size=1, max_size=4))
def test_matches_what_git_ignores(checkout: Path, chosen: list[str]) -> None:
    """For any list of patterns, the matcher excludes exactly what ``git check-ignore`` ignores."""
    (checkout / ".git" / "info" / "exclude").write_text("".join(pattern + "\n" for pattern in chosen))
    paths = everything(checkout)
    answer = subprocess.run(
        ["git", "-C", str(checkout), "check-ignore", "--no-index", "-z", "--stdin"],
        input=b"".join(path + b"\0" for path, _ in paths),
        capture_output=True,
    )
    assert answer.returncode in (0, 1), answer.stderr
    ignored = set(answer.stdout.split(b"\0")) - {b""}

    matcher = ExcludeMatcher(checkout, effective_patterns(str(checkout), (), chosen))
    assert {path for path, is_dir in paths if matcher.match(path, is_dir)} == ignored


@settings(max_examples=200, deadline=None)
@given(
    chosen=st.lists(patterns(), max_size=3),
    path=st.lists(st.sampled_from(NAMES), min_size=2, max_size=5).map(b"/".join),
    is_dir=st.booleans(),
)
def test_nothing_below_an_excluded_directory_comes_back(chosen: list[str], path: bytes, is_dir: bool) -> None:
    """Whatever the patterns, a path is excluded whenever a directory above it is."""
    matcher = ExcludeMatcher("/data", effective_patterns("/data", (), chosen))
    parent = path.rpartition(b"/")[0]
    fresh = ExcludeMatcher("/data", effective_patterns("/data", (), chosen))
    assert matcher.match(path, is_dir) or not fresh.match(parent, True)
