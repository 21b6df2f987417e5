"""Tests that exclude patterns match as in git, also on names that are not text."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.depth import by_depth

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
    """Make a git checkout with directories and files of all NAMES, some nested three deep."""
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


def all_paths(top: Path) -> list[tuple[bytes, bool]]:
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


@settings(
    max_examples=by_depth(50, 150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(chosen=st.lists(patterns(), min_size=1, max_size=4))
def test_the_matcher_agrees_with_git_check_ignore(checkout: Path, chosen: list[str]) -> None:
    """The matcher excludes exactly what ``git check-ignore`` ignores, for any list of patterns."""
    (checkout / ".git" / "info" / "exclude").write_text("".join(pattern + "\n" for pattern in chosen))
    paths = all_paths(checkout)
    answer = subprocess.run(
        ["git", "-C", str(checkout), "check-ignore", "--no-index", "-z", "--stdin"],
        input=b"".join(path + b"\0" for path, _ in paths),
        capture_output=True,
    )
    assert answer.returncode in (0, 1), answer.stderr
    ignored = set(answer.stdout.split(b"\0")) - {b""}

    matcher = ExcludeMatcher(checkout, effective_patterns(str(checkout), (), chosen))
    assert {path for path, is_dir in paths if matcher.match(path, is_dir)} == ignored


MEMBERS = [*"abz-]![:^\x7f", "\\]", "\\-", "\\\\", "a-c", "c-a", "z-a", "]-a", "a-]", "[-a", "--a", "a-[", "\\z-\\a",
           "[:alpha:]", "[:punct:]", "[:nonsense:]", "[:a", "[::]", ":]"]  # fmt: skip
CHARACTERS = [bytes([value]) for value in range(1, 256) if value != ord("/")]


@settings(
    max_examples=by_depth(30, 60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@example(
    expressions=["[z-a]", "[!z-a]", "[a-]", "[]-a]", "[[:a]", "[[:]", "[a-[:digit:]]", "[--0]", "[a-c-z]"]
)
@given(
    expressions=st.lists(
        st.lists(st.sampled_from(MEMBERS), max_size=5).map(lambda members: f"[{''.join(members)}]"),
        min_size=1,
        max_size=9,
    )
)
def test_bracket_expressions_match_what_git_ignores(checkout: Path, expressions: list[str]) -> None:
    """A bracket expression matches the same bytes as in git; one that is refused matches nothing in git."""
    # A name of its own for each: one call of git answers for all.
    lines = [f"n{number}{expression}" for number, expression in enumerate(expressions)]
    (checkout / ".git" / "info" / "exclude").write_text("".join(line + "\n" for line in lines))
    names = [b"n%d" % number + char for number in range(len(lines)) for char in CHARACTERS]
    answer = subprocess.run(
        ["git", "-C", str(checkout), "check-ignore", "--no-index", "-z", "--stdin"],
        input=b"".join(name + b"\0" for name in names),
        capture_output=True,
    )
    assert answer.returncode in (0, 1), answer.stderr
    accepted = []
    for line in lines:
        try:
            accepted.append(ExcludeMatcher(checkout, [line]))
        except ValueError:
            continue
    found = {name for name in names if any(matcher.match(name, False) for matcher in accepted)}
    assert found == set(answer.stdout.split(b"\0")) - {b""}


@settings(max_examples=200, deadline=None)
@given(
    chosen=st.lists(patterns(), max_size=3),
    path=st.lists(st.sampled_from(NAMES), min_size=2, max_size=5).map(b"/".join),
    is_dir=st.booleans(),
)
def test_nothing_below_an_excluded_directory_comes_back(chosen: list[str], path: bytes, is_dir: bool) -> None:
    """Whatever the patterns, a path is excluded when a directory above it is."""
    matcher = ExcludeMatcher("/data", effective_patterns("/data", (), chosen))
    parent = path.rpartition(b"/")[0]
    fresh = ExcludeMatcher("/data", effective_patterns("/data", (), chosen))
    assert matcher.match(path, is_dir) or not fresh.match(parent, True)
