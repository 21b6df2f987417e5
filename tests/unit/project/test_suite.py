"""Tests of the runner of the suite's tiers, which looks at failures twice."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import suite

_FLAKY = """
import pathlib, pytest
@pytest.mark.parametrize("n", range({count}))
def test_flaky(n):
    mark = pathlib.Path(__file__).with_name(f"mark-{{n}}")
    again = mark.exists()
    mark.touch()
    assert again, "the first time"
def test_sound(): pass
"""
_DIES = """
import os
def test_dies():
    mark = pathlib.Path(__file__).with_name("died")
    if not mark.exists():
        mark.touch()
        os._exit(9)
"""
_SKIPPED = """
import pathlib, pytest
def test_skipped():
    mark = pathlib.Path(__file__).with_name("skips")
    if mark.exists():
        pytest.skip("the second time")
    mark.touch()
    assert False
"""
_BROKEN = "def test_broken(): assert False, 'always'\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide a directory of tests; pytest there knows nothing of this suite."""
    monkeypatch.setenv("JOBS", "1")
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p no:kmock\n")
    return tmp_path


def _look(project: Path, program: str) -> list[suite.Flaky] | int:
    (project / "test_it.py").write_text(program)
    return suite.look(suite.Run(()), [], seed=7, cwd=project)


def test_what_passes_alone_is_flaky(project: Path) -> None:
    """A test that failed or whose process died, and that passes alone, is listed with the seed and its first failure."""
    found = _look(project, _FLAKY.format(count=2) + _DIES)
    assert isinstance(found, list)
    assert [one.name for one in found] == [
        "test_it.py::test_dies",
        *(f"test_it.py::test_flaky[{n}]" for n in range(2)),
    ]
    assert {one.seed for one in found} == {7}
    assert "crashed" in found[0].first_failure
    assert {one.first_failure for one in found[1:]} == {"AssertionError: the first time"}


@pytest.mark.parametrize(
    ("program", "status"),
    [
        (_FLAKY.format(count=1) + _BROKEN, 1),
        (_FLAKY.format(count=30), 2),
        ("import nothing_of_the_kind\n", 1),
        (_SKIPPED, 1),
        ("", 5),
    ],
)
def test_what_fails_twice_fails_the_run(
    project: Path, monkeypatch: pytest.MonkeyPatch, program: str, status: int
) -> None:
    """A broken test, many at once, a file that cannot be imported, one that is skipped then, and no test at all are failures."""
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:cacheprovider")
    assert _look(project, program) == status


@pytest.mark.parametrize(("count", "status"), [(suite.MAX_FLAKY, 0), (suite.MAX_FLAKY + 1, 1)])
def test_flaky_tests_are_few(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], count: int, status: int
) -> None:
    """Flaky tests are named at the end, and more than a few fail the run."""
    found = [suite.Flaky(f"test_{n}", 7, "was late") for n in range(count)]
    monkeypatch.setattr(suite, "look", lambda *_: [found.pop()] if found else [])
    assert suite.main(["full"] * count) == status
    printed = capsys.readouterr().out
    assert all(
        f"flaky: test_{n}\n    seed 7, passed alone; first: was late\n" in printed for n in range(count)
    )


def test_slices_are_the_full_tier_beyond_the_first() -> None:
    """Each file with tests of the full tier, and each further driver, is in one slice."""
    slices = [run for number in range(1, suite.SLICES + 1) for run in suite.runs_of(f"slice-{number}")]
    files = [
        name for run in slices for name in run.arguments if run.driver == "kernel" and name.endswith(".py")
    ]
    assert len(files) == len(set(files))
    e2e = {f"tests/e2e/{path.name}" for path in (suite.CHECKOUT / "tests/e2e").glob("test_*.py")}
    assert e2e < set(files)
    assert {run.driver for run in slices} == {run.driver for run in suite.runs_of("full")}
    with pytest.raises(ValueError, match="no tier named slice-4"):
        suite.runs_of("slice-4")
    for arguments in ([], ["--durations=20"], ["test", "-x"], ["test", "-q", "--maxfail=1"]):
        assert suite.main(arguments) == 2
