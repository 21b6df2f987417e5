"""Tests of the documentation: links and paths exist, and docs/conformance.md names the failures that the torture expects."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torture.__main__ import CHECKOUT
from torture.xfstests import EXPECTED, Kind, Xfstests, judged

PAGES = sorted(
    str(page.relative_to(CHECKOUT))
    for page in (*CHECKOUT.glob("*.md"), *CHECKOUT.glob("docs/**/*.md"), *CHECKOUT.glob("examples/*.md"))
)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
_STEP = re.compile(r"^[│├└ ]*(\w+)(?:\.(\w+))? +(\S+\.py) ", re.MULTILINE)
_PATH = re.compile(r"`((?:ciuic|tests|docs|etc|benchmarks)/[\w/.\-]+)`")


def _anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as forges make them."""
    headings = re.findall(r"^#+ +(.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", PAGES)
def test_every_link_leads_somewhere(name: str) -> None:
    """Files and headings that links name exist."""
    page = CHECKOUT / name
    text = _CODE.sub("", page.read_text(encoding="utf-8"))
    for target in _LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{name}: {target}"
        if anchor and found.suffix == ".md":
            assert anchor in _anchors(found), f"{name}: {target}"


@pytest.mark.parametrize("name", [page for page in PAGES if page != "CHANGELOG.md"])
def test_every_file_that_is_named_exists(name: str) -> None:
    """A path below a folder of the checkout that the documentation names exists."""
    text = (CHECKOUT / name).read_text(encoding="utf-8")
    for path in _PATH.findall(text):
        # The wheel has systemd/ and etc/ below ciuic/data.
        in_checkout = path.replace("ciuic/data/", "")
        assert (CHECKOUT / in_checkout).exists() or "NAME" in path, f"{name}: {path}"


def test_the_code_map_answers_fifteen_questions() -> None:
    """CONTRIBUTING says where things are decided, with at most two files for each question."""
    text = (CHECKOUT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("## Where is")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ") and "?" in line]
    assert len(rows) >= 15
    for row in rows:
        files = re.findall(r"`([^`]+\.py)`", row)
        assert 1 <= len(files) <= 2, row
        assert all((CHECKOUT / file).is_file() for file in files), row


def test_the_code_map_names_parts_that_exist() -> None:
    """Every module and folder in a row of CONTRIBUTING's code map lies in the package of that row."""
    text = (CHECKOUT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(ciuic/[^`]*)` \|[^|]*\|(.*)\|$", text, re.MULTILINE)
    assert len(rows) >= 15
    for place, parts in rows:
        package = (CHECKOUT / place).parent if place.endswith(".py") else CHECKOUT / place
        for part in re.findall(r"`([a-z_]+(?:\.py)?)`", parts):
            is_module = (package / part).is_file() or (package / f"{part}.py").is_file()
            assert is_module or (package / part / "__init__.py").is_file(), f"{place}: {part}"


def test_the_walks_name_what_exists() -> None:
    """Every step of the walks in docs/architecture.md is a function or a class of the file beside it."""
    text = (CHECKOUT / "docs/architecture.md").read_text(encoding="utf-8")
    walks = re.findall(
        r"\(`(ciuic/\w+)/`\):\n\n```\n(.*?)```",
        text.partition("## Three walks")[2].partition("\n## ")[0],
        re.DOTALL,
    )
    assert len(walks) == 3
    for package, walk in walks:
        steps = _STEP.findall(walk)
        assert len(steps) == len(walk.splitlines())
        for name, member, path in steps:
            source = (CHECKOUT / package / path).read_text(encoding="utf-8")
            for defined in filter(None, (name, member)):
                found = re.search(rf"^\s*(?:async )?(?:def|class) {defined}\b", source, re.MULTILINE)
                assert found, f"{path}: {defined}"


def test_the_page_has_the_expected_failures_of_xfstests() -> None:
    """The page lists each expected failure once, and says of the same ones on which drivers and kernels they fail."""
    page = (CHECKOUT / "docs/conformance.md").read_text()
    rows = re.findall(r"^\| generic/([\d, ]+)(.*?) \|", page, re.MULTILINE)
    shown = [
        (
            tuple(map(int, re.findall(r"\d+", numbers))),
            "pyfuse3" in rest,
            "before Linux 6.9" in rest,
            "without passthrough" in rest,
        )
        for numbers, rest in rows
    ]
    assert shown == [(one.numbers, one.pyfuse3_only, one.handles, one.cached) for one in EXPECTED]


def test_a_failure_is_expected_where_its_reason_applies() -> None:
    """Failures of file handles are expected with pyfuse3 and before Linux 6.9, those of the cache where it answers, and the limit of
    attributes everywhere.
    """
    times, attributes, handles = EXPECTED
    drivers = ("pyfuse3", "kernel-cached", "kernel")
    assert [times.here(driver, (6, 18)) for driver in drivers] == [True, True, False]
    assert attributes.here("kernel", (6, 18))
    assert [
        handles.here(*one) for one in (("kernel", (6, 18)), ("kernel", (6, 8)), ("pyfuse3", (6, 18)))
    ] == [
        False,
        True,
        True,
    ]


class _Suite(Xfstests):
    """A suite in which the named tests fail on ext4 too."""

    def __init__(self, fails_on_ext4: str = "") -> None:
        super().__init__(Path("/nowhere"), Path("/nowhere"))
        self._fails_on_ext4 = fails_on_ext4

    def run(self, kind: Kind, tests: list[str]) -> dict[str, str]:
        assert kind == "ext4"
        return {test: "failed" if test == self._fails_on_ext4 else "passed" for test in tests}


def test_a_run_fails_by_what_was_not_expected() -> None:
    """A test that fails on the mount alone fails the run, and so does an expected failure that passes; other results do not."""
    outcomes = {
        "generic/001": "passed",
        "generic/394": "differed",
        "generic/020": "differed",
        "generic/100": "not run",
    }
    assert not any(figure.failures for figure in judged(_Suite("generic/394"), outcomes))
    assert [figure.failures for figure in judged(_Suite(), outcomes) if figure.failures] == [
        ("generic/394: differed",)
    ]
    passing = judged(_Suite("generic/394"), {**outcomes, "generic/020": "passed"})
    assert sum(len(figure.failures) for figure in passing) == 1
